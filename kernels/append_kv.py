"""Append keys and values to a KV cache, at a position of each batch row's own."""

import functools
from collections.abc import Callable

import tilelang.language as T
import torch
from torch import Tensor

from minifused.kernels.build import compile_kernel, dtype_name, tile_for
from minifused.kernels.schedule import RowSchedule, row_schedule
from minifused.kernels.tile import Tile

MAX_COLUMNS_A_BLOCK = 1024


def append_kv_kernel(tile: Tile, width: int, packed: bool, dtype: str, schedule: RowSchedule):
    """Build K_cache[b, positions[b] + t] = K[b, t], and V alike, for rows of `width` = h * d.

    K and V are (b, t, slots, width): one slot each, or `packed` slots 1 and 2 of a QKV tensor that
    is passed twice; the caches are (b, capacity, width). b, t and capacity are dynamic. Rows that
    would fall outside the cache are not written.
    """
    block_n = schedule.block_n
    slots, k_slot, v_slot = (3, 1, 2) if packed else (1, 0, 0)
    batch, length, capacity = T.dynamic("batch"), T.dynamic("length"), T.dynamic("capacity")

    grid = (length, T.ceildiv(width, block_n), batch)

    @T.prim_func
    def append_kv(
        K: T.Tensor((batch, length, slots, width), dtype),
        V: T.Tensor((batch, length, slots, width), dtype),
        positions: T.Tensor((batch,), "int32"),
        K_cache: T.Tensor((batch, capacity, width), dtype),
        V_cache: T.Tensor((batch, capacity, width), dtype),
    ):
        with T.Kernel(*grid, threads=schedule.num_threads) as (bx, by, bz):
            tile.pdl_sync()  # without a trigger: decode attention reads caches ahead of its own
            row = positions[bz] + bx
            if row >= 0 and row < capacity:
                for j in tile.parallel(block_n):
                    col = by * block_n + j
                    if col < width:
                        K_cache[bz, row, col] = K[bz, bx, k_slot, col]
                        V_cache[bz, row, col] = V[bz, bx, v_slot, col]

    return append_kv


@functools.cache
def _select(
    device: torch.device, width: int, packed: bool, dtype: torch.dtype
) -> Callable[..., None]:
    tile = tile_for(device)
    schedule = row_schedule(tile, width, MAX_COLUMNS_A_BLOCK)
    return compile_kernel(append_kv_kernel, tile, width, packed, dtype_name(dtype), schedule)


def append_kv(k: Tensor, v: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Write k, v to rows positions[b] + t of the caches (b, capacity, h, d).

    k, v are contiguous (b, t, h, d), or k is v, one packed (b, t, 3, h, d).
    """
    packed = k.dim() == 5
    width = k.shape[-2] * k.shape[-1]
    k, v = (x.view(x.shape[0], x.shape[1], 3 if packed else 1, width) for x in (k, v))
    caches = (c.view(c.shape[0], c.shape[1], width) for c in (k_cache, v_cache))
    _select(k.device, width, packed, k.dtype)(k, v, positions, *caches)
