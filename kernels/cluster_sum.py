"""Sums over the blocks of a cluster, which read each other's shared memory."""

import tilelang.language as T

VECTOR = 4  # float32, of an access of 16 bytes
# TileLang 0.1.15 can copy to the shared memory of another block, but not read there: see mapa and
# ld.shared::cluster in the PTX manual.
WITH_CLUSTER_SUM = """
__device__ __forceinline__ void add_from_cluster(float* sum, const float* here, int rank) {
  unsigned place = __cvta_generic_to_shared(here), there;
  float4 x;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(there));
  sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
}
"""


@T.macro
def sum_over_cluster(x, i, sums, at, blocks):
    """x[i] (VECTOR) = the sum, over all blocks in the order of their ranks, of sums[*at …].

    A cluster_sync comes before, or they may not be there yet, and one after.
    """
    for e in T.vectorized(VECTOR):
        x[i, e] = 0.0
    for rank in T.unroll(blocks):
        T.call_extern(
            "handle", "add_from_cluster", T.address_of(x[i, 0]), T.address_of(sums[at]), rank
        )
