"""Our attention inside Hugging Face models: `attn_implementation="minifused"`.

transformers asks a backend for two functions: one that makes the mask of a forward pass, and one
that each layer calls for its attention. Our mask is None, or which keys are valid: (B, K) bool,
where K is up to the last query's position if causal. Left padding, right padding and gaps are one
case: valid keys move to the front, in order, and the kernel gets their number.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from minifused import ops
from minifused.errors import UserError

# Arguments of a layer that change its numbers and that the kernel does not know.
FEATURES = {
    "sliding_window": "a sliding window",
    "softcap": "a cap on scores (softcap)",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a position bias",
    "attention_bias": "an attention bias",
    "head_mask": "a head mask",
    "output_attentions": "output_attentions",
    "indices": "sparse attention (indices)",
    "block_indices": "sparse attention (block_indices)",
    "block_table": "a paged cache (block_table)",
    "cu_seq_lens_q": "packed sequences (cu_seq_lens_q)",
    "cu_seq_lens_k": "packed sequences (cu_seq_lens_k)",
}


def register_attention(name: str = "minifused") -> None:
    """Let transformers models take `attn_implementation=name` and attend with our kernel.

    Raises:
        UserError: transformers is missing or too old.
        ValueError: another implementation has this name.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise UserError(
            f"transformers with attention backends is needed ({error}): pip install 'minifused[hf]'"
        ) from error
    if name == "eager" or AttentionInterface().get(name, attention_forward) != attention_forward:
        raise ValueError(f"attention {name!r} exists in transformers: choose another name")
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


def _refuse(feature: str) -> NoReturn:
    raise ValueError(
        f"minifused's attention does not support {feature}: "
        'load the model with attn_implementation="eager"'
    )


# The mask of a forward pass


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor | None:
    """The mask function of the backend: which keys are valid, (B, K) bool, or None for all.

    Args:
        q_offset, kv_offset: positions of the first query and of the first key. A static cache has
            keys after the last query too: K leaves them out.
        mask_function: transformers' pattern, causal if None.
        attention_mask: (B, positions so far) bool, which tokens are no padding.

    Raises:
        ValueError: the pattern is neither causal nor all keys, or the mask is too short.
    """
    count = kv_length
    if _is_causal_pattern(mask_function):
        count = int(q_offset) + q_length - kv_offset
        if not q_length <= count <= kv_length:
            _refuse(f"{q_length} queries from position {int(q_offset)} on {kv_length} keys")
    if attention_mask is None:
        return None if count == kv_length else torch.ones(batch_size, count, device=device).bool()
    end = kv_offset + count
    if attention_mask.shape[0] != batch_size or attention_mask.shape[1] < end:
        shape = tuple(attention_mask.shape)
        raise ValueError(f"attention_mask is {shape}: expected ({batch_size}, {end})")
    valid = attention_mask[:, kv_offset:end].bool()
    return None if count == kv_length and valid.all() else valid


def _is_causal_pattern(mask_function: Callable | None) -> bool:
    from transformers import masking_utils

    if mask_function is None or mask_function is masking_utils.causal_mask_function:
        return True
    if mask_function is not masking_utils.bidirectional_mask_function:
        _refuse("masks other than causal and padding (sliding window, chunks, packed sequences)")
    return False


