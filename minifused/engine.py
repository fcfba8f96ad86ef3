"""Text generation: prefill the prompts, then decode a token at a time through a KV cache.

The loop serves both models, the fused one and the twin: both have `new_cache(batch, capacity)` and
`forward(tokens, cache, last_only)`. The fused one takes prompts of different lengths in one batch;
the twin gets those of one length together.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minifused import checkpoint, ops
from minifused.cache import KVCache
from minifused.completion import Completion, Stopper
from minifused.config import GPTConfig
from minifused.errors import UserError
from minifused.model import GPTModel
from minifused.sampling import (
    SamplingParams,
    check_logits,
    logprobs,
    mark_seen,
    philox_uniform,
    sample,
)
from minifused.tokenizer import Tokenizer, load_tokenizer
from minifused.twin import Twin

BACKENDS = ("tilelang", "torch")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DEMO_FOLDER = Path(__file__).parent / "assets" / "demo"


@dataclass(frozen=True)
class Event:
    """A token that a completion gained: which completion, the text it released, and its state."""

    index: int
    text: str
    completion: Completion


@dataclass(frozen=True)
class GPT:
    """A GPT-2 that is ready to generate: a model, its tokenizer, and the softmax of its choices."""

    model: GPTModel | Twin
    tokenizer: Tokenizer
    softmax: Callable[[Tensor], Tensor]
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def from_pretrained(
        cls,
        folder: Path | str = DEMO_FOLDER,
        backend: str = "tilelang",
        device: str = "auto",
        dtype: str = "auto",
    ) -> "GPT":
        """Load a model folder for a backend, device and dtype; raises UserError."""
        folder = Path(folder)
        where = resolve_device(device)
        precision = resolve_dtype(dtype, where)
        config = checkpoint.load_config(folder)
        tokenizer = load_tokenizer(folder, config)
        model = load_model(folder, config, backend, where, precision)
        softmax = ops.softmax if backend == "tilelang" else _torch_softmax
        return cls(model, tokenizer, softmax, where, precision)

    @property
    def config(self) -> GPTConfig:
        return self.model.config

    def tokenize(self, prompt: str, special: bool = True) -> list[int]:
        """The tokens of a prompt; an empty one stands for the token that begins a text.

        Args:
            special: `<|endoftext|>` spelled out in the prompt is that token; False: plain text.

        Raises:
            UserError: the prompt is empty and no token begins a text.
        """
        return self.tokenizer.encode(prompt, special) or self._begin_of_text()

    def encode(self, prompt: str, special: bool = True) -> list[int]:
        """The tokens of a prompt, as `tokenize`; raises UserError where the context is shorter."""
        tokens, limit = self.tokenize(prompt, special), self.config.n_positions
        if len(tokens) > limit:
            raise UserError(
                f"the prompt has {len(tokens)} tokens but the model's context {limit}: "
                "shorten it, or drop its oldest tokens with --truncate left"
            )
        return tokens

    def _begin_of_text(self) -> list[int]:
        ids = (self.config.bos_token_id, self.config.eos_token_id, self.tokenizer.end_of_text)
        for token in ids:
            if token is not None:
                return [token]
        raise UserError("the prompt is empty: give at least one character to go on from")

    def room(self, prompt: Sequence[int]) -> int:
        """How many tokens can follow a prompt: the last one needs no position of its own."""
        return self.config.n_positions - len(prompt) + 1

    def generate(
        self,
        prompts: str | Sequence[str],
        on_event: Callable[[Event], object] | None = None,
        special: bool = True,
        **options: Any,
    ) -> list[Completion]:
        """Complete one prompt or many.

        Args:
            on_event: called with each Event as it comes, in the order in which tokens are chosen.
            special: `<|endoftext|>` spelled out in a prompt is that token; False: plain text.
            **options: those of `stream`.

        Returns:
            num_samples completions of the first prompt, then of the second, and so on.
        """
        texts = [prompts] if isinstance(prompts, str) else prompts
        done: dict[int, Completion] = {}
        for event in self.stream([self.encode(text, special) for text in texts], **options):
            done[event.index] = event.completion
            if on_event is not None:
                on_event(event)
        return [done[index] for index in sorted(done)]

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int = 128,
        params: SamplingParams | None = None,
        num_samples: int = 1,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        with_logprobs: bool = False,
    ) -> Iterator[Event]:
        """Yield an event for each token of each completion, as they come.

        Args:
            prompts: tokens, at least one each. Completion index is prompt * num_samples + sample.
            max_new_tokens: for each completion, which ends earlier where the context does.
            num_samples: continuations of each prompt. Sample s draws the random numbers of
                (seed, s, position), whatever runs beside it.
            stop: texts that end a completion, and are not part of it.
            ignore_eos: go on behind the token that ends a text.
            with_logprobs: record the log-probability of each token under the model alone.

        Raises:
            UserError: max_new_tokens or num_samples is below 1.
            FloatingPointError: the logits of a step are not finite.
        """
        if max_new_tokens < 1 or num_samples < 1:
            counts = f"max_new_tokens is {max_new_tokens}, num_samples {num_samples}"
            raise UserError(f"{counts}: both have to be at least 1")
        eos = None if ignore_eos else self.config.eos_token_id
        repeated = [list(prompt) for prompt in prompts for _ in range(num_samples)]
        rows = [
            Row(
                index=index,
                prompt=prompt,
                sample=index % num_samples,
                steps=min(max_new_tokens, self.room(prompt)),
                stopper=Stopper(self.tokenizer.stream(), tuple(stop), eos, max_new_tokens),
            )
            for index, prompt in enumerate(repeated)
        ]
        for batch in self._batches(rows):
            yield from self._run(batch, params or SamplingParams(), with_logprobs)

    def _batches(self, rows: list["Row"]) -> list[list["Row"]]:
        """Rows that run together: all of them, or for the twin those of one length."""
        if isinstance(self.model, GPTModel):
            return [rows] if rows else []
        by_length = sorted(rows, key=lambda row: len(row.prompt))
        return [list(same) for _, same in groupby(by_length, key=lambda row: len(row.prompt))]

    @torch.inference_mode()
    def _run(
        self, rows: list["Row"], params: SamplingParams, with_logprobs: bool
    ) -> Iterator[Event]:
        batch = Batch(
            self.model,
            self.softmax,
            self.tokenizer.vocab_size,
            self.device,
            prompts=[row.prompt for row in rows],
            samples=[row.sample for row in rows],
            steps=[row.steps for row in rows],
            params=params,
        )
        for step in range(max(row.steps for row in rows)):
            logits = batch.logits()  # (B, V)
            check_logits(logits, step, [row.index for row in rows])
            tokens = batch.choose(logits)  # (B,)
            scores = logprobs(logits, tokens).tolist() if with_logprobs else None
            ids = tokens.tolist()
            for position, row in enumerate(rows):
                if row.stopper.finish_reason is None:
                    score = None if scores is None else scores[position]
                    text = row.stopper.push(ids[position], score, row.steps)
                    yield Event(row.index, text, row.stopper.completion)
            going = [row.stopper.finish_reason is None for row in rows]
            if not any(going):
                return
            batch.keep(going)


@dataclass
class Row:
    """One completion in the making: `steps` is how many tokens it may get."""

    index: int
    prompt: list[int]
    sample: int
    steps: int
    stopper: Stopper


class Batch:
    """The device's side of some rows: cache, next tokens, random numbers, tokens seen.

    Args:
        softmax: over the last dimension, of what is drawn from.
        vocab_size: how many of the model's tokens may be chosen, the first ones.
        prompts, samples, steps: of each row its tokens, the number of its random stream, and how
            many tokens it may get.
    """

    def __init__(
        self,
        model: GPTModel | Twin,
        softmax: Callable[[Tensor], Tensor],
        vocab_size: int,
        device: torch.device,
        *,
        prompts: Sequence[Sequence[int]],
        samples: Sequence[int],
        steps: Sequence[int],
        params: SamplingParams,
    ):
        self.model, self.softmax, self.vocab_size, self.params = model, softmax, vocab_size, params
        self.device, self.step = device, 0
        self.lengths = [len(prompt) for prompt in prompts]
        longest = max(self.lengths)
        padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
        self.tokens = torch.tensor(padded, device=self.device)  # (B, T)
        self.counts = torch.tensor(self.lengths, dtype=torch.int32, device=self.device)
        self.ragged = any(length != longest for length in self.lengths)
        # Which rows self.counts lets go on by one token: none yet, if it holds unequal prompts.
        self.going = [not self.ragged] * len(prompts)
        capacity = max(n + count - 1 for n, count in zip(self.lengths, steps, strict=True))
        self.cache = model.new_cache(len(prompts), capacity)
        self.uniforms = self._uniforms(samples, max(steps))  # (steps, B)
        self.seen = None
        if params.repetition_penalty != 1.0:
            shape = (len(prompts), vocab_size)
            self.seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
            mark_seen(self.seen, self.tokens, self.counts)

    def _uniforms(self, samples: Sequence[int], steps: int) -> Tensor:
        """The uniform numbers of all steps at once, by each row's own sample and position."""
        streams = torch.tensor(samples, device=self.device)
        positions = self.counts[None, :] + torch.arange(steps, device=self.device)[:, None]
        return philox_uniform(self.params.seed, streams[None, :], positions)

    def logits(self) -> Tensor:
        """Run the model on the next tokens: (B, V) float32, V the tokens that may be chosen."""
        ragged = {"lengths": self.counts} if self.ragged else {}
        logits = self.model(self.tokens, self.cache, last_only=True, **ragged)
        return logits[:, -1, : self.vocab_size]

    def choose(self, logits: Tensor) -> Tensor:
        """The next token of each row, (B,) int64."""
        chosen = sample(logits, self.params, self.uniforms[self.step], self.softmax, self.seen)
        if self.seen is not None:
            mark_seen(self.seen, chosen[:, None])
        self.tokens = chosen[:, None]
        self.step += 1
        return chosen

    def keep(self, going: list[bool]) -> None:
        """Let the rows that have finished stand still; one at least goes on."""
        if isinstance(self.cache, KVCache) and going != self.going:
            self.ragged, self.going = True, going
            self.counts = torch.tensor(going, dtype=torch.int32, device=self.device)
            filled = [length + self.step - 1 for length in self.lengths]
            self.cache.longest = max(n for n, on in zip(filled, going, strict=True) if on)


def load_model(
    folder: Path, config: GPTConfig, backend: str, device: torch.device, dtype: torch.dtype
) -> GPTModel | Twin:
    """The weights of a folder in a model, each read straight to its device and dtype."""
    weights = checkpoint.iter_weights(folder, config, device, dtype)
    if backend == "tilelang":
        return GPTModel.from_weights(config, weights, device, dtype)
    with torch.device("meta"):
        twin = Twin(config).eval()
    twin.load_state_dict(dict(weights), assign=True)
    return twin.requires_grad_(False)


def _torch_softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


def resolve_device(name: str) -> torch.device:
    """The device of "auto", "cpu" or "cuda"; raises UserError for a GPU that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch sees no GPU; use --device cpu, or check nvidia-smi")
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of a name; "auto" is bfloat16 on a GPU that has it (sm_80), float32 elsewhere."""
    if name != "auto":
        return DTYPES[name]
    has_bfloat16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if has_bfloat16 else torch.float32
