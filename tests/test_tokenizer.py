"""The tokenizers, and their stream, which never shows half a character."""

import json
import random
import sys

import pytest

from minifused.config import GPTConfig
from minifused.errors import UserError
from minifused.tokenizer import END_OF_TEXT, ByteTokenizer, load_tokenizer

TEXT = "naïve Ωmega 日本 \N{SMILING FACE WITH HALO}\r\n\0end"
SMILE = "\N{SMILING FACE WITH HALO}"
VOCAB_SIZE = 280  # 256 bytes, <|endoftext|> and some merges
CONFIG = GPTConfig(vocab_size=VOCAB_SIZE)
BPE_FILES = {"json": ["tokenizer.json"], "pair": ["vocab.json", "merges.txt"]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with one small BPE in all its files, and the number of its tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = [f"the naïve {word} of the end, and {SMILE}" for word in ("Ωmega", "日本", "other")]
    tokenizer.train_from_iterator(lines * 3, trainer)
    folder = tmp_path_factory.mktemp("trained")
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))
    return folder


@pytest.fixture(params=BPE_FILES)
def bpe_folder(request, trained, tmp_path):
    for name in BPE_FILES[request.param]:
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    return tmp_path


@pytest.fixture
def bpe(bpe_folder):
    return load_tokenizer(bpe_folder, CONFIG)


@pytest.fixture
def json_folder(trained, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((trained / "tokenizer.json").read_bytes())
    return tmp_path


def change_json(folder, **changes):
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def message_of(folder, config=CONFIG):
    with pytest.raises(UserError) as error:
        load_tokenizer(folder, config)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)
    return str(error.value)


def random_text(seed):
    source = random.Random(seed)
    words = [
        "the",
        " end",
        "\n\n",
        "  ",
        "'s",
        " 12",
        END_OF_TEXT,
        "naïve",
        "日本",
        SMILE,
        "\0",
        "é",
    ]
    return "".join(source.choice(words) for _ in range(40))


def test_tokens_are_the_bytes_of_utf8():
    assert ByteTokenizer().encode("aé") == [97, 0xC3, 0xA9]
    assert ByteTokenizer().encode("") == []
    assert bytes(ByteTokenizer().encode(END_OF_TEXT, special=True)).decode() == END_OF_TEXT


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
    assert [stream.push(token) for token in SMILE.encode()] == ["", "", "", SMILE]
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


@pytest.mark.parametrize("text", ["", "the end", TEXT, f"{SMILE}{END_OF_TEXT}a\u0301 ~"])
def test_bpe_text_comes_back(bpe, text):
    for special in (True, False):
        assert bpe.decode(bpe.encode(text, special=special)) == text
    assert len(bpe.encode("the naïve end")) < len("the naïve end")


@pytest.mark.parametrize("seed", range(5))
def test_bpe_tokens_and_text_are_those_of_hugging_face(bpe, bpe_folder, seed):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GPT2TokenizerFast.from_pretrained(bpe_folder)
    text = random_text(seed)
    tokens = bpe.encode(text)
    assert tokens == theirs(text)["input_ids"] and len(theirs) == bpe.vocab_size
    assert bpe.encode(text, special=False) == theirs(text, split_special_tokens=True)["input_ids"]
    any_tokens = random.Random(seed).choices(range(VOCAB_SIZE), k=100)
    kept = {"clean_up_tokenization_spaces": False, "skip_special_tokens": False}
    for sequence in (tokens, any_tokens):
        assert bpe.decode(sequence) == theirs.decode(sequence, **kept)


def test_end_of_text_is_special_unless_told_otherwise(bpe):
    (end,) = bpe.encode(END_OF_TEXT)
    assert bpe.encode(f"a{END_OF_TEXT}b") == [*bpe.encode("a"), end, *bpe.encode("b")]
    plain = bpe.encode(END_OF_TEXT, special=False)
    assert end not in plain and bpe.decode(plain) == bpe.decode([end]) == END_OF_TEXT
    assert bpe.encode(END_OF_TEXT) == [end]  # the flag does not stick


def test_end_of_text_is_not_added_to_a_vocabulary_without_it(json_folder):
    data = json.loads((json_folder / "tokenizer.json").read_text())
    vocabulary = [token for token in data["model"]["vocab"] if token != END_OF_TEXT]
    model = data["model"] | {"vocab": {token: n for n, token in enumerate(vocabulary)}}
    bpe = load_tokenizer(change_json(json_folder, added_tokens=[], model=model), CONFIG)
    assert bpe.vocab_size == VOCAB_SIZE - 1
    assert bpe.encode(END_OF_TEXT) == bpe.encode(END_OF_TEXT, special=False)


def test_bpe_stream_holds_an_emoji_of_several_tokens_back(trained, json_folder):
    emoji = "\N{GRINNING FACE}"  # not in the training text, so its last byte is a token of its own
    bpe = load_tokenizer(json_folder, CONFIG)
    tokens, stream = bpe.encode(emoji), bpe.stream()
    assert len(tokens) > 1
    assert [stream.push(token) for token in tokens] == [""] * (len(tokens) - 1) + [emoji]
    for token in tokens[:-1]:
        assert stream.push(token) == ""
    assert stream.flush() == "\ufffd" == bpe.decode(tokens[:-1])
    assert stream.push(bpe.encode("a")[0]) == "a" and stream.flush() == ""


