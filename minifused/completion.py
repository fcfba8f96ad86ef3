"""What becomes of a prompt: its continuation, and when that ends."""

from dataclasses import dataclass, field, replace

from minifused.tokenizer import ByteStream


@dataclass(frozen=True)
class Completion:
    """A continuation of a prompt.

    Attributes:
        text: without the stop text that may have ended it.
        tokens: all that were chosen but the one that ends a text; they may spell a stop text.
        logprobs: of the tokens, if asked for.
        finish_reason: None while it goes on, then "length" (as many tokens as asked for),
            "context" (the model's positions are used up), "eos" or "stop".
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    finish_reason: str | None = None


class Stopper:
    """Takes the tokens of one completion, releases its text, and knows when it is over.

    Text is released once it can no longer be part of a stop text, so that what was released adds
    up to the completion's text.
    """

    def __init__(
        self, stream: ByteStream, stop: tuple[str, ...], eos: int | None, max_new_tokens: int
    ):
        self._stream, self._stop, self._eos = stream, stop, eos
        self._max_new_tokens, self._text, self._released = max_new_tokens, "", 0
        self.completion = Completion()

    @property
    def finish_reason(self) -> str | None:
        return self.completion.finish_reason

    def push(self, token: int, logprob: float | None, limit: int) -> str:
        """Take a token, the last if `limit` are there; return the text that can be released."""
        if token == self._eos:
            return self._finish("eos")
        done = self.completion
        self.completion = replace(
            done,
            tokens=[*done.tokens, token],
            logprobs=done.logprobs if logprob is None else [*(done.logprobs or []), logprob],
        )
        self._text += self._stream.push(token)
        if (at := self._find_stop()) is not None:
            self._text = self._text[:at]
            return self._finish("stop", flush=False)
        if len(self.completion.tokens) >= limit:
            return self._finish("length" if limit == self._max_new_tokens else "context")
        return self._release(len(self._text) - self._held_back())

    def _finish(self, reason: str, flush: bool = True) -> str:
        if flush:
            self._text += self._stream.flush()
            if (at := self._find_stop()) is not None:
                self._text, reason = self._text[:at], "stop"
        self.completion = replace(self.completion, finish_reason=reason)
        return self._release(len(self._text))

    def _release(self, end: int) -> str:
        text = self._text[self._released : end]
        self._released = max(self._released, end)
        self.completion = replace(self.completion, text=self._text[: self._released])
        return text

    def _find_stop(self) -> int | None:
        """Where the first stop text begins."""
        places = [self._text.find(stop, self._released) for stop in self._stop]
        return min((place for place in places if place >= 0), default=None)

    def _held_back(self) -> int:
        """How many characters at the end may be the beginning of a stop text."""
        pending = self._text[self._released :]
        return max(
            (n for stop in self._stop for n in range(1, len(stop)) if pending.endswith(stop[:n])),
            default=0,
        )
