"""Text to token ids and back: the bytes of UTF-8, or the byte-level BPE of a model folder."""

import codecs
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minifused.checkpoint import describe_file, read_json
from minifused.config import GPTConfig
from minifused.errors import UserError

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILE = "tokenizer.json"
VOCAB_FILE, MERGES_FILE = "vocab.json", "merges.txt"
END_OF_TEXT = "<|endoftext|>"
REPLACEMENT = "\ufffd".encode()


class ByteStream:
    """Decodes tokens one at a time and holds a character back until all its bytes are there.

    What `push` and `flush` return adds up to what the tokenizer's `decode` gives for all tokens.

    Args:
        token_bytes: the bytes of a token; raises ValueError for what is no token.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Take one token; return the text it completes, often one character, sometimes none."""
        return self._decoder.decode(self._token_bytes(token))

    def flush(self) -> str:
        """End the text: a character that was cut off becomes U+FFFD. The stream starts afresh."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class ByteTokenizer:
    """The 256 bytes of UTF-8 as a vocabulary; it has no special tokens."""

    vocab_size = 256
    end_of_text = None

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text, which may be empty; `special` changes nothing.

        Bytes of a command line that are not UTF-8 (Python's surrogate escapes) stay as they were.

        Raises:
            UserError: the text holds half of a surrogate pair, which has no bytes.
        """
        return list(_utf8(text, errors="surrogateescape"))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: a token is not in 0 ... 255.
        """
        return bytes(tokens).decode("utf-8", errors="replace")

    def stream(self) -> ByteStream:
        """A decoder that takes tokens as they are made."""
        return ByteStream(lambda token: bytes([token]))


class BPETokenizer:
    """Byte-level byte-pair encoding as in GPT-2: each token stands for some bytes of UTF-8.

    Attributes:
        vocab_size: one more than the largest id, special tokens included.
        end_of_text: the id of `<|endoftext|>`, or None.
    """

    def __init__(self, tokenizer: "tokenizers.Tokenizer"):
        """Take a tokenizer with a byte-level BPE model; its truncation and padding are undone."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.end_of_text: int | None = tokenizer.token_to_id(END_OF_TEXT)
        if self.end_of_text is not None:  # as GPT-2's own class does
            tokenizer.add_special_tokens([END_OF_TEXT])
        self._tokenizer = tokenizer
        self._bytes = _bytes_of_tokens(tokenizer)
        self.vocab_size = len(self._bytes)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text, which may be empty.

        Args:
            special: a special token spelled out in the text, such as `<|endoftext|>`, becomes that
                token, as in Hugging Face's GPT-2. False takes it as any other text: choose that
                for text that must not end a document.

        Raises:
            UserError: the text holds a surrogate: half a pair, or a byte that is not UTF-8.
        """
        _utf8(text)
        self._tokenizer.encode_special_tokens = not special
        return self._tokenizer.encode(text).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, special tokens as they are spelled.

        Bytes that are not UTF-8 become U+FFFD, and so does an id that the vocabulary skips.

        Raises:
            ValueError: a token is not in 0 ... vocab_size - 1.
        """
        return b"".join(map(self._token_bytes, tokens)).decode("utf-8", errors="replace")

    def stream(self) -> ByteStream:
        """A decoder that takes tokens as they are made."""
        return ByteStream(self._token_bytes)

    def _token_bytes(self, token: int) -> bytes:
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token {token} is not in 0 ... {self.vocab_size - 1}")
        return self._bytes[token]


Tokenizer = ByteTokenizer | BPETokenizer


