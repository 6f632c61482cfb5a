# pyright: reportInvalidTypeForm=false
"""What comes first among findings of one cause, and what is said to do about it, in CUDA C++ and in the language."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC")

import warploom
from tests.ptx.text import check
from tests.ptx.text import kernel as kernel_text
from warploom.emulate import Finding, emulate
from warploom.lang import Global, Kernel, f32, kernel

Array = np.ndarray[Any, Any]


def first(body: str, grid: int, block: int, sizes: list[int]) -> Finding:
    """The first finding of a kernel on arrays of zeros; its lines are those of the body, from 1 on."""
    source = 'extern "C" __global__ void k(int* x, int* y, int* n) {' + body.strip("\n") + "\n}"
    given = [np.zeros(size, np.int32) for size in (*sizes, *[1] * (3 - len(sizes)))]
    return warploom.check_cuda(source, "k", grid, block, given).findings[0]


LAST = """
x[64 * blockIdx.x + threadIdx.x] = 1;
WRITER
__shared__ int last;
__syncthreads();
if (threadIdx.x == 0) last = atomicAdd(n, 1);
__syncthreads();
if (last != gridDim.x - 1) return;
READER
int sum = 0;
for (int i = 0; i < gridDim.x; i++) sum += x[64 * i + threadIdx.x];
y[threadIdx.x] = sum;"""


@pytest.mark.parametrize(("side", "line", "says"), [("WRITER", 2, "publishes"), ("READER", 8, "nothing is published")])
def test_the_fence_that_is_there_is_named_with_the_one_that_is_missing(side: str, line: int, says: str) -> None:
    body = LAST.replace(side, "__threadfence();")
    found = first(body.replace("WRITER", "").replace("READER", ""), 4, 64, [256, 64])
    assert found.kind == "race"
    assert f"kernel.cu:{line} " in found.message
    assert says in found.message


def test_without_any_fence_the_ctas_are_to_be_ordered() -> None:
    found = first(LAST.replace("WRITER", "").replace("READER", ""), 4, 64, [256, 64])
    assert "order the CTAs" in found.message


def test_a_barrier_in_a_branch_comes_before_the_races_that_it_brings() -> None:
    found = first(
        """
    __shared__ int s[128]; int t = threadIdx.x; s[t] = x[t]; __syncthreads();
    for (int h = 64; h > 0; h /= 2) if (t < h) { s[t] += s[t + h];
        __syncthreads(); }
    __syncthreads(); y[t] = s[0];""",
        1,
        128,
        [128, 128],
    )
    assert (found.kind, found.where.line) == ("divergence", 3)
    assert "race" in {other.kind for other in found.follows}


def test_a_flag_that_several_warps_read_takes_a_barrier_of_the_cta() -> None:
    body = "__shared__ int flag;\nif (threadIdx.x == 0) flag = x[0];\ny[threadIdx.x] = flag;"
    found = first(body, 1, 256, [1, 256])
    assert "put a barrier (__syncthreads)" in found.message


def test_ctas_that_write_one_element_are_both_named() -> None:
    found = first("y[48 * blockIdx.x + threadIdx.x] = blockIdx.x;", 4, 64, [1, 256])
    assert found.kind == "race"
    assert "y[48]" in found.message
    assert {f"CTA {found.cta}", "CTA 1"} == {"CTA 0", "CTA 1"}
    assert "CTA 1" in found.message


@kernel(threads=64)
def copied(k: Kernel, x: Global[f32], y: Global[f32], *, pending: int, committed: bool = True) -> None:
    """Three rows by copies of their own groups, of which the second is read."""
    tile = k.shared(f32, (3, 256), name="tile")
    for row in range(3):
        if not committed:
            k.commit_group()
        k.cp_async(tile.address(row, k.thread * 4), x + (row * 256 + k.thread * 4), 16)
        if committed:
            k.commit_group()
    k.wait_group(pending)
    k.syncthreads()
    y.store(tile.load(1 if committed else 2, k.thread), k.thread)
    k.wait_group(0)


@pytest.mark.parametrize(
    ("setting", "says"), [({"pending": 2}, "wait_group(1)"), ({"pending": 0, "committed": False}, "commit its group")]
)
def test_a_copy_under_way_says_which_wait_ends_it(setting: dict[str, Any], says: str) -> None:
    given = [np.ones(768, np.float32), np.zeros(64, np.float32)]
    assert emulate(copied.trace(pending=1), 1, given).findings == ()
    found = emulate(copied.trace(**setting), 1, given).findings[0]
    assert found.kind == "in_flight"
    assert says in found.message


def test_sums_that_nobody_began_name_the_product() -> None:
    body = """mov.u32 %r0, %tid.x; mov.u32 %r1, 1065369472; BEGIN
    mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%f0, %f1, %f2, %f3}, {%r1, %r1}, {%r1}, {%f0, %f1, %f2, %f3};
    mul.wide.u32 %d1, %r0, 4; add.s64 %d1, %d0, %d1;
    st.global.f32 [%d1], %f0;"""
    begin = "".join(f"mov.f32 %f{i}, 0f00000000;" for i in range(4))
    y = np.zeros(32, np.float32)
    assert check(kernel_text(body.replace("BEGIN", begin)), [y]).findings == ()
    assert y.tolist() == [8] * 32
    text = kernel_text(body.replace("BEGIN", ""))
    found = check(text, [y]).findings[0]
    assert found.kind == "uninitialised"
    assert found.other is not None
    assert text.splitlines()[found.other.line - 1].strip().startswith("mma.sync")
