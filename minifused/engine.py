"""Text generation: prefill the prompts, then decode a token at a time through a KV cache.

The loop serves both models, the fused one and the twin: both have `new_cache(batch, capacity)` and
`forward(tokens, cache, last_only)`. The fused one takes prompts of different lengths in one batch;
the twin gets those of one length together.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minifused import checkpoint, ops
from minifused.batch import Batch, Choice, Step
from minifused.completion import Completion, Stopper
from minifused.config import GPTConfig
from minifused.errors import UserError
from minifused.model import GPTModel
from minifused.sampling import SamplingParams
from minifused.tokenizer import Tokenizer, load_tokenizer
from minifused.twin import Twin

BACKENDS = ("tilelang", "torch")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CAPACITY_MULTIPLE = 256  # of the positions of captured batches, so that few kinds are captured
MAX_IDLE = 4  # captured batches that are kept for the next request
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
    cuda_graph: bool = False
    _idle: list[Batch] = field(default_factory=list, init=False, repr=False, compare=False)

    @classmethod
    def from_pretrained(
        cls,
        folder: Path | str = DEMO_FOLDER,
        backend: str = "tilelang",
        device: str = "auto",
        dtype: str = "auto",
        cuda_graph: bool = True,
    ) -> "GPT":
        """Load a model folder for a backend, device and dtype.

        Args:
            cuda_graph: on a GPU, replay a decoding step as one CUDA graph ("tilelang" alone).

        Raises:
            UserError: the folder holds no model that can be read, or there is no such device.
        """
        folder = Path(folder)
        where = resolve_device(device)
        precision = resolve_dtype(dtype, where)
        config = checkpoint.load_config(folder)
        tokenizer = load_tokenizer(folder, config)
        model = load_model(folder, config, backend, where, precision)
        softmax = ops.softmax if backend == "tilelang" else _torch_softmax
        graph = cuda_graph and backend == "tilelang" and where.type == "cuda"
        return cls(model, tokenizer, softmax, where, precision, graph)

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
        params = params or SamplingParams()
        choice = Choice(replace(params, seed=0), eos, with_logprobs)
        for batch in self._batches(rows):
            yield from self._run(batch, params, choice)

    def _batches(self, rows: list["Row"]) -> list[list["Row"]]:
        """Rows that run together: all of them, or for the twin those of one length."""
        if isinstance(self.model, GPTModel):
            return [rows] if rows else []
        by_length = sorted(rows, key=lambda row: len(row.prompt))
        return [list(same) for _, same in groupby(by_length, key=lambda row: len(row.prompt))]

    @torch.inference_mode()
    def _run(self, rows: list["Row"], params: SamplingParams, choice: Choice) -> Iterator[Event]:
        batch = self._take_batch(rows, choice)
        try:
            batch.begin(
                prompts=[row.prompt for row in rows],
                samples=[row.sample for row in rows],
                steps=[row.steps for row in rows],
                seed=params.seed,
            )
            going = [True] * len(rows)
            for index, step in enumerate(batch.run(max(row.steps for row in rows))):
                for place, row in enumerate(rows):
                    if going[place]:
                        yield row.take(index, step, place)
                still = [row.stopper.finish_reason is None for row in rows]
                if not any(still):
                    return
                if still != going:
                    batch.stop(still)
                    going = still
        finally:
            self._idle.append(batch)
            del self._idle[: -MAX_IDLE if self.cuda_graph else None]

    def _take_batch(self, rows: list["Row"], choice: Choice) -> Batch:
        """A batch that is large enough: under CUDA graphs one that was captured, if it is idle."""
        size = len(rows)
        capacity = max(len(row.prompt) + row.steps - 1 for row in rows)
        if self.cuda_graph:
            size = 1 << (size - 1).bit_length()
            rounded = -(-capacity // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE
            capacity = min(rounded, self.config.n_positions)
        for place, batch in enumerate(self._idle):
            if (batch.size, batch.capacity, batch.choice) == (size, capacity, choice):
                return self._idle.pop(place)
        return Batch(
            self.model,
            self.softmax,
            self.tokenizer.vocab_size,
            self.device,
            size,
            capacity,
            choice,
            self.cuda_graph,
        )


@dataclass
class Row:
    """One completion in the making: `steps` is how many tokens it may get."""

    index: int
    prompt: list[int]
    sample: int
    steps: int
    stopper: Stopper

    def take(self, index: int, step: Step, place: int) -> Event:
        """Add the token of step `index`, which is at `place` there.

        Raises FloatingPointError if its logits were not finite.
        """
        if not step.finite[place]:
            raise FloatingPointError(f"logits are not finite at step {index}, row {self.index}")
        score = None if step.logprobs is None else step.logprobs[place]
        text = self.stopper.push(step.tokens[place], score, self.steps)
        return Event(self.index, text, self.stopper.completion)


def load_model(
    folder: Path, config: GPTConfig, backend: str, device: torch.device, dtype: torch.dtype
) -> GPTModel | Twin:
    """The weights of a folder in a model, each read straight to its device and dtype."""
    weights = checkpoint.iter_weights(folder, config, device, dtype)
    if backend == "tilelang":
        return GPTModel.from_weights(config, weights, device, dtype)
    return Twin.from_weights(config, dict(weights))


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
