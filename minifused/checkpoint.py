"""Model folders in and out: config.json and safetensors, in the layout of Hugging Face's GPT-2.

Files name tensors `transformer.h.0...` or `h.0...` and store the weights of c_attn, c_fc and c_proj
as (in, out). The rest of the project uses the twin's names and (out, in), as in `nn.Linear`.
"""

import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor

from minifused.config import GPTConfig
from minifused.errors import UserError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PREFIX = "transformer."
DTYPES = ("F64", "F32", "F16", "BF16")
MASK_BUFFER = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
LAYER = re.compile(r"h\.(\d+)\.")
TABLES = ("wte.weight", "wpe.weight", "lm_head.weight")
CONV1D_WEIGHT = re.compile(r"h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight")

Place = tuple[Path, str]  # a file, and the name of a tensor in it


def load_config(folder: Path) -> GPTConfig:
    """Read the configuration of a model folder.

    Raises:
        UserError: the folder or its config.json is missing or cannot be read, or is no GPT-2.
    """
    path = Path(folder) / CONFIG_FILE
    if not path.parent.is_dir():
        raise UserError(f"{path.parent}: no such folder; give a folder with a model in it")
    if not path.is_file():
        raise UserError(f"{path.parent}: no {CONFIG_FILE} in this folder; give a model folder")
    try:
        return GPTConfig.from_dict(read_json(path))
    except UserError as error:
        message = str(error)
        raise UserError(message if str(path) in message else f"{path}: {message}") from None


def load_weights(
    folder: Path,
    config: GPTConfig,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """All weights of a model folder: what `iter_weights` yields, as a dictionary."""
    return dict(_read_all(_locate(Path(folder), config), device, dtype))


def iter_weights(
    folder: Path,
    config: GPTConfig,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Read the weights of a model folder one at a time, so that none need be held twice.

    All are checked against `expected_shapes(config)` before this returns. Tensors that no GPT-2 has
    are left out, with a warning that lists them.

    Args:
        device, dtype: where the tensors go and in what dtype; None keeps the stored one. Where
            neither changes, the embeddings and the head stay mapped from the file.

    Returns:
        Pairs of the twin's name and the tensor, weights (out, in), as `nn.Linear` holds them.

    Raises:
        UserError: a file is missing or damaged, or a tensor is missing or misshapen, or the
            weights have more layers than `config`.
    """
    return _read_all(_locate(Path(folder), config), device, dtype)


def save(
    folder: Path,
    config: GPTConfig,
    state_dict: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
) -> None:
    """Write a model folder that `load_config`, `load_weights` and Hugging Face can read.

    Each file is written beside its target and then renamed, so none is ever half-written.

    Args:
        state_dict: all tensors of `expected_shapes(config)`, on any device.
        dtype: what to store; None stores each tensor in its own dtype.

    Raises:
        UserError: the folder cannot be written.
        ValueError: `state_dict` does not fit `config`.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
    if shapes != expected_shapes(config):
        raise ValueError("the names and shapes of state_dict do not fit config")
    tensors = dict(to_stored(name, tensor.to("cpu", dtype)) for name, tensor in state_dict.items())
    text = json.dumps(config.to_dict(), indent=2) + "\n"
    try:  # safetensors' own save_file would leave the file unreadable for other users
        Path(folder).mkdir(parents=True, exist_ok=True)
        _replace(Path(folder) / WEIGHTS_FILE, serialise(tensors, metadata={"format": "pt"}))
        _replace(Path(folder) / CONFIG_FILE, text.encode())
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: cannot write the model here ({error})") from error


def expected_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of a model, under the twin's names, weights (out, in)."""
    width, inner = config.n_embd, config.inner_dim
    linears = {
        "attn.c_attn": (3 * width, width),
        "attn.c_proj": (width, width),
        "mlp.c_fc": (inner, width),
        "mlp.c_proj": (width, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (config.vocab_size, width),
        "wpe.weight": (config.n_positions, width),
        "ln_f.weight": (width,),
        "ln_f.bias": (width,),
    }
    for layer in range(config.n_layer):
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"h.{layer}.{norm}.{part}": (width,) for part in ("weight", "bias")}
        for linear, shape in linears.items():
            shapes[f"h.{layer}.{linear}.weight"] = shape
            shapes[f"h.{layer}.{linear}.bias"] = shape[:1]
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, width)
    return shapes


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises UserError for what is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        remedy = "fetch the file again"
        raise UserError(f"{path}: {describe_file(path)}, not valid JSON; {remedy}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds no JSON object; fetch the file again")
    return values


def _tensor_files(folder: Path) -> dict[str, Path]:
    """The file of each stored tensor. Files that an index does not name are left alone."""
    if (folder / WEIGHTS_FILE).is_file():
        path = folder / WEIGHTS_FILE
        with _open(path) as handle:
            return dict.fromkeys(handle.keys(), path)
    index = folder / INDEX_FILE
    if not index.is_file():
        found = f"no {WEIGHTS_FILE} or {INDEX_FILE}"
        raise UserError(f"{folder}: {found} in this folder; put the model's weights there")
    weight_map = read_json(index).get("weight_map")
    # A bare file name: an index must not reach out of its folder.
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) and file == Path(file).name for file in weight_map.values()
    ):
        raise UserError(f"{index}: weight_map does not give a file of the folder for each tensor")
    for file in sorted(set(weight_map.values())):
        if not (folder / file).is_file():
            raise UserError(f"{folder / file}: named by {INDEX_FILE}, but missing; fetch it again")
    return {name: folder / file for name, file in weight_map.items()}


