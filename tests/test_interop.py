"""transformers' models on our attention, against their eager attention."""

import sys

import pytest
import torch
from helpers import needs_cuda, normal
from torch import Tensor

from minifused import interop, ops
from minifused.errors import UserError
from minifused.metrics import BOUNDS, measure, within

transformers = pytest.importorskip("transformers")

# All models have heads of size 32, so that few builds of the kernel serve the whole file.
GPT2 = {"vocab_size": 97, "n_positions": 64, "n_embd": 64, "n_head": 2, "n_layer": 2}
WIDTHS = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
TOLERANCE = 1e-4

VALID = {
    "no-padding": [[1] * 9] * 3,
    "right": [[1] * 9, [1] * 4 + [0] * 5, [1] + [0] * 8],
    "left": [[1] * 9, [0] * 5 + [1] * 4, [0] * 8 + [1]],
    "gaps": [[1] * 9, [0, 1, 1, 0, 0, 1, 1, 1, 0], [1, 0] * 4 + [1]],
}
on_each_padding = pytest.mark.parametrize("padding", VALID)


@pytest.fixture(autouse=True)
def registered():
    interop.register_attention()


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """How many queries each call of our attention has had."""
    counts: list[int] = []
    attention = ops.attention

    def counted(q, *arguments, **named):
        counts.append(q.shape[1])
        return attention(q, *arguments, **named)

    monkeypatch.setattr(ops, "attention", counted)
    return counts


def make(kind, config):
    """A model with random weights, large enough that a wrong mask is seen."""
    torch.manual_seed(0)
    model = kind(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def gpt2(**changes):
    config = transformers.GPT2Config(**GPT2 | changes, bos_token_id=96, eos_token_id=96)
    return make(transformers.GPT2LMHeadModel, config)


def llama(**changes):
    config = transformers.LlamaConfig(**WIDTHS | HEADS | changes)
    return make(transformers.LlamaForCausalLM, config)


def random_tokens(*shape: int) -> Tensor:
    return torch.randint(96, shape, generator=torch.Generator().manual_seed(1))


def by_both(model, run):
    """What run(model) gives with eager attention and with ours."""
    results = []
    for name in ("eager", "minifused"):
        model.set_attn_implementation(name)
        results.append(run(model))
    return results


def assert_same_logits(model, tokens, mask=None, **arguments):
    def run(model):
        return model(tokens, attention_mask=mask, **arguments).logits

    expected, logits = by_both(model, run)
    valid = torch.ones_like(tokens).bool() if mask is None else mask.bool()
    assert expected.std() > 0.5 and logits.isfinite().all()
    torch.testing.assert_close(logits[valid], expected[valid], rtol=0, atol=TOLERANCE)


@on_each_padding
def test_gpt2_logits_equal_eager(padding, calls):
    mask = torch.tensor(VALID[padding])
    assert_same_logits(gpt2(), random_tokens(3, 9), mask)
    assert calls == [9, 9]  # once a layer, and not in the eager pass


def test_a_padding_mask_changes_the_logits():
    model, tokens = gpt2(), random_tokens(3, 9)
    model.set_attn_implementation("minifused")
    padded = model(tokens, attention_mask=torch.tensor(VALID["left"])).logits
    assert (padded - model(tokens).logits)[1, -1].abs().max() > 0.1


def test_scale_of_the_layer_counts():
    assert_same_logits(gpt2(scale_attn_by_inverse_layer_idx=True), random_tokens(2, 9))


@pytest.mark.parametrize("padding", ["no-padding", "left"])
def test_grouped_query_heads_equal_eager(padding, calls):
    assert_same_logits(llama(), random_tokens(3, 9), torch.tensor(VALID[padding]))
    assert calls == [9, 9]


def bert_states(model):
    mask = torch.tensor(VALID["gaps"])
    return model(random_tokens(3, 9), attention_mask=mask).last_hidden_state


def test_bidirectional_attention_equals_eager(calls):
    config = transformers.BertConfig(**WIDTHS, num_attention_heads=2)
    expected, states = by_both(make(transformers.BertModel, config), bert_states)
    torch.testing.assert_close(states, expected, rtol=0, atol=TOLERANCE)
    assert calls == [9, 9]


def test_a_decoder_made_bidirectional_is():
    assert_same_logits(llama(is_causal=False, num_attention_heads=2), random_tokens(2, 9))


# Decoding


def generated(tokens, mask, **arguments):
    options = {"do_sample": False, "min_new_tokens": 16, "max_new_tokens": 16, "pad_token_id": 96}
    return lambda model: model.generate(tokens, attention_mask=mask, **options | arguments)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["no-padding", "left"])
