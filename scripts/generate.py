"""Write text with a GPT-2 model on fused TileLang kernels.

With no arguments the bundled demo model, trained on Shakespeare, goes on from a short prompt. Text
goes to stdout as it comes; a last line on stderr says how fast it was.
"""

import json
import sys
import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path

from tqdm import tqdm

from minifused.engine import BACKENDS, DEMO_FOLDER, DTYPES, Engine, load_engine
from minifused.errors import UserError, run_cli
from minifused.kernels import build
from minifused.sampling import SamplingParams

DEFAULT_PROMPT = "ROMEO:\n"


@dataclass
class Timing:
    """Seconds of a run, without those that went into compiling kernels."""

    compile_seconds: float = 0.0
    first_token_seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: int = 0
    num_samples: int = 1

    @property
    def ms_per_token(self) -> float:
        return 1e3 * self.decode_seconds / max(1, self.steps - 1)

    @property
    def tokens_per_second(self) -> float:
        seconds = self.first_token_seconds + self.decode_seconds
        return self.steps * self.num_samples / seconds if seconds else 0.0

    def __str__(self) -> str:
        return (
            f"first token {1e3 * self.first_token_seconds:.1f} ms, "
            f"{self.ms_per_token:.3f} ms per token, "
            f"{self.tokens_per_second:.0f} tokens/s, "
            f"compile {self.compile_seconds:.1f} s (not counted)"
        )

    def to_dict(self) -> dict:
        return {
            **asdict(self),
            "ms_per_token": self.ms_per_token,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass
class Run:
    """The tokens of each sample so far, and what they cost."""

    tokens: list[list[int]]
    timing: Timing = field(default_factory=Timing)


def parse_args(argv: list[str] | None) -> Namespace:
    """Read the command line; `argv` None means that of the process."""
    p = ArgumentParser(description=__doc__, formatter_class=ArgumentDefaultsHelpFormatter)
    prompt = p.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", default=DEFAULT_PROMPT, help="text to go on from")
    prompt.add_argument("--prompt-file", type=Path, help="a file that holds the prompt")
    p.add_argument("--max-new-tokens", type=int, default=240, help="tokens to write a sample")
    p.add_argument("--temperature", type=float, default=0.8, help="0 always takes the likeliest")
    p.add_argument("--top-k", type=int, default=0, help="choose among the k likeliest; 0: all")
    p.add_argument("--seed", type=int, default=0, help="the same seed writes the same text")
    p.add_argument("--num-samples", type=int, default=1, help="continuations, run as one batch")
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
    p.add_argument("--model", type=Path, default=DEMO_FOLDER, help="folder with a GPT-2 model")
    p.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    args = p.parse_args(argv)
    for flag in ("max_new_tokens", "num_samples"):
        if getattr(args, flag) < 1:
            raise UserError(f"--{flag.replace('_', '-')} is {getattr(args, flag)}: at least 1")
    return args


def read_prompt(args: Namespace) -> str:
    """The prompt, from the command line or from a file without its last line break."""
    if args.prompt_file is None:
        return args.prompt
    try:
        return args.prompt_file.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"--prompt-file {args.prompt_file}: {reason}; give a text file") from error


@contextmanager
def compile_progress() -> Iterator[None]:
    """Count kernels on stderr while they compile, if that takes more than a second."""
    with tqdm(desc="compiling kernels", unit="", leave=False, delay=1, file=sys.stderr) as bar:
        build.stats.on_compile = bar.update
        try:
            yield
        finally:
            build.stats.on_compile = None


def generate(
    engine: Engine, prompt: list[int], args: Namespace, params: SamplingParams
) -> Iterator[Run]:
    """Yield the run after each step."""
    run = Run([[] for _ in range(args.num_samples)], Timing(num_samples=args.num_samples))
    timing, compiled, start = run.timing, build.stats.seconds, time.perf_counter()
    for tokens in engine.stream(prompt, args.max_new_tokens, params, args.num_samples):
        for sample, token in zip(run.tokens, tokens, strict=True):
            sample.append(token)
        timing.compile_seconds = build.stats.seconds - compiled
        seconds = time.perf_counter() - start - timing.compile_seconds
        if timing.steps == 0:
            timing.first_token_seconds = seconds
        timing.decode_seconds = seconds - timing.first_token_seconds
        timing.steps += 1
        yield run


def compile_first(runs: Iterator[Run]) -> Iterator[Run]:
    """Take the two steps that compile all kernels, prefill and one decode step; give back all."""
    with compile_progress():
        first = list(islice(runs, 2))
    return chain(first, runs)


def write_text(engine: Engine, prompt: str, runs: Iterator[Run]) -> Run:
    """Stream the first sample to stdout, then print the others; return the finished run."""
    stream = engine.tokenizer.stream()
    print(prompt, end="", flush=True)
    for step, run in enumerate(runs):
        print(stream.push(run.tokens[0][step]), end="", flush=True)
    print(stream.flush())
    for number, sample in enumerate(run.tokens[1:], start=2):
        print(f"\n--- sample {number} ---\n{prompt}{engine.tokenizer.decode(sample)}")
    return run


def document(engine: Engine, prompt: str, args: Namespace, run: Run, reason: str) -> dict:
    """What --json prints."""
    return {
        "model": str(args.model),
        "backend": args.backend,
        "device": str(engine.device),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "prompt": prompt,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "seed": args.seed,
        "samples": [
            {"text": engine.tokenizer.decode(t), "tokens": t, "finish_reason": reason}
            for t in run.tokens
        ],
        "timing": run.timing.to_dict(),
    }


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    params = SamplingParams(args.temperature, args.top_k, args.seed)
    prompt = read_prompt(args)
    engine = load_engine(args.model, args.backend, args.device, args.dtype)
    tokens = engine.encode(prompt)
    reason = "length" if args.max_new_tokens <= engine.room(tokens) else "context"
    try:
        runs = compile_first(generate(engine, tokens, args, params))
        if args.json:
            *_, run = runs
            print(json.dumps(document(engine, prompt, args, run, reason)))
        else:
            run = write_text(engine, prompt, runs)
    except FloatingPointError as error:
        raise UserError(f"{error}: try --dtype float32, or check the weights") from error
    if reason == "context":
        print(f"note: stopped at the model's context of {engine.config.n_positions} tokens",
              file=sys.stderr)  # fmt: skip
    print(run.timing, file=sys.stderr)


if __name__ == "__main__":
    run_cli(main)
