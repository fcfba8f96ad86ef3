"""Matrix-vector product for one row, on a GPU.

The weights are the whole cost, and each is read once. A warp holds `warp_n` weight rows, or its
slice of their columns, in registers, and has asked for them before it waits for the kernel that
makes the row (programmatic dependent launch): the memory never idles between two layers. What
comes before, a layer norm or the merging of a split attention, each block does for itself, since a
kernel of its own would cost more than the arithmetic.

The products are a tensor core's, whose other operand has the row in all of its 8 columns. That
seems a waste, but by multiplications of single numbers, each behind a conversion, the weights of a
layer of GPT-2 XL took as long to multiply as to read.
"""

import tilelang.language as T

from minifused.kernels.gemv_output import (
    CHAINS,
    LANES,
    dot,
    finish,
    gather,
    keep,
    peak_width,
    write_peaks,
)
from minifused.kernels.gemv_row import (
    CHUNK,
    FLOATS,
    VECTOR,
    load_gain,
    load_lane,
    merge_splits,
    norm_row,
)
from minifused.kernels.row_lanes import FAST_MATH
from minifused.kernels.schedule import GemvSchedule
from minifused.kernels.tile import Tile


def gemv_kernel(
    tile: Tile, n: int, k: int, dtype: str, out_dtype: str, activation: str | None, has_bias: bool,
    has_residual: bool, eps: float | None, parts: tuple[int, int] | None, cached: bool, ahead: bool,
    schedule: GemvSchedule, valid: int | None = None,
):  # fmt: skip
    """Build Y (1, n) = act(x @ W (n, k)^T + bias (n)) + R (1, n).

    x is X (1, k); with `eps`, the layer norm of a float32 X with `gain` (1, k), whose shift and the
    bias are in `sums` (2, n), as gemv.norm_sums makes them; with `parts` = (splits, d), the
    attention that O (1, k / d, splits, d) and ML (1, k / d, splits, 2) make (see merge_splits).
    With `cached`, Y is a packed query, key and value, and the latter two also go to row
    positions[0] of the caches (1, capacity, n / 3), if there is such a row. `ahead` reads W, bias,
    gain and sums before the kernels launched earlier have ended. X, W, bias and gain have `dtype`,
    R and Y `out_dtype`, the others float32. `valid`: of Y (float32) also write the `peaks` (1, 2 *
    parts) of parts of peak_width(block_n), of its first `valid` columns: see swap_peaks.py.
    """
    block_n, warp_n, split_k = schedule.block_n, schedule.warp_n, schedule.split_k
    chunks, num_threads = -(-k // (split_k * CHUNK)), schedule.num_threads
    whole, tiles = split_k * chunks * CHUNK == k, -(-warp_n // 16)
    normed, merged = eps is not None, parts is not None
    splits, head_dim = parts or (1, k)
    capacity, width = (T.dynamic("capacity"), n // 3) if cached else (1, 1)

    @T.prim_func
    def gemv(
        X: T.Tensor((1, k), "float32" if normed else dtype),
        O: T.Tensor((1, k // head_dim, splits, head_dim), "float32"),
        ML: T.Tensor((1, k // head_dim, splits, 2), "float32"),
        gain: T.Tensor((1, k), dtype),
        sums: T.Tensor((2, n), "float32"),
        W: T.Tensor((n, k), dtype),
        bias: T.Tensor((n,), dtype),
        R: T.Tensor((1, n), out_dtype),
        Y: T.Tensor((1, n), out_dtype),
        positions: T.Tensor((1,), "int32"),
        K_cache: T.Tensor((1, capacity, width), out_dtype),
        V_cache: T.Tensor((1, capacity, width), out_dtype),
        peaks: T.Tensor((1, 2 * -(-n // peak_width(block_n))), "float32"),
    ):
        with T.Kernel(T.ceildiv(n, block_n), threads=num_threads) as bx:
            tx = T.get_thread_binding()
            lane, part = tx % 32, tx // 32 % split_k
            group = tx // 32 // split_k * warp_n  # the first of the warp's rows in the block
            col = part * (chunks * CHUNK) + lane % 4 * VECTOR
            row = T.min(bx * block_n + tx, n - 1)  # the block's first threads finish its rows
            w = T.alloc_local((warp_n // LANES * chunks, VECTOR), dtype)
            g = T.alloc_local((-(-k // (FLOATS * num_threads)) if normed else 1, FLOATS), dtype)
            x = T.alloc_local((chunks, VECTOR), dtype)
            acc = T.alloc_local((CHAINS * tiles * 4,), "float32")
            shifted = T.alloc_local((1,), "float32")
            total = T.alloc_local((1,), "float32")
            added = T.alloc_local((1,), dtype)
            residual = T.alloc_local((1,), out_dtype)
            position = T.alloc_local((1,), "int32")
            # Dynamic shared memory would be used twice, behind barriers.
            in_shared = normed or merged
            x_shared = T.alloc_shared((1, k if in_shared else 1), dtype, scope="shared")
            dots = T.alloc_shared((split_k, block_n), "float32", scope="shared")
            moments = T.alloc_shared((num_threads // 32, 2), "float32", scope="shared")
            T.annotate_compile_flags(FAST_MATH)
            T.annotate_min_blocks_per_sm(schedule.min_blocks)
            if not cached:
                tile.pdl_trigger()
            if not ahead:
                tile.pdl_sync()
            for r in T.unroll(warp_n // LANES):
                w_row = T.min(bx * block_n + group + LANES * r + lane // 4, n - 1)
                load_lane(W, w_row, col, whole, w, r, chunks)
            if normed:
                load_gain(gain, g, tx, num_threads)
                shifted[0] = sums[1, row]
            if has_bias:
                added[0] = bias[row]
            tile.pdl_sync()
            if cached:
                tile.pdl_trigger()  # late: decode attention relies on older rows of the caches
                position[0] = positions[0]
            if has_residual:
                residual[0] = R[0, row]
            if normed:
                norm_row(X, g, x_shared, moments, eps, tx, num_threads)
            if merged:
                merge_splits(O, ML, x_shared, tx, num_threads)
            if in_shared:
                T.sync_threads()
            load_lane(x_shared if in_shared else X, 0, col, whole, x, 0, chunks)
            T.clear(acc)
            dot(w, x, acc)
            gather(acc, dots, part, group, warp_n, tx, total)
            if normed:
                total[0] += shifted[0]
            if tx < block_n and bx * block_n + tx < n:
                finish(tile, total, row, activation, has_bias, added, has_residual, residual, Y)
                if cached:
                    keep(total[0], row, position[0], K_cache, V_cache)
            if valid:
                write_peaks(total, bx * block_n, valid, block_n, tx, peaks)

    return gemv