def test_generated_tokens_equal_eager(padding, cache, calls):
    mask = torch.tensor(VALID[padding])[: 3 if padding == "left" else 1]
    run = generated(random_tokens(*mask.shape), mask, cache_implementation=cache)
    expected, tokens = by_both(gpt2(), run)
    assert tokens.shape == (len(mask), 9 + 16)
    assert tokens.tolist() == expected.tolist()
    assert calls == [9, 9] + [1] * 2 * 15  # a prompt, then one token after another


@pytest.mark.parametrize("cache", ["DynamicCache", "StaticCache"])
def test_several_tokens_after_a_cache_equal_eager(cache):
    model, tokens = gpt2(), random_tokens(3, 9)
    mask = torch.tensor(VALID["left"])
    length = {"max_cache_len": 32} if cache == "StaticCache" else {}

    def run(model):
        past = getattr(transformers, cache)(config=model.config, **length)
        model(tokens[:, :6], past, mask[:, :6])
        return model(tokens[:, 6:], past, mask).logits

    expected, logits = by_both(model, run)
    valid = mask[:, 6:].bool()
    torch.testing.assert_close(logits[valid], expected[valid], rtol=0, atol=TOLERANCE)


def test_static_cache_without_a_mask():
    def run(model):
        past = transformers.StaticCache(config=model.config, max_cache_len=32)
        return model(random_tokens(2, 9), past).logits

    expected, logits = by_both(gpt2(), run)
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)


# The function a layer calls


def attend(mask=None, head_dim=32, kv_heads=2, dtype=torch.float32, **arguments):
    draw = normal(dtype=dtype)
    q, k, v = (draw(2, heads, 5, head_dim) for heads in (2, kv_heads, kv_heads))
    return interop.attention_forward(torch.nn.Module(), q, k, v, mask, **arguments)


def test_rows_of_padded_queries_are_zero():
    mask = torch.tensor([[False, False, True, True, True], [True, True, False, False, False]])
    out, weights = attend(mask)
    assert out.shape == (2, 5, 2, 32) and weights is None
    assert (out.abs().amax((2, 3)) > 0).tolist() == mask.tolist()


REFUSED_ARGUMENTS = {
    "sliding_window": 4,
    "softcap": 30.0,
    "s_aux": torch.zeros(2),
    "sinks": torch.zeros(2),
    "position_bias": torch.zeros(1, 2, 5, 5),
    "attention_bias": torch.zeros(2, 5),
    "head_mask": torch.ones(2),
    "output_attentions": True,
    "indices": torch.zeros(1),
    "block_indices": torch.zeros(1),
    "block_table": torch.zeros(1),
    "cu_seq_lens_q": torch.tensor([0, 5]),
    "cu_seq_lens_k": torch.tensor([0, 5]),
}


def assert_refused(feature, call):
    with pytest.raises(ValueError, match=feature) as refusal:
        call()
    assert 'attn_implementation="eager"' in str(refusal.value)


def test_every_refused_argument_is_tried():
    assert REFUSED_ARGUMENTS.keys() == interop.FEATURES.keys()


