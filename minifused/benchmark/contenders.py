"""Who generates text in the benchmark: minifused, and what a user would take instead.

All have the same weights and share one interface. Sampling is a draw from the whole distribution
at temperature 1: minifused as it always does, the others by the least work known for it, the
largest of p / Exp(1).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from minifused import checkpoint, ops
from minifused.batch import Batch, Choice
from minifused.config import GPTConfig
from minifused.model import GPTModel
from minifused.sampling import SamplingParams
from minifused.twin import Twin, TwinCache


class Contender(ABC):
    """A model that continues prompts of one length.

    Attributes:
        model: holds the weights, which contenders share where they can.
    """

    model: Any

    @abstractmethod
    def prepare(self, batch: int, capacity: int) -> None:
        """Make ready for `batch` rows of up to `capacity` positions."""

    @abstractmethod
    def logits(self, tokens: Tensor, prompt: int) -> Tensor:
        """Teacher-forced: run `prompt` of tokens (B, T) at once and the others one by one.

        Returns:
            What followed the prompt and each token behind it: float32 (B, T - prompt + 1, V).
        """

    @abstractmethod
    def generate(self, prompts: Tensor, count: int) -> Tensor:
        """Continue prompts (B, P) by `count` tokens each: int64 (B, count)."""


class Stepper(Contender):
    """A contender that is driven a token at a time."""

    @abstractmethod
    def prefill(self, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Forget what was, and run prompts (B, P).

        Returns:
            A drawn token (B,) int64, and the logits (B, V) it was drawn from. The next call may
            overwrite both.
        """

    @abstractmethod
    def step(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Run one more token (B,) a row; returns as `prefill` does."""

    @torch.inference_mode()
    def logits(self, tokens: Tensor, prompt: int) -> Tensor:
        steps = tokens.shape[1] - prompt
        followed = [self.prefill(tokens[:, :prompt])[1].clone()]
        followed += [self.step(tokens[:, prompt + i])[1].clone() for i in range(steps)]
        return torch.stack(followed, dim=1)

    @torch.inference_mode()
    def generate(self, prompts: Tensor, count: int) -> Tensor:
        chosen = [self.prefill(prompts)[0].clone()]
        for _ in range(count - 1):
            chosen.append(self.step(chosen[-1])[0].clone())
        return torch.stack(chosen, dim=1)


class Minifused(Stepper):
    """The engine of this project."""

    def __init__(self, config: GPTConfig, weights: Mapping[str, Tensor]):
        like = weights["wte.weight"]
        self.device = like.device
        self.model = GPTModel.from_weights(config, weights, like.device, like.dtype)

    def prepare(self, batch: int, capacity: int) -> None:
        self.batch = Batch(
            self.model,
            ops.softmax,
            self.model.config.vocab_size,
            self.device,
            batch,
            capacity,
            Choice(SamplingParams()),
            graph=self.device.type == "cuda",
        )

    def prefill(self, prompts: Tensor) -> tuple[Tensor, Tensor]:
        rows, length = prompts.shape
        steps = self.batch.capacity - length + 1
        self.batch.begin(prompts, range(rows), [steps] * rows)
        logits = self.batch.prefill()
        return self.batch.tokens[:, 0], logits

    def step(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        self.batch.tokens.copy_(tokens[:, None])
        logits = self.batch.step()
        return self.batch.tokens[:, 0], logits

    @torch.inference_mode()
    def generate(self, prompts: Tensor, count: int) -> Tensor:
        """As the engine does it: a step has its tokens from the one before, and notes its own."""
        self.prefill(prompts)
        for _ in range(count - 1):
            self.batch.step()
        return self.batch.chosen[:count].T.clone()


def draw(logits: Tensor) -> Tensor:
    """A token of each row of logits (B, V) at temperature 1: the largest of p / Exp(1), int64."""
    probabilities = logits.softmax(-1)
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1)


class EagerTwin(Stepper):
    """The twin, in plain PyTorch."""

    def __init__(self, twin: Twin):
        self.model = twin

    def prepare(self, batch: int, capacity: int) -> None:
        self.new_cache = lambda: self.model.new_cache(batch, capacity)

    def prefill(self, prompts: Tensor) -> tuple[Tensor, Tensor]:
        self.cache = self.new_cache()
        return self._run(prompts)

    def step(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self._run(tokens[:, None])

    def _run(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(tokens, self.cache, last_only=True)[:, -1]
        return draw(logits), logits


class CompiledTwin(Stepper):
    """The twin under torch.compile, in CUDA graphs where there is a GPU.

    Its cache is static and just as long as the run needs, so that hardly any key is read in vain;
    the prefill and the step, drawing included, are each one compiled function.
    """

    def __init__(self, twin: Twin):
        self.model = twin

    def prepare(self, batch: int, capacity: int) -> None:
        self.cache = StaticCache(self.model, batch, -(-capacity // 64) * 64)
        mode = "reduce-overhead" if self.model.wte.weight.is_cuda else None
        self.run = torch.compile(self._forward, mode=mode, dynamic=False, fullgraph=True)

    def prefill(self, prompts: Tensor) -> tuple[Tensor, Tensor]:
        self.cache.position.zero_()
        return self.run(prompts)

    def step(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.run(tokens[:, None])

    def _forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(tokens, self.cache, last_only=True)[:, -1]
        return draw(logits), logits


class StaticCache(TwinCache):
    """A cache whose addresses and shapes never change: where it ends is known to the device alone.

    It takes one prompt, which begins it, and then a token at a time.
    """

    def __init__(self, twin: Twin, batch: int, capacity: int):
        c, weight = twin.config, twin.wte.weight
        self.capacity, self.length = capacity, 0
        shape = (batch, c.n_head, capacity, c.head_dim)
        # A tensor a layer: compiled code would copy a larger one whole to write to a part of it.
        self.layers = [(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in twin.h]
        self.position = torch.zeros(1, dtype=torch.int64, device=weight.device)
        for tensor in (*(cache for layer in self.layers for cache in layer), self.position):
            torch._dynamo.mark_static_address(tensor)

    def positions(self, count: int) -> Tensor:
        return self.position + torch.arange(count, device=self.position.device)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, scale: float
    ) -> Tensor:
        count, (keys, values) = q.shape[2], self.layers[layer]
        keys.index_copy_(2, self.positions(count), k)
        values.index_copy_(2, self.positions(count), v)
        if count > 1:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        visible = torch.arange(self.capacity, device=q.device) <= self.position
        return F.scaled_dot_product_attention(q, keys, values, visible[None], scale=scale)

    def advance(self, count: int) -> None:
        self.position.add_(count)


class HuggingFace(Contender):
    """transformers' GPT-2 through its own `generate`; `static` adds a static cache, compiled.

    Raises ImportError where transformers is not installed.
    """

    def __init__(self, config: GPTConfig, weights: Mapping[str, Tensor], static: bool):
        import transformers

        with torch.device("meta"):
            model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config.to_dict()))
        stored = dict(checkpoint.to_stored(name, weight) for name, weight in weights.items())
        model.load_state_dict(stored, strict=False, assign=True)
        model.tie_weights()
        self.model = model.eval().requires_grad_(False)
        self.options: dict[str, Any] = {
            "eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True,
        }  # fmt: skip
        if static:
            self.options["cache_implementation"] = "static"

    def prepare(self, batch: int, capacity: int) -> None:
        """Nothing: generate() makes its own cache."""

    def logits(self, tokens: Tensor, prompt: int) -> Tensor:
        followed = F.pad(tokens, (0, 1))  # some token is chosen from the last logits too

        def force(chosen: Tensor, scores: Tensor) -> Tensor:
            column = followed[:, chosen.shape[1], None]
            return torch.full_like(scores, -torch.inf).scatter_(1, column, 0.0)

        count = followed.shape[1] - prompt
        result = self._generate(
            tokens[:, :prompt], count, do_sample=False, output_logits=True,
            logits_processor=[force],
        )  # fmt: skip
        return torch.stack(result.logits, dim=1).float()

    def generate(self, prompts: Tensor, count: int) -> Tensor:
        result = self._generate(prompts, count, do_sample=True, top_k=0)
        return result.sequences[:, prompts.shape[1] :]

    def _generate(self, prompts: Tensor, count: int, **options: Any) -> Any:
        mask = torch.ones_like(prompts)
        return self.model.generate(
            prompts, attention_mask=mask, max_new_tokens=count, **self.options, **options
        )


# By name, in the order of the tables: what makes a contender of a configuration and weights.
CONTENDERS: dict[str, Callable[[GPTConfig, Mapping[str, Tensor]], Contender]] = {
    "minifused": Minifused,
    "torch eager": lambda config, weights: EagerTwin(Twin.from_weights(config, dict(weights))),
    "torch.compile": lambda config, weights: CompiledTwin(Twin.from_weights(config, dict(weights))),
    "transformers": lambda config, weights: HuggingFace(config, weights, static=False),
    "transformers static": lambda config, weights: HuggingFace(config, weights, static=True),
}
