"""The rows of a tile that are a block's where a cluster shares K, as macros of gemm_sm90_split."""

from typing import Any, NamedTuple

import tilelang.language as T

from minifused.kernels.cluster_sum import VECTOR, sum_over_cluster
from minifused.kernels.gemm_finish import Output, activated
from minifused.kernels.schedule import RingGemmSchedule


class Part(NamedTuple):
    """Rows of a tile, and which vectors of them are whose: pieces of a thread, side by side."""

    schedule: RingGemmSchedule
    out: Output
    tile: Any  # its row and column, in tiles
    rank: Any  # of the block in its cluster

    @property
    def rows(self) -> int:
        return self.schedule.block_m // self.schedule.splits

    @property
    def pieces(self) -> int:
        return -(-self.rows * self.schedule.block_n // (VECTOR * self.out.threads))

    def at(self, tx, piece):
        """The row of the tile, and the first column."""
        index, vectors = piece * self.out.threads + tx, self.schedule.block_n // VECTOR
        return self.rank * self.rows + index // vectors, index % vectors * VECTOR

    def is_of_block(self, tx, piece):
        return piece * self.out.threads + tx < self.rows * self.schedule.block_n // VECTOR

    def of_matrix(self, tx, piece, e=0):
        """An element of a piece: TileLang sees that vectors are aligned if it is not named."""
        (j, i), s = self.at(tx, piece), self.schedule
        return self.tile[0] * s.block_m + j, self.tile[1] * s.block_n + i + e

    def is_of_matrix(self, tx, piece):
        (row, col), (m, n) = self.of_matrix(tx, piece), self.out.C.shape
        return T.And(self.is_of_block(tx, piece), T.And(row < m, col < n))


@T.macro
def load_residual(part: Part, residual, tx):
    R = part.out.R
    if R is not None:
        for piece in T.unroll(part.pieces):
            if part.is_of_matrix(tx, piece):
                for e in T.vectorized(VECTOR):
                    residual[piece, e] = R[part.of_matrix(tx, piece, e)]


@T.macro
def finish_part(part: Part, sums, residual, tx):
    """C = act(sums of all blocks + bias) + residual."""
    out, x = part.out, T.alloc_local((part.pieces, VECTOR), "float32")
    for piece in T.unroll(part.pieces):  # all are asked for before one is used
        if part.is_of_block(tx, piece):
            sum_over_cluster(x, piece, sums, part.at(tx, piece), part.schedule.splits)
    for piece in T.unroll(part.pieces):
        if part.is_of_matrix(tx, piece):
            if out.bias is not None:
                for e in T.vectorized(VECTOR):
                    x[piece, e] += T.cast(out.bias[part.of_matrix(tx, piece, e)[1]], "float32")
            for e in T.unroll(VECTOR):
                x[piece, e] = activated(out, x[piece, e])
            if out.R is not None:
                for e in T.vectorized(VECTOR):
                    x[piece, e] += T.cast(residual[piece, e], "float32")
            for e in T.vectorized(VECTOR):
                out.C[part.of_matrix(tx, piece, e)] = T.cast(x[piece, e], out.C.dtype)
