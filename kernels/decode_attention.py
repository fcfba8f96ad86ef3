"""Decode attention: one query per batch row against the rows of a KV cache.

One block serves one head of one batch row. There is no matrix product to speak of, so keys and
values go straight from global memory to registers. Each of `block_n` lanes keeps an online softmax
over its own keys, every `block_n`-th; they are merged once, at the end. That is the form for a CPU
and for float32; 16 bits on a GPU go to `decode_attention_split`.
"""

import functools
import math
from collections.abc import Callable

import tilelang.language as T
import torch
from torch import Tensor

from minifused.kernels import buckets
from minifused.kernels.build import compile_kernel, dtype_name, tile_for
from minifused.kernels.decode_attention_combine import decode_attention_split
from minifused.kernels.schedule import RowSchedule, decode_attention_schedule, next_power_of_2
from minifused.kernels.tile import Tile


def decode_attention_kernel(
    tile: Tile,
    heads: int,
    head_dim: int,
    packed: bool,
    scale: float,
    dtype: str,
    schedule: RowSchedule,
):
    """Build O (b, h, d) = softmax(q K^T * scale) V over the first lengths[b] rows of a cache.

    Q is (b, slots, h, d): one slot, or slot 0 of a `packed` QKV tensor; the caches are
    (b, capacity, h, d); b and capacity are dynamic. Cache rows from lengths[b] on are never used.
    A length of 0 gives 0.
    """
    block_n = schedule.block_n
    # A power of two splits evenly over lanes; the columns added hold zeros.
    dim = next_power_of_2(head_dim) if tile.is_cuda else head_dim
    slots = 3 if packed else 1
    batch, capacity = T.dynamic("batch"), T.dynamic("capacity")
    scale_log2 = scale * math.log2(math.e)
    minus_inf = -T.infinity("float32")

    @T.prim_func
    def decode_attention(
        Q: T.Tensor((batch, slots, heads, head_dim), dtype),
        K: T.Tensor((batch, capacity, heads, head_dim), dtype),
        V: T.Tensor((batch, capacity, heads, head_dim), dtype),
        lengths: T.Tensor((batch,), "int32"),
        O: T.Tensor((batch, heads, head_dim), dtype),
    ):
        with T.Kernel(heads, batch, threads=schedule.num_threads) as (bx, by):
            product = tile.fragment((block_n, dim), "float32")
            o = tile.fragment((block_n, dim), "float32")
            s = tile.fragment((block_n,), "float32")
            m = tile.fragment((block_n,), "float32")
            rescale = tile.fragment((block_n,), "float32")
            l = tile.fragment((block_n,), "float32")
            m_all = tile.fragment((1,), "float32")
            l_all = tile.fragment((1,), "float32")
            o_all = tile.fragment((dim,), "float32")
            T.clear(o)
            T.clear(l)
            T.fill(m, minus_inf)
            valid = T.min(lengths[by], capacity)
            for kb in T.serial(T.ceildiv(valid, block_n)):
                for j, d in tile.parallel(block_n, dim):
                    product[j, d] = T.cast(Q[by, 0, bx, d], "float32") * T.if_then_else(
                        kb * block_n + j < valid and d < head_dim,
                        T.cast(K[by, kb * block_n + j, bx, d], "float32"),
                        0.0,
                    )
                T.reduce_sum(product, s, dim=1)
                T.copy(m, rescale)
                for j in tile.parallel(block_n):
                    s[j] = T.if_then_else(kb * block_n + j < valid, s[j] * scale_log2, minus_inf)
                    m[j] = T.max(m[j], s[j])
                for j in tile.parallel(block_n):
                    # A lane without a key so far: shift by 0, since -inf - -inf is NaN.
                    shift = T.if_then_else(m[j] == minus_inf, 0.0, m[j])
                    s[j] = tile.exp2(s[j] - shift)
                    rescale[j] = tile.exp2(rescale[j] - shift)
                    l[j] = l[j] * rescale[j] + s[j]
                for j, d in tile.parallel(block_n, dim):
                    o[j, d] = o[j, d] * rescale[j] + s[j] * T.if_then_else(
                        kb * block_n + j < valid and d < head_dim,
                        T.cast(V[by, kb * block_n + j, bx, d], "float32"),
                        0.0,
                    )
            T.reduce_max(m, m_all, dim=0)
            for j in tile.parallel(block_n):
                m[j] = T.if_then_else(m[j] == minus_inf, 0.0, tile.exp2(m[j] - m_all[0]))
                l[j] *= m[j]
            T.reduce_sum(l, l_all, dim=0)
            for j, d in tile.parallel(block_n, dim):
                o[j, d] *= m[j]
            T.reduce_sum(o, o_all, dim=0)
            for d in tile.parallel(dim):
                if d < head_dim:
                    O[by, bx, d] = T.cast(
                        T.if_then_else(valid > 0, o_all[d] / l_all[0], 0.0), dtype
                    )

    return decode_attention


@functools.cache
def _select(
    device: torch.device,
    heads: int,
    head_dim: int,
    packed: bool,
    scale: float,
    dtype: torch.dtype,
    blocks: int,
) -> Callable[..., None]:
    tile, name = tile_for(device), dtype_name(dtype)
    schedule = decode_attention_schedule(tile, head_dim, name, blocks)
    return compile_kernel(
        decode_attention_kernel, tile, heads, head_dim, packed, scale, name, schedule
    )


def decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, scale: float, out: Tensor
) -> None:
    """Write the attention of each row's query to out (b, h, d).

    q is (b, h, d), or packed (b, 3, h, d) with the query first; the caches are (b, capacity, h, d);
    lengths (b,) int32; all contiguous.
    """
    if tile_for(q.device).has_tensor_core(dtype_name(q.dtype)):
        return decode_attention_split(q, k_cache, v_cache, lengths, scale, out)
    packed = q.dim() == 4
    q = q if packed else q.unsqueeze(1)
    blocks = buckets.ceiling(q.shape[0] * q.shape[2], buckets.BLOCKS)
    kernel = _select(q.device, *q.shape[2:], packed, scale, q.dtype, blocks)
    kernel(q, k_cache, v_cache, lengths, out)
