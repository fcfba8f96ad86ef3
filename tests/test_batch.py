"""Rows that decode together: what a step leaves behind, eager and as a CUDA graph."""

import dataclasses
from collections import Counter

import pytest
import torch
from helpers import DEVICES, needs_cuda, on_each_device

from minifused import GPT, ops
from minifused import batch as batch_module
from minifused.batch import CHUNK, Batch, Choice, Graphs
from minifused.engine import DEMO_FOLDER, MAX_IDLE
from minifused.errors import UserError
from minifused.kernels import build
from minifused.kernels.append_kv import append_kv_kernel
from minifused.sampling import SamplingParams

PROMPTS = [list(text.encode()) for text in ("R", "First Citizen:\nWe are", "O, she doth teach")]
GREEDY = SamplingParams(temperature=0)
EVERY_OPTION = SamplingParams(
    temperature=0.8, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1
)


def demo(device, dtype="float32", **options):
    return GPT.from_pretrained(DEMO_FOLDER, device=device, dtype=dtype, **options)


def new_batch(gpt, size, capacity, choice, graph=False):
    model, device = gpt.model, gpt.device
    return Batch(model, ops.softmax, 256, device, size, capacity, choice, graph)


def take(batch, prompts, count, seed=0):
    """All that `count` steps gave, one list a step."""
    with torch.inference_mode():
        batch.begin(prompts, range(len(prompts)), [count] * len(prompts), seed)
        return list(batch.run(count))


def is_varied(tokens):
    """Not what a model would say that computes nothing, and always the same."""
    return len(set(tokens)) > 5


@on_each_device
def test_a_row_ends_with_its_last_token_and_with_eos(device):
    batch = new_batch(demo(device), 4, 64, Choice(GREEDY, eos=ord(" ")))
    with torch.inference_mode():
        batch.begin(PROMPTS, [0, 1, 2], [3, 9, 40])
        steps = list(batch.run(40))
    ends = []
    for row in range(3):
        said = [step.tokens[row] for step in steps]
        until_space = said.index(ord(" ")) + 1 if ord(" ") in said else 40
        ends.append(min([3, 9, 40][row], until_space))
    filled = [len(prompt) + end - 1 for prompt, end in zip(PROMPTS, ends, strict=True)]
    # The last token needs no position, and a row without a prompt has none at all.
    assert batch.cache.lengths.tolist() == [*filled, 0]
    assert ends[0] == 3 and ends[2] < 40 and not batch.going.any()


@on_each_device
def test_a_row_that_was_stopped_changes_no_other(device):
    gpt = demo(device)
    alone = take(new_batch(gpt, 2, 64, Choice(EVERY_OPTION)), PROMPTS[1:], 30)
    batch = new_batch(gpt, 2, 64, Choice(EVERY_OPTION))
    said = []
    with torch.inference_mode():
        batch.begin(PROMPTS[1:], [0, 1], [30, 30])
        for step in batch.run(30):
            said.append(step.tokens[1])
            if len(said) == 5:
                batch.stop([False, True])
    assert said == [step.tokens[1] for step in alone] and is_varied(said)
    assert batch.cache.lengths.tolist() == [len(PROMPTS[1]) + 4, len(PROMPTS[2]) + 29]


@on_each_device
def test_what_an_earlier_request_left_changes_nothing(device):
    gpt = demo(device)
    fresh = take(new_batch(gpt, 3, 64, Choice(EVERY_OPTION, None, True)), PROMPTS, 20, seed=5)
    used = new_batch(gpt, 3, 64, Choice(EVERY_OPTION, None, True))
    take(used, PROMPTS[::-1], 40, seed=1)
    used.cache.keys.fill_(float("nan"))  # unused slots of the cache are never read
    used.cache.values.fill_(float("nan"))
    assert take(used, PROMPTS, 20, seed=5) == fresh
    assert is_varied(step.tokens[0] for step in fresh)


