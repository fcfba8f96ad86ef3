"""A load of a ring of tiles in shared memory: what gemm_sm90 and swap_gemm have in common."""

import tilelang.language as T


@T.macro
def load_step(X, row, step, slots, full, slot, arrive):
    """slots[slot] = the rows of X from `row` on, and the columns of a step, by TMA.

    full[slot] is to wait for their bytes; with `arrive` 1 the load is the slot's last.
    """
    stop, cols, note = row + slots.shape[1], slots.shape[2], {"emit_arrive": arrive}
    T.tma_copy(
        X[row:stop, step * cols : (step + 1) * cols],
        slots[slot, :, :],
        barrier=full[slot],
        annotations=note,
    )
