"""Batches of prompts, and when their completions end."""

import copy
import dataclasses
import itertools
import json

import pytest
import torch

from minifused import GPT, checkpoint
from minifused.completion import Stopper
from minifused.config import GPTConfig
from minifused.engine import DEMO_FOLDER
from minifused.errors import UserError
from minifused.kernels import build
from minifused.model import GPTModel
from minifused.sampling import SamplingParams
from minifused.tokenizer import END_OF_TEXT, ByteTokenizer
from minifused.twin import Twin, TwinCache

PROMPTS = ["R", "First Citizen:\nWe are", "O, she doth teach", "JULIET:\nAy me! " * 5]
GREEDY = SamplingParams(temperature=0)
BACKENDS = ("tilelang", "torch")


@pytest.fixture(scope="module", params=BACKENDS)
def demo(request):
    return GPT.from_pretrained(DEMO_FOLDER, request.param, "cpu")


class Scripted(torch.nn.Module):
    """A model that says what it is told: tokens[b][i] is what prompt b's step i will choose."""

    def __init__(self, like, script):
        super().__init__()
        self.config, self.script, self.step = like.config, script, 0

    def new_cache(self, batch_size, capacity):
        return TwinCache((1, 1, 1, 1, 1), torch.zeros(()))

    def forward(self, tokens, cache, last_only):
        logits = torch.zeros(len(tokens), 1, self.config.vocab_size)
        for row, said in enumerate(self.script):
            logits[row, 0, said[min(self.step, len(said) - 1)]] = 9.0
        self.step += 1
        return logits


def scripted(said, eos=None, n_positions=256):
    config = GPTConfig(vocab_size=256, n_positions=n_positions, n_embd=64, n_head=1, n_layer=1,
                       eos_token_id=eos)  # fmt: skip
    twin = Twin(config)
    model = Scripted(twin, [list(text.encode()) for text in said])
    return GPT(model, ByteTokenizer(), lambda x: x.softmax(-1), torch.device("cpu"), torch.float32)


def say(said, eos=None, n_positions=256, prompt="p", **options):
    model = scripted(said, eos, n_positions)
    options = {"max_new_tokens": 8, "params": GREEDY} | options
    return model.generate([prompt] * len(said), **options)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(0.9, seed=3), SamplingParams(
    0.9, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.2, seed=3)])  # fmt: skip
def test_each_row_of_a_ragged_batch_equals_the_row_alone(demo, params):
    together = demo.generate(PROMPTS, max_new_tokens=24, params=params, with_logprobs=True)
    for prompt, completion in zip(PROMPTS, together, strict=True):
        (alone,) = demo.generate(prompt, max_new_tokens=24, params=params, with_logprobs=True)
        assert completion.tokens == alone.tokens and completion.text == alone.text
        assert len(set(alone.tokens)) > 5  # nothing computed says the same, and always
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), torch.tensor(alone.logprobs), rtol=0, atol=1e-4
        )


def test_both_backends_complete_ragged_prompts_alike():
    fused, twin = (GPT.from_pretrained(backend=b, device="cpu") for b in BACKENDS)
    params = SamplingParams(0.8, seed=11)
    for options in ({}, {"num_samples": 2}):
        assert fused.generate(PROMPTS, max_new_tokens=40, params=params, **options) == (
            twin.generate(PROMPTS, max_new_tokens=40, params=params, **options)
        )


def test_logits_of_a_ragged_prefill_equal_each_row_alone(demo):
    if not isinstance(demo.model, GPTModel):
        pytest.skip("the twin takes rows of one length")
    rows = [demo.encode(p) for p in PROMPTS]
    longest = max(map(len, rows))
    for pad in (0, 255):
        padded = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int32)
        cache = demo.model.new_cache(len(rows), 256)
        logits = demo.model(padded, cache, last_only=True, lengths=lengths)
        assert cache.lengths.tolist() == lengths.tolist()
        for row, got in zip(rows, logits, strict=True):
            alone = demo.model(torch.tensor([row]), last_only=True)[0]
            torch.testing.assert_close(got, alone, rtol=0, atol=1e-4)
            assert alone.std() > 1