@on_each_device
def test_rows_without_a_prompt_change_nothing(device):
    gpt = demo(device)
    exact = take(new_batch(gpt, 3, 64, Choice(GREEDY)), PROMPTS, 20)
    roomy = take(new_batch(gpt, 4, 128, Choice(GREEDY)), PROMPTS, 20)
    assert [step.tokens[:3] for step in roomy] == [step.tokens for step in exact]
    assert is_varied(step.tokens[0] for step in exact)


@on_each_device
def test_steps_that_are_not_finite_are_marked_by_row(device):
    gpt = demo(device)
    first = 20 if device == "cpu" else 70  # behind what prompts are padded to
    gpt.model.wpe["weight"][first] = float("nan")
    count, end = first - 14, first - len(PROMPTS[2]) + 1
    steps = take(new_batch(gpt, 2, 128, Choice(GREEDY)), [PROMPTS[0], PROMPTS[2]], count)
    assert [step.finite for step in steps] == [[True, n < end] for n in range(count)]


def test_a_copy_with_another_model_has_batches_of_its_own():
    gpt = demo("cpu")
    other = dataclasses.replace(gpt, model=demo("cpu").model)
    assert other._idle is not gpt._idle


@needs_cuda
@pytest.mark.parametrize("eos", [None, ord("e")])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), EVERY_OPTION])
def test_one_kernel_chooses_as_operators_of_pytorch_do(params, eos):
    gpt = demo("cuda")
    fused, unfused = (new_batch(gpt, 4, 256, Choice(params, eos, True)) for _ in range(2))
    unfused.fused = False
    for seed in range(3):
        steps = take(fused, PROMPTS, 200, seed)
        assert steps == take(unfused, PROMPTS, 200, seed)
        assert all(torch.equal(a, b) for a, b in zip(state(fused), state(unfused), strict=True))
        assert eos is not None or is_varied(step.tokens[0] for step in steps)


# CUDA graphs


@needs_cuda
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), EVERY_OPTION])
def test_replays_equal_launches_bit_for_bit(dtype, params):
    gpt = demo("cuda", dtype)
    choice = Choice(params, eos=ord("!"), with_logprobs=True)
    batches = [new_batch(gpt, 4, 256, choice, graph) for graph in (False, True)]
    for seed in range(3):  # the first request captures the step, the second one the prefill
        launched, replayed = (take(batch, PROMPTS, 230, seed) for batch in batches)
        assert replayed == launched
    assert all(torch.equal(a, b) for a, b in zip(*map(state, batches), strict=True))
    names = set(batches[1]._graphs._graphs)
    assert names == {"step", ("prefill", 64)}


def state(batch):
    return batch.cache.lengths, batch.left, batch.going, batch.chosen, batch.finite, batch.scores


@needs_cuda
def test_two_steps_in_one_graph_are_right_too():
    gpt = demo("cuda")
    eager, captured = (new_batch(gpt, 2, 128, Choice(EVERY_OPTION)) for _ in range(2))
    expected = take(eager, PROMPTS[:2], 41)
    with torch.inference_mode():
        take(captured, PROMPTS[:2], 3)  # loads what a capture must not load
        captured.begin(PROMPTS[:2], [0, 1], [41, 41])
        captured.prefill()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured.step()
            captured.step()
        for _ in range(20):
            graph.replay()
    assert captured.chosen[:41].tolist() == [step.tokens for step in expected]


# The host's side of graphs: chunks, batches that are kept. On a CPU the work is done each time.


class Repeated(Graphs):
    def __init__(self):
        self._uses, self._graphs = Counter(), {}

    def launch(self, name, work):
        self._graphs.setdefault(name, (name,))
        return work()


@pytest.fixture(params=DEVICES)
def with_graphs(request, monkeypatch):
    """The demo model with CUDA graphs, and without."""
    if request.param == "cpu":
        monkeypatch.setattr(batch_module, "Graphs", Repeated)
    plain = demo(request.param, cuda_graph=False)
    return dataclasses.replace(plain, cuda_graph=True), plain


