"""What is written of a row that `row_lanes` walks: the probabilities, and 0 in padded columns."""

import tilelang.language as T

# x is as `row_lanes` has loaded it; row_max (1) and inverse (1), of the sum, are the whole row's.


@T.macro
def store(r, x, first, Y, row_max, inverse):
    """Write a step of whole vectors from vector `first` on."""
    if (first + r.stride) * r.width <= Y.shape[0]:
        for k, i, j in r.tile.parallel(r.vectors, r.lanes, r.width):
            e = r.exp(T.cast(x[k, i, j], "float32") - row_max[0])
            Y[(first + k * r.lanes + i) * r.width + j] = T.cast(e * inverse[0], Y.dtype)


@T.macro
def store_up_to(r, x, first, last, Y, row_max, inverse):
    """The same, nothing from vector `last` on."""
    vectors = int(x.shape[0])
    for k, i, j in r.tile.parallel(vectors, r.lanes, r.width):
        vector = first + k * r.lanes + i
        if vector < last and (vector + 1) * r.width <= Y.shape[0]:
            e = r.exp(T.cast(x[k, i, j], "float32") - row_max[0])
            Y[vector * r.width + j] = T.cast(e * inverse[0], Y.dtype)


@T.macro
def store_edges(r, x, start, n, first, last, head, tail, Y, row_max, inverse):
    """Write the head, the tail, and 0 in the columns from there to the end of the row."""
    for i in r.tile.parallel(r.lanes):
        e = T.cast(r.exp(x[0, i, 0] - row_max[0]) * inverse[0], Y.dtype)
        if head and i < r.width and start + i < T.min(first * r.width, start + r.valid):
            Y[start + i] = e
        at = (last - 1) * r.width + i
        if tail and r.width <= i and i < 2 * r.width and at < start + r.valid:
            Y[at] = e
    if tail:
        for block in T.serial(T.ceildiv(n - r.valid, r.lanes)):
            for i in r.tile.parallel(r.lanes):
                column = r.valid + block * r.lanes + i
                if column < n:
                    Y[start + column] = T.cast(0.0, Y.dtype)


@T.macro
def keep(r, x, first, last, kept):
    """Copy vectors to where shared memory keeps them, nothing from vector `last` on."""
    for k, i, j in r.tile.parallel(int(x.shape[0]), r.lanes, r.width):
        vector = first + k * r.lanes + i
        if vector < last and (vector + 1) * r.width <= kept.shape[0]:
            kept[vector * r.width + j] = x[k, i, j]