def test_bpe_stream_of_an_emoji_in_the_three_tokens_of_gpt2(json_folder):
    vocabulary = {"\u00f0": 172, "\u0141": 253, "\u00f0\u0141": 8582, "\u00a4": 97, "\u0139": 245}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [["\u00f0", "\u0141"]]}
    bpe = load_tokenizer(change_json(json_folder, added_tokens=[], model=model), GPTConfig())
    emoji, stream = "\N{HUGGING FACE}", bpe.stream()
    assert bpe.encode(emoji) == [8582, 97, 245] and bpe.decode([8582, 97, 245]) == emoji
    assert [stream.push(token) for token in (8582, 97, 245)] == ["", "", emoji]
    assert [stream.push(token) for token in (8582, 97)] == ["", ""] and stream.flush() == "\ufffd"


@pytest.mark.parametrize("seed", range(10))
def test_bpe_stream_adds_up_to_decode_for_any_tokens(bpe, seed):
    source = random.Random(seed)
    text = bpe.encode(random_text(seed))
    tokens = [source.choice([source.randrange(VOCAB_SIZE), source.choice(text)]) for _ in text]
    stream = bpe.stream()
    assert "".join(map(stream.push, tokens)) + stream.flush() == bpe.decode(tokens)


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE])
def test_bpe_refuses_a_token_outside_the_vocabulary(bpe, token):
    for take in (bpe.stream().push, lambda token: bpe.decode([token])):
        with pytest.raises(ValueError, match=f"{token} is not in 0"):
            take(token)


def test_added_tokens_and_gaps_between_them(json_folder):
    data = json.loads((json_folder / "tokenizer.json").read_text())
    added = data["added_tokens"][0] | {"id": VOCAB_SIZE + 1, "content": "<é x>"}
    data["model"]["vocab"]["!!!!"] = VOCAB_SIZE + 3
    change_json(json_folder, added_tokens=[*data["added_tokens"], added], model=data["model"])
    bpe = load_tokenizer(json_folder, GPTConfig())
    assert bpe.vocab_size == VOCAB_SIZE + 4
    assert bpe.decode(bpe.encode("a<é x>b")) == "a<é x>b"
    assert bpe.decode([VOCAB_SIZE, VOCAB_SIZE + 1, VOCAB_SIZE + 3]) == "\ufffd<é x>!!!!"


def test_stored_truncation_and_padding_do_not_touch_the_prompt(bpe, json_folder):
    truncation = {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    padding = {
        "strategy": {"Fixed": 128},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": END_OF_TEXT,
    }
    changed = load_tokenizer(
        change_json(json_folder, truncation=truncation, padding=padding), CONFIG
    )
    assert changed.encode(TEXT) == bpe.encode(TEXT)


@pytest.mark.parametrize("text", ["a\ud800", "a\udcff"])
def test_bpe_refuses_half_a_surrogate_pair(bpe, text):
    with pytest.raises(UserError, match="character 1 of the text is"):
        bpe.encode(text)


def test_a_tokenizer_may_be_smaller_than_the_table_but_not_larger(bpe_folder):
    assert load_tokenizer(bpe_folder, GPTConfig(vocab_size=384)).vocab_size == VOCAB_SIZE
    message = message_of(bpe_folder, GPTConfig(vocab_size=256))
    assert "280 tokens" in message and "vocab_size is 256" in message


def test_tokenizer_json_comes_first(trained, json_folder):
    (json_folder / "vocab.json").write_text("{}")
    assert load_tokenizer(json_folder, CONFIG).vocab_size == VOCAB_SIZE


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "merges.txt"])
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5\n", "Git LFS"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "web page"),
        (b'{"half": ', "9 bytes, an incomplete download"),
        (b"\xff\xfe", "2 bytes"),
    ],
    ids=["lfs", "html", "cut", "binary"],
)
def test_damaged_tokenizer_files(trained, tmp_path, name, data, said):
    for file in BPE_FILES["json" if name == "tokenizer.json" else "pair"]:
        (tmp_path / file).write_bytes((trained / file).read_bytes())
    (tmp_path / name).write_bytes(data)
    message = message_of(tmp_path)
    assert str(tmp_path / name) in message and said in message and "fetch" in message


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
def test_one_file_of_the_pair_alone(trained, tmp_path, name):
    (tmp_path / name).write_bytes((trained / name).read_bytes())
    other = {"vocab.json": "merges.txt", "merges.txt": "vocab.json"}[name]
    assert f"{name} without {other}; fetch" in message_of(tmp_path)


def test_other_kinds_of_tokenizers_are_refused(json_folder):
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    assert "no byte-level BPE" in message_of(change_json(json_folder, model=model, added_tokens=[]))
    assert "no byte-level BPE" in message_of(change_json(json_folder, decoder=None))


def test_without_the_package_its_extra_is_named(bpe_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "pip install 'minifused[bpe]'" in message_of(bpe_folder)


def test_a_folder_without_tokenizer_files(tmp_path):
    assert load_tokenizer(tmp_path, GPTConfig(vocab_size=256)).vocab_size == 256
    message = message_of(tmp_path, GPTConfig())
    assert all(part in message for part in ("tokenizer.json", "merges.txt", "50257", "256"))
