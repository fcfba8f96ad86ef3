"""What kernels have in common whose tiles go through a ring in shared memory."""

import tilelang.language as T


def place_in(slots: int, i):
    """The slot of a ring that its i-th load goes to, and which phase of the barriers it is."""
    return T.truncmod(i, slots), T.truncmod(T.truncdiv(i, slots), 2)


def share(pieces, first, step):
    """How many of so many pieces of work are first, first + step, …"""
    return T.truncdiv(pieces - first + step - 1, step)


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