def test_rows_end_where_the_context_does(demo):
    prompts = ["x" * 254, "y" * 250, "z"]
    done = demo.generate(prompts, max_new_tokens=9, params=GREEDY)
    assert [len(c.tokens) for c in done] == [3, 7, 9]
    assert [c.finish_reason for c in done] == ["context", "context", "length"]
    (alone,) = demo.generate("z", max_new_tokens=9, params=GREEDY)
    assert done[2] == alone


def test_eos_ends_its_own_row_and_is_not_part_of_it():
    first, second = say(["ab\0cdefgh", "ijklmnopq"], eos=0)
    assert (first.text, first.finish_reason) == ("ab", "eos")
    assert first.tokens == list(b"ab")
    assert (second.text, second.finish_reason) == ("ijklmnop", "length")
    first, _ = say(["ab\0cdefgh", "ijklmnopq"], eos=0, ignore_eos=True)
    assert (first.text, first.finish_reason) == ("ab\0cdefg", "length")


def with_eos(generator, token):
    model = copy.copy(generator.model)
    model.config = dataclasses.replace(model.config, eos_token_id=token)
    return dataclasses.replace(generator, model=model)


def test_a_row_that_ends_with_eos_changes_no_other(demo):
    prompts = [*PROMPTS[1:3], "First Citizen:\nYe are"]  # two of one length
    free = demo.generate(prompts, max_new_tokens=20, params=GREEDY)
    eos = next(token for token in free[0].tokens[2:] if token not in free[1].tokens)
    generator = with_eos(demo, eos)
    done = generator.generate(prompts, max_new_tokens=20, params=GREEDY)
    assert done[0].tokens == free[0].tokens[: free[0].tokens.index(eos)]
    assert (done[0].finish_reason, done[1].finish_reason) == ("eos", "length")
    assert done[1].tokens == free[1].tokens and len(done[1].tokens) == 20
    for prompt, completion in zip(prompts, done, strict=True):
        assert generator.generate(prompt, max_new_tokens=20, params=GREEDY) == [completion]
    assert generator.generate(prompts, max_new_tokens=20, params=GREEDY, ignore_eos=True) == free


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(top_k=5)], ids=["greedy", "drawn"])
def test_nan_logits_end_the_loop_with_their_step_and_row(params, monkeypatch):
    engine = scripted(["abcd", "efgh"])
    forward = engine.model.forward

    def broken(*args, **options):
        logits = forward(*args, **options)
        if engine.model.step == 3:
            logits[1, 0, 5] = float("nan")
        return logits

    monkeypatch.setattr(engine.model, "forward", broken)
    with pytest.raises(FloatingPointError, match=r"step 2, row 1$"):
        engine.generate(["p", "p"], max_new_tokens=4, params=params)
    assert engine.model.step == 3


def test_a_bad_row_is_named_by_its_place_among_the_prompts():
    twin = GPT.from_pretrained(DEMO_FOLDER, "torch", "cpu")  # it runs the lengths apart
    twin.model.wpe.weight[3] = float("nan")  # the second prompt alone reaches it
    with pytest.raises(FloatingPointError, match=r"step 0, row 1$"):
        twin.generate(["ab", "abcq"], max_new_tokens=2, params=GREEDY)


def test_the_loop_ends_with_the_last_row():
    model = scripted(["ab\0", "c\0"], eos=0)
    model.generate(["p", "p"], max_new_tokens=50, params=GREEDY)
    assert model.model.step == 3


def test_stop_texts():
    (done,) = say(["one END two"], stop=["END"], max_new_tokens=20)
    assert (done.text, done.finish_reason) == ("one ", "stop")
    (done,) = say(["abcabd!!"], stop=["abd", "!"], max_new_tokens=20)
    assert (done.text, done.finish_reason) == ("abc", "stop")
    (done,) = say(["one EN"], stop=["END"], max_new_tokens=6)
    assert (done.text, done.finish_reason) == ("one EN", "length")


