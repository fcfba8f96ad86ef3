"""Hugging Face's own GPT-2: its folders load here and ours load there, with the same logits."""

import pytest
import torch

from minifused import checkpoint
from minifused.twin import Twin

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("error")  # a file as they write it brings no warning

BASE = {
    "vocab_size": 97,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 2,
    "bos_token_id": 96,
    "eos_token_id": 96,
}
VARIANTS = {
    "plain": {},
    "n_inner": {"n_inner": 48},
    "relu": {"activation_function": "relu"},
    "gelu-erf": {"activation_function": "gelu"},
    "gelu-fast": {"activation_function": "gelu_fast"},
    "unscaled": {"scale_attn_weights": False},
    "scaled-by-layer": {"scale_attn_by_inverse_layer_idx": True},
    "both-scales": {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True},
    "untied": {"tie_word_embeddings": False},
    "odd-sizes": {"vocab_size": 1009, "n_embd": 35, "n_head": 5, "n_layer": 1},
    "epsilon": {"layer_norm_epsilon": 1e-2},
}
on_each_variant = pytest.mark.parametrize("variant", VARIANTS)


def their_model(**changes):
    """A model with random weights, biases and norms, all large enough to be missed."""
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**BASE | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def our_model(folder):
    config = checkpoint.load_config(folder)
    twin = Twin(config).eval()
    twin.load_state_dict(checkpoint.load_weights(folder, config))
    return twin


@torch.inference_mode()
def assert_same_logits(ours, theirs, tolerance):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(ours.config.vocab_size, (2, 33), generator=generator)
    logits, expected = ours(tokens), theirs(tokens).logits.float()
    assert logits.shape == expected.shape and expected.std() > 0.5
    torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance)


@on_each_variant
def test_their_folder_loads_here(tmp_path, variant):
    theirs = their_model(**VARIANTS[variant])
    theirs.save_pretrained(tmp_path)
    assert_same_logits(our_model(tmp_path), theirs, 1e-4)


@pytest.mark.parametrize("variant", ["plain", "untied"])
def test_their_shards_load_here_bit_for_bit(tmp_path, variant):
    theirs = their_model(**VARIANTS[variant])
    theirs.save_pretrained(tmp_path / "one")
    theirs.save_pretrained(tmp_path / "many", max_shard_size="60KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    one, many = (our_model(tmp_path / name).state_dict() for name in ("one", "many"))
    assert one.keys() == many.keys() and all(torch.equal(one[name], many[name]) for name in one)


@on_each_variant
def test_our_folder_loads_there(tmp_path, variant):
    their_model(**VARIANTS[variant]).save_pretrained(tmp_path / "theirs")
    ours = our_model(tmp_path / "theirs")
    checkpoint.save(tmp_path / "ours", ours.config, ours.state_dict())
    theirs, info = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(info.values())
    assert_same_logits(ours, theirs.eval(), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_files_of_16_bits_go_both_ways(tmp_path, dtype):
    theirs = their_model().to(dtype)
    theirs.save_pretrained(tmp_path / "theirs")
    config = checkpoint.load_config(tmp_path / "theirs")
    weights = checkpoint.load_weights(tmp_path / "theirs", config)
    assert {tensor.dtype for tensor in weights.values()} == {dtype}
    assert_same_logits(our_model(tmp_path / "theirs"), theirs.float(), 1e-4)
    checkpoint.save(tmp_path / "ours", config, weights)
    back = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours", dtype=dtype)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor.to(dtype)), name


def test_the_base_model_without_a_head_and_its_prefix_loads_here(tmp_path):
    theirs = their_model()
    theirs.transformer.save_pretrained(tmp_path)
    assert_same_logits(our_model(tmp_path), theirs, 1e-4)
