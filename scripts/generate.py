"""Write text with a GPT-2 model on fused TileLang kernels.

With no arguments the bundled demo model, trained on Shakespeare, goes on from a short prompt. Text
goes to stdout as it comes; a last line on stderr says how fast it was.
"""

import json
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path

from minifused.completion import Completion
from minifused.engine import BACKENDS, DEMO_FOLDER, DTYPES, GPT, Event
from minifused.errors import UserError, run_cli
from minifused.model import GPTModel
from minifused.sampling import SamplingParams
from minifused.timing import Timing, compile_progress, timed

DEFAULT_PROMPT = "ROMEO:\n"


@dataclass
class Run:
    """Prompts, their completions so far, and what they cost."""

    prompts: list[str]
    completions: dict[int, Completion] = field(default_factory=dict)
    timing: Timing = field(default_factory=Timing)


def parse_args(argv: list[str] | None) -> Namespace:
    """Read the command line; `argv` None means that of the process."""
    p = ArgumentParser(description=__doc__, formatter_class=ArgumentDefaultsHelpFormatter)
    add_prompt_flags(p)
    add_sampling_flags(p)
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPU")
    p.add_argument(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="auto: bfloat16 on a GPU, float32 on a CPU",
    )
    p.add_argument(
        "--backend",
        choices=BACKENDS,
        default="tilelang",
        help="torch: the plain PyTorch twin, to compare with",
    )
    p.add_argument(
        "--no-cuda-graph",
        action="store_true",
        help="on a GPU, launch kernels one by one rather than replay a step as one CUDA graph",
    )
    p.add_argument("--model", type=Path, default=DEMO_FOLDER, help="folder with a GPT-2 model")
    p.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    p.add_argument(
        "--verbose",
        action="store_true",
        help="say on stderr which kernel each part of a step goes through",
    )
    args = p.parse_args(argv)
    for flag in ("max_new_tokens", "num_samples"):
        if getattr(args, flag) < 1:
            raise UserError(f"--{flag.replace('_', '-')} is {getattr(args, flag)}: at least 1")
    if "" in args.stop:
        raise UserError("--stop is empty: give the text to stop at")
    return args


def add_prompt_flags(p: ArgumentParser) -> None:
    prompt = p.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt",
        action="append",
        help=f"text to go on from, repeatable; {DEFAULT_PROMPT!r} if there is none",
    )
    prompt.add_argument(
        "--prompt-file",
        type=Path,
        help='a prompt a line, or with the ending .jsonl a {"prompt": "…"} a line',
    )
    p.add_argument(
        "--plain-prompt",
        action="store_true",
        help="take <|endoftext|> in a prompt as text, not as the token that ends one",
    )
    p.add_argument(
        "--truncate",
        choices=("never", "left"),
        default="never",
        help="left: drop the oldest tokens of a prompt so that --max-new-tokens fit behind it",
    )


def add_sampling_flags(p: ArgumentParser) -> None:
    p.add_argument("--max-new-tokens", type=int, default=240, help="tokens to write a completion")
    p.add_argument("--num-samples", type=int, default=1, help="completions of each prompt")
    p.add_argument("--temperature", type=float, default=0.8, help="0 always takes the likeliest")
    p.add_argument("--top-k", type=int, default=0, help="choose among the k likeliest; 0: all")
    p.add_argument("--top-p", type=float, default=1.0, help="among the likeliest that reach p")
    p.add_argument("--min-p", type=float, default=0.0, help="not below p times the likeliest")
    p.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1: repeat less")
    p.add_argument("--seed", type=int, default=0, help="the same seed writes the same text")
    p.add_argument("--stop", action="append", default=[], help="text to stop at, repeatable")
    p.add_argument("--ignore-eos", action="store_true", help="go on behind the end of a text")
    p.add_argument("--logprobs", action="store_true", help="with --json: of each token")


def read_prompts(args: Namespace) -> list[str]:
    """The prompts, from the command line or from a file."""
    if args.prompt_file is None:
        return args.prompt or [DEFAULT_PROMPT]
    try:
        lines = args.prompt_file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"--prompt-file {args.prompt_file}: {reason}; give a text file") from error
    if not lines:
        raise UserError(f"--prompt-file {args.prompt_file} is empty: put a prompt on each line")
    if args.prompt_file.suffix != ".jsonl":
        return lines
    return [read_json_prompt(args.prompt_file, n, line) for n, line in enumerate(lines, start=1)]


