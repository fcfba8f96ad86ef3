"""The byte tokenizer, and its stream, which never shows half a character."""

import random

import pytest

from minifused.config import GPTConfig
from minifused.errors import UserError
from minifused.tokenizer import ByteTokenizer, load_tokenizer

TEXT = "naïve Ωmega 日本 \N{SMILING FACE WITH HALO}\r\n\0end"


def test_tokens_are_the_bytes_of_utf8():
    assert ByteTokenizer().encode("aé") == [97, 0xC3, 0xA9]
    assert ByteTokenizer().encode("") == []


def test_text_comes_back():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_bytes_that_are_not_utf8():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([97, 0xFF, 98]) == "a\ufffdb"
    from_command_line = b"a\xffb".decode("utf-8", "surrogateescape")
    assert tokenizer.encode(from_command_line) == [97, 0xFF, 98]
    with pytest.raises(UserError, match="character 1 of the text is"):
        tokenizer.encode("a\ud800")


def test_a_token_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError):
        ByteTokenizer().decode([256])


def test_stream_holds_a_character_back_until_it_is_whole():
    stream = ByteTokenizer().stream()
    smile = "\N{SMILING FACE WITH HALO}"
    assert [stream.push(token) for token in smile.encode()] == ["", "", "", smile]
    assert stream.push(97) == "a" and stream.flush() == ""


def test_stream_that_ends_inside_a_character():
    stream = ByteTokenizer().stream()
    assert [stream.push(token) for token in (97, 0xF0, 0x9F)] == ["a", "", ""]
    assert stream.flush() == "\ufffd"
    assert stream.push(98) == "b"


@pytest.mark.parametrize("seed", range(20))
def test_stream_adds_up_to_decode_for_any_bytes(seed):
    source = random.Random(seed)
    valid = TEXT.encode()
    tokens = [source.choice([source.randrange(256), source.choice(valid)]) for _ in range(200)]
    stream = ByteTokenizer().stream()
    text = "".join(stream.push(token) for token in tokens) + stream.flush()
    assert text == ByteTokenizer().decode(tokens)


def test_load_tokenizer_wants_256_tokens(tmp_path):
    assert load_tokenizer(tmp_path, GPTConfig(vocab_size=256)).vocab_size == 256
    with pytest.raises(UserError) as error:
        load_tokenizer(tmp_path, GPTConfig())
    assert all(part in str(error.value) for part in (str(tmp_path), "50257", "256"))