def test_graphs_write_the_same_text_and_are_captured_once(with_graphs):
    graphs, plain = with_graphs
    options = {"max_new_tokens": 5 * CHUNK + 3, "params": SamplingParams(0.8, seed=3)}
    prompts = [bytes(prompt).decode() for prompt in PROMPTS]
    expected = plain.generate(prompts, stop=["the"], **options)
    assert {completion.finish_reason for completion in expected} >= {"stop"}
    assert graphs.generate(prompts, stop=["the"], **options) == expected
    (batch,) = graphs._idle
    assert (batch.size, batch.capacity) == (4, 256)
    captured = dict(batch._graphs._graphs)
    assert "step" in captured
    for _ in range(2):
        assert graphs.generate(prompts, stop=["the"], **options) == expected
    assert graphs._idle == [batch] and plain._idle == []
    assert batch._graphs._graphs["step"] is captured["step"]


def test_the_first_token_comes_before_any_other_is_launched(with_graphs, monkeypatch):
    steps = []
    step = Batch.step
    monkeypatch.setattr(Batch, "step", lambda self: steps.append(1) or step(self))
    events = with_graphs[0].stream(PROMPTS, max_new_tokens=60)
    assert len(next(events).completion.tokens) == 1 and steps == []
    for _ in range(3):  # the last two rows' first token, then the first chunk and the next one
        next(events)
    assert len(steps) == 2 * CHUNK
    assert len(list(events)) == 3 * 60 - 4 and len(steps) == 59


def test_streams_side_by_side_do_not_share_a_batch(with_graphs):
    gpt, _ = with_graphs
    options = {"max_new_tokens": 40, "params": SamplingParams(0.8, seed=3)}
    expected = [gpt.generate(bytes(prompt).decode(), **options)[0] for prompt in PROMPTS]
    streams = [gpt.stream([prompt], **options) for prompt in PROMPTS]
    *_, last = zip(*streams, strict=True)  # a token of each, in turns
    assert [event.completion for event in last] == expected
    assert all(is_varied(completion.tokens) for completion in expected)


def test_a_stream_that_is_left_gives_its_batch_back(with_graphs):
    gpt, plain = with_graphs
    options = {"max_new_tokens": 50, "params": SamplingParams(0.8, seed=3)}
    for _ in range(2):
        events = gpt.stream(PROMPTS, **options)
        next(events)
        events.close()
        assert len(gpt._idle) == 1
    prompts = [bytes(prompt).decode() for prompt in PROMPTS]
    expected = plain.generate(prompts, **options)
    assert gpt.generate(prompts, **options) == expected
    assert all(is_varied(completion.tokens) for completion in expected)


def test_idle_batches_are_few(with_graphs):
    gpt, _ = with_graphs
    for k in range(1, MAX_IDLE + 3):
        gpt.generate("a", max_new_tokens=4, params=SamplingParams(top_k=k))
    assert len(gpt._idle) == MAX_IDLE


# What a batch compiles before its first prefill


@pytest.fixture
def forget(monkeypatch):
    """Forget what is compiled until the test ends; its result says what has been since."""

    def forget():
        batch_module._compiled.clear()
        for kernel in build._kernels.values():
            monkeypatch.setattr(kernel, "_launch", None)
        return lambda: {key for key, kernel in build._kernels.items() if kernel._launch is not None}

    return forget


def without_compiling_ahead(batch):
    batch._compile_ahead = lambda *work: None
    return batch


CHOICES = [Choice(GREEDY), Choice(SamplingParams(), 10), Choice(EVERY_OPTION, None, True)]


