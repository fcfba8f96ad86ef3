"""How a warpgroup of flash_attention_sm90 computes weights beside products of its own."""

import tilelang.language as T

from minifused.kernels.flash_attend import (
    Fragments,
    await_turn,
    forget,
    forget_all,
    leave_queries,
    maxima,
    pass_turn,
    scores,
    values,
    weights,
)
from minifused.kernels.flash_rings import Rings
from minifused.kernels.flash_steps import scale_rows, sum_rows


@T.macro
def attend_overlapped(r: Rings, f: Fragments, tx, visible, step, scale_log2, n):
    """The weights of a block are computed beside the product of the block before with its values.

    o is rescaled between the two products, beside the first.
    """
    first_block(r, f, tx, visible, step, scale_log2, n)
    more_blocks(r, f, tx, visible, step, scale_log2, 0, 0, n)
    leave_queries(r, 0)
    last_values(r, f, n - 1)


@T.macro
def first_block(r: Rings, f: Fragments, tx, visible, step, scale_log2, n):
    """Up to the weights, of a thread block's first piece of work."""
    forget_all(f)
    r.wait(r.k_full, 0)
    await_turn(r, tx)
    scores(r, f, 0, 0)
    pass_turn(r, tx)
    T.wait_wgmma(0)
    r.arrive(r.k_free, 0)
    maxima(r, f, n - 1, visible, step)
    weights(f, scale_log2)
    T.copy(f.s, f.p)
    r.wait(r.v_full, 0)


@T.macro
def more_blocks(r: Rings, f: Fragments, tx, visible, step, scale_log2, t, begin, n):
    """Of the t-th piece of work: all but the first up to the weights, all but the last in o."""
    for kk in T.serial(n - 1):
        i = begin + kk
        r.wait(r.k_full, i + 1)
        _products(r, f, tx, t, i)
        maxima(r, f, n - 2 - kk, visible, step)
        _weights_beside(r, f, scale_log2, i)


@T.macro
def last_values(r: Rings, f: Fragments, i):
    scale_rows(f.o, f.rescale)
    values(r, f, i)
    T.wait_wgmma(0)
    r.arrive(r.v_free, i)


@T.macro
def join(r: Rings, f: Fragments, tx, visible, step, scale_log2, t, i, n):
    """The last product of a piece of work, i, beside the scores of the t-th, the one after it.

    Leaves the output and the sum of weights of the one, and the weights and maxima of the other.
    """
    r.wait(r.k_full, i + 1)
    _products(r, f, tx, t, i)
    sum_rows(f.l, f.total)
    forget(f)
    maxima(r, f, n - 1, visible, step)
    _weights_beside(r, f, scale_log2, i)


@T.macro
def _products(r: Rings, f: Fragments, tx, t, i):
    """Scores of the block of keys after the i-th, and the product of the i-th with its values."""
    await_turn(r, tx)
    scores(r, f, t, i + 1)
    scale_rows(f.o, f.rescale)
    values(r, f, i)
    pass_turn(r, tx)
    T.wait_wgmma(1)
    r.arrive(r.k_free, i + 1)


@T.macro
def _weights_beside(r: Rings, f: Fragments, scale_log2, i):
    """Of the scores from the block of keys after the i-th, whose product goes on meanwhile."""
    # Waiting for a barrier is a branch, above which ptxas moves no wait for the product.
    if r.schedule.pin:
        r.wait(r.v_full, i + 1)
    weights(f, scale_log2)
    T.wait_wgmma(0)
    r.arrive(r.v_free, i)
    if not r.schedule.pin:
        r.wait(r.v_full, i + 1)
    T.copy(f.s, f.p)
