"""Split-KV decode attention on a GPU: the keys of a head of a batch row over several blocks.

Flash-Decoding (Dao et al. 2023, https://crfm.stanford.edu/2023/10/12/flashdecoding.html). With few
rows a block a head leaves most of a GPU idle, and a decode step waits for memory, not arithmetic.
So `splits` blocks take turns at a head's keys, each with the loads of many on their way at once.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import tilelang.language as T
import torch
from torch import Tensor

from minifused.kernels import decode_lanes
from minifused.kernels.build import compile_kernel, dtype_name, tile_for
from minifused.kernels.schedule import SplitSchedule, split_schedule
from minifused.kernels.tile import Tile

LINE_BYTES = 128  # of a GPU's caches


def decode_attention_split_kernel(
    tile: Tile, heads: int, head_dim: int, packed: bool, scale: float, dtype: str, partial: bool,
    ahead: bool, schedule: SplitSchedule,
):  # fmt: skip
    """Build the attention of each row's query over the first lengths[b] rows of a cache.

    Q is (b, slots, h, d): one slot, or slot 0 of a `packed` QKV tensor; the caches are
    (b, capacity, h, d); b and capacity are dynamic. If `partial`, O (b, h, splits, d) and
    ML (b, h, splits, 2), float32, are as `decode_attention_partials` says. Otherwise splits is 1,
    O in `dtype` is the result, 0 for a length of 0, and ML is not used. `ahead` reads lengths, and
    rows of the caches but for each row's last, before the kernel launched just before has ended.
    """
    splits, loads, threads = schedule.splits, schedule.num_loads, schedule.num_threads
    lanes, columns = decode_lanes.lanes_of(head_dim), decode_lanes.COLUMNS
    keys, warps = threads // lanes, threads // 32
    batch, capacity = T.dynamic("batch"), T.dynamic("capacity")

    @T.prim_func
    def decode_attention_split(
        Q: T.Tensor((batch, 3 if packed else 1, heads, head_dim), dtype),
        K: T.Tensor((batch, capacity, heads, head_dim), dtype),
        V: T.Tensor((batch, capacity, heads, head_dim), dtype),
        lengths: T.Tensor((batch,), "int32"),
        O: T.Tensor((batch, heads, splits, head_dim), "float32" if partial else dtype),
        ML: T.Tensor((batch, heads, splits, 2), "float32"),
    ):
        with T.Kernel(splits, heads, batch, threads=threads) as (bx, by, bz):
            tx = T.get_thread_binding()
            q = T.alloc_local((1, columns), dtype)
            k = T.alloc_local((loads, columns), dtype)
            v = T.alloc_local((loads, columns), dtype)
            s = T.alloc_local((loads,), "float32")
            o = T.alloc_local((columns,), "float32")
            ml = T.alloc_local((2,), "float32")
            ml_parts = T.alloc_local((warps, 2), "float32")
            weights = T.alloc_local((warps,), "float32")
            o_warps = T.alloc_shared((warps, lanes * columns), "float32")
            ml_warps = T.alloc_shared((warps, 2), "float32")
            tile.pdl_trigger()
            if not ahead:
                tile.pdl_sync()
            valid = T.min(lengths[bz], capacity)
            T.assume(valid <= capacity)
            first, stride, col = bx * keys + tx // lanes, splits * keys, tx % lanes * columns
            known = valid - ahead
            decode_lanes.load_keys(v, V, bz, by, first, stride, col, known)
            # Without this ptxas delays the loads above until keys have arrived and been used.
            T.sync_warp()
            decode_lanes.load_keys(k, K, bz, by, first, stride, col, known)
            if ahead:
                tile.pdl_sync()
            decode_lanes.load(q, 0, Q, (bz, 0, by), col, True)
            if ahead:
                decode_lanes.load_newest(v, V, bz, by, first, stride, col, known)
                decode_lanes.load_newest(k, K, bz, by, first, stride, col, known)
            decode_lanes.clear(ml, o)
            for step in T.serial(T.ceildiv(valid - bx * keys, loads * stride)):
                key = first + step * loads * stride
                for i in T.unroll(loads):
                    decode_lanes.dot(s, i, q, k, lanes, scale)
                    if key + i * stride >= valid:
                        s[i] = -T.infinity("float32")
                after = key + loads * stride
                decode_lanes.load_keys(k, K, bz, by, after, stride, col, valid)
                decode_lanes.accumulate(ml, o, s, v, lanes)
                decode_lanes.load_keys(v, V, bz, by, after, stride, col, valid)
            decode_lanes.exchange(ml, o, ml_parts, ml_warps, o_warps, tx, lanes)
            decode_lanes.combine_weights(ml_parts, weights, ml)
            for piece in T.unroll(-(-head_dim // threads)):
                d = piece * threads + tx
                if d < head_dim:
                    o[0] = 0.0
                    for w in T.unroll(warps):
                        o[0] += weights[w] * o_warps[w, d]
                    if not partial:
                        o[0] = T.if_then_else(valid > 0, o[0] / ml[1], 0.0)
                    O[bz, by, bx, d] = T.cast(o[0], O.dtype)
            if partial and tx == 0:
                for e in T.vectorized(2):
                    ML[bz, by, bx, e] = ml[e]

    return decode_attention_split


@functools.cache
def _select(device: torch.device, *static: object) -> Callable[..., None]:
    return compile_kernel(decode_attention_split_kernel, tile_for(device), *static)


def _attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, scale: float, o: Tensor,
    ml: Tensor | None,
) -> None:  # fmt: skip
    """Launch the form that writes partials if there is an `ml`; o is (b, h, splits, d)."""
    q = q if q.dim() == 4 else q.unsqueeze(1)
    batch, slots, heads, head_dim = q.shape
    schedule = replace(split_schedule(batch * heads, k_cache.shape[1]), splits=o.shape[2])
    ahead = _has_whole_lines(k_cache) and _has_whole_lines(v_cache)
    static = heads, head_dim, slots == 3, scale, dtype_name(q.dtype), ml is not None, ahead
    _select(q.device, *static, schedule)(q, k_cache, v_cache, lengths, o, ml)


def _has_whole_lines(cache: Tensor) -> bool:
    """Whether a row shares none with another: what was read ahead of one is in L1 from then on."""
    return cache.data_ptr() % LINE_BYTES == cache.stride(1) * cache.itemsize % LINE_BYTES == 0


def decode_attention_unsplit(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, scale: float, out: Tensor
) -> None:
    """`decode_attention` on a GPU, with one block for all keys of a head of a row."""
    _attend(q, k_cache, v_cache, lengths, scale, out.unsqueeze(2), None)


def decode_attention_partials(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, scale: float,
    o_partial: Tensor, ml_partial: Tensor,
) -> None:  # fmt: skip
    """Write the attention of each row's query over each of several parts of its keys.

    q, the caches, lengths and scale are those of `decode_attention`, on a GPU. The shapes of
    o_partial (b, h, splits, d) and ml_partial (b, h, splits, 2), float32, say how many parts there
    are. With the scores s = q · k · scale · log2(e) of the keys of a part, ml_partial[..., 0] is
    their maximum m, ml_partial[..., 1] is Σ exp2(s - m), and o_partial is Σ exp2(s - m) v, which
    is not divided by that sum. A part without a key has -inf, 0 and 0.
    """
    _attend(q, k_cache, v_cache, lengths, scale, o_partial, ml_partial)
