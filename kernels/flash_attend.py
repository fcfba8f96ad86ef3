"""What the computing warpgroups of flash_attention_sm90 do with blocks of keys, in turn."""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from minifused.kernels.flash_rings import WARPGROUP, Rings
from minifused.kernels.flash_steps import mask, row_maxima, scale_rows, weigh
from minifused.kernels.schedule import FlashSchedule

TURN = 8  # the first of the named barriers by which warpgroups take turns; the compiler's are below
WHOLE_ROWS = T.GemmWarpPolicy.FullRow


@dataclass(frozen=True)
class Fragments:
    """Registers of the computing warpgroups."""

    s: Any  # (block_m, block_n) scores, then weights
    p: Any  # the weights in the dtype of the inputs
    o: Any  # (block_m, head_dim)
    l: Any  # (block_m, LANES)
    m: Any  # (block_m), as all below
    rescale: Any
    shift: Any
    total: Any
    q: Any  # (block_m, head_dim) in the dtype of the inputs, None if they are not held


def take_turns(schedule: FlashSchedule) -> bool:
    """Whether warpgroups do at the tensor cores, so that one computes weights beside the other."""
    return schedule.overlap and schedule.consumers > 1


@T.macro
def first_turn(r: Rings, tx):
    """The first warpgroup need not wait for the last."""
    if take_turns(r.schedule):
        if tx >= (r.schedule.consumers - 1) * WARPGROUP:
            T.named_barrier_arrive(TURN, 2 * WARPGROUP)


@T.macro
def await_turn(r: Rings, tx):
    if take_turns(r.schedule):
        T.sync_threads(TURN + tx // WARPGROUP, 2 * WARPGROUP)


@T.macro
def pass_turn(r: Rings, tx):
    if take_turns(r.schedule):
        following = (tx // WARPGROUP + 1) % r.schedule.consumers
        T.named_barrier_arrive(TURN + following, 2 * WARPGROUP)


@T.macro
def await_queries(r: Rings, f: Fragments, t):
    r.wait_queries(t)
    if r.schedule.held:
        T.copy(r.queries(t), f.q)
        r.release_queries(t)


@T.macro
def leave_queries(r: Rings, t):
    if not r.schedule.held:
        r.release_queries(t)


def _queries(r: Rings, f: Fragments, t):
    return f.q if r.schedule.held else r.queries(t)


@T.macro
def scores(r: Rings, f: Fragments, t, i):
    T.wgmma_gemm(_queries(r, f, t), r.k[r.slot(i), :, :], f.s, transpose_B=True,
                 policy=WHOLE_ROWS, clear_accum=True)  # fmt: skip


@T.macro
def forget_all(f: Fragments):
    T.clear(f.o)
    forget(f)


@T.macro
def forget(f: Fragments):
    T.clear(f.l)
    T.fill(f.m, -T.infinity("float32"))


@T.macro
def maxima(r: Rings, f: Fragments, block, visible, step):
    """Of a block of scores; row i sees keys below visible + step * i."""
    key0 = block * r.schedule.block_n
    if key0 + r.schedule.block_n > visible:
        mask(f.s, key0, visible, step)
    row_maxima(f.s, f.m, f.rescale)


@T.macro
def weights(f: Fragments, scale_log2):
    weigh(f.s, f.m, f.l, f.rescale, f.shift, scale_log2)


@T.macro
def values(r: Rings, f: Fragments, i):
    T.wgmma_gemm(f.p, r.v[r.slot(i), :, :], f.o, policy=WHOLE_ROWS)


@T.macro
def attend_in_turn(r: Rings, f: Fragments, visible, step, scale_log2, n):
    """Scores, weights, output: other warpgroups compute while this one waits."""
    forget_all(f)
    for i in T.serial(n):
        r.wait(r.k_full, i)
        scores(r, f, 0, i)
        T.wait_wgmma(0)
        r.arrive(r.k_free, i)
        maxima(r, f, n - 1 - i, visible, step)
        weights(f, scale_log2)
        T.copy(f.s, f.p)
        scale_rows(f.o, f.rescale)
        r.wait(r.v_full, i)
        values(r, f, i)
        T.wait_wgmma(0)
        r.arrive(r.v_free, i)
    leave_queries(r, 0)
