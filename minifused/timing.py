"""How long a generation takes, and a progress bar for the kernels it compiles first."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from tqdm import tqdm

from minifused.engine import Event
from minifused.kernels import build


@dataclass
class Timing:
    """Seconds of a run, without those that went into compiling kernels."""

    compile_seconds: float = 0.0
    first_token_seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: int = 0
    tokens: int = 0

    @property
    def ms_per_token(self) -> float:
        """Of a step behind the first, which gives each completion a token."""
        return 1e3 * self.decode_seconds / max(1, self.steps - 1)

    @property
    def tokens_per_second(self) -> float:
        seconds = self.first_token_seconds + self.decode_seconds
        return self.tokens / seconds if seconds else 0.0

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


def timed(events: Iterable[Event], timing: Timing) -> Iterator[Event]:
    """Pass events on as they come, and keep `timing` up to date."""
    compiled, start = build.stats.seconds, time.perf_counter()
    for event in events:
        timing.compile_seconds = build.stats.seconds - compiled
        seconds = time.perf_counter() - start - timing.compile_seconds
        if timing.tokens == 0:
            timing.first_token_seconds = seconds
        timing.decode_seconds = seconds - timing.first_token_seconds
        timing.tokens += 1
        timing.steps = max(timing.steps, len(event.completion.tokens))
        yield event


@contextmanager
def compile_progress() -> Iterator[None]:
    """Count kernels on stderr while they compile, if that takes more than a second."""
    with tqdm(desc="compiling kernels", unit="", leave=False, delay=1, file=sys.stderr) as bar:
        build.stats.on_compile = bar.update
        try:
            yield
        finally:
            build.stats.on_compile = None
