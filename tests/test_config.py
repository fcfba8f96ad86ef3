"""The configuration: GPT-2's defaults and names, and what is refused."""

import dataclasses

import pytest

from minifused.config import PRESETS, GPTConfig
from minifused.errors import UserError


def parameter_count(c: GPTConfig) -> int:
    block = 4 * c.n_embd**2 + 2 * c.n_embd * c.inner_dim + c.inner_dim + 9 * c.n_embd
    return (c.vocab_size + c.n_positions + 2) * c.n_embd + c.n_layer * block


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_presets_have_the_published_sizes(name, parameters):
    assert parameter_count(PRESETS[name]) == parameters
    assert PRESETS[name].head_dim == 64


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("gelu_new", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("gelu_fast", "gelu_tanh"),
        ("gelu", "gelu"),
        ("relu", "relu"),
    ],
)
def test_activation_names(name, form):
    assert GPTConfig(activation_function=name).activation == form


@pytest.mark.parametrize("inner", [{}, {"n_inner": None}], ids=["absent", "null"])
def test_missing_keys_take_the_defaults_of_gpt2(inner):
    config = GPTConfig.from_dict({"n_embd": 1024, "n_head": 16, "n_ctx": 512, **inner})
    assert (config.inner_dim, config.n_positions, config.activation) == (4096, 1024, "gelu_tanh")
    assert config.tie_word_embeddings


def test_missing_special_ids_are_those_of_gpt2_where_the_table_has_them():
    for vocab_size, given, ids in (
        (50257, {}, (50256, 50256)),
        (50256, {}, (None, None)),
        (50304, {"eos_token_id": None}, (50256, None)),
        (50304, {"bos_token_id": 7, "eos_token_id": 9}, (7, 9)),
    ):
        config = GPTConfig.from_dict({"vocab_size": vocab_size, **given})
        assert (config.bos_token_id, config.eos_token_id) == ids


def test_inner_dim_follows_n_inner():
    assert GPTConfig(n_embd=32, n_head=2, n_inner=48).inner_dim == 48


@pytest.mark.parametrize(
    ("by_width", "by_layer", "scales"),
    [
        (True, False, [0.25, 0.25, 0.25]),
        (False, False, [1.0, 1.0, 1.0]),
        (True, True, [0.25, 0.125, 0.25 / 3]),
        (False, True, [1.0, 0.5, 1 / 3]),
    ],
)
def test_attention_scale_of_each_layer(by_width, by_layer, scales):
    options = {"scale_attn_weights": by_width, "scale_attn_by_inverse_layer_idx": by_layer}
    config = GPTConfig.from_dict({"n_embd": 32, "n_head": 2, **options})
    assert [config.attention_scale(layer) for layer in range(3)] == scales
    assert config.to_dict().items() >= options.items()


def test_to_dict_comes_back_as_the_same_config():
    config = GPTConfig(vocab_size=97, n_inner=48, tie_word_embeddings=False, eos_token_id=96)
    values = config.to_dict()
    assert values["model_type"] == "gpt2" and values["architectures"] == ["GPT2LMHeadModel"]
    assert GPTConfig.from_dict(values) == config


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        GPTConfig().n_layer = 3


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("vocab_size", 0, "positive integer"),
        ("n_positions", -1, "positive integer"),
        ("n_embd", 768.0, "positive integer"),
        ("n_embd", 770, "multiple of n_head 12"),
        ("n_layer", True, "positive integer"),
        ("n_head", "12", "positive integer"),
        ("n_inner", 0, "positive integer"),
        ("activation_function", "swish", "gelu_new, gelu_pytorch_tanh, gelu_fast, gelu, relu"),
        ("activation_function", ["gelu"], "use one of"),
        ("scale_attn_weights", 1, "true or false"),
        ("scale_attn_by_inverse_layer_idx", None, "true or false"),
        ("layer_norm_epsilon", 0.0, "1e-5"),
        ("layer_norm_epsilon", float("nan"), "1e-5"),
        ("tie_word_embeddings", None, "true or false"),
        ("attn_pdrop", 1.0, "probability"),
        ("eos_token_id", 50257, "below vocab_size 50257"),
        ("bos_token_id", -1, "below vocab_size 50257"),
    ],
)
def test_bad_values_are_refused_by_name(field, value, remedy):
    with pytest.raises(UserError) as error:
        GPTConfig.from_dict({field: value})
    assert f"{field} is {value!r}" in str(error.value) and remedy in str(error.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("model_type", "llama"),
        ("add_cross_attention", True),
    ],
)
def test_options_that_change_the_numbers_are_refused(option, value):
    with pytest.raises(UserError, match=f"{option} is {value!r}; only"):
        GPTConfig.from_dict({option: value})


def test_harmless_options_are_ignored():
    values = {"reorder_and_upcast_attn": True, "use_cache": False, "summary_type": "mean"}
    assert GPTConfig.from_dict(values) == GPTConfig.from_dict({})
