"""Batches of prompts, and when their completions end."""

import dataclasses
import itertools

import pytest
import torch

from minifused import GPT
from minifused.completion import Stopper
from minifused.config import GPTConfig
from minifused.engine import DEMO_FOLDER
from minifused.errors import UserError
from minifused.model import GPTModel
from minifused.sampling import SamplingParams
from minifused.tokenizer import ByteTokenizer
from minifused.twin import Twin

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
        return None

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


def test_no_prompts_and_no_tokens(demo):
    assert demo.generate([]) == []
    with pytest.raises(UserError, match="max_new_tokens is 0"):
        demo.generate("a", max_new_tokens=0)


def test_truncation_keeps_the_end_of_a_prompt(demo):
    assert demo.encode("abc" * 100, truncate_to=4) == list(b"cabc")
    with pytest.raises(UserError, match=r"300 tokens.*256.*--truncate left"):
        demo.encode("abc" * 100)


def test_tokens_beyond_the_tokenizer_are_never_chosen():
    config = GPTConfig(vocab_size=300, n_positions=16, n_embd=64, n_head=1, n_layer=1)
    torch.manual_seed(0)
    twin = Twin(config).eval().requires_grad_(False)
    twin.wte.weight[256:] = 40 * twin.ln_f.weight.new_ones(64)  # the likeliest by far
    twin.ln_f.bias.fill_(1.0)
    fused = GPTModel.from_weights(config, twin.state_dict())
    for model in (fused, twin):
        generator = GPT(
            model, ByteTokenizer(), lambda x: x.softmax(-1), torch.device("cpu"), torch.float32
        )
        (done,) = generator.generate("a", max_new_tokens=10, params=SamplingParams(seed=1))
        assert max(done.tokens) < 256
        assert model(torch.tensor([[97]]))[0, 0].argmax() >= 256


def test_logprobs_are_those_of_the_chosen_tokens():
    (done,) = say(["abc"], max_new_tokens=2, with_logprobs=True)
    assert dataclasses.asdict(done).keys() == {"text", "tokens", "logprobs", "finish_reason"}
    assert len(done.logprobs) == 2 and all(-1 < p <= 0 for p in done.logprobs)