@pytest.mark.parametrize("stop", [(), ("wor",), ("worl", "d!"), ("o", "lo w")])
def test_what_is_released_adds_up_to_the_text(stop):
    text = "héllo wörld wor😀l world! wo"
    stopper = Stopper(ByteTokenizer().stream(), stop, None, 100)
    released = ""
    for token in text.encode():
        released += stopper.push(token, None, len(text.encode()))
        assert stopper.completion.text == released
        if stopper.finish_reason:
            break
    complete = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    assert released == (text[: min(complete)[1]] if complete else text)
    assert not any(s in released for s in stop)


def test_text_cut_within_a_character():
    (done,) = say(["a\U0001f600"], max_new_tokens=3)
    assert done.text == "a\ufffd" and len(done.tokens) == 3


def test_events_come_token_by_token(demo):
    events = list(demo.stream([demo.encode("ROMEO:")] * 2, 5, GREEDY))
    assert len(events) == 10
    for index, group in itertools.groupby(sorted(events, key=lambda e: e.index), lambda e: e.index):
        texts, counts = zip(*((e.text, len(e.completion.tokens)) for e in group), strict=True)
        assert counts == (1, 2, 3, 4, 5)
        assert "".join(texts) == [e for e in events if e.index == index][-1].completion.text


def test_empty_prompt_begins_a_text():
    model = scripted(["ab"], eos=0)
    assert model.encode("") == [0]
    with pytest.raises(UserError, match="empty"):
        scripted(["ab"]).encode("")


def test_without_bos_and_eos_the_tokenizers_end_of_text_begins_a_text(with_end_of_text):
    config = dataclasses.replace(with_end_of_text.config, bos_token_id=None, eos_token_id=None)
    model = copy.copy(with_end_of_text.model)
    model.config = config
    assert dataclasses.replace(with_end_of_text, model=model).encode("") == [255]


def test_end_of_text_in_a_prompt_is_a_token_or_plain_text(with_end_of_text):
    assert with_end_of_text.encode(f"a{END_OF_TEXT}")[1:] == [255]
    assert len(with_end_of_text.encode(f"a{END_OF_TEXT}", special=False)) == 1 + len(END_OF_TEXT)
    options = {"max_new_tokens": 6, "params": GREEDY, "ignore_eos": True}
    as_token, as_text = (
        with_end_of_text.generate(f"a{END_OF_TEXT}", special=special, **options)[0].tokens
        for special in (True, False)
    )
    assert as_token != as_text


def test_events_reach_the_callback_in_order(demo):
    events = []
    done = demo.generate(PROMPTS[:2], events.append, max_new_tokens=5, params=GREEDY)
    for index, completion in enumerate(done):
        own = [event for event in events if event.index == index]
        assert [len(event.completion.tokens) for event in own] == [1, 2, 3, 4, 5]
        assert "".join(event.text for event in own) == completion.text


def test_an_id_that_the_tokenizer_does_not_have_is_refused(with_end_of_text, tmp_path):
    for name in ("bos_token_id", "eos_token_id"):
        config = dataclasses.replace(with_end_of_text.config, **{name: 280})
        checkpoint.save(tmp_path, config, Twin(config).state_dict())
        (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, END_OF_TEXT: 256}))
        (tmp_path / "merges.txt").write_text("#version: 0.2\n")
        with pytest.raises(UserError, match=f"{name} is 280, but the tokenizer has 257 tokens"):
            GPT.from_pretrained(tmp_path, device="cpu")


