"""Shape buckets: which shapes share one schedule in a table.

Sizes that a kernel is compiled for are told apart exactly; those it takes at run time go by the
range they lie in. This lies beside the kernels because they look schedules up by bucket and import
nothing above them; whoever tunes may import it from here.
"""

from bisect import bisect_left

GEMM_ROWS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
SKINNY_ROWS = (1, 2, 4, 8, 16)
SWAP_ROWS = (8, 16, 32, 64, 128)  # each has tiles of its own
KEYS = (256, 512, 1024, 2048, 4096, 8192)  # of an attention
BLOCKS = (16, 64, 256)  # batch times heads, of decoding
ROWS = (128, 1024)  # of softmax and layer norm: fewer than a GPU's cores, a few each, many
ANY_LENGTH = "any length"  # of vectors: no compiled size, and no reason seen to part them


def ceiling(size: int, edges: tuple[int, ...]) -> int:
    """The first edge that `size` does not exceed; past the last one, that and 1."""
    place = bisect_left(edges, size)
    return edges[place] if place < len(edges) else edges[-1] + 1


def _range(name: str, size: int, edges: tuple[int, ...]) -> str:
    top = ceiling(size, edges)
    return f"{name}<={top}" if top <= edges[-1] else f"{name}>{edges[-1]}"


def gemm(m: int, n: int, k: int) -> str:
    return f"{_range('m', m, GEMM_ROWS)},n={n},k={k}"


def skinny_gemm(m: int, n: int, k: int) -> str:
    return f"{_range('m', m, SKINNY_ROWS)},n={n},k={k}"


def swap_gemm(m: int, n: int, k: int) -> str:
    return f"{_range('m', m, SWAP_ROWS)},n={n},k={k}"


def gemv(n: int, k: int, normed: bool) -> str:
    return f"n={n},k={k}" + (",norm" if normed else "")


def flash_attention(head_dim: int, causal: bool, keys: int) -> str:
    mask = "causal" if causal else "not causal"
    return f"head_dim={head_dim},{mask},{_range('keys', keys, KEYS)}"


def decode_attention(head_dim: int, blocks: int) -> str:
    return f"head_dim={head_dim},{_range('blocks', blocks, BLOCKS)}"


def row(m: int, n: int) -> str:
    """Of row_softmax and layer_norm."""
    return f"{_range('rows', m, ROWS)},n={n}"
