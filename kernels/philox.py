"""Philox4x32-10 on a thread of a kernel: see minifused/sampling.py, whose numbers these are."""

import tilelang.language as T

ROUNDS = 10
UNIFORM_BITS = 24  # the integers that float32 holds without gaps


@T.macro
def philox_uniform(seed, sample, position, uniform):
    """uniform (1) = the number in [0, 1) of (seed, sample, position), int64, of which the latter
    two count mod 2 ** 32."""
    c = T.alloc_local((4,), "uint32")
    k = T.alloc_local((2,), "uint32")
    products = T.alloc_local((2,), "uint64")
    c[0] = T.cast(position, "uint32")
    c[1] = T.cast(sample, "uint32")
    c[2] = T.uint32(0)
    c[3] = T.uint32(0)
    k[0] = T.cast(seed, "uint32")
    k[1] = T.cast(seed >> T.int64(32), "uint32")
    for _ in T.unroll(ROUNDS):
        products[0] = T.cast(c[0], "uint64") * T.uint64(0xD2511F53)
        products[1] = T.cast(c[2], "uint64") * T.uint64(0xCD9E8D57)
        c[0] = T.cast(products[1] >> T.uint64(32), "uint32") ^ c[1] ^ k[0]
        c[1] = T.cast(products[1], "uint32")
        c[2] = T.cast(products[0] >> T.uint64(32), "uint32") ^ c[3] ^ k[1]
        c[3] = T.cast(products[0], "uint32")
        k[0] += T.uint32(0x9E3779B9)
        k[1] += T.uint32(0xBB67AE85)
    half = float(
        2 ** (UNIFORM_BITS // 2)
    )  # target c writes constants of few digits: 2**-24 is none
    uniform[0] = T.cast(c[0] >> T.uint32(32 - UNIFORM_BITS), "float32") / half / half
