"""The operators as PyTorch sees them, and any shape at all."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import test_attention
import test_cache_ops
import test_linear
import test_rows
import torch
from helpers import int32, needs_cuda, normal, on_each_device
from hypothesis import given, settings
from hypothesis import strategies as st

from minifused import ops
from minifused.kernels import build

ROOT = Path(__file__).parents[1]


# One call of each overload. Widths and head sizes are those of other tests: compiled once for all.


def linear(draw):
    return (draw(50, 33), draw(96, 33), draw(96), None, draw(50, 96)), (50, 96)


def attention(draw):
    q, k, v = draw(2, 17, 2, 8), draw(2, 33, 2, 8), draw(2, 33, 2, 8)
    q_lengths, kv_lengths = (int32(*row, device=q.device) for row in ((5, 17), (6, 33)))
    return (q, k, v, True, None, q_lengths, kv_lengths), (2, 17, 2, 8)


def decode_attention(draw):
    caches = draw(2, 33, 2, 8), draw(2, 33, 2, 8)
    return (draw(2, 1, 3, 2, 8), *caches, int32(5, 33, device=caches[0].device)), (2, 1, 2, 8)


def softmax(draw):
    return (draw(5, 7), 3), (5, 7)


def layer_norm(draw):
    return (draw(5, 192), draw(192), draw(192), 1e-5), (5, 192)


def softmax_to_draw(draw):
    return (draw(5, 7), 3), None


def append_kv(draw):
    caches = draw(2, 33, 2, 8), draw(2, 33, 2, 8)
    return (*caches, draw(2, 5, 3, 2, 8), None, int32(0, 30, device=caches[0].device)), None


def vector_add(draw):
    return (draw(5, 7), draw(5, 7)), (5, 7)


def norm_linear(draw):
    return (draw(5, 192), draw(192), draw(192), 1e-5, draw(96, 192), draw(96), "gelu_tanh"), None


def scores(draw):
    return (draw(5, 192), draw(192), draw(192), 1e-5, draw(96, 192), 77), None


def norm_qkv(draw):
    caches = draw(2, 33, 2, 8), draw(2, 33, 2, 8)
    positions = int32(0, 30, device=caches[0].device)
    weights = draw(192), draw(192), 1e-5, draw(48, 192), draw(48)
    return (draw(2, 5, 192), *weights, *caches, positions), None


def add_linear(draw):
    return (draw(2, 5, 96), draw(2, 5, 16), draw(96, 16), draw(96), draw(96)), None


def add_decode_attention(draw):
    arguments, _ = decode_attention(draw)
    return (draw(2, 1, 96), *arguments, 0.3, draw(96, 16), draw(96), draw(96)), None


def embed(draw):
    tokens = torch.arange(10).view(2, 5).to(draw(1).device)
    return (tokens, int32(0, 30, device=tokens.device), draw(10, 16), draw(33, 16)), None


SAMPLES = {make.__name__: make for make in
           (linear, attention, decode_attention, softmax, layer_norm, append_kv, vector_add,
            norm_linear, scores, norm_qkv, add_linear, add_decode_attention, embed,
            softmax_to_draw)
           }  # fmt: skip
WITH_OUT = [name for name in SAMPLES if SAMPLES[name](normal())[1] is not None]
OVERLOADS = [*SAMPLES, *(f"{name}.out" for name in WITH_OUT)]
ON_GPUS_ALONE = ["choose_token"]  # test_batch.py


def sample(overload, device="cpu", seed=0):
    """The operator, arguments and keyword arguments of one call."""
    name, _, variant = overload.partition(".")
    arguments, out_shape = SAMPLES[name](normal(device, seed=seed))
    options = {"out": torch.empty(out_shape, device=device)} if variant else {}
    return getattr(getattr(torch.ops.minifused, name), variant or "default"), arguments, options


def call(operator, arguments, options):
    """Run it; return the tensors that hold results."""
    returned = operator(*arguments, **options)
    written = [x for x in arguments if isinstance(x, torch.Tensor) and x.shape[1:2] == (33,)]
    return [*results_of(returned), *options.values(), *written]


def results_of(returned):
    """The tensors among them that hold something."""
    returned = returned if isinstance(returned, tuple) else (returned,)
    return [x for x in returned if x is not None and x.numel()]


def run_every_operator():
    for overload in OVERLOADS:
        call(*sample(overload))


def test_no_operator_is_left_out():
    names = torch._C._dispatch_get_all_op_names()
    assert {n.removeprefix("minifused::") for n in names if n.startswith("minifused::")} == {
        *OVERLOADS, *ON_GPUS_ALONE
    }  # fmt: skip


@pytest.mark.parametrize("overload", OVERLOADS)
@on_each_device
def test_opcheck(overload, device):
    operator, arguments, options = sample(overload, device)
    torch.library.opcheck(operator, arguments, options)


def off_by_one(tensor):
    """A contiguous copy that begins one element into its memory, where no wide access may."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        return tensor
    memory = tensor.new_empty(tensor.numel() + 1)
    return memory[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("name", [name for name in SAMPLES if "kv" not in name])
@on_each_device
def test_inputs_may_begin_at_any_element(name, device):
    operator, arguments, _ = sample(name, device)
    caches = {"decode_attention": (1, 2), "add_decode_attention": (2, 3)}.get(name, ())
    # Caches are never copied.
    shifted = [x if i in caches else off_by_one(x) for i, x in enumerate(arguments)]
    results, others = results_of(operator(*arguments)), results_of(operator(*shifted))
    assert results
    for result, other in zip(results, others, strict=True):
        assert torch.equal(other, result) and result.any()


@needs_cuda
def test_what_is_written_has_to_begin_where_wide_accesses_may():
    for name in WITH_OUT:
        operator, arguments, options = sample(f"{name}.out", "cuda")
        with pytest.raises(ValueError, match="out begins off a multiple of 32 bytes"):
            operator(*arguments, out=off_by_one(options["out"]))
    operator, arguments, _ = sample("append_kv", "cuda")
    with pytest.raises(ValueError, match="k_cache begins off"):
        operator(off_by_one(arguments[0]), *arguments[1:])


# torch.compile


def step(x, weight, bias, norm, k_cache, v_cache, positions):
    x = ops.layer_norm(x, norm, norm)  # (T, 33)
    qkv = ops.linear(x, weight, bias).view(1, -1, 3, 2, 8)
    y = ops.attention(qkv).flatten(2)  # (1, 2 * T, 16)
    ops.append_kv(k_cache, v_cache, qkv, None, positions)
    last = ops.decode_attention(qkv[:, -1:], k_cache, v_cache, positions + qkv.shape[1])
    return ops.softmax(y * 2), last, k_cache, v_cache


@on_each_device
def test_compiled_whole_with_dynamic_rows(device):
    backend = "aot_eager" if device == "cpu" else "inductor"  # which takes 15 s on a CPU
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    draw = normal(device)
    parameters = draw(96, 33), draw(96), draw(33)
    for rows in (17, 20, 40):
        x, results = draw(rows, 33), []
        for run in (step, compiled):
            caches = torch.zeros(2, 1, 200, 2, 8, device=device)
            results.append(run(x, *parameters, *caches, int32(3, device=device)))
        for eager, other in zip(*results, strict=True):
            assert torch.equal(eager, other) and eager.any()


# Processes, threads, graphs


def test_denormals_survive_every_operator():
    """A library built with -ffast-math would flush them in the whole process."""
    script = """
import torch
denormal = torch.full((64,), 1e-40)
assert (denormal * 1.0).all(), "already flushed"
import test_ops
test_ops.run_every_operator()
assert (denormal * 1.0).all(), "flushed by a kernel"
assert 1e-310 * 1.0 != 0.0
"""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


@on_each_device
def test_threads_share_one_compile(device):
    draw = normal(device)
    x, weight = draw(2, 5), draw(13, 5)  # widths of no other test
    before, results, start = build.stats.count, [], threading.Barrier(4)

    def work():
        start.wait()
        results.append(ops.linear(x, weight))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert build.stats.count == before + 1
    assert len(results) == 4
    assert all(torch.equal(result, results[0]) for result in results)
    test_linear.check(x, weight)


@on_each_device
def test_new_row_counts_compile_nothing(device):
    draw = normal(device)
    weight, bias = draw(96, 33), draw(96)
    counts = []
    for rows in (50, 20, 64, 33):
        assert ops.linear(draw(rows, 33), weight, bias).any()
        assert (ops.softmax(draw(rows, 7)) > 0).all()
        assert ops.attention(draw(2, rows, 3, 2, 8)).any()
        counts.append(build.stats.count)
    assert len(set(counts)) == 1


@pytest.mark.parametrize("overload", OVERLOADS)
@needs_cuda
def test_captured_graph_replays_on_new_inputs(overload):
    operator, arguments, options = sample(overload, "cuda")
    other = sample(overload, "cuda", seed=1)
    call(operator, arguments, options)  # compiles, which a capture could not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call(operator, arguments, options)
    for old, new in zip(arguments, other[1], strict=True):
        if isinstance(old, torch.Tensor):
            old.copy_(new)
    graph.replay()
    for result, expected in zip(results, call(*other), strict=True):
        assert torch.equal(result, expected) and expected.any()


# Any number of rows: widths are drawn from few, as each compiles.

any_shape = settings(deadline=None, derandomize=True, max_examples=15)
rows = st.one_of(st.integers(1, 20), st.integers(1, 200))
lengths = st.one_of(st.integers(0, 20), st.integers(0, 140))
seeds = st.integers(0, 2**31)


@on_each_device
@any_shape
@given(
    leading=st.lists(st.integers(1, 4), max_size=2),
    m=rows,
    seed=seeds,
)
def test_linear_of_any_rows(leading, m, seed, device):
    draw, shape = normal(device, seed=seed), (*leading, m)
    test_linear.check(draw(*shape, 33), draw(96, 33, std=0.2), draw(96), residual=draw(*shape, 96))


@on_each_device
@any_shape
@given(batch=st.integers(1, 3), length=rows, seed=seeds)
def test_packed_attention_of_any_length(batch, length, seed, device):
    test_attention.check(normal(device, seed=seed)(batch, length, 3, 2, 8))


@on_each_device
@any_shape
@given(
    q_len=rows,
    k_len=rows,
    valid=st.one_of(st.none(), st.lists(st.tuples(lengths, lengths), min_size=1, max_size=3)),
    seed=seeds,
)
def test_attention_of_any_lengths(q_len, k_len, valid, seed, device):
    draw, batch = normal(device, seed=seed), 2 if valid is None else len(valid)
    q, k, v = draw(batch, q_len, 2, 8), draw(batch, k_len, 2, 8), draw(batch, k_len, 2, 8)
    pairs = (None, None)
    if valid is not None:
        pairs = (int32(*column, device=device) for column in zip(*valid, strict=True))
    test_attention.check(q, k, v, True, None, *pairs)


@on_each_device
@any_shape
@given(
    length=st.integers(1, 20),
    capacity=st.integers(1, 40),
    positions=st.lists(st.integers(-25, 45), min_size=1, max_size=4),
    packed=st.booleans(),
    seed=seeds,
)
def test_append_at_any_position(length, capacity, positions, packed, seed, device):
    test_cache_ops.check_append(
        normal(device, seed=seed)(len(positions), length, 3, 2, 8), positions, capacity, packed
    )


@on_each_device
@any_shape
@given(capacity=st.integers(1, 70), data=st.data(), packed=st.booleans(), seed=seeds)
def test_decode_of_any_lengths(capacity, data, packed, seed, device):
    valid = data.draw(st.lists(st.integers(0, capacity), min_size=1, max_size=4))
    draw, batch = normal(device, seed=seed), len(valid)
    q = draw(batch, 1, 3, 2, 8) if packed else draw(batch, 1, 2, 8)
    caches = draw(batch, capacity, 2, 8), draw(batch, capacity, 2, 8)
    test_cache_ops.check_decode(q, *caches, int32(*valid, device=device))


@on_each_device
@any_shape
@given(
    leading=st.lists(st.integers(1, 9), max_size=3),
    config=st.sampled_from([(1, 1), (7, 7), (7, 3), (1000, 1000)]),
    std=st.sampled_from([1e-3, 1.0, 10.0]),
    seed=seeds,
)
def test_softmax_of_any_rows(leading, config, std, seed, device):
    n, valid = config
    test_rows.check_softmax(normal(device, seed=seed)(*leading, n, std=std), valid)


@on_each_device
@any_shape
@given(
    leading=st.lists(st.integers(1, 9), max_size=3),
    n=st.sampled_from([1, 7, 192]),
    mean=st.sampled_from([0.0, -10.0]),
    seed=seeds,
)
def test_layer_norm_of_any_rows(leading, n, mean, seed, device):
    x = normal(device, seed=seed)(*leading, n) + mean
    test_rows.check_layer_norm(x, torch.float32)
