"""Text to token ids and back: one token a byte, so that nothing needs to be learnt or stored."""

import codecs
from collections.abc import Sequence
from pathlib import Path

from minifused.config import GPTConfig
from minifused.errors import UserError


class ByteStream:
    """Decodes tokens one at a time and holds a character back until all its bytes are there.

    What `push` and `flush` return adds up to what `ByteTokenizer.decode` gives for all the tokens.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Take one token; return the text it completes, often one character, sometimes none."""
        return self._decoder.decode(bytes([token]))

    def flush(self) -> str:
        """End the text: a character that was cut off becomes U+FFFD. The stream starts afresh."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class ByteTokenizer:
    """The 256 bytes of UTF-8 as a vocabulary; it has no special tokens."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, which may be empty.

        Bytes of a command line that are not UTF-8 (Python's surrogate escapes) stay as they were.

        Raises:
            UserError: the text holds half of a surrogate pair, which has no bytes.
        """
        try:
            return list(text.encode("utf-8", errors="surrogateescape"))
        except UnicodeEncodeError as error:
            where = f"character {error.start} of the text is {text[error.start]!r}"
            raise UserError(f"{where}, half of a surrogate pair; remove it") from None

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: a token is not in 0 ... 255.
        """
        return bytes(tokens).decode("utf-8", errors="replace")

    def stream(self) -> ByteStream:
        """A decoder that takes tokens as they are made."""
        return ByteStream()


def load_tokenizer(folder: Path, config: GPTConfig) -> ByteTokenizer:
    """The tokenizer of the model in `folder`.

    Raises:
        UserError: the model's vocabulary is not the 256 bytes.
    """
    if config.vocab_size != ByteTokenizer.vocab_size:
        raise UserError(
            f"{folder}: vocab_size is {config.vocab_size}, and only byte vocabularies can be read; "
            f"use a model with a vocabulary of {ByteTokenizer.vocab_size}"
        )
    return ByteTokenizer()
