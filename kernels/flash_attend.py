"""What the computing warpgroups of flash_attention_sm90 do with a block of queries."""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from minifused.kernels.flash_rings import WARPGROUP, Rings
from minifused.kernels.flash_steps import mask, row_maxima, scale_rows, weigh
from minifused.kernels.schedule import FlashSchedule

TURN = 8  # the first of the named barriers by which warpgroups take turns; the compiler's are below
STORED = 1  # that of all of them, which the compiler leaves free: its own begin at 3
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
def _await_turn(r: Rings, tx):
    if take_turns(r.schedule):
        T.sync_threads(TURN + tx // WARPGROUP, 2 * WARPGROUP)


@T.macro
def _pass_turn(r: Rings, tx):
    if take_turns(r.schedule):
        following = (tx // WARPGROUP + 1) % r.schedule.consumers
        T.named_barrier_arrive(TURN + following, 2 * WARPGROUP)


@T.macro
def _scores(r: Rings, f: Fragments, i):
    T.wgmma_gemm(r.q, r.k[r.slot(i), :, :], f.s, transpose_B=True, policy=WHOLE_ROWS,
                 clear_accum=True)  # fmt: skip


@T.macro
def _begin(f: Fragments):
    T.clear(f.o)
    T.clear(f.l)
    T.fill(f.m, -T.infinity("float32"))


@T.macro
def _maxima(r: Rings, f: Fragments, block, visible, step):
    """Of a block of scores; row i sees keys below visible + step * i."""
    key0 = block * r.schedule.block_n
    if key0 + r.schedule.block_n > visible:
        mask(f.s, key0, visible, step)
    row_maxima(f.s, f.m, f.rescale)


@T.macro
def _weights(f: Fragments, scale_log2):
    weigh(f.s, f.m, f.l, f.rescale, f.shift, scale_log2)


@T.macro
def attend_in_turn(r: Rings, f: Fragments, tx, visible, step, scale_log2, begin, n):
    """Scores, weights, output: other warpgroups compute while this one waits."""
    _begin(f)
    for kk in T.serial(n):
        i = begin + kk
        r.wait(r.k_full, i)
        _scores(r, f, i)
        T.wait_wgmma(0)
        r.arrive(r.k_free, i)
        _maxima(r, f, n - 1 - kk, visible, step)
        _weights(f, scale_log2)
        T.copy(f.s, f.p)
        scale_rows(f.o, f.rescale)
        r.wait(r.v_full, i)
        T.wgmma_gemm(f.p, r.v[r.slot(i), :, :], f.o, policy=WHOLE_ROWS)
        T.wait_wgmma(0)
        r.arrive(r.v_free, i)
    T.barrier_arrive(r.q_free)


@T.macro
def attend_overlapped(r: Rings, f: Fragments, tx, visible, step, scale_log2, begin, n):
    """The weights of a block are computed beside the product of the block before with its values.

    o is rescaled between the two products, beside the first.
    """
    _begin(f)
    r.wait(r.k_full, begin)
    _await_turn(r, tx)
    _scores(r, f, begin)
    _pass_turn(r, tx)
    T.wait_wgmma(0)
    r.arrive(r.k_free, begin)
    _maxima(r, f, n - 1, visible, step)
    _weights(f, scale_log2)
    T.copy(f.s, f.p)
    r.wait(r.v_full, begin)
    for kk in T.serial(n - 1):
        i = begin + kk
        r.wait(r.k_full, i + 1)
        _await_turn(r, tx)
        _scores(r, f, i + 1)
        scale_rows(f.o, f.rescale)
        T.wgmma_gemm(f.p, r.v[r.slot(i), :, :], f.o, policy=WHOLE_ROWS)
        _pass_turn(r, tx)
        T.wait_wgmma(1)
        r.arrive(r.k_free, i + 1)
        _maxima(r, f, n - 2 - kk, visible, step)
        # Waiting for a barrier is a branch, above which ptxas moves no wait for the product.
        if r.schedule.pin:
            r.wait(r.v_full, i + 1)
        _weights(f, scale_log2)
        T.wait_wgmma(0)
        r.arrive(r.v_free, i)
        if not r.schedule.pin:
            r.wait(r.v_full, i + 1)
        T.copy(f.s, f.p)
    T.barrier_arrive(r.q_free)
    scale_rows(f.o, f.rescale)
    T.wgmma_gemm(f.p, r.v[r.slot(begin + n - 1), :, :], f.o, policy=WHOLE_ROWS)
    T.wait_wgmma(0)
    r.arrive(r.v_free, begin + n - 1)