def load_tokenizer(folder: Path, config: GPTConfig) -> Tokenizer:
    """The tokenizer of the model in `folder`.

    tokenizer.json comes first, then vocab.json with merges.txt; without any of them, a model of
    256 tokens has the bytes. A table with more rows than the tokenizer has tokens is padded: the
    rows from the tokenizer's `vocab_size` on stand for nothing.

    Raises:
        UserError: there is no tokenizer, or its files are damaged or of another kind, or it has
            more tokens than the model, or the package that reads it is missing.
    """
    folder = Path(folder)
    found = [
        name for name in (TOKENIZER_FILE, VOCAB_FILE, MERGES_FILE) if (folder / name).is_file()
    ]
    if not found and config.vocab_size == ByteTokenizer.vocab_size:
        return ByteTokenizer()
    if not found:
        raise UserError(
            f"{folder}: no {TOKENIZER_FILE}, nor {VOCAB_FILE} and {MERGES_FILE}, for the model's "
            f"{config.vocab_size} tokens; put them there (only 256 tokens, bytes, need none)"
        )
    tokenizer = BPETokenizer(_read_tokenizer(folder, found))
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{folder / found[0]}: the tokenizer has {tokenizer.vocab_size} tokens, but the "
            f"model's vocab_size is {config.vocab_size}; use the tokenizer of this model"
        )
    for name in ("bos_token_id", "eos_token_id"):
        if (getattr(config, name) or 0) >= tokenizer.vocab_size:
            raise UserError(
                f"{folder}: {name} is {getattr(config, name)}, but the tokenizer has "
                f"{tokenizer.vocab_size} tokens; correct config.json, or set it to null there"
            )
    return tokenizer


def _read_tokenizer(folder: Path, found: list[str]) -> "tokenizers.Tokenizer":
    """Read tokenizer.json, or vocab.json and merges.txt, whichever is `found`."""
    path = folder / found[0]
    try:
        import tokenizers
    except ImportError as error:
        remedy = "pip install 'minifused[bpe]'"
        raise UserError(f"{path}: the package tokenizers must read it; {remedy}") from error
    if found[0] == TOKENIZER_FILE:
        tokenizer = _parse(path, lambda: tokenizers.Tokenizer.from_file(str(path)))
        kinds = tokenizers.models.BPE, tokenizers.decoders.ByteLevel
        if not all(map(isinstance, (tokenizer.model, tokenizer.decoder), kinds)):
            raise UserError(f"{path}: no byte-level BPE as in GPT-2; use a model that has one")
        return tokenizer
    if len(found) < 2:
        missing = MERGES_FILE if found == [VOCAB_FILE] else VOCAB_FILE
        raise UserError(f"{folder}: {found[0]} without {missing}; fetch that file too")
    read_json(path)  # the library's errors do not say which of the two files is at fault
    merges = folder / MERGES_FILE
    model = _parse(merges, lambda: tokenizers.models.BPE.from_file(str(path), str(merges)))
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def _parse(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:  # the library raises this very class, whatever is wrong
        cause = str(error).partition("\n")[0]
        raise UserError(
            f"{path}: {describe_file(path)} ({cause}); fetch the tokenizer's files again"
        ) from error


def _bytes_of_tokens(tokenizer: "tokenizers.Tokenizer") -> list[bytes]:
    """The bytes of each id; an id without a token gets those of U+FFFD."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = [REPLACEMENT] * (max(vocabulary.values(), default=-1) + 1)
    alphabet = _byte_alphabet()
    for token, number in vocabulary.items():
        try:
            table[number] = bytes([alphabet[character] for character in token])
        except KeyError:  # not spelled in the alphabet, so it stands for itself
            table[number] = token.encode()
    for number, added in tokenizer.get_added_tokens_decoder().items():
        table[number] = added.content.encode()
    return table


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (Radford et al., 2019).

    Bytes that print stand for themselves; the others are numbered from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + number): byte for number, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


def _utf8(text: str, errors: str = "strict") -> bytes:
    try:
        return text.encode("utf-8", errors)
    except UnicodeEncodeError as error:
        where = f"character {error.start} of the text is {text[error.start]!r}"
        raise UserError(f"{where}, half of a surrogate pair; remove it") from None
