"""The twin against formulas written out by hand, and against itself with a cache."""

import ast
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from minifused import twin as twin_module
from minifused.checkpoint import expected_shapes
from minifused.config import GPTConfig
from minifused.twin import Twin, causal_attention

CONFIG = GPTConfig(vocab_size=97, n_positions=64, n_embd=32, n_layer=2, n_head=2)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4}


def make_twin(config=CONFIG, dtype=torch.float32, seed=0):
    """A twin whose parameters are all random and large, so that none of them can be left out."""
    torch.manual_seed(seed)
    twin = Twin(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return twin


def make_tokens(batch_size, length, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(CONFIG.vocab_size, (batch_size, length), generator=generator)


def attention_by_hand(q, k, v, divisor=None):
    """Loops over queries; the last one sees every key. Scores are divided by `divisor`."""
    divisor = math.sqrt(q.shape[3]) if divisor is None else divisor
    out = torch.zeros_like(q)
    for row in range(q.shape[2]):
        visible = k.shape[2] - q.shape[2] + row + 1
        scores = (k[:, :, :visible] * q[:, :, row : row + 1]).sum(-1) / divisor
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)  # (B, H, visible)
        out[:, :, row] = (weights[..., None] * v[:, :, :visible]).sum(2)
    return out


def logits_by_hand(weights, config, tokens):
    """GPT-2 from its formulas, on a dictionary of weights: (B, T, vocab_size)."""

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x, name):
        centred = x - x.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + config.layer_norm_epsilon).sqrt()
        return centred / scale * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def activate(x):
        if config.activation == "relu":
            return x * (x > 0)
        if config.activation == "gelu":
            return x * (1 + torch.erf(x / math.sqrt(2))) / 2
        return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2

    x = weights["wte.weight"][tokens] + weights["wpe.weight"][: tokens.shape[1]]
    for layer in range(config.n_layer):
        name = f"h.{layer}"
        qkv = linear(norm(x, f"{name}.ln_1"), f"{name}.attn.c_attn")
        q, k, v = (
            torch.stack(part.split(config.head_dim, -1), 1) for part in qkv.split(config.n_embd, -1)
        )
        divisor = math.sqrt(config.head_dim) if config.scale_attn_weights else 1.0
        divisor *= layer + 1 if config.scale_attn_by_inverse_layer_idx else 1
        heads = attention_by_hand(q, k, v, divisor)
        x = x + linear(torch.cat(heads.unbind(1), -1), f"{name}.attn.c_proj")
        hidden = activate(linear(norm(x, f"{name}.ln_2"), f"{name}.mlp.c_fc"))
        x = x + linear(hidden, f"{name}.mlp.c_proj")
    head = weights["wte.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return norm(x, "ln_f") @ head.T


def test_imports_only_torch_einops_and_config():
    tree = ast.parse(Path(twin_module.__file__).read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    assert found == {"torch", "torch.nn", "einops", "minifused.config"}


@pytest.mark.parametrize("activation", ["gelu_new", "gelu", "relu"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_the_formulas(activation, tied):
    config = GPTConfig(
        vocab_size=97,
        n_positions=64,
        n_embd=36,
        n_layer=2,
        n_head=3,
        n_inner=50,
        activation_function=activation,
        tie_word_embeddings=tied,
        layer_norm_epsilon=1e-3,
    )
    twin, tokens = make_twin(config, torch.float64), make_tokens(2, 9)
    expected = logits_by_hand(twin.state_dict(), config, tokens)
    torch.testing.assert_close(twin(tokens), expected, rtol=1e-11, atol=1e-11)
    assert expected.std() > 0.1


@pytest.mark.parametrize("by_width", [True, False])
@pytest.mark.parametrize("by_layer", [True, False])
def test_scale_of_attention_in_one_pass_in_chunks_and_in_steps(by_width, by_layer):
    config = replace(CONFIG, scale_attn_weights=by_width, scale_attn_by_inverse_layer_idx=by_layer)
    twin, tokens = make_twin(config, torch.float64), make_tokens(2, 9)
    expected = logits_by_hand(twin.state_dict(), config, tokens)
    with torch.no_grad():
        for chunks in ((9,), (4, 5), (8, 1)):
            cache = twin.new_cache(2, 9)
            parts = [twin(part, cache) for part in tokens.split(chunks, dim=1)]
            torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("tied", [True, False])
def test_state_dict_has_the_names_of_the_checkpoint(tied):
    config = GPTConfig(vocab_size=97, n_embd=32, n_layer=2, n_head=2, tie_word_embeddings=tied)
    shapes = {name: tuple(tensor.shape) for name, tensor in Twin(config).state_dict().items()}
    assert shapes == expected_shapes(config)


@pytest.mark.parametrize(("q_len", "k_len"), [(1, 1), (1, 5), (2, 5), (5, 5), (4, 9)])
def test_attention_equals_the_formula(q_len, k_len):
    generator = torch.Generator().manual_seed(2)
    q, k, v = (
        torch.randn(2, 3, length, 7, generator=generator, dtype=torch.float64)
        for length in (q_len, k_len, k_len)
    )
    expected = attention_by_hand(q, k, v)
    torch.testing.assert_close(causal_attention(q, k, v), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("q_len", "expected"), [(1, [3.0]), (2, [2.5, 3.0])])
def test_causal_mask_aligns_bottom_right(q_len, expected):
    q, k = torch.zeros(1, 1, q_len, 4), torch.randn(1, 1, 5, 4)
    v = torch.arange(1.0, 6.0).view(1, 1, 5, 1).expand(1, 1, 5, 4)
    torch.testing.assert_close(causal_attention(q, k, v)[0, 0, :, 0], torch.tensor(expected))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "chunks",
    [(1,), (1, 1), (62, 1), (63, 1), (33, 31), (3, 4, 1), (1, 5, 1, 7), (1,) * 12],
    ids=str,
)
def test_cached_chunks_equal_one_pass(chunks, dtype):
    twin, tokens = make_twin(dtype=dtype), make_tokens(2, sum(chunks))
    with torch.no_grad():
        # Positions far apart make an off-by-one stand out.
        twin.wpe.weight += torch.arange(64)[:, None] * torch.tensor([1.0, -0.5] * 16)
        whole = twin(tokens)
        cache = twin.new_cache(2, max_length=64)
        parts = [twin(part, cache) for part in tokens.split(chunks, dim=1)]
    assert cache.length == sum(chunks) and type(cache.length) is int
    limit = {"rtol": 0, "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, **limit)


def test_cache_is_written_in_place_and_only_where_it_should_be():
    twin, tokens = make_twin(), make_tokens(3, 7)
    cache = twin.new_cache(3, max_length=10)
    keys, address = cache.keys, cache.keys.data_ptr()
    with torch.no_grad():
        twin(tokens[:, :6], cache)
        twin(tokens[:, 6:], cache)
    assert cache.keys is keys and keys.data_ptr() == address
    assert keys.shape == (2, 3, 2, 10, 16)
    assert keys[:, :, :, :7].abs().amin(-1).gt(0).all()
    assert not keys[:, :, :, 7:].any() and not cache.values[:, :, :, 7:].any()


def test_last_only_is_the_last_row():
    twin, tokens = make_twin(), make_tokens(2, 11)
    last, whole = twin(tokens, last_only=True), twin(tokens)
    assert last.shape == (2, 1, 97)
    torch.testing.assert_close(last, whole[:, -1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_weights_stay_near_float64(dtype):
    twin, tokens = make_twin(dtype=dtype), make_tokens(2, 17)
    exact = make_twin(dtype=torch.float64)
    exact.load_state_dict(twin.state_dict())
    with torch.no_grad():
        cache = twin.new_cache(2, 17)
        logits = torch.cat([twin(tokens[:, :9], cache), twin(tokens[:, 9:], cache)], dim=1)
        error = (logits.double() - exact(tokens)).square().mean().sqrt()
        scale = exact(tokens).square().mean().sqrt()
    assert logits.dtype == torch.float32 and cache.keys.dtype == dtype
    assert error < 8 * torch.finfo(dtype).eps * scale


def test_a_later_token_changes_no_earlier_logits():
    twin, tokens = make_twin(dtype=torch.float64), make_tokens(1, 12)
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 97
    difference = (twin(tokens) - twin(changed)).abs().amax(-1)[0]
    assert difference[:7].max() < 1e-13 and difference[7:].min() > 1e-6


def test_every_parameter_gets_a_gradient():
    twin, tokens = make_twin(dtype=torch.float64), make_tokens(2, 9)
    F.cross_entropy(twin(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    names = [name for name, p in twin.named_parameters() if p.grad is None or not p.grad.any()]
    assert names == []


def test_dropout_acts_in_training_only():
    twin, tokens = make_twin(), make_tokens(2, 9)
    assert torch.equal(twin(tokens), twin(tokens))
    twin.train()
    torch.manual_seed(3)
    assert not torch.equal(twin(tokens), twin(tokens))


def test_initialisation_follows_gpt2():
    torch.manual_seed(4)
    twin = Twin(GPTConfig(vocab_size=500, n_embd=128, n_layer=8, n_head=2))
    for block in twin.h:
        assert not block.attn.c_attn.bias.any() and torch.equal(block.ln_1.weight, torch.ones(128))
        assert block.mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
        for projection in (block.attn.c_proj, block.mlp.c_proj):
            assert projection.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert twin.wte.weight.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("length", [65, 9])
def test_too_many_positions_are_refused(length):
    twin = make_twin()
    cache = twin.new_cache(1, max_length=8) if length == 9 else None
    with pytest.raises(ValueError, match=f"{length} positions.*ends at {length - 1}"):
        twin(make_tokens(1, length), cache)


def test_hooks_see_the_residual_stream_of_each_layer():
    twin, tokens, seen = make_twin(), make_tokens(2, 5), []
    for block in twin.h:
        block.register_forward_hook(lambda module, inputs, output: seen.append(output))
    logits = twin(tokens)
    assert [tuple(x.shape) for x in seen] == [(2, 5, 32)] * 2
    torch.testing.assert_close(F.linear(twin.ln_f(seen[-1]), twin.wte.weight), logits)
