"""Whole generations, by minifused and by what a user would take instead.

A case runs all contenders on the same weights, prompts and number of tokens. First they read on a
text of their common greedy choices and have to give the logits of float64 math within the bound;
then they are timed in turns. A run of one new token gives the time to the first one; what a run
of all of them takes longer, the time of each further one. A case of one new token is the prefill
alone: there is no decoding to check or to time, and its prompt may fill the model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from minifused import checkpoint, metrics
from minifused.benchmark import clock
from minifused.benchmark.contenders import CONTENDERS, Contender, EagerTwin
from minifused.benchmark.records import OURS, Record, Spread
from minifused.benchmark.suite import (
    Setting,
    Unavailable,
    WrongResultError,
    allocated,
    make_record,
    peak_since,
    release_memory,
)
from minifused.config import PRESETS, GPTConfig
from minifused.engine import DEMO_FOLDER
from minifused.errors import UserError
from minifused.metrics import BOUNDS, Errors
from minifused.twin import Twin
from minifused.workloads import decode_bytes, prefill_flops

FORCED_STEPS = 16  # tokens behind the prompt whose logits are compared, if there is room
WARM_RUNS = 3  # the third run of a compiled function is the first that only replays

Check = dict[str, float | int | str | bool | None]


@dataclass(frozen=True)
class Subject:
    """A model to measure: a configuration, and its weights or None for random ones."""

    name: str
    config: GPTConfig
    folder: Path | None = None

    @classmethod
    def of(cls, name: str) -> "Subject":
        """A preset with random weights, or "demo", the bundled model."""
        return cls.load(DEMO_FOLDER, name) if name == "demo" else cls(name, PRESETS[name])

    @classmethod
    def load(cls, folder: Path, name: str = "") -> "Subject":
        """A model folder; raises UserError where there is none."""
        return cls(name or folder.name, checkpoint.load_config(folder), folder)

    def weights(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        if self.folder is not None:
            return checkpoint.load_weights(self.folder, self.config, device, dtype)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            with device:
                return Twin(self.config).to(dtype).requires_grad_(False).state_dict()


@dataclass(frozen=True)
class ModelCase:
    """`new_tokens` tokens behind prompts (batch, prompt) of random tokens."""

    subject: Subject
    batch: int
    prompt: int
    new_tokens: int
    contenders: Sequence[str] = tuple(CONTENDERS)
    suite: str = "model"

    @property
    def name(self) -> str:
        return f"{self.subject.name}, batch {self.batch}, {self.prompt} + {self.new_tokens} tokens"

    @property
    def shape(self) -> dict[str, int | str | bool]:
        sizes = {"batch": self.batch, "prompt": self.prompt, "new_tokens": self.new_tokens}
        return {"model": self.subject.name, **sizes}

    @property
    def capacity(self) -> int:
        """Positions that a run fills: the last token needs none."""
        return self.prompt + max(self.new_tokens, self.compared) - 1

    @property
    def compared(self) -> int:
        """Tokens behind the prompt whose logits are compared: of a prefill alone the first."""
        room = self.subject.config.n_positions - self.prompt + 1
        return 1 if self.new_tokens == 1 else max(1, min(FORCED_STEPS, room))

    def require_room(self) -> None:
        """Raises UserError where the model has too few positions, or a size is below what works."""
        for what, size in (
            ("batch", self.batch), ("prompt", self.prompt), ("new-tokens", self.new_tokens)
        ):  # fmt: skip
            if size < 1:
                raise UserError(f"--{what} is {size}: at least 1")
        limit = self.subject.config.n_positions
        if self.capacity > limit:
            raise UserError(
                f"{self.name}: {self.capacity} positions, but the model has {limit}; "
                "take fewer with --prompt or --new-tokens"
            )

    def run(self, setting: Setting) -> Iterator[Record]:
        """Check all contenders, then time those that passed; see `suite.Case`."""
        weights = self.subject.weights(setting.device, setting.dtype)
        text = Text.choose(self, weights, setting)
        ready: dict[str, Ready] = {}
        for name in self.contenders:
            try:
                ready[name] = self._make_ready(name, weights, text, setting)
            except WrongResultError:
                raise
            except Unavailable as why:
                yield make_record(setting, self, name, self.shape, {}, {}, str(why), skipped=True)
            except Exception as error:  # a rival's failure is a finding, not the end of the run
                if name == OURS:
                    raise
                reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                yield make_record(setting, self, name, self.shape, {}, {}, reason)
        for name, metrics_ in self._time(ready, text.prompts, setting).items():
            yield make_record(setting, self, name, self.shape, metrics_, ready[name].check)
        ready.clear()
        release_memory()

    def _make_ready(
        self, name: str, weights: Mapping[str, Tensor], text: "Text", setting: Setting
    ) -> "Ready":
        """A contender that was checked and warmed up, with what that showed."""
        require_available(name, setting.device)
        before = allocated(setting.device)
        contender = CONTENDERS[name](self.subject.config, weights)
        contender.prepare(self.batch, self.capacity)
        check = text.check(name, contender, setting.dtype)
        for _ in range(WARM_RUNS):
            for count in self._counts():
                contender.generate(text.prompts, count)
        peak = peak_since(before, setting.device)
        return Ready(contender, check, peak and peak + shared_bytes(contender, weights))

    def _counts(self) -> Sequence[int]:
        """Of the new tokens of the runs that are timed."""
        return (1, self.new_tokens) if self.new_tokens > 1 else (1,)

    def _time(
        self, ready: Mapping[str, "Ready"], prompts: Tensor, setting: Setting
    ) -> dict[str, dict[str, Spread]]:
        works = {
            (name, count): (lambda r=r, count=count: r.contender.generate(prompts, count))
            for name, r in ready.items()
            for count in self._counts()
        }
        seconds = clock.in_turns(
            lambda work: clock.wall_seconds(work, setting.device), works, setting.rounds
        )
        return {
            name: self._metrics(
                seconds[name, 1], seconds[name, self.new_tokens], r.peak_bytes, setting
            )
            for name, r in ready.items()
        }

    def _metrics(
        self,
        first: Sequence[float],
        whole: Sequence[float],
        peak_bytes: int | None,
        setting: Setting,
    ) -> dict[str, Spread]:
        """From the seconds of runs of one token and of all tokens, round by round."""
        start = Spread.of(first).median
        flops = prefill_flops(self.subject.config, self.batch, self.prompt)
        measured = {
            "first_token_ms": Spread.of([1e3 * s for s in first]),
            "tokens_per_s": Spread.of([self.batch * self.new_tokens / s for s in whole]),
            "prefill_tokens_per_s": Spread.exact(self.batch * self.prompt / start),
            "matmul_rate_share": Spread.exact(flops / start / setting.matmul_flops_per_s),
        }
        if self.new_tokens > 1:
            measured |= self._decode_metrics(first, whole, setting)
        if peak_bytes is not None:
            measured["peak_memory_mib"] = Spread.exact(peak_bytes / 2**20)
        return measured

    def _decode_metrics(
        self, first: Sequence[float], whole: Sequence[float], setting: Setting
    ) -> dict[str, Spread]:
        further = self.new_tokens - 1
        steps = [max(w - f, 1e-9) / further for f, w in zip(first, whole, strict=True)]
        context = self.prompt + (further + 1) / 2  # keys that a step attends to, on average
        moved = decode_bytes(self.subject.config, self.batch, context, setting.dtype)
        step = Spread.of(steps).median
        return {
            "ms_per_token": Spread.of([1e3 * s for s in steps]),
            "decode_tokens_per_s": Spread.exact(self.batch / step),
            "copy_bandwidth_share": Spread.exact(moved / step / setting.copy_bytes_per_s),
        }


@dataclass(frozen=True)
class Ready:
    """A contender that may be timed."""

    contender: Contender
    check: Check
    peak_bytes: int | None  # of weights and all else, None on a CPU


@dataclass(frozen=True)
class Text:
    """Prompts, the twin's greedy choices behind them, and what float64 thinks of both.

    Attributes:
        tokens: (B, prompt + N - 1), each row a prompt and all its choices but the last; N is the
            case's `compared`.
        choices: (B, N).
        exact: logits, float64 (B, N, V).
        eager: the errors of the eager twin in the dtype that is measured.
    """

    prompts: Tensor
    tokens: Tensor
    choices: Tensor
    exact: Tensor
    eager: Errors

    @classmethod
    @torch.inference_mode()
    def choose(cls, case: ModelCase, weights: Mapping[str, Tensor], setting: Setting) -> "Text":
        config = case.subject.config
        generator = torch.Generator().manual_seed(1)
        size = (case.batch, case.prompt)
        prompts = torch.randint(config.vocab_size, size, generator=generator).to(setting.device)
        twin = EagerTwin(Twin.from_weights(config, dict(weights)))
        twin.prepare(case.batch, case.capacity)
        logits = [twin.prefill(prompts)[1]]
        for _ in range(case.compared - 1):
            logits.append(twin.step(logits[-1].argmax(-1))[1])
        followed = torch.stack(logits, dim=1)
        choices = followed.argmax(-1)
        tokens = torch.cat([prompts, choices[:, :-1]], dim=1)
        doubles = {name: weight.double() for name, weight in weights.items()}
        oracle = EagerTwin(Twin.from_weights(config, doubles))
        oracle.prepare(case.batch, case.capacity)
        exact = oracle.logits(tokens, case.prompt)
        return cls(prompts, tokens, choices, exact, metrics.measure(followed, exact))

    def check(self, name: str, contender: Contender, dtype: torch.dtype) -> Check:
        """The errors of a contender's logits, and where its greedy choice is not the twin's.

        Raises:
            WrongResultError: it is ours, and past the bound.
            RuntimeError: it is a rival, and past the bound.
        """
        logits = contender.logits(self.tokens, self.prompts.shape[1])
        errors, limits = metrics.measure(logits, self.exact), BOUNDS["model"].limits(self.eager)
        step, margin = self._departure(logits)
        check: Check = {
            "max_error": errors.max,
            "rms_error": errors.rms,
            "rms_bound": limits.rms,
            "greedy_difference": step,
            "greedy_margin": margin,
            "decode_steps": logits.shape[1] - 1,  # that were compared, behind the prefill
        }
        # In 16 bits a choice may be as far below the best as the largest error of a logit allows.
        tie = 0.0 if dtype == torch.float32 else limits.max * metrics.rms(self.exact)
        if not metrics.within(errors, limits) or (margin is not None and margin > tie):
            kind = WrongResultError if name == OURS else RuntimeError
            raise kind(f"{name} is past its bound: {check}, max bound {limits.max}")
        return check

    def _departure(self, logits: Tensor) -> tuple[int | None, float | None]:
        """The first step where a row's choice is another than the twin's, and how wrong it is.

        The margin is the largest of all: by how much float64 puts such a choice below its best.
        """
        chosen = logits.argmax(-1)
        other = chosen != self.choices  # (B, N)
        if not other.any():
            return None, None
        below = self.exact.amax(-1) - self.exact.gather(-1, chosen[..., None]).squeeze(-1)
        return int(other.any(0).nonzero()[0, 0]), below[other].max().item()


def require_available(name: str, device: torch.device) -> None:
    if name.startswith("transformers") and find_spec("transformers") is None:
        raise Unavailable("not installed: pip install 'minifused[hf]'")
    if name == "transformers static" and device.type == "cpu":
        raise Unavailable("transformers compiles on a GPU only")


def shared_bytes(contender: Contender, weights: Mapping[str, Tensor]) -> int:
    """Bytes of the weights that the contender uses and did not allocate itself."""
    addresses = {weight.data_ptr() for weight in weights.values()}
    shared = (p for p in contender.model.parameters() if p.data_ptr() in addresses)
    return sum(parameter.nbytes for parameter in shared)