@pytest.fixture(scope="module", params=BACKENDS)
def with_end_of_text(request, tmp_path_factory):
    """A random model of 300 rows, whose 256 tokens are all bytes but one, and <|endoftext|>."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("bpe")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: n for n, token in enumerate([*alphabet[1:], END_OF_TEXT])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    config = GPTConfig(vocab_size=300, n_positions=32, n_embd=40, n_head=2, n_layer=1,
                       bos_token_id=255, eos_token_id=255)  # fmt: skip
    torch.manual_seed(0)
    state = {name: t + 0.3 * torch.randn_like(t) for name, t in Twin(config).state_dict().items()}
    checkpoint.save(folder, config, state)
    return GPT.from_pretrained(folder, request.param, "cpu")


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=3, repetition_penalty=1.2)])
def test_an_empty_prompt_is_end_of_text_alone_and_beside_others(with_end_of_text, params):
    options = {"max_new_tokens": 12, "params": params, "ignore_eos": True}
    empty, spelled, other = (
        with_end_of_text.generate(prompt, **options)[0] for prompt in ("", END_OF_TEXT, "abc")
    )
    assert with_end_of_text.encode("") == [255]
    assert empty == spelled != other and len(empty.tokens) == 12
    assert with_end_of_text.generate(["", "abc"], **options) == [empty, other]


def test_longer_prompts_and_caches_compile_nothing_after_the_first_steps():
    engine, params = GPT.from_pretrained(device="cpu"), SamplingParams(top_k=9, top_p=0.9)
    engine.generate(PROMPTS, max_new_tokens=2, params=params)
    compiled = build.stats.count
    done = engine.generate(
        [text + " my lord" for text in PROMPTS], max_new_tokens=64, params=params
    )
    assert build.stats.count == compiled > 0
    assert [len(completion.tokens) for completion in done] == [64] * 4


def test_no_prompts_and_no_tokens(demo):
    assert demo.generate([]) == []
    with pytest.raises(UserError, match="max_new_tokens is 0"):
        demo.generate("a", max_new_tokens=0)


def test_a_prompt_longer_than_the_context_is_refused_and_harms_no_other(demo):
    before = demo.generate("abc", max_new_tokens=4, params=GREEDY)
    with pytest.raises(UserError, match=r"300 tokens.*256.*--truncate left"):
        demo.generate(["abc", "abc" * 100], max_new_tokens=4, params=GREEDY)
    assert demo.generate("abc", max_new_tokens=4, params=GREEDY) == before


def test_tokens_beyond_the_tokenizer_are_never_chosen():
    config = GPTConfig(vocab_size=300, n_positions=16, n_embd=40, n_head=2, n_layer=1)
    torch.manual_seed(0)
    twin = Twin(config).eval().requires_grad_(False)
    twin.wte.weight[256:] = 40 * twin.ln_f.weight.new_ones(40)  # the likeliest by far
    twin.ln_f.bias.fill_(1.0)
    fused = GPTModel.from_weights(config, twin.state_dict())
    for model in (fused, twin):
        generator = GPT(
            model, ByteTokenizer(), lambda x: x.softmax(-1), torch.device("cpu"), torch.float32
        )
        logits = model(torch.tensor([[97]]))[0, 0]
        assert logits.argmax() >= 256
        for params in (GREEDY, SamplingParams(seed=1), SamplingParams(top_k=40, top_p=0.9)):
            (done,) = generator.generate("a", max_new_tokens=10, params=params, with_logprobs=True)
            assert max(done.tokens) < 256
            assert done.text == ByteTokenizer().decode(done.tokens)
            # the probabilities of the 256 tokens add up to 1 without the other rows
            expected = logits[:256].log_softmax(-1)[done.tokens[0]].item()
            assert done.logprobs[0] == pytest.approx(expected, abs=1e-5)


def test_logprobs_are_those_of_the_chosen_tokens():
    (done,) = say(["abc"], max_new_tokens=2, with_logprobs=True)
    assert dataclasses.asdict(done).keys() == {"text", "tokens", "logprobs", "finish_reason"}
    assert len(done.logprobs) == 2 and all(-1 < p <= 0 for p in done.logprobs)
