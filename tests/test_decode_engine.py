"""A thousand decoding steps: logits at every kind of position, one capture, and no compiling."""

import dataclasses
import functools

import pytest
import torch
from helpers import needs_cuda

from minifused import ops
from minifused.batch import Batch, Choice
from minifused.config import PRESETS
from minifused.kernels import build
from minifused.metrics import BOUNDS, measure, within
from minifused.model import GPTModel
from minifused.sampling import SamplingParams
from minifused.twin import Twin

SHALLOW = dataclasses.replace(PRESETS["gpt2"], n_layer=2)
POSITIONS = (1, 63, 64, 511, 1023)
GREEDY = SamplingParams(temperature=0)


@functools.cache
def shallow_twin():
    """GPT-2's widths in two layers, in float64, with some channels a hundred times the others."""
    torch.manual_seed(0)
    twin = Twin(SHALLOW).eval().requires_grad_(False)
    for name, parameter in twin.named_parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        if name.endswith("c_proj.bias"):
            parameter[5::191] *= 100
    return twin.cuda().double()


def fused(dtype):
    return GPTModel.from_weights(SHALLOW, shallow_twin().state_dict(), "cuda", dtype)


def random_tokens(*shape):
    return torch.randint(50257, shape, generator=torch.Generator().manual_seed(1)).cuda()


def decoded(model, tokens, lengths):
    """Logits (B, V) of the token at lengths[b] of each row, behind a cache that ends in NaN."""
    cache = model.new_cache(len(tokens), 1024)
    counts = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    model(tokens[:, : max(lengths)], cache, last_only=True, lengths=counts)
    for row, length in enumerate(lengths):
        cache.keys[:, row, length:] = cache.values[:, row, length:] = torch.nan
    cache.longest = max(lengths)
    last = tokens.gather(1, counts.long()[:, None])
    return model(last, cache, lengths=torch.ones_like(counts))[:, 0]


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 3, 32, 96])
@torch.inference_mode()
def test_logits_at_every_kind_of_position(batch, dtype):
    model, exact = fused(dtype), shallow_twin()
    eager = Twin.from_weights(SHALLOW, dict(exact.state_dict())).to(dtype)
    cases = [[p] for p in POSITIONS] if batch == 1 else [[*POSITIONS, 700, 2] * batch][:1]
    for lengths in cases:
        lengths = lengths[:batch]
        tokens = random_tokens(batch, 1024)
        logits, references, eagers = decoded(model, tokens, lengths), [], []
        for row, length in list(enumerate(lengths))[:7]:
            seen = tokens[row : row + 1, : length + 1]
            references.append(exact(seen)[0, -1])
            eagers.append(eager(seen)[0, -1])
        reference = torch.stack(references)
        errors = measure(logits[:7], reference)
        limits = BOUNDS["model"].limits(measure(torch.stack(eagers), reference))
        assert within(errors, limits), f"{lengths}: {errors}, allowed {limits}"


def new_batch(model, size, params, graph):
    return Batch(model, ops.softmax, 50257, torch.device("cuda"), size, 1024, Choice(params), graph)


def take(batch, prompts, count):
    batch.begin(prompts, range(len(prompts)), [count] * len(prompts), seed=3)
    return [step.tokens for step in batch.run(count)]


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 3])
@torch.inference_mode()
def test_a_thousand_steps_of_one_graph_are_those_of_launches(size, dtype):
    model, prompts = fused(dtype), random_tokens(3, 20).tolist()[:size]
    launched, replayed = (new_batch(model, size, SamplingParams(), g) for g in (False, True))
    expected = take(launched, prompts, 1000)
    take(replayed, prompts, 4)  # the second step is captured, and here the prompts' length is met
    take(replayed, prompts, 4)
    compiled, graphs = build.stats.count, dict(replayed._graphs._graphs)
    assert take(replayed, prompts, 1000) == expected
    assert build.stats.count == compiled and replayed._graphs._graphs == graphs
    assert {name if name == "step" else name[0] for name in graphs} == {"step", "prefill"}
    assert torch.equal(launched.cache.lengths, replayed.cache.lengths)
    assert len({token for step in expected for token in step}) > 500


@needs_cuda
@pytest.mark.parametrize("size", [2, 33])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@torch.inference_mode()
def test_scores_with_peaks_take_no_kernel_to_add_them_up(dtype, size):
    batch = new_batch(fused(dtype), size, SamplingParams(), False)
    take(batch, random_tokens(size, 20).tolist(), 4)  # compiles
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        batch.step()
        torch.cuda.synchronize()
    ran = {event.name.removesuffix("_kernel") for event in profile.events()}
    assert "piece_values" in ran and ("piece_sums" in ran) == (dtype == torch.float32)


@needs_cuda
@pytest.mark.parametrize("size", [1, 3, 33])
@torch.inference_mode()
def test_greedy_tokens_are_the_largest_scores(size):
    batch = new_batch(fused(torch.bfloat16), size, GREEDY, False)
    batch.begin(random_tokens(size, 20).tolist(), range(size), [9] * size)
    for choose in (batch.prefill, *[batch.step] * 8):
        logits = choose()
        assert torch.equal(batch.tokens[:, 0], logits.argmax(-1)) and logits.any()
    assert batch.finite[:9].all() and not batch.finite[9:].any()


@needs_cuda
@torch.inference_mode()
def test_512_greedy_tokens_are_the_twins():
    prompt = random_tokens(1, 20)
    said = [
        tokens[0]
        for tokens in take(new_batch(fused(torch.float32), 1, GREEDY, True), prompt.tolist(), 512)
    ]
    twin = Twin.from_weights(SHALLOW, dict(shallow_twin().state_dict())).float()
    cache, tokens, expected = twin.new_cache(1, 1024), prompt, []
    for _ in range(512):
        tokens = twin(tokens, cache, last_only=True)[:, -1].argmax(-1, keepdim=True)
        expected.append(int(tokens))
    assert said == expected