def _locate(folder: Path, config: GPTConfig) -> dict[str, Place]:
    """Where each weight of the model is, after checking that all are there and fit."""
    files = _tensor_files(folder)
    names = _twin_names(files)
    head = names.pop("lm_head.weight", None) if config.tie_word_embeddings else None
    if head is not None:  # one tensor, stored under either name or under both
        names.setdefault("wte.weight", head)
    names = _known_names(names, config, folder)
    places = {name: (files[stored], stored) for name, stored in names.items()}
    with ExitStack() as stack:
        paths = sorted(set(files.values()))
        handles = {path: stack.enter_context(_open(path)) for path in paths}
        for name, (path, stored) in places.items():
            _check_tensor(handles[path], name, stored, path, config)
    if head is not None and head != names["wte.weight"]:
        _check_head((files[head], head), places["wte.weight"])
    return places


def _twin_names(files: Mapping[str, Path]) -> dict[str, str]:
    """Map the twin's name of each tensor to its stored name; mask buffers are left out."""
    names: dict[str, str] = {}
    for stored, path in files.items():
        name = stored.removeprefix(PREFIX)
        if MASK_BUFFER.fullmatch(name):
            continue
        if name in names:
            raise UserError(f"{path}: {names[name]} and {stored} are one tensor; remove one")
        names[name] = stored
    return names


def _known_names(names: Mapping[str, str], config: GPTConfig, folder: Path) -> dict[str, str]:
    """The entries of `names` that are parameters of the model; the others bring a warning."""
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in names]
    if missing:
        raise UserError(
            f"{folder}: the weights lack {_some(missing)}; {CONFIG_FILE} does not fit them, "
            "or the file is not whole"
        )
    unknown = {name: stored for name, stored in names.items() if name not in expected}
    layers = {name: LAYER.match(name) for name in unknown}
    deeper = [unknown[name] for name, at in layers.items() if at and int(at[1]) >= config.n_layer]
    if deeper:
        raise UserError(
            f"{folder}: the weights hold {_some(deeper)}, but n_layer is {config.n_layer}; "
            f"{CONFIG_FILE} does not fit them"
        )
    if unknown:
        listed = _some(list(unknown.values()), limit=20)
        warnings.warn(f"{folder}: tensors unknown to GPT-2 are ignored: {listed}", stacklevel=4)
    return {name: names[name] for name in expected}


