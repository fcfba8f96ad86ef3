"""The end of split-KV decode attention: one softmax of the partial ones of several blocks.

Sums are taken in the order of the splits, so that results repeat bit for bit.
"""

import functools
from collections.abc import Callable

import tilelang.language as T
import torch
from torch import Tensor

from minifused.kernels.build import compile_kernel, dtype_name, tile_for
from minifused.kernels.decode_attention_split import (
    decode_attention_partials,
    decode_attention_unsplit,
)
from minifused.kernels.decode_lanes import combine_weights
from minifused.kernels.schedule import next_power_of_2, split_schedule
from minifused.kernels.tile import Tile

MAX_THREADS = 128


def decode_attention_combine_kernel(tile: Tile, heads: int, head_dim: int, splits: int, dtype: str):
    """Build O (b, h, d) in `dtype` of what `decode_attention_partials` wrote; b is dynamic."""
    threads = min(MAX_THREADS, max(32, next_power_of_2(head_dim)))
    batch = T.dynamic("batch")

    @T.prim_func
    def decode_attention_combine(
        O_partial: T.Tensor((batch, heads, splits, head_dim), "float32"),
        ML_partial: T.Tensor((batch, heads, splits, 2), "float32"),
        O: T.Tensor((batch, heads, head_dim), dtype),
    ):
        with T.Kernel(T.ceildiv(head_dim, threads), heads, batch, threads=threads) as (bx, by, bz):
            d = bx * threads + T.get_thread_binding()
            ml = T.alloc_local((splits, 2), "float32")
            o = T.alloc_local((splits,), "float32")
            weights = T.alloc_local((splits,), "float32")
            total = T.alloc_local((2,), "float32")
            x = T.alloc_local((1,), "float32")
            tile.pdl_trigger()
            tile.pdl_sync()
            if d < head_dim:
                for i in T.unroll(splits):
                    for e in T.vectorized(2):
                        ml[i, e] = ML_partial[bz, by, i, e]
                for i in T.unroll(splits):
                    o[i] = O_partial[bz, by, i, d]
                combine_weights(ml, weights, total)
                x[0] = 0.0
                for i in T.unroll(splits):
                    x[0] += weights[i] * o[i]
                O[bz, by, d] = T.cast(T.if_then_else(total[1] == 0.0, 0.0, x[0] / total[1]), dtype)

    return decode_attention_combine


@functools.cache
def _select(
    device: torch.device, heads: int, head_dim: int, splits: int, dtype: torch.dtype
) -> Callable[..., None]:
    tile, name = tile_for(device), dtype_name(dtype)
    return compile_kernel(decode_attention_combine_kernel, tile, heads, head_dim, splits, name)


def decode_attention_combine(o_partial: Tensor, ml_partial: Tensor, out: Tensor) -> None:
    """Write to out (b, h, d) the attention that the partials of its keys make up.

    o_partial (b, h, splits, d) and ml_partial (b, h, splits, 2) are float32, as
    `decode_attention_partials` writes them. All contiguous, and on a GPU.
    """
    _, heads, splits, head_dim = o_partial.shape
    _select(out.device, heads, head_dim, splits, out.dtype)(o_partial, ml_partial, out)


def decode_attention_split(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, scale: float, out: Tensor
) -> None:
    """`decode_attention` on a GPU: as many splits as batch, heads and capacity suggest."""
    batch, heads, head_dim = out.shape
    splits = split_schedule(batch * heads, k_cache.shape[1]).splits
    if splits == 1:
        return decode_attention_unsplit(q, k_cache, v_cache, lengths, scale, out)
    o_partial = q.new_empty((batch, heads, splits, head_dim), dtype=torch.float32)
    ml_partial = q.new_empty((batch, heads, splits, 2), dtype=torch.float32)
    decode_attention_partials(q, k_cache, v_cache, lengths, scale, o_partial, ml_partial)
    decode_attention_combine(o_partial, ml_partial, out)
