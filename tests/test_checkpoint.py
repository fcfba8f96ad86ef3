"""Model folders: the layout of GPT-2's files, and what is said of files that do not fit."""

import json
import stat
import warnings
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from minifused import checkpoint
from minifused.config import GPTConfig
from minifused.errors import UserError
from minifused.twin import Twin

CONFIG = GPTConfig(vocab_size=97, n_positions=64, n_embd=32, n_layer=2, n_head=2)
UNTIED = replace(CONFIG, n_inner=48, tie_word_embeddings=False)


def make_state(config=CONFIG, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = checkpoint.expected_shapes(config)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def assert_same(loaded, expected):
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name


def save_raw(folder, tensors, config=CONFIG):
    """Write tensors just as they are given, beside a config."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    save_file(tensors, folder / "model.safetensors")
    return folder


def stored_state(config=CONFIG):
    """What a folder's file should hold, written out by hand: (in, out) and prefixed."""
    turned = ("c_attn.weight", "c_fc.weight", "c_proj.weight")
    return {
        name if name.startswith("lm_head") else f"transformer.{name}": (
            tensor.T.contiguous() if name.endswith(turned) else tensor
        )
        for name, tensor in make_state(config).items()
    }


def message_of(folder, config=CONFIG):
    with pytest.raises(UserError) as error:
        checkpoint.load_weights(folder, config)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)
    return str(error.value)


@pytest.fixture
def folder(tmp_path):
    checkpoint.save(tmp_path / "model", CONFIG, make_state())
    return tmp_path / "model"


@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
def test_save_and_load_give_back_every_bit(tmp_path, config):
    checkpoint.save(tmp_path, config, make_state(config))
    assert checkpoint.load_config(tmp_path) == config
    loaded = checkpoint.load_weights(tmp_path, config)
    assert_same(loaded, make_state(config))
    Twin(config).load_state_dict(loaded)


@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
def test_saved_file_has_the_layout_of_gpt2(tmp_path, config):
    checkpoint.save(tmp_path, config, make_state(config))
    assert_same(load_file(tmp_path / "model.safetensors"), stored_state(config))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtype_is_stored_and_kept(tmp_path, dtype):
    checkpoint.save(tmp_path, CONFIG, make_state(), dtype)
    expected = {name: tensor.to(dtype) for name, tensor in make_state().items()}
    assert_same(checkpoint.load_weights(tmp_path, CONFIG), expected)


def test_loaded_weights_can_be_saved_over_their_own_file(folder):
    checkpoint.save(folder, CONFIG, checkpoint.load_weights(folder, CONFIG))
    assert_same(checkpoint.load_weights(folder, CONFIG), make_state())


