"""FlashAttention forward: exact attention that never stores the score matrix.

Online softmax over blocks of keys (Dao et al., arXiv 2205.14135; Dao, arXiv 2307.08691): a block
of queries keeps the running maximum and sum of its rows and rescales its output when the maximum
moves. Causal masks align bottom-right: the last query sees the last key.
"""

import functools
import math
from collections.abc import Callable

import tilelang.language as T
import torch
from torch import Tensor

from minifused.kernels import buckets, flash_attention_sm90
from minifused.kernels.build import compile_kernel, dtype_name, tile_for
from minifused.kernels.online_softmax import online_softmax
from minifused.kernels.schedule import AttentionSchedule, attention_schedule, flash_schedule
from minifused.kernels.tile import Tile


def flash_attention_kernel(
    tile: Tile,
    heads: int,
    head_dim: int,
    packed: bool,
    causal: bool,
    ragged: bool,
    scale: float,
    dtype: str,
    schedule: AttentionSchedule,
):
    """Build O (b, q, h, d) = softmax(Q K^T * scale) V; b, q_len and k_len are dynamic.

    Q, K and V are (b, t, slots, h, d): one slot each, or `packed` all three in one tensor that is
    passed three times. `ragged` reads the valid lengths of each batch row from q_lengths and
    kv_lengths. Rows that see no key, and rows past their length, give 0. Keys past their length
    have weight 0, so what lies there has to be finite.
    """
    block_m, block_n = schedule.block_m, schedule.block_n
    # The tensor core multiplies 16 deep: the tail is zeros, and `scale` knows the true size.
    dim = -(-head_dim // 16) * 16 if tile.has_tensor_core(dtype) else head_dim
    slots, k_slot, v_slot = (3, 1, 2) if packed else (1, 0, 0)
    batch, q_len, k_len = T.dynamic("batch"), T.dynamic("q_len"), T.dynamic("k_len")
    p_scope = tile.fragment if tile.has_tensor_core(dtype) else tile.shared
    scale_log2 = scale * math.log2(math.e)
    grid = (T.ceildiv(q_len, block_m), heads, batch)

    @T.prim_func
    def flash_attention(
        Q: T.Tensor((batch, q_len, slots, heads, head_dim), dtype),
        K: T.Tensor((batch, k_len, slots, heads, head_dim), dtype),
        V: T.Tensor((batch, k_len, slots, heads, head_dim), dtype),
        q_lengths: T.Tensor((batch,), "int32"),
        kv_lengths: T.Tensor((batch,), "int32"),
        O: T.Tensor((batch, q_len, heads, head_dim), dtype),
    ):
        with T.Kernel(*grid, threads=schedule.num_threads) as (bx, by, bz):
            Q_shared = tile.shared((block_m, dim), dtype)
            K_shared = tile.shared((block_n, dim), dtype)
            V_shared = tile.shared((block_n, dim), dtype)
            O_shared = tile.shared((block_m, dim), dtype)
            s = tile.fragment((block_m, block_n), "float32")
            p = p_scope((block_m, block_n), dtype)
            o = tile.fragment((block_m, dim), "float32")
            m = tile.fragment((block_m,), "float32")
            l = tile.fragment((block_m,), "float32")
            rescale = tile.fragment((block_m,), "float32")
            shift = tile.fragment((block_m,), "float32")
            block_sum = tile.fragment((block_m,), "float32")
            tile.pdl_trigger()
            tile.pdl_sync()
            T.clear(o)
            T.clear(l)
            T.fill(m, -T.infinity("float32"))
            q_valid = T.min(q_lengths[bz], q_len) if ragged else q_len
            kv_valid = T.min(kv_lengths[bz], k_len) if ragged else k_len
            first_key_hidden = kv_valid - q_valid + 1  # from row 0, if causal
            row0 = bx * block_m
            end = T.min(kv_valid, row0 + block_m - 1 + first_key_hidden) if causal else kv_valid
            if ragged:
                end = T.if_then_else(row0 < q_valid, end, 0)
            # At least one block, masked or not: with none, the copy of Q would never be waited
            # for and could land on the output, which reuses its shared memory.
            end = T.max(end, 1)
            T.copy(Q[bz, row0 : row0 + block_m, 0, by, 0:dim], Q_shared)
            for kb in T.Pipelined(T.ceildiv(end, block_n), num_stages=schedule.num_stages):
                key0 = kb * block_n
                T.copy(K[bz, key0 : key0 + block_n, k_slot, by, 0:dim], K_shared)
                T.clear(s)
                tile.gemm(Q_shared, K_shared, s, transpose_b=True, whole_rows=True)
                for i, j in tile.parallel(block_m, block_n):
                    visible = key0 + j < kv_valid
                    if causal:
                        visible = visible and key0 + j < row0 + i + first_key_hidden
                    s[i, j] = T.if_then_else(visible, s[i, j], -T.infinity("float32"))
                online_softmax(tile, s, m, l, rescale, shift, block_sum, scale_log2)
                T.copy(s, p)
                for i, j in tile.parallel(block_m, dim):
                    o[i, j] *= rescale[i]
                T.copy(V[bz, key0 : key0 + block_n, v_slot, by, 0:dim], V_shared)
                tile.gemm(p, V_shared, o, whole_rows=True)
            for i, j in tile.parallel(block_m, dim):
                o[i, j] = T.if_then_else(l[i] > 0 and row0 + i < q_valid, o[i, j] / l[i], 0.0)
            T.copy(o, O_shared)
            T.copy(O_shared, O[bz, row0 : row0 + block_m, by, 0:dim])

    return flash_attention


@functools.cache
def _select(
    device: torch.device, heads: int, head_dim: int, packed: bool, causal: bool, ragged: bool,
    scale: float, dtype: torch.dtype, keys: int,
) -> Callable[..., None]:  # fmt: skip
    tile, name = tile_for(device), dtype_name(dtype)
    static = heads, head_dim, packed, causal, ragged, scale, name
    if flash_attention_sm90.takes(tile, head_dim, name):
        chosen = flash_schedule(tile, head_dim, name, causal, keys)
        builder = flash_attention_sm90.flash_attention_sm90_kernel
        return compile_kernel(builder, tile, *static, chosen)
    schedule = attention_schedule(tile, head_dim, name, causal, keys)
    return compile_kernel(flash_attention_kernel, tile, *static, schedule)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    q_lengths: Tensor | None,
    kv_lengths: Tensor | None,
    out: Tensor,
) -> None:
    """Write attention to out (b, q, h, d), contiguous.

    q, k, v are contiguous (b, t, h, d), or q is k is v, one packed (b, t, 3, h, d). The lengths
    (b,) int32 are both given or both None.
    """
    packed = q.dim() == 5
    q, k, v = (x if packed else x.unsqueeze(2) for x in (q, k, v))
    ragged = q_lengths is not None
    keys = buckets.ceiling(k.shape[1], buckets.KEYS)
    kernel = _select(q.device, *q.shape[3:], packed, causal, ragged, scale, q.dtype, keys)
    kernel(q, k, v, q_lengths, kv_lengths, out)
