"""The fused model against the twin, which shares no code with it."""

import dataclasses

import pytest
import torch
from helpers import DEVICES, int32
from torch.utils._python_dispatch import TorchDispatchMode

from minifused import checkpoint, ops
from minifused.config import GPTConfig
from minifused.engine import DEMO_FOLDER
from minifused.kernels import build
from minifused.model import GPTModel
from minifused.twin import Twin

# Widths of its own, but one head size: kernels are compiled per width.
SMALL = GPTConfig(vocab_size=97, n_positions=64, n_embd=40, n_layer=2, n_head=2)
VARIANTS = {
    "tied": SMALL,
    "untied, inner width, relu": dataclasses.replace(
        SMALL, n_inner=48, activation_function="relu", tie_word_embeddings=False
    ),
    "erf gelu, wide epsilon": dataclasses.replace(
        SMALL, activation_function="gelu", layer_norm_epsilon=1e-2
    ),
}


def random_pair(config, device="cpu", seed=0):
    """A fused model and a twin with the same weights, none of them zero or one."""
    torch.manual_seed(seed)
    twin = Twin(config).eval().requires_grad_(False)
    for parameter in twin.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    return GPTModel.from_weights(config, twin.state_dict(), device), twin.to(device)


@pytest.fixture(scope="module", params=DEVICES)
def demo(request):
    config = checkpoint.load_config(DEMO_FOLDER)
    weights = checkpoint.load_weights(DEMO_FOLDER, config)
    twin = Twin(config).eval().requires_grad_(False)
    twin.load_state_dict(weights)
    return GPTModel.from_weights(config, weights, request.param), twin.to(request.param)


def random_tokens(config, *shape, seed=1, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, shape, generator=generator).to(device)


def device_of(model):
    return model.wpe["weight"].device


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_equal_the_twins(config, device):
    model, twin = random_pair(config, device)
    tokens = random_tokens(config, 2, 33, device=device)
    logits = model(tokens)
    assert logits.shape == (2, 33, 97) and logits.dtype == torch.float32
    torch.testing.assert_close(logits, twin(tokens), rtol=0, atol=1e-4)
    torch.testing.assert_close(model(tokens, last_only=True), logits[:, -1:], rtol=0, atol=1e-5)


def test_positions_matter_and_are_not_off_by_one():
    config = SMALL
    torch.manual_seed(0)
    twin = Twin(config).eval().requires_grad_(False)
    twin.wpe.weight.copy_(10 * torch.randn_like(twin.wpe.weight))
    model = GPTModel.from_weights(config, twin.state_dict())
    tokens = random_tokens(config, 1, 20)
    cache = model.new_cache(1, 20)
    steps = [model(tokens[:, i : i + 1], cache) for i in range(20)]
    torch.testing.assert_close(torch.cat(steps, 1), twin(tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_last_scores_are_those_of_a_pass_and_count_positions_if_told(device):
    model, _ = random_pair(SMALL, device)
    tokens, lengths = random_tokens(SMALL, 2, 9, device=device), int32(4, 9, device=device)
    logits = model(tokens, model.new_cache(2, 16), last_only=True, lengths=lengths)[:, 0]
    for advance in (True, False):
        cache = model.new_cache(2, 16)
        scores, peaks = model.last_scores(tokens, cache, lengths, 97, advance)
        assert torch.equal(scores[:, :97], logits) and logits.any()
        assert scores.shape[1] == 128 and len(peaks) == 2
        assert cache.lengths.tolist() == ([4, 9] if advance else [0, 0])


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129])
def test_one_cached_step_equals_one_pass(demo, length):
    model, twin = demo
    tokens = random_tokens(model.config, 2, length, device=device_of(model))
    cache = model.new_cache(2, length)
    if length > 1:
        model(tokens[:, :-1], cache)
    step = model(tokens[:, -1:], cache)
    torch.testing.assert_close(step, model(tokens)[:, -1:], rtol=0, atol=1e-4)
    torch.testing.assert_close(step, twin(tokens)[:, -1:], rtol=0, atol=1e-4)
    assert cache.lengths.tolist() == [length, length] and cache.longest == length


@pytest.mark.parametrize("chunks", [(3, 4, 1), (1, 1, 6), (5, 3)])
def test_chunked_prefill_equals_one_pass(demo, chunks):
    model, twin = demo
    tokens = random_tokens(model.config, 2, sum(chunks), device=device_of(model))
    cache = model.new_cache(2, 200)
    logits = torch.cat([model(part, cache) for part in tokens.split(chunks, dim=1)], dim=1)
    torch.testing.assert_close(logits, twin(tokens), rtol=0, atol=1e-4)


def greedy(model, prompt, steps):
    cache, tokens, chosen = model.new_cache(len(prompt), 256), prompt, []
    for _ in range(steps):
        tokens = model(tokens, cache, last_only=True).argmax(-1)
        chosen.append(tokens)
    return torch.cat(chosen, dim=1)


