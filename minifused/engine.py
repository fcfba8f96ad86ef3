"""Text generation: prefill the prompt, then decode a token at a time through a KV cache.

The loop serves both models, the fused one and the twin: both have `new_cache(batch, capacity)` and
`forward(tokens, cache, last_only)`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minifused import checkpoint, ops
from minifused.config import GPTConfig
from minifused.errors import UserError
from minifused.model import GPT
from minifused.sampling import SamplingParams, check_logits, philox_uniform, sample
from minifused.tokenizer import ByteTokenizer, load_tokenizer
from minifused.twin import Twin

BACKENDS = ("tilelang", "torch")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DEMO_FOLDER = Path(__file__).parent / "assets" / "demo"


@dataclass(frozen=True)
class Engine:
    """A model that is ready to generate, with the softmax its probabilities come from."""

    model: GPT | Twin
    tokenizer: ByteTokenizer
    softmax: Callable[[Tensor], Tensor]
    device: torch.device
    dtype: torch.dtype

    @property
    def config(self) -> GPTConfig:
        return self.model.config

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a prompt that fits the context; raises UserError for others."""
        tokens = self.tokenizer.encode(prompt)
        limit = self.config.n_positions
        if not tokens:
            raise UserError("the prompt is empty: give at least one character to go on from")
        if len(tokens) > limit:
            raise UserError(
                f"the prompt has {len(tokens)} tokens but the model's context {limit}: shorten it"
            )
        return tokens

    def room(self, prompt: list[int]) -> int:
        """How many tokens can follow a prompt: the last one needs no position of its own."""
        return self.config.n_positions - len(prompt) + 1

    @torch.inference_mode()
    def stream(
        self,
        prompt: list[int],
        max_new_tokens: int,
        params: SamplingParams,
        num_samples: int = 1,
    ) -> Iterator[list[int]]:
        """Yield the next token of each sample, step by step.

        Args:
            prompt: tokens, at least one.
            max_new_tokens: the number of steps; no more than `room(prompt)` are taken.
            num_samples: continuations, run as one batch. Sample s draws the random numbers of
                (seed, s, position), whatever runs beside it.

        Raises:
            FloatingPointError: the logits of a step are not finite.
        """
        steps = min(max_new_tokens, self.room(prompt))
        uniforms = self._uniforms(params.seed, num_samples, len(prompt), steps)
        tokens = torch.tensor([prompt] * num_samples, device=self.device)  # (S, T)
        cache = self.model.new_cache(num_samples, len(prompt) + steps - 1) if steps else None
        for step in range(steps):
            logits = self.model(tokens, cache, last_only=True)[:, -1]  # (S, V)
            check_logits(logits, step)
            chosen = sample(logits, params, uniforms[step], self.softmax)  # (S,)
            yield chosen.tolist()
            tokens = chosen[:, None]

    def _uniforms(self, seed: int, num_samples: int, start: int, steps: int) -> Tensor:
        """The uniform numbers of all steps at once, (steps, S)."""
        samples = torch.arange(num_samples, device=self.device)
        positions = torch.arange(start, start + steps, device=self.device)
        return philox_uniform(seed, samples[None, :], positions[:, None])


def load_engine(
    folder: Path = DEMO_FOLDER,
    backend: str = "tilelang",
    device: str = "auto",
    dtype: str = "auto",
) -> Engine:
    """Load a model folder for a backend, device and dtype; raises UserError."""
    where = resolve_device(device)
    precision = resolve_dtype(dtype, where)
    config = checkpoint.load_config(folder)
    tokenizer = load_tokenizer(folder, config)
    weights = checkpoint.load_weights(folder, config)
    if backend == "tilelang":
        model = GPT.from_weights(config, weights, where, precision)
        return Engine(model, tokenizer, ops.softmax, where, precision)
    twin = Twin(config).eval().requires_grad_(False)
    twin.load_state_dict(weights)
    return Engine(twin.to(where, precision), tokenizer, _torch_softmax, where, precision)


def _torch_softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


def resolve_device(name: str) -> torch.device:
    """The device of "auto", "cpu" or "cuda"; raises UserError for a GPU that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA GPU is visible to PyTorch: use --device cpu, or check nvidia-smi")
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of a name; "auto" is bfloat16 on a GPU that has it (sm_80), float32 elsewhere."""
    if name != "auto":
        return DTYPES[name]
    has_bfloat16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if has_bfloat16 else torch.float32
