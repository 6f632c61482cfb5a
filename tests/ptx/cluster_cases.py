"""CUDA C++ for clusters on sm_90, as CUTLASS does it: multicast copies, arrivals at other CTAs, their memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ptx.cuda_cases import CudaCase
from warploom.core.dtypes import f32
from warploom.layout.tensor_map import TensorMapSpec

STEPS, ROWS = 4, 16

_HELPERS = """
struct alignas(64) Map { char bytes[128]; };
__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void wait(unsigned long long* bar, unsigned parity) {
  asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;"
               "@p bra done; bra again; done: }" :: "r"(at(bar)), "r"(parity) : "memory");
}
"""

MULTICAST = CudaCase(
    f"""(const __grid_constant__ Map map, float* y) {{
  __shared__ alignas(128) float tile[2][{ROWS}][32];
  __shared__ unsigned long long full[2], empty[2];
  unsigned t = threadIdx.x, rank, other;
  asm("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
  if (t == 0) {{
    for (int s = 0; s < 2; s++) {{
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at(&full[s])) : "memory");
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 4;" :: "r"(at(&empty[s])) : "memory");
    }}
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }}
  asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  float sum = 0;
  for (int i = 0; i < {STEPS}; i++) {{
    int s = i & 1;
    if (t == 0) {{
      wait(&empty[s], (i >> 1 & 1) ^ 1);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 2048;" :: "r"(at(&full[s])) : "memory");
      asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                   "[%0], [%1, {{%2, %3}}], [%4], %5;" :: "r"(at(tile[s][8 * rank])), "l"(&map), "r"(32 * blockIdx.y),
                   "r"({ROWS} * i + 8 * rank), "r"(at(&full[s])), "h"((short)3) : "memory");
    }}
    wait(&full[s], i >> 1 & 1);
    for (int r = 0; r < {ROWS}; r++) sum += tile[s][r][t & 31] * (r + i);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if ((t & 31) < 2) {{
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(other) : "r"(at(&empty[s])), "r"(t & 31));
      asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(other) : "memory");
    }}
  }}
  y[(blockIdx.y * 2 + rank) * 64 + t] = sum;
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}}""",
    (2, 2),
    64,
    lambda rng: [_tensor(rng), np.full(256, np.nan, np.float32)],
    lambda x, _: [None, _sums(x[0])],
    before=_HELPERS,
    target="sm_90",
    tolerance=1e-4,
    options={"cluster": 2},
)
"""Each CTA copies half of a tile to both; four warps give a stage back to both producers. Needs no headers."""

MEMORY = CudaCase(
    """(const int* x, int* y) {
  __shared__ int bins[64];
  auto cluster = cg::this_cluster();
  int t = threadIdx.x, rank = cluster.block_rank();
  bins[t] = x[rank * 64 + t];
  cluster.sync();
  int sum = 0;
  for (int r = 0; r < 2; r++) sum += cluster.map_shared_rank(bins, r)[63 - t];
  cluster.sync();
  y[rank * 64 + t] = sum;
}""",
    2,
    64,
    lambda rng: [rng.integers(-9, 9, 128).astype(np.int32), np.zeros(128, np.int32)],
    lambda x, _: [None, np.tile(x.reshape(2, 64).sum(0)[::-1], 2)],
    target="sm_90",
    options={"cluster": 2},
    before="#include <cooperative_groups.h>\nnamespace cg = cooperative_groups;",
)
"""Sums over both CTAs of a cluster, by cooperative groups."""


def _tensor(rng: np.random.Generator) -> Any:
    x = rng.standard_normal((STEPS * ROWS, 64)).astype(np.float32)
    return x, TensorMapSpec(f32, (64, STEPS * ROWS), (256,), (32, 8))


def _sums(x: Any) -> Any:
    """What each thread adds up: the weighted sum of its column."""
    tiles = x.astype(np.float64).reshape(STEPS, ROWS, 2, 32)
    weights = np.arange(ROWS)[None, :] + np.arange(STEPS)[:, None]
    columns = np.einsum("irck,ir->ck", tiles, weights)
    return np.tile(columns[:, None, :], (1, 4, 1)).reshape(-1)
