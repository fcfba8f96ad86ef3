"""The model's shape, under the field names of GPT-2's config.json."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from minifused.errors import UserError

ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}

END_OF_TEXT_ID = 50256  # in GPT-2's own vocabulary

# Options of GPT-2 configurations that would change the numbers: the only value supported.
REQUIRED_OPTIONS = {"add_cross_attention": False}


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and options of one GPT-2-style model.

    The defaults are those of GPT-2 small, so a key that is missing from config.json means what it
    means there. The three `_pdrop` fields act only while the twin trains.

    Raises:
        UserError: a field has a value that no model can have, such as a bos or eos id that is no
            row of the token table.
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    resid_pdrop: float = 0.1
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_options()
        for name in ("bos_token_id", "eos_token_id"):
            token = getattr(self, name)
            valid = token is None or (_is_int(token) and 0 <= token < self.vocab_size)
            _require(valid, name, token, f"give null or an id below vocab_size {self.vocab_size}")

    def _check_sizes(self) -> None:
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner"):
            size = getattr(self, name)
            valid = (_is_int(size) and size > 0) or (name == "n_inner" and size is None)
            _require(valid, name, size, "give a positive integer")
        remedy = f"make it a multiple of n_head {self.n_head}"
        _require(self.n_embd % self.n_head == 0, "n_embd", self.n_embd, remedy)

    def _check_options(self) -> None:
        activation = self.activation_function
        known = isinstance(activation, str) and activation in ACTIVATIONS
        _require(known, "activation_function", activation, f"use one of {', '.join(ACTIVATIONS)}")
        eps = self.layer_norm_epsilon
        _require(_is_number(eps) and 0 < eps < 1, "layer_norm_epsilon", eps, "use, say, 1e-5")
        flags = ("tie_word_embeddings", "scale_attn_weights", "scale_attn_by_inverse_layer_idx")
        for name in flags:
            flag = getattr(self, name)
            _require(isinstance(flag, bool), name, flag, "give true or false")
        for name in ("embd_pdrop", "attn_pdrop", "resid_pdrop"):
            p = getattr(self, name)
            _require(_is_number(p) and 0 <= p < 1, name, p, "give a probability from 0 to below 1")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.n_embd // self.n_head

    @property
    def inner_dim(self) -> int:
        """Width of the hidden layer of the MLP."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    @property
    def activation(self) -> str:
        """The MLP's activation: "gelu_tanh", "gelu" (the erf form) or "relu"."""
        return ACTIVATIONS[self.activation_function]

    def attention_scale(self, layer: int) -> float:
        """What the scores of a layer, counted from 0, are multiplied by before the softmax."""
        scale = self.head_dim**-0.5 if self.scale_attn_weights else 1.0
        return scale / (layer + 1) if self.scale_attn_by_inverse_layer_idx else scale

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "GPTConfig":
        """Build from the contents of a config.json; keys that do not matter here are ignored.

        Raises:
            UserError: the model is not a GPT-2, or has an option that changes its numbers and is
                not supported, or a field is invalid.
        """
        model_type = values.get("model_type", "gpt2")
        _require(model_type == "gpt2", "model_type", model_type, "only gpt2 models are supported")
        for name, required in REQUIRED_OPTIONS.items():
            value = values.get(name, required)
            remedy = f"only {name}={required} is supported"
            _require(value is required, name, value, remedy)
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        config = cls(**known)
        # Missing ids are those of GPT-2's <|endoftext|>, if the table has that row.
        if config.vocab_size > END_OF_TEXT_ID:
            absent = {"bos_token_id", "eos_token_id"} - known.keys()
            ids: dict[str, Any] = dict.fromkeys(absent, END_OF_TEXT_ID)
            config = replace(config, **ids)
        return config

    def to_dict(self) -> dict[str, Any]:
        """The contents of a config.json that GPT-2 loaders understand."""
        return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **asdict(self)}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require(valid: bool, name: str, value: object, remedy: str) -> None:
    if not valid:
        raise UserError(f"config: {name} is {value!r}; {remedy}")


PRESETS: dict[str, GPTConfig] = {
    name: GPTConfig(
        n_embd=n_embd,
        n_layer=n_layer,
        n_head=n_head,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
    )
    for name, n_embd, n_layer, n_head in (
        ("gpt2", 768, 12, 12),
        ("gpt2-medium", 1024, 24, 16),
        ("gpt2-large", 1280, 36, 20),
        ("gpt2-xl", 1600, 48, 25),
    )
}
