"""Orders in which a CTA stands between two of its instructions while the others run to their end."""

from __future__ import annotations

import numpy as np
import pytest

import warploom
from warploom.checking.kernel_file import ORDERS

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC")

SOURCE = """
__device__ unsigned count;
__device__ void total(volatile int* parts, int* out) {
  int sum = 0;
  for (int i = 0; i < gridDim.x; i++) sum += parts[i];
  out[0] = sum;
}
__device__ unsigned ticket() {
  __threadfence();
  unsigned mine = atomicAdd(&count, 1);
  __threadfence();
  return mine;
}
__global__ void right(volatile int* parts, int* out) {
  if (threadIdx.x) return;
  parts[blockIdx.x] = 1;
  if (ticket() == gridDim.x - 1) total(parts, out);
}
__global__ void stores_late(volatile int* parts, int* out) {
  if (threadIdx.x) return;
  unsigned mine = ticket();
  parts[blockIdx.x] = 1;
  if (mine == gridDim.x - 1) total(parts, out);
}
__global__ void last_but_one(volatile int* parts, int* out) {
  if (threadIdx.x) return;
  parts[blockIdx.x] = 1;
  if (ticket() == gridDim.x - 2) total(parts, out);
}
__global__ void waits(volatile int* parts, int* out) {
  if (threadIdx.x) return;
  parts[blockIdx.x] = 1;
  __threadfence();
  atomicAdd(&count, 1);
  for (int looks = 0; atomicAdd(&count, 0) < gridDim.x; looks++) __nanosleep(looks);
  __threadfence();
  if (blockIdx.x == 0) total(parts, out);
}
"""


def sums(kernel: str, grid: int, seed: int | None) -> int:
    """What the kernel adds up; no order has a finding: all accesses are strong."""
    parts, out = np.zeros(grid, np.int32), np.zeros(1, np.int32)
    assert warploom.check_cuda(SOURCE, kernel, grid, 64, [parts, out], seed=seed).findings == ()
    return int(out[0])


@pytest.mark.parametrize("grid", [2, 3, 5])
@pytest.mark.parametrize("kernel", ["stores_late", "last_but_one"])
def test_a_sum_that_is_made_too_early_shows_in_the_orders_of_a_check(kernel: str, grid: int) -> None:
    assert any(sums(kernel, grid, seed) != grid for seed in ORDERS)


@pytest.mark.parametrize("kernel", ["right", "waits"])
def test_held_ctas_go_on_when_the_others_have_ended_or_wait(kernel: str) -> None:
    for seed in (None, *range(12)):
        assert sums(kernel, 4, seed) == 4, seed