def _check_tensor(handle: safe_open, name: str, stored: str, path: Path, config: GPTConfig) -> None:
    try:
        view = handle.get_slice(stored)
    except SafetensorError as error:
        raise UserError(f"{path}: lacks {stored}, which {INDEX_FILE} puts there") from error
    shape, expected = tuple(view.get_shape()), expected_shapes(config)[name]
    conv1d = CONV1D_WEIGHT.fullmatch(name) is not None
    needed = expected[::-1] if conv1d else expected
    if shape != needed:
        cause = f"{CONFIG_FILE} does not fit the weights"
        if conv1d and shape == expected:
            cause = "it seems stored as (out, in), and GPT-2 files hold (in, out): transpose it"
        elif name in ("wte.weight", "lm_head.weight") and shape[1:] == expected[1:]:
            cause += f": set its vocab_size {expected[0]} to the table's {shape[0]} rows"
        raise UserError(f"{path}: {stored} has shape {shape}, but {needed} is needed; {cause}")
    if view.get_dtype() not in DTYPES:
        kinds = ", ".join(DTYPES)
        raise UserError(f"{path}: {stored} is {view.get_dtype()}; only {kinds} can be read")


def _read_all(
    places: Mapping[str, Place], device: torch.device | str, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    for name, place in places.items():
        yield name, _read(name, place, device, dtype)


def _read(name: str, place: Place, device: torch.device | str, dtype: torch.dtype | None) -> Tensor:
    path, stored = place
    with _open(path) as own:  # a mapping that ends here, and its pages and their neighbours with it
        tensor = own.get_tensor(stored)
        moved = tensor.to(device, dtype)  # first, as a GPU transposes faster
        if CONV1D_WEIGHT.fullmatch(name):
            return moved.t().contiguous()
        # A small tensor that stayed mapped would keep pages of its neighbours.
        return moved.clone() if moved is tensor and name not in TABLES else moved


def _check_head(head: Place, table: Place) -> None:
    """Warn of a stored head that is not the token table, though the config ties the two."""
    stored, tied = (_read("lm_head.weight", place, "cpu", None) for place in (head, table))
    if stored.dtype != tied.dtype or not torch.equal(stored, tied):
        warnings.warn(
            f"{head[0]}: {head[1]} differs from wte.weight and is ignored, as tie_word_embeddings "
            f"is true; set it to false in {CONFIG_FILE} to use it",
            stacklevel=4,
        )


def to_stored(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """A parameter as files hold it, under its name there."""
    stored = name if name == "lm_head.weight" else PREFIX + name
    return stored, _transpose_conv1d(name, tensor).contiguous()


def _transpose_conv1d(name: str, tensor: Tensor) -> Tensor:
    """Turn (in, out) into (out, in) or back, if the tensor is one that files store turned."""
    return tensor.t().contiguous() if CONV1D_WEIGHT.fullmatch(name) else tensor


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: {describe_file(path)}; fetch the file again") from error


def describe_file(path: Path) -> str:
    """Say what a file that cannot be read seems to be, with its size."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            start = file.read(64).lstrip().lower()
    except OSError as error:
        return f"{size:,} bytes that cannot be read ({error.strerror})"
    if start.startswith(b"version https://git-lfs"):
        return f"{size:,} bytes that look like a Git LFS pointer (try `git lfs pull`)"
    if start.startswith((b"<!doctype", b"<html")):
        return f"{size:,} bytes that look like a web page"
    return f"{size:,} bytes, an incomplete download or another kind of file"


def _some(names: list[str], limit: int = 3) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def _replace(path: Path, data: bytes) -> None:
    """Write a temporary file beside `path`, then rename it to `path`."""
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=path.parent) as scratch:
        temporary = Path(scratch) / path.name
        temporary.write_bytes(data)
        os.replace(temporary, path)
