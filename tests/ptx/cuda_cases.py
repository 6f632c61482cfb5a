"""Kernels in CUDA C++ as people write them, what they are run on, and what they should give.

Those under :data:`HEADERS` need the headers of CUDA and CCCL (wheels ``nvidia-cuda-runtime``, ``nvidia-cuda-cccl``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import warploom

Array = np.ndarray[Any, Any]
Wanted = Callable[..., list[Any]]


@dataclass
class CudaCase:
    """A kernel ``k``: ``wanted`` makes of its arguments, before the run, what they should hold, None for any."""

    body: str
    grid: Any
    block: Any
    arguments: Callable[[np.random.Generator], list[Any]]
    wanted: Wanted
    before: str = ""
    target: str = "sm_80"
    tolerance: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """The whole source."""
        return f'{self.before}\nextern "C" __global__ void k{self.body}'

    def run(self, source: str = "", seed: int | None = None, check: Any = warploom.check_cuda) -> tuple[Any, float]:
        """What the check found, and the largest error over the tolerance (right is at most 1)."""
        given = self.arguments(np.random.default_rng(1))
        wanted = self.wanted(*(np.copy(x) if isinstance(x, np.ndarray) else x for x in given))
        found = check(
            source or self.source, "k", self.grid, self.block, given, target=self.target, seed=seed, **self.options
        )
        return found, max(self._error(x, w) for x, w in zip(given, wanted, strict=True) if w is not None)

    def _error(self, got: Any, wanted: Any) -> float:
        wanted = np.asarray(wanted, np.float64)
        away = np.abs(np.asarray(got)[: len(wanted)].astype(np.float64) - wanted).max()
        return float(np.nan_to_num(away / (self.tolerance or 1e-30), nan=np.inf)) if away != 0 else 0.0


def floats(*sizes: int) -> Callable[[np.random.Generator], list[Any]]:
    return lambda rng: [rng.standard_normal(n).astype(np.float32) for n in sizes]


def integers(*sizes: int) -> Callable[[np.random.Generator], list[Any]]:
    return lambda rng: [rng.integers(-500, 500, n).astype(np.int32) for n in sizes]


def _switched(x: Array, y: Array) -> list[Any]:
    which = x & 3
    counted = np.bitwise_count(x.view(np.uint32))
    return [None, np.select([which == 0, which == 1, which == 2], [x * 3, counted, x ^ 77], -x)]


PLAIN: dict[str, CudaCase] = {
    "local arrays": CudaCase(
        """(const int* x, int* y) {
        int a[16], t = threadIdx.x;
        for (int i = 0; i < 16; i++) a[i] = x[i] * t;
        y[t] = a[x[t] & 15];
    }""",
        1,
        64,
        integers(64, 64),
        lambda x, y: [None, x[x & 15] * np.arange(64)],
    ),
    "calls": CudaCase(
        """(const float* x, float* y) {
        int t = threadIdx.x;
        y[t] = f(x[t], x, t) + f(2.f, x, t);
    }""",
        1,
        64,
        floats(64, 64),
        lambda x, y: [None, x * x + 2 * x + 2],
        tolerance=1e-5,
        before="__noinline__ __device__ float f(float a, const float* p, int i) { return a * p[i] + 1.f; }",
    ),
    "generic pointers": CudaCase(
        """(const float* x, float* y) {
        __shared__ float s[64];
        int t = threadIdx.x;
        s[t] = x[t] * 2;
        __syncthreads();
        const float* p = x[t] > 0 ? s : x;
        y[t] = p[t ^ 1];
    }""",
        1,
        64,
        floats(64, 64),
        lambda x, y: [None, np.where(x > 0, 2, 1) * x[np.arange(64) ^ 1]],
    ),
    "constants": CudaCase(
        """(const int* x, int* y) {
        y[threadIdx.x] = c[x[threadIdx.x] & 3] + table[x[threadIdx.x] & 1];
    }""",
        1,
        32,
        integers(32, 32),
        lambda x, y: [None, 1 + (x & 3) + 5 + (x & 1)],
        before="__constant__ float c[4] = {1.f, 2.f, 3.f, 4.f}; __device__ int table[2] = {5, 6};",
    ),
    "structures": CudaCase(
        """(P p, float3 s) {
        if (threadIdx.x < p.n) p.y[threadIdx.x] = p.a * p.x[threadIdx.x] + s.y;
    }""",
        1,
        64,
        lambda rng: [[2.0, 40, *floats(64, 64)(rng)], [1.0, 3.0, 5.0]],
        lambda p, s: [None, None],
        before="struct P { float a; int n; float* y; const float* x; };",
    ),
    "switches": CudaCase(
        """(const int* x, int* y) {
        int v = x[threadIdx.x];
        switch (v & 3) { case 0: v *= 3; break; case 1: v = __popc(v); break; case 2: v ^= 77; break; default: v = -v; }
        y[threadIdx.x] = v;
    }""",
        1,
        64,
        integers(64, 64),
        _switched,
    ),
    "histogram": CudaCase(
        """(const int* x, unsigned* h, int n) {
        __shared__ unsigned s[32];
        if (threadIdx.x < 32) s[threadIdx.x] = 0;
        __syncthreads();
        int step = gridDim.x * blockDim.x;
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) atomicAdd(&s[x[i] & 31], 1u);
        __syncthreads();
        if (threadIdx.x < 32) atomicAdd(&h[threadIdx.x], s[threadIdx.x]);
    }""",
        4,
        128,
        lambda rng: [*integers(1000)(rng), np.zeros(32, np.uint32), 1000],
        lambda x, h, n: [None, np.bincount(x & 31, minlength=32), None],
    ),
    "doubles": CudaCase(
        """(const double* x, double* y, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) { y[i] = exp(x[i]) / sqrt(fabs(x[i]) + 1.0); atomicAdd(y + n, x[i]); }
    }""",
        2,
        64,
        lambda rng: [rng.standard_normal(100), np.zeros(101), 100],
        lambda x, y, n: [None, [*np.exp(x) / np.sqrt(np.abs(x) + 1), x.sum()], None],
        tolerance=1e-13,
    ),
    "functions": CudaCase(
        """(const float* x, float* y) {
        float v = x[threadIdx.x];
        y[threadIdx.x] = sinf(100.f * v) + expf(v) * logf(fabsf(v) + 1.f) + tanhf(v) + powf(fabsf(v), 1.5f)
            + rsqrtf(v * v + 1.f);
    }""",
        1,
        64,
        floats(64, 64),
        lambda x, y: [
            None,
            np.sin(np.float32(100) * x, dtype=np.float64)
            + np.exp(x) * np.log(np.abs(x) + 1)
            + np.tanh(x)
            + np.abs(x) ** 1.5
            + 1 / np.sqrt(x * x + 1),
        ],
        tolerance=2e-5,
    ),
    "rounding": CudaCase(
        """(const float* x, float* y) {
        float v = x[threadIdx.x], w = x[threadIdx.x ^ 1];
        y[threadIdx.x] = __fadd_rd(v, w) <= __fadd_rn(v, w) && __fadd_rn(v, w) <= __fadd_ru(v, w)
            && fabsf(__fmaf_rz(v, w, v)) <= fabsf(__fmaf_rn(v, w, v)) && __fmul_rd(v, w) < __fmul_ru(v, w);
    }""",
        1,
        64,
        floats(64, 64),
        lambda x, y: [None, np.ones(64)],
    ),
    "atomics": CudaCase(
        """(float* m, unsigned* u, const float* x) {
        int *p = (int*)m, o = atomicAdd(p, 0), a;
        float v = x[threadIdx.x];
        do { a = o; o = atomicCAS(p, a, __float_as_int(fmaxf(v, __int_as_float(a)))); } while (a != o);
        atomicMax((int*)u, (int)threadIdx.x);
        atomicInc(u + 1, 5u);
        atomicAnd(u + 2, threadIdx.x | 1u);
        atomicAdd((unsigned long long*)(u + 4), 1ull << 33);
    }""",
        1,
        64,
        lambda rng: [np.full(1, -9, np.float32), np.full(6, [0, 0, 7, 0, 0, 0], np.uint32), *floats(64)(rng)],
        lambda m, u, x: [[x.max()], [63, 64 % 6, 1, 0, 0, 128], None],
    ),
    "warps": CudaCase(
        """(const int* x, int* y) {
        int v = x[threadIdx.x], all;
        unsigned ballot = __ballot_sync(~0u, v & 1), same = __match_any_sync(~0u, v & 3);
        __match_all_sync(~0u, v >> 31 & 0, &all);
        y[threadIdx.x] = __reduce_add_sync(~0u, v) + __popc(ballot) + __popc(same) + all + __shfl_up_sync(~0u, v, 1);
    }""",
        1,
        32,
        integers(32, 32),
        lambda x, y: [None, x.sum() + (x & 1).sum() + np.bincount(x & 3, minlength=4)[x & 3] + 1 + np.r_[x[0], x[:-1]]],
    ),
    "two-dimensional blocks": CudaCase(
        """(const float* a, const float* b, float* c, int n) {
        __shared__ float s[16][17], u[16][17];
        int x = threadIdx.x, y = threadIdx.y, r = blockIdx.y * 16 + y, q = blockIdx.x * 16 + x;
        float sum = 0;
        for (int i = 0; i < n; i += 16) {
            s[y][x] = a[r * n + i + x]; u[y][x] = b[(i + y) * n + q];
            __syncthreads();
            for (int j = 0; j < 16; j++) sum += s[y][j] * u[j][x];
            __syncthreads();
        }
        c[r * n + q] = sum;
    }""",
        (3, 3),
        (16, 16),
        lambda rng: [*floats((48, 48), (48, 48), (48, 48))(rng), 48],  # type: ignore[arg-type]
        lambda a, b, c, n: [None, None, a.astype(np.float64) @ b, None],
        tolerance=2e-5,
    ),
    "volatile": CudaCase(
        """(const float* x, float* y) {
        __shared__ volatile float s[64];
        int t = threadIdx.x;
        s[t] = x[t];
        __syncthreads();
        if (t < 32) { float v = s[t] + s[t + 32]; __syncwarp(); s[t] = v; __syncwarp(); y[t] = s[t ^ 16]; }
    }""",
        1,
        64,
        floats(64, 32),
        lambda x, y: [None, (x[:32] + x[32:])[np.arange(32) ^ 16]],
    ),
}


def block(
    name: str, header: str, body: str, wanted: Callable[[Any], Any], count: int = 512, returns: int = 512
) -> CudaCase:
    """A CUB primitive of a block of 128 threads."""
    return CudaCase(
        f"(const int* x, int* y) {{ typedef cub::{name} B; __shared__ typename B::TempStorage s; int t = "
        f"threadIdx.x; {body} }}",
        1,
        128,
        integers(count, returns),
        lambda x, y: [None, wanted(x)],
        before=f"#include <cub/block/{header}.cuh>\n#include <cub/warp/warp_reduce.cuh>",
    )


_FOUR = "int v[4]; for (int i = 0; i < 4; i++) v[i] = x[4 * t + i];"
HEADERS: dict[str, CudaCase] = {
    "BlockReduce": block(
        "BlockReduce<int, 128>",
        "block_reduce",
        "int v = B(s).Sum(x[t]); if (t == 0) y[0] = v;",
        lambda x: [x.sum()],
        128,
        1,
    ),
    "BlockScan": block(
        "BlockScan<int, 128>",
        "block_scan",
        "int v; B(s).ExclusiveSum(x[t], v); y[t] = v;",
        lambda x: np.cumsum(x) - x,
        128,
        128,
    ),
    "BlockRadixSort": block(
        "BlockRadixSort<int, 128, 4>",
        "block_radix_sort",
        f"{_FOUR} B(s).Sort(v); for (int i = 0; i < 4; i++) y[4 * t + i] = v[i];",
        np.sort,
    ),
    "BlockMergeSort": block(
        "BlockMergeSort<int, 128, 4>",
        "block_merge_sort",
        f"{_FOUR} B(s).Sort(v, [](int a, int b) {{ return a < b; }}); for (int i = 0; i < 4; i++) y[4 * t + i] = v[i];",
        np.sort,
    ),
    "BlockLoad": block(
        "BlockLoad<int, 128, 4, cub::BLOCK_LOAD_TRANSPOSE>",
        "block_load",
        "int v[4]; B(s).Load(x, v); for (int i = 0; i < 4; i++) y[4 * t + i] = 3 * v[i];",
        lambda x: 3 * x,
    ),
    "BlockHistogram": block(
        "BlockHistogram<unsigned char, 128, 4, 32>",
        "block_histogram",
        "__shared__ int h[32]; "
        "unsigned char v[4]; for (int i = 0; i < 4; i++) v[i] = x[4 * t + i] & 31; "
        "B(s).Histogram(v, h); __syncthreads(); if (t < 32) y[t] = h[t];",
        lambda x: np.bincount(x & 31, minlength=32),
        512,
        32,
    ),
    "halves": CudaCase(
        """(const __half2* x, __half2* y) {
        __half2 v = x[threadIdx.x];
        y[threadIdx.x] = __hmax2(__hfma2(v, v, v), __float2half2_rn(0.f));
    }""",
        1,
        32,
        lambda rng: [rng.standard_normal(64).astype(np.float16), np.zeros(64, np.float16)],
        lambda x, y: [None, np.maximum((x.astype(np.float64) * x + x).astype(np.float16), 0)],
        before="#include <cuda_fp16.h>",
    ),
    "cooperative groups": CudaCase(
        """(const int* x, int* y) {
        auto block = cg::this_thread_block();
        auto warp = cg::tiled_partition<32>(block);
        int v = cg::reduce(warp, x[block.thread_rank()], cg::plus<int>());
        block.sync();
        y[block.thread_rank()] = v;
    }""",
        1,
        64,
        integers(64, 64),
        lambda x, y: [None, np.repeat(x.reshape(2, 32).sum(1), 32)],
        before="#include <cooperative_groups.h>\n#include <cooperative_groups/reduce.h>\n"
        "namespace cg = cooperative_groups;",
    ),
    "pipeline": CudaCase(
        """(const float4* x, float* y, int n) {
        __shared__ float4 s[2][64];
        auto p = cuda::make_pipeline();
        int t = threadIdx.x;
        float sum = 0;
        auto put = [&](int i) {
            p.producer_acquire();
            if (i < n) cuda::memcpy_async(&s[i & 1][t], &x[i * 64 + t], cuda::aligned_size_t<16>(16), p);
            p.producer_commit();
        };
        put(0); put(1);
        for (int i = 0; i < n; i++) { p.consumer_wait(); sum += s[i & 1][t].x; p.consumer_release(); put(i + 2); }
        y[t] = sum;
    }""",
        1,
        64,
        lambda rng: [*floats(5 * 64 * 4, 64)(rng), 5],
        lambda x, y, n: [None, x.reshape(5, 64, 4)[:, :, 0].astype(np.float64).sum(0), None],
        tolerance=1e-6,
        before="#include <cuda/pipeline>",
    ),
    "copies on a barrier": CudaCase(
        """(const float4* x, float* y, int n) {
        __shared__ cuda::barrier<cuda::thread_scope_block> bar;
        __shared__ float4 s[2][64];
        int t = threadIdx.x;
        float sum = 0;
        if (t == 0) init(&bar, 64);
        __syncthreads();
        for (int i = 0; i < n; i++) {
            cuda::memcpy_async(&s[i & 1][t], &x[i * 64 + t], cuda::aligned_size_t<16>(16), bar);
            bar.arrive_and_wait();
            sum += s[i & 1][63 - t].x;
        }
        y[t] = sum;
    }""",
        1,
        64,
        lambda rng: [*floats(5 * 64 * 4, 64)(rng), 5],
        lambda x, y, n: [None, x.reshape(5, 64, 4)[:, ::-1, 0].astype(np.float64).sum(0), None],
        tolerance=1e-6,
        before="#include <cuda/barrier>",
    ),
    **{
        f"barrier, {target}": CudaCase(
            """(const float* x, float* y) {
        __shared__ cuda::barrier<cuda::thread_scope_block> bar;
        __shared__ float s[64];
        int t = threadIdx.x;
        if (t == 0) init(&bar, 64);
        __syncthreads();
        for (int i = 0; i < 3; i++) { s[t] = x[t] + i; bar.arrive_and_wait(); y[t] = s[63 - t]; bar.arrive_and_wait(); }
    }""",
            1,
            64,
            floats(64, 64),
            lambda x, y: [None, x[::-1] + np.float32(2)],
            before="#include <cuda/barrier>",
            target=target,
        )
        for target in ("sm_80", "sm_90")
    },
}