def test_nothing_else_is_left_in_the_folder(folder):
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == ["config.json", "model.safetensors"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {
        stat.S_IMODE((folder / "config.json").stat().st_mode)
    }


def test_a_failed_save_leaves_the_old_files(folder, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, "serialise", fail)
    with pytest.raises(UserError, match="disk full"):
        checkpoint.save(folder, CONFIG, make_state(seed=1))
    assert_same(checkpoint.load_weights(folder, CONFIG), make_state())
    assert len(list(folder.iterdir())) == 2


def test_saving_into_a_file_is_refused(tmp_path):
    (tmp_path / "model").write_text("a file")
    with pytest.raises(UserError, match="model: cannot write"):
        checkpoint.save(tmp_path / "model", CONFIG, make_state())


def test_saving_weights_of_another_shape_is_a_bug(tmp_path):
    with pytest.raises(ValueError):
        checkpoint.save(tmp_path / "model", UNTIED, make_state(CONFIG))
    assert not (tmp_path / "model").exists()


def test_square_conv1d_weights_are_transposed(folder):
    """Hugging Face's Conv1D computes x @ weight, which a square weight must not be guessed for."""
    stored = load_file(folder / "model.safetensors")["transformer.h.1.attn.c_proj.weight"]
    loaded = checkpoint.load_weights(folder, CONFIG)["h.1.attn.c_proj.weight"]
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(torch.nn.functional.linear(x, loaded), x @ stored)
    assert not torch.equal(loaded, stored) and loaded.is_contiguous()


@pytest.mark.parametrize("prefix", [True, False], ids=["prefix", "no-prefix"])
@pytest.mark.parametrize("buffers", [True, False], ids=["buffers", "no-buffers"])
def test_variants_of_the_names_load_alike(tmp_path, prefix, buffers):
    tensors = stored_state()
    if buffers:
        for layer in range(2):
            name = f"transformer.h.{layer}.attn"
            tensors[f"{name}.bias"] = torch.ones(1, 1, 64, 64).tril().to(torch.uint8)
            tensors[f"{name}.masked_bias"] = torch.tensor(-1e4)
    if not prefix:
        tensors = {name.removeprefix("transformer."): t for name, t in tensors.items()}
    save_raw(tmp_path, tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(checkpoint.load_weights(tmp_path, CONFIG), make_state())


@pytest.mark.parametrize("kept", ["both", "head"])
def test_a_tied_head_may_be_stored_beside_the_table_or_for_it(tmp_path, kept):
    tensors = stored_state() | {"lm_head.weight": make_state()["wte.weight"].clone()}
    if kept == "head":
        del tensors["transformer.wte.weight"]
    save_raw(tmp_path, tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(checkpoint.load_weights(tmp_path, CONFIG), make_state())


@pytest.mark.parametrize("head", [torch.zeros(97, 32), torch.zeros(104, 32, dtype=torch.float16)])
def test_a_tied_head_with_other_values_is_ignored_with_a_warning(tmp_path, head):
    save_raw(tmp_path, stored_state() | {"lm_head.weight": head})
    with pytest.warns(UserWarning, match=r"lm_head.weight differs.*set it to false") as caught:
        loaded = checkpoint.load_weights(tmp_path, CONFIG)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert_same(loaded, make_state())


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        ("h.0.attn.c_attn", (96, 32)),
        ("h.1.mlp.c_fc", (128, 32)),
        ("h.1.mlp.c_proj", (32, 128)),
    ],
)
def test_weights_stored_out_in_are_refused_with_the_cause(tmp_path, layer, shape):
    tensors = stored_state()
    name = f"transformer.{layer}.weight"
    tensors[name] = tensors[name].T.contiguous()
    message = message_of(save_raw(tmp_path, tensors))
    assert f"{name} has shape {shape}, but {shape[::-1]} is needed" in message
    assert "stored as (out, in)" in message and "transpose" in message


def test_rows_of_the_vocabulary_must_fit_the_config(tmp_path):
    tensors = stored_state() | {"transformer.wte.weight": torch.zeros(104, 32)}
    message = message_of(save_raw(tmp_path, tensors))
    assert "wte.weight has shape (104, 32), but (97, 32) is needed" in message
    assert "set its vocab_size 97 to the table's 104 rows" in message
    padded = replace(CONFIG, vocab_size=104)
    assert checkpoint.load_weights(tmp_path, padded)["wte.weight"].shape == (104, 32)


def test_a_table_of_another_width_is_not_blamed_on_the_vocabulary(tmp_path):
    tensors = stored_state() | {"transformer.wte.weight": torch.zeros(97, 48)}
    message = message_of(save_raw(tmp_path, tensors))
    assert "config.json does not fit the weights" in message and "vocab_size" not in message


def test_missing_tensors_are_listed(tmp_path):
    tensors = stored_state()
    for name in ("wpe.weight", "h.1.ln_2.bias"):
        del tensors[f"transformer.{name}"]
    assert "lack wpe.weight, h.1.ln_2.bias;" in message_of(save_raw(tmp_path, tensors))


def test_an_untied_head_must_be_there(folder):
    untied = replace(CONFIG, tie_word_embeddings=False)
    assert "lack lm_head.weight" in message_of(folder, untied)


def test_unknown_tensors_are_left_out_with_a_warning_that_lists_them(tmp_path):
    extra = {name: torch.zeros(3) for name in ("score.weight", "transformer.h.1.attn.rotary")}
    save_raw(tmp_path, stored_state() | extra)
    with pytest.warns(
        UserWarning, match=r"score\.weight, transformer\.h\.1\.attn\.rotary"
    ) as caught:
        loaded = checkpoint.load_weights(tmp_path, CONFIG)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert str(tmp_path) in str(caught[0].message)
    assert_same(loaded, make_state())


def test_more_layers_than_the_config_has_are_refused(tmp_path):
    extra = {f"transformer.h.{n}.attn.c_attn.bias": torch.zeros(96) for n in (2, 3, 4, 5)}
    message = message_of(save_raw(tmp_path, stored_state() | extra))
    assert "hold transformer.h.2.attn.c_attn.bias, " in message and "and 1 more" in message
    assert "n_layer is 2; config.json does not fit them" in message


def test_a_tensor_under_both_of_its_names_is_refused(tmp_path):
    tensors = stored_state() | {"wpe.weight": torch.zeros(64, 32)}
    message = message_of(save_raw(tmp_path, tensors))
    assert "transformer.wpe.weight" in message and "are one tensor" in message


def test_integer_weights_are_refused(tmp_path):
    tensors = stored_state()
    tensors["transformer.ln_f.bias"] = torch.zeros(32, dtype=torch.int8)
    assert "ln_f.bias is I8; only F64, F32" in message_of(save_raw(tmp_path, tensors))


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab29\nsize 5512\n"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[:-100], "incomplete download"),
        (lambda data: data[:4], "4 bytes, an incomplete download"),
        (lambda data: b"", "0 bytes, an incomplete download"),
        (lambda data: LFS_POINTER, f"{len(LFS_POINTER)} bytes that look like a Git LFS pointer"),
        (lambda data: b"<!DOCTYPE html><html>404</html>", "31 bytes that look like a web page"),
        (lambda data: b"PK\x03\x04" * 100, "400 bytes, an incomplete download"),
    ],
    ids=["cut", "four-bytes", "empty", "lfs", "html", "zip"],
)
def test_damaged_weights(folder, damage, said):
    path = folder / "model.safetensors"
    data = damage(path.read_bytes())
    path.write_bytes(data)
    message = message_of(folder)
    assert f"{path}: {len(data):,} bytes" in message and said in message and "fetch" in message


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    assert "no model.safetensors or model.safetensors.index.json" in message_of(folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "1 bytes"),
        ("[]", "no JSON object"),
        (LFS_POINTER.decode(), "Git LFS pointer"),
        ('{"n_head": 5}', "n_embd is 768; make it a multiple of n_head 5"),
        ('{"model_type": "llama"}', "model_type is 'llama'"),
        ('{"vocab_size": 97, "eos_token_id": 97}', "eos_token_id is 97; give null or an id below"),
        ("\ud800", "not valid JSON"),
    ],
)
def test_bad_config(tmp_path, text, said):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError) as error:
        checkpoint.load_config(tmp_path)
    assert str(error.value).count(str(path)) == 1 and said in str(error.value)


