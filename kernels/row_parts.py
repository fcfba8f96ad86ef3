"""The maximum and the sum of a row, from those of its parts, however these were cut."""

import tilelang.language as T

from minifused.kernels.online_softmax import shift_by


@T.macro
def merge_parts(r, P, row, m, l, maximum, total, row_max, row_sum):
    """row_max (1) and row_sum (1) of a row, from the maxima and sums of all its parts in P.

    m and l (parts a lane, lanes) are what the lanes take of P, maximum and total (lanes) of that.
    """
    count = int(m.shape[0])
    T.fill(m, -T.infinity("float32"))
    T.clear(l)
    for k in T.unroll(count):
        for i in r.tile.parallel(r.lanes):
            if k * r.lanes + i < P.shape[1]:
                m[k, i] = P[row, k * r.lanes + i, 0]
                l[k, i] = P[row, k * r.lanes + i, 1]
    T.fill(maximum, -T.infinity("float32"))
    T.clear(total)
    for k in T.unroll(count):
        for i in r.tile.parallel(r.lanes):
            maximum[i] = T.max(maximum[i], m[k, i])
    T.reduce_max(maximum, row_max, dim=0)
    for k in T.unroll(count):
        for i in r.tile.parallel(r.lanes):
            shift = shift_by(row_max[0])
            total[i] += l[k, i] * r.exp(m[k, i] - shift)
    T.reduce_sum(total, row_sum, dim=0)