@pytest.mark.parametrize("name", REFUSED_ARGUMENTS)
def test_arguments_the_kernel_does_not_know_are_refused(name):
    words = interop.FEATURES[name].split("(")[0]
    assert_refused(words, lambda: attend(**{name: REFUSED_ARGUMENTS[name]}))


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("dropout", {"dropout": 0.1}),
        ("heads of size 264", {"head_dim": 264}),
        ("float64", {"dtype": torch.float64}),
        ("shapes", {"kv_heads": 3}),
        ("4-D", {"mask": torch.ones(2, 1, 5, 5).bool()}),
        ("masks of one's own", {"mask": torch.zeros(2, 5)}),
        (r"mask of shape \(1, 5\)", {"mask": torch.ones(1, 5).bool()}),
        (r"mask of shape \(2, 4\)", {"mask": torch.ones(2, 4).bool()}),
        (r"mask of shape \(2, 6\)", {"mask": torch.ones(2, 6).bool()}),
        (r"mask of shape \(2, 4\)", {"mask": torch.ones(2, 4).bool(), "is_causal": False}),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(words, arguments):
    assert_refused(words, lambda: attend(**arguments))


def test_harmless_arguments_pass():
    out, _ = attend(output_attentions=False, sliding_window=None, position_ids=torch.arange(5))
    assert out.any() and torch.equal(out, attend()[0])


# What a whole model asks for


def on_ours(model):
    model.set_attn_implementation("minifused")
    return model


def test_training_with_dropout_is_refused():
    assert_refused("dropout", lambda: on_ours(gpt2()).train()(random_tokens(1, 5)))


def test_backward_is_refused():
    model = on_ours(gpt2(attn_pdrop=0.0)).requires_grad_(True).train()
    tokens = random_tokens(1, 5)
    assert_refused("gradients", model(tokens, labels=tokens).loss.backward)


def test_output_attentions_is_refused():
    model = on_ours(gpt2())
    assert_refused("output_attentions", lambda: model(random_tokens(1, 5), output_attentions=True))
    model(random_tokens(1, 5), output_hidden_states=True)


def test_4d_mask_is_refused():
    mask = torch.zeros(1, 1, 5, 5)
    assert_refused("4-D", lambda: on_ours(gpt2())(random_tokens(1, 5), attention_mask=mask))


def test_sliding_window_model_is_refused():
    config = transformers.MistralConfig(**WIDTHS | HEADS, sliding_window=4)
    model = on_ours(make(transformers.MistralForCausalLM, config))
    assert_refused("sliding window", lambda: model(random_tokens(1, 9)))


def test_packed_sequences_are_refused():
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    tokens = random_tokens(1, 5)
    model = on_ours(gpt2())
    assert_refused("packed", lambda: model(tokens, position_ids=positions, use_cache=False))


def test_short_mask_is_refused():
    with pytest.raises(ValueError, match=r"attention_mask is \(1, 4\): expected \(1, 5\)"):
        on_ours(gpt2())(random_tokens(1, 5), attention_mask=torch.ones(1, 4))


# Registration


def test_other_names_are_taken_and_theirs_are_not():
    interop.register_attention("minifused-again")
    interop.register_attention("minifused-again")
    model = gpt2()
    model.set_attn_implementation("minifused-again")
    for name in ("eager", "sdpa"):
        with pytest.raises(ValueError, match=f"'{name}' exists"):
            interop.register_attention(name)


def test_missing_transformers_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"pip install 'minifused\[hf\]'"):
        interop.register_attention()


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("padding", ["no-padding", "left"])
def test_gpt2_on_a_gpu_is_as_close_as_eager(dtype, padding, calls):
    mask, tokens = torch.tensor(VALID[padding]).cuda(), random_tokens(3, 9).cuda()
    model = gpt2()
    model.set_attn_implementation("eager")
    reference = model.double().cuda()(tokens, attention_mask=mask).logits[mask.bool()]
    model.to(dtype)
    eager, ours = by_both(model, lambda model: model(tokens, attention_mask=mask).logits)
    errors = measure(ours[mask.bool()], reference)
    assert within(errors, BOUNDS["model"].limits(measure(eager[mask.bool()], reference)))
    assert calls == [9, 9]