def read_json_prompt(path: Path, number: int, line: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
        if isinstance(prompt, str):
            return prompt
    except (ValueError, TypeError, KeyError):
        pass
    raise UserError(f'{path}, line {number}: expected an object such as {{"prompt": "text"}}')


def encode_prompts(model: GPT, texts: list[str], args: Namespace) -> list[list[int]]:
    """Tokens of the prompts; with --truncate left no more than leave room for the new ones."""
    special = not args.plain_prompt
    if args.truncate == "never":
        return [model.encode(text, special) for text in texts]
    most = max(1, model.config.n_positions - args.max_new_tokens + 1)
    prompts = [model.tokenize(text, special) for text in texts]
    for tokens in prompts:
        if len(tokens) > most:
            note = f"note: dropped the first {len(tokens) - most} tokens of a prompt"
            print(note, file=sys.stderr)
    return [tokens[-most:] for tokens in prompts]


def generate(model: GPT, run: Run, prompts: list[list[int]], args: Namespace) -> Iterator[Event]:
    """Yield each event, and keep the run's completions and timing up to date."""
    params = SamplingParams(
        args.temperature, args.top_k, args.seed, args.top_p, args.min_p, args.repetition_penalty
    )
    events = model.stream(
        prompts, args.max_new_tokens, params, args.num_samples, args.stop, args.ignore_eos,
        args.logprobs,
    )  # fmt: skip
    for event in timed(events, run.timing):
        run.completions[event.index] = event.completion
        yield event


def compile_first(events: Iterator[Event]) -> Iterator[Event]:
    """Take prefill and one decode step, by when all kernels are compiled; give back all."""
    first = []
    with compile_progress():
        for event in events:
            first.append(event)
            if len(event.completion.tokens) > 1:
                break
    return chain(first, events)


def write_text(run: Run, events: Iterator[Event], num_samples: int) -> None:
    """Stream the first completion to stdout, and print the others when they are done."""
    print(run.prompts[0], end="", flush=True)
    for event in events:
        if event.index == 0:
            print(event.text, end="", flush=True)
    print()
    for index in sorted(run.completions)[1:]:
        prompt, sample = divmod(index, num_samples)
        text = run.prompts[prompt] + run.completions[index].text
        print(f"\n--- prompt {prompt + 1}, sample {sample + 1} ---\n{text}")


def document(model: GPT, run: Run, args: Namespace) -> dict:
    """What --json prints."""
    flags = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop")
    return {
        "model": str(args.model),
        "backend": args.backend,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        **{flag: getattr(args, flag) for flag in flags},
        "completions": [
            {"prompt": run.prompts[i // args.num_samples], "sample": i % args.num_samples,
             **asdict(run.completions[i])}
            for i in sorted(run.completions)
        ],
        "timing": run.timing.to_dict(),
    }  # fmt: skip


def kernels_of(model: GPT, rows: int) -> str:
    """The kernels of a decoding step of so many rows, a line each."""
    if not isinstance(model.model, GPTModel):
        return "no kernels: --backend torch is plain PyTorch"
    from minifused.step_kernels import step_table  # all that tunes comes with it

    return step_table(model.config, model.device, model.dtype, rows)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    run = Run(read_prompts(args))
    model = GPT.from_pretrained(
        args.model, args.backend, args.device, args.dtype, cuda_graph=not args.no_cuda_graph
    )
    prompts = encode_prompts(model, run.prompts, args)
    if args.verbose:
        print(kernels_of(model, len(prompts) * args.num_samples), file=sys.stderr)
    try:
        events = compile_first(generate(model, run, prompts, args))
        if args.json:
            list(events)
            print(json.dumps(document(model, run, args)))
        else:
            write_text(run, events, args.num_samples)
    except FloatingPointError as error:
        raise UserError(f"{error}: try --dtype float32, or check the weights") from error
    if any(done.finish_reason == "context" for done in run.completions.values()):
        limit = model.config.n_positions
        print(f"note: stopped at the model's context of {limit} tokens", file=sys.stderr)
    print(run.timing, file=sys.stderr)


if __name__ == "__main__":
    run_cli(main)
