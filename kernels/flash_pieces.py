"""How the computing warpgroups of flash_attention_sm90 go through a block's pieces of work."""

import tilelang.language as T

from minifused.kernels.flash_attend import (
    Fragments,
    attend_in_turn,
    await_queries,
    leave_queries,
)
from minifused.kernels.flash_overlap import (
    attend_overlapped,
    first_block,
    join,
    last_values,
    more_blocks,
)
from minifused.kernels.flash_rings import Rings
from minifused.kernels.flash_steps import divide, sum_rows
from minifused.kernels.flash_work import Pieces, find
from minifused.kernels.limits import CHUNK

WARP = 32
WARP_ROWS = 16  # of a tile of a tensor core


@T.macro
def only_one(r: Rings, f: Fragments, tx, pieces: Pieces, scale_log2, O_shared, O):
    work = T.alloc_local((6,), "int32")
    find(work, pieces, 0)
    await_queries(r, f, 0)
    if r.schedule.overlap:
        attend_overlapped(r, f, tx, work[5], int(pieces.causal), scale_log2, work[4])
    else:
        attend_in_turn(r, f, work[5], int(pieces.causal), scale_log2, work[4])
    sum_rows(f.l, f.total)
    divide(f.o, f.total, f.shift, work[3])
    T.copy(f.o, O_shared)
    T.tma_copy(O_shared, O[work[0], work[2] : work[2] + r.schedule.block_m, work[1], :])
    T.tma_store_wait(0)


@T.macro
def one_after_another(r: Rings, f: Fragments, tx, pieces: Pieces, scale_log2, O_shared, O):
    """A warpgroup computes the first weights of a piece beside the last product of the one before.

    None waits for another but for its turn at the tensor cores.
    """
    step = int(pieces.causal)
    work, ahead = T.alloc_local((6,), "int32"), T.alloc_local((6,), "int32")
    done = T.alloc_local((1,), "int32")
    done[0] = 0
    find(work, pieces, 0)
    await_queries(r, f, 0)
    first_block(r, f, tx, work[5], step, scale_log2, work[4])
    for t in T.serial(pieces.count):
        more_blocks(r, f, tx, work[5], step, scale_log2, t, done[0], work[4])
        leave_queries(r, t)
        done[0] += work[4]
        if t + 1 < pieces.count:
            find(ahead, pieces, t + 1)
            await_queries(r, f, t + 1)
            join(r, f, tx, ahead[5], step, scale_log2, t + 1, done[0] - 1, ahead[4])
        else:
            last_values(r, f, done[0] - 1)
            sum_rows(f.l, f.total)
        divide(f.o, f.total, f.shift, work[3])
        _store_rows(r, f.o, tx, work, O_shared, O)
        T.clear(f.o)
        for part in T.unroll(6):
            work[part] = ahead[part]
    T.tma_store_wait(0)


@T.macro
def _store_rows(r: Rings, o, tx, work, O_shared, O):
    """Those of this warp; its rows of the piece before have left beside the products."""
    first = tx // WARP * WARP_ROWS
    T.tma_store_wait(0)
    T.sync_warp()
    T.copy(o, O_shared)
    T.fence_proxy_async()
    T.sync_warp()
    # In shared memory 64 columns of all rows lie beside each other, as TMA swizzles them.
    for c in list(range(int(o.shape[1]) // CHUNK)):
        columns, row = slice(c * CHUNK, (c + 1) * CHUNK), work[2] + first
        T.tma_copy(O_shared[first : first + WARP_ROWS, columns],
                   O[work[0], row : row + WARP_ROWS, work[1], columns],
                   leader_scope_threads=WARP)  # fmt: skip