def test_no_folder_and_no_config(tmp_path):
    with pytest.raises(UserError, match="absent: no such folder"):
        checkpoint.load_config(tmp_path / "absent")
    with pytest.raises(UserError, match=r"no config\.json in this folder"):
        checkpoint.load_config(tmp_path)


@pytest.fixture
def sharded(tmp_path):
    """The same model in two files and an index."""
    stored = stored_state()
    shards = [dict(list(stored.items())[::2]), dict(list(stored.items())[1::2])]
    weight_map = {}
    for number, tensors in enumerate(shards):
        save_file(tensors, tmp_path / f"model-{number}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"model-{number}.safetensors")
    (tmp_path / checkpoint.INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_shards_equal_one_file_and_stray_files_are_ignored(sharded):
    save_file({"transformer.wpe.weight": torch.zeros(64, 32)}, sharded / "stray.safetensors")
    assert_same(checkpoint.load_weights(sharded, CONFIG), make_state())


@pytest.mark.parametrize("shard", ["model-0.safetensors", "model-1.safetensors"])
def test_a_missing_shard_is_named_before_any_other_is_opened(sharded, shard, monkeypatch):
    (sharded / shard).unlink()
    monkeypatch.delattr(checkpoint, "safe_open")
    assert f"{sharded / shard}: named by {checkpoint.INDEX_FILE}, but" in message_of(sharded)


def test_a_damaged_shard_is_named(sharded):
    path = sharded / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert f"{path}: {path.stat().st_size:,} bytes, an incomplete" in message_of(sharded)


def test_a_shard_without_its_tensor_is_named(sharded):
    path = sharded / "model-1.safetensors"
    tensors = load_file(path)
    name = next(iter(tensors))
    del tensors[name]
    save_file(tensors, path)
    assert f"{path}: lacks {name}" in message_of(sharded)


def test_an_index_must_not_reach_out_of_its_folder(sharded):
    text = json.dumps({"weight_map": {"wpe.weight": "../model-0.safetensors"}})
    (sharded / checkpoint.INDEX_FILE).write_text(text)
    assert "weight_map" in message_of(sharded)