def test_64_greedy_tokens_equal_the_twins_and_compile_nothing_after_the_first(demo):
    model, twin = demo
    prompt = torch.tensor([list(b"First Citizen:\nWe are")], device=device_of(model))
    greedy(model, prompt, 2)
    before = build.stats.count
    tokens = greedy(model, prompt, 64)
    assert build.stats.count == before
    assert tokens.tolist() == greedy(twin, prompt, 64).tolist()
    assert len(set(tokens[0].tolist())) > 10  # verse, not one letter over and over


def pair_with_distant_positions(device):
    """Position embeddings ten times the other ones: a shift stands out, and so does attention."""
    model, twin = random_pair(SMALL, device)
    wpe = torch.randn(64, 40, generator=torch.Generator().manual_seed(2))
    for table in (model.wpe["weight"], twin.wpe.weight):
        table.copy_(wpe)
    return model, twin


@pytest.mark.parametrize("device", DEVICES)
def test_64_greedy_tokens_equal_those_without_a_cache(device):
    model, twin = pair_with_distant_positions(device)
    prompt = torch.tensor([[7], [90]], device=device)
    tokens = greedy(model, prompt, 64)
    fed = torch.cat([prompt, tokens[:, :-1]], dim=1)
    for whole in (model(fed), twin(fed)):  # each token is the choice after all those before it
        assert tokens.tolist() == whole.argmax(-1).tolist()
    assert len(set(tokens[0].tolist())) > 10


@pytest.mark.parametrize("device", DEVICES)
def test_ragged_rows_keep_their_own_positions_whatever_the_padding(device):
    model, twin = pair_with_distant_positions(device)
    rows = [random_tokens(SMALL, 1, n, seed=n, device=device) for n in (1, 5, 17)]
    following = random_tokens(SMALL, 3, 8, device=device)
    lengths = torch.tensor([1, 5, 17], dtype=torch.int32, device=device)
    results = []
    for pad in (0, 96):
        padded = torch.full((3, 17), pad, device=device)
        for row, tokens in zip(padded, rows, strict=True):
            row[: tokens.shape[1]] = tokens[0]
        cache = model.new_cache(3, 25)
        parts = [model(padded, cache, last_only=True, lengths=lengths)]
        parts += [model(step, cache) for step in following.split(1, dim=1)]
        results.append(torch.cat(parts, dim=1))
    assert torch.equal(*results)
    for got, row, after in zip(results[0], rows, following, strict=True):
        alone = twin(torch.cat([row, after[None]], dim=1))[0, row.shape[1] - 1 :]
        torch.testing.assert_close(got, alone, rtol=0, atol=1e-4)
        assert got.argmax(-1).tolist() == alone.argmax(-1).tolist()


def test_a_row_of_a_batch_equals_the_row_alone(demo):
    model, twin = demo
    prompts = random_tokens(model.config, 3, 17, device=device_of(model))
    together = greedy(model, prompts, 16)
    alone = torch.cat([greedy(model, row[None], 16) for row in prompts])
    assert together.tolist() == alone.tolist() == greedy(twin, prompts, 16).tolist()


class Recorder(TorchDispatchMode):
    """Collects the names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket._qualified_op_name)
        return func(*args, **(kwargs or {}))


HEAVY = ("mm", "bmm", "addmm", "matmul", "linear", "softmax", "gelu", "relu", "layer_norm",
         "attention", "baddbmm", "einsum", "var_mean")  # fmt: skip


def run_prefill_and_decode(model, tokens, softmax):
    cache = model.new_cache(1, 64)
    model(tokens, cache)
    model(tokens[:, :3], cache)
    softmax(model(tokens[:, :1], cache, last_only=True)[:, -1])


def test_no_heavy_aten_operator_runs_in_the_fused_forward(demo):
    model, twin = demo
    tokens = random_tokens(model.config, 1, 20, device=device_of(model))
    with Recorder() as fused:
        run_prefill_and_decode(model, tokens, ops.softmax)
    aten = [n for n in fused.names if not n.startswith("minifused::")]
    assert [n for n in aten if any(heavy in n for heavy in HEAVY)] == []
    expected = "embed norm_qkv attention add_linear add_decode_attention norm_linear softmax"
    for name in expected.split():
        assert f"minifused::{name}" in fused.names
    with Recorder() as plain:  # the list of names does catch a model that is not fused
        run_prefill_and_decode(twin, tokens, lambda x: x.softmax(-1))
    assert {"aten::addmm", "aten::gelu", "aten::_softmax"} <= plain.names


def test_compiles_into_one_graph():
    model, twin = random_pair(SMALL)
    tokens = random_tokens(SMALL, 2, 20)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens), model(tokens), rtol=0, atol=1e-5)
    torch.testing.assert_close(compiled(tokens), twin(tokens), rtol=0, atol=1e-4)


def test_refuses_more_positions_than_there_are():
    model, _ = random_pair(SMALL)
    with pytest.raises(ValueError, match=r"65 positions.*64"):
        model(random_tokens(SMALL, 1, 65))
    cache = model.new_cache(1, 8)
    model(random_tokens(SMALL, 1, 8), cache)
    with pytest.raises(ValueError, match=r"9 positions.*8"):
        model(random_tokens(SMALL, 1, 1), cache)