# The attention of a layer


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of the backend.

    Args:
        module: the layer, whose `is_causal` counts if the argument is None.
        query: (B, H, Tq, D). key, value: (B, Hkv, Tk, D), where Hkv divides H; D <= 256.
        attention_mask: what the function above made: (B, K) bool with K <= Tk, or None.
        scaling: D ** -0.5 if None.

    Returns:
        (B, Tq, H, D) and no weights. Causal rows of padded queries are 0.

    Raises:
        ValueError: the layer asks for what the kernel cannot do; its backward raises too.
    """
    _require_plain(dropout, kwargs)
    _require_shapes(query, key, value)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    _require_mask(attention_mask, query, key, is_causal)
    tensors = (x.transpose(1, 2) for x in (query, key, value))  # (B, T, H, D)
    return _ForwardOnly.apply(*tensors, attention_mask, is_causal, scaling), None


def _require_plain(dropout: float, arguments: dict[str, Any]) -> None:
    if dropout:
        _refuse(f"dropout ({dropout})")
    for name, feature in FEATURES.items():
        argument = arguments.get(name)
        if argument is not None and argument is not False:
            _refuse(feature)
    if _collects_weights():
        _refuse("output_attentions")


def _collects_weights() -> bool:
    """Whether the caller asked for attention weights, which most models tell no layer."""
    from transformers import utils

    # Not public. Without it the caller gets None for the weights, as transformers' sdpa gives.
    capturing = getattr(utils, "output_capturing", None)
    collector = getattr(capturing, "_active_collector", None)
    names = (collector.get() if collector is not None else None) or ()
    return any(name.endswith("attentions") for name in names)


def _require_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    if query.shape[-1] > ops.MAX_HEAD_DIM:
        _refuse(f"heads of size {query.shape[-1]}, more than {ops.MAX_HEAD_DIM}")
    if query.dtype not in ops.DTYPES:
        _refuse(f"{query.dtype}")
    shape = (query.shape[0], key.shape[1], key.shape[2], query.shape[-1])
    if key.shape != shape or value.shape != shape or query.shape[1] % key.shape[1]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        _refuse(f"query, key and value of shapes {shapes}")


def _require_mask(mask: Any, query: Tensor, key: Tensor, causal: bool) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.dtype != torch.bool:
        _refuse("masks of one's own, such as 4-D ones: it reads 2-D padding masks")
    fits = mask.shape[1] <= key.shape[2] if causal else mask.shape[1] == key.shape[2]
    if mask.shape[0] != query.shape[0] or not fits or (causal and mask.shape[1] < query.shape[2]):
        _refuse(f"a mask of shape {tuple(mask.shape)} for keys of shape {tuple(key.shape)}")


class _ForwardOnly(torch.autograd.Function):
    """Attention whose backward is refused: without this, gradients would be 0."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, valid: Any, *options: Any) -> Tensor:
        return _attend(q, k, v, valid, *options)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        _refuse("gradients, as it is for inference")


def _attend(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    """Attention of q (B, Tq, H, D) to k, v (B, Tk, Hkv, D), of which valid (B, K) count."""
    groups = q.shape[2] // k.shape[2]
    if valid is None:
        k, v = (_repeat_heads(x, groups) for x in (k, v))
        return ops.attention(q, k, v, causal, scale)
    order, kv_lengths = _valid_first(valid)
    k, v = (_repeat_heads(_take(x, order), groups) for x in (k, v))
    if not causal:
        return ops.attention(q, k, v, causal, scale, kv_lengths=kv_lengths)
    # The queries are the last positions. Moved alike, the valid ones still end where keys end.
    order, q_lengths = _valid_first(valid[:, -q.shape[1] :])
    y = ops.attention(_take(q, order), k, v, causal, scale, q_lengths, kv_lengths)
    return _take(y, order.argsort(1))


def _repeat_heads(x: Tensor, groups: int) -> Tensor:
    return x if groups == 1 else x.repeat_interleave(groups, 2)


def _valid_first(valid: Tensor) -> tuple[Tensor, Tensor]:
    """Indices (B, T) that put the valid positions first, in order; their numbers (B,) int32."""
    order = (~valid).byte().argsort(dim=1, stable=True)
    return order, valid.sum(1, dtype=torch.int32)


def _take(x: Tensor, order: Tensor) -> Tensor:
    """x[b, order[b]] of x (B, T, H, D): (B, K, H, D)."""
    return x.gather(1, order[:, :, None, None].expand(-1, -1, *x.shape[2:]))