@on_each_device
@pytest.mark.parametrize("choice", CHOICES)
def test_a_batch_compiles_ahead_what_it_launches_and_nothing_else(choice, device, forget):
    gpt = demo(device)
    compiled = forget()
    take(without_compiling_ahead(new_batch(gpt, 3, 64, choice)), PROMPTS, 9)
    launched = compiled()
    compiled = forget()
    batch = new_batch(gpt, 3, 64, choice)
    with torch.inference_mode():
        batch.begin(PROMPTS, [0, 1, 2], [9] * 3)
        batch.prefill()
        assert compiled() == launched and len(launched) > 5
        count = build.stats.count
        for _ in range(8):
            batch.step()
    assert build.stats.count == count


@on_each_device
@pytest.mark.parametrize("choice", CHOICES)
def test_compiling_ahead_launches_nothing_and_changes_no_token(choice, device):
    gpt = demo(device)
    plain, batch = (new_batch(gpt, 3, 64, choice) for _ in range(2))
    batch.cache.keys.fill_(float("nan"))
    batch.cache.values.fill_(float("nan"))
    with torch.inference_mode():
        batch.begin(PROMPTS, [0, 1, 2], [9] * 3)
        batch_module._compiled.clear()
        batch._compile_ahead(40, True)
    assert batch.cache.keys.isnan().all() and batch.cache.values.isnan().all()
    for prompts in (PROMPTS, PROMPTS[:2]):  # the second time with the state that the first left
        batch_module._compiled.clear()
        expected = take(without_compiling_ahead(plain), prompts, 20, seed=5)
        assert take(batch, prompts, 20, seed=5) == expected
        assert is_varied(step.tokens[0] for step in expected)


def test_work_of_a_kind_is_looked_at_once(monkeypatch):
    gpt, looks = demo("cpu"), []
    monkeypatch.setattr(ops, "compile_ahead", looks.append)
    batch_module._compiled.clear()
    for length, capacity in ((5, 9), (8, 16), (9, 16), (9, 17), (9, 32)):
        take(new_batch(gpt, 1, capacity, Choice(GREEDY)), [[82] * length], 2)
    assert len(looks) == 3  # of 5 to 8 positions, and of 9 to 16, with room for 16 and for 32
    for size, choice in ((2, Choice(GREEDY)), (2, Choice(SamplingParams()))):
        for _ in range(2):
            take(new_batch(gpt, size, 9, choice), [[82] * 5], 2)
    assert len(looks) == 5
    for backend in ("tilelang", "torch"):  # another model, and one without kernels
        take(new_batch(demo("cpu", backend=backend), 2, 9, choice), [[82] * 5] * 2, 2)
        assert len(looks) == 6


def test_work_that_failed_to_compile_is_looked_at_again(monkeypatch):
    gpt, looks = demo("cpu"), []

    def fail(work):
        looks.append(work)
        raise UserError("no room")

    monkeypatch.setattr(ops, "compile_ahead", fail)
    batch_module._compiled.clear()
    for _ in range(2):
        with pytest.raises(UserError, match="no room"):
            gpt.generate("R", max_new_tokens=2)
    assert len(looks) == 2


@on_each_device
def test_a_batch_with_room_for_its_only_token_compiles_no_step(device):
    gpt = demo(device)
    (step,) = take(new_batch(gpt, 1, 1, Choice(EVERY_OPTION)), [[82]], 1)
    assert step == take(new_batch(gpt, 1, 2, Choice(EVERY_OPTION)), [[82]], 2)[0]


def test_a_kernel_that_does_not_compile_is_an_error_of_the_request(forget, monkeypatch):
    gpt, compile_it = demo("cpu"), build._compile
    expected = gpt.generate("R", max_new_tokens=9)
    assert is_varied(expected[0].tokens)

    def fail(builder, *static):
        if builder is append_kv_kernel:
            raise UserError("no room for append_kv")
        return compile_it(builder, *static)

    forget()
    with monkeypatch.context() as broken:
        broken.setattr(build, "_compile", fail)
        for _ in range(2):
            with pytest.raises(UserError, match=r"^no room for append_kv$"):
                gpt.generate("R", max_new_tokens=9)
    assert gpt.generate("R", max_new_tokens=9) == expected
