"""Launches in a row, of kernels in CUDA C++, PTX and the language: what orders them, and what they leave behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import warploom
from warploom.core.errors import EmulationError, ProblemError
from warploom.lang import Global, Kernel, f32, kernel

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC")
from warploom.cuda.ptx import ptx_of

SOURCE = """
#define WAIT asm volatile("griddepcontrol.wait;" ::: "memory")
#define TRIGGER asm volatile("griddepcontrol.launch_dependents;")
__device__ unsigned count;
__global__ void produce(float* x) { TRIGGER; x[threadIdx.x] = threadIdx.x; }
__global__ void consume(const float* x, float* y) { WAIT; y[threadIdx.x] = 2 * x[threadIdx.x ^ 32]; }
__global__ void hasty(const float* x, float* y) { y[threadIdx.x] = 2 * x[threadIdx.x ^ 32]; }
template <bool RESET> __global__ void last(float* y) {
  if (threadIdx.x == 0 && atomicAdd(&count, 1) == gridDim.x - 1) { y[0] = 1; if (RESET) count = 0; }
}
"""
RIGHT = 2 * (np.arange(64, dtype=np.float32).reshape(2, 32)[::-1].reshape(-1))


@kernel(threads=64)
def halve(k: Kernel, x: Global[f32], y: Global[f32]) -> None:
    y.store(x.load(k.thread) / 2.0, k.thread)


def row(second: str, seed: int | None = None, **order: Any) -> tuple[Any, np.ndarray[Any, Any]]:
    x, y = np.zeros(64, np.float32), np.zeros(64, np.float32)
    with warploom.sequence(seed) as s:
        s.launch_cuda(SOURCE, "produce", 1, 64, [x], target="sm_90", file="row.cu")
        s.launch_cuda(SOURCE, second, 1, 64, [x, y], target="sm_90", file="row.cu", **order)
    return s, y


@pytest.mark.parametrize("seed", [None, 0, 3])
def test_what_is_read_without_a_wait_is_a_race_between_kernels(seed: int | None) -> None:
    for second, order in (("consume", True), ("consume", False), ("hasty", False)):
        s, y = row(second, seed, programmatic=order)
        assert s.findings == ()
        assert np.array_equal(y, RIGHT)
    s, y = row("hasty", seed, programmatic=True)
    assert s.launches[0].findings == ()
    (finding,) = s.launches[1].findings
    assert np.array_equal(y, RIGHT)
    assert "st.global.b32 of launch 0, produce, wrote" in finding.message
    assert "griddepcontrol.wait" in finding.message
    lines = SOURCE.splitlines()
    assert finding.other is not None
    assert lines[finding.where.line - 1].startswith("__global__ void hasty")
    assert lines[finding.other.line - 1].startswith("__global__ void produce")
    with pytest.raises(EmulationError, match="hasty"):
        s.raise_if_found()


def test_streams_run_beside_each_other_and_events_order_them() -> None:
    s, _ = row("consume", stream="other")
    assert [finding.kind for finding in s.findings] == ["race"]
    assert "event" in s.findings[0].message
    assert row("hasty", stream="other", after=[0])[0].findings == ()


def test_launches_of_one_source_share_its_variables() -> None:
    for reset, second in (("true", 1), ("false", 0)):
        y = np.zeros((2, 1), np.float32)
        with warploom.sequence() as s:
            for out in y:
                s.launch_cuda(SOURCE, f"last<{reset}>", 3, 32, [out], target="sm_90")
        assert s.findings == ()
        assert y.tolist() == [[1], [second]]


def test_kernels_of_ptx_and_of_the_language_are_in_one_row() -> None:
    x, y, z = (np.zeros(64, np.float32) for _ in range(3))
    ptx = ptx_of(SOURCE, "row.cu", "sm_90", (), kernel="produce")
    with warploom.sequence() as s:
        s.launch_ptx(ptx.text, 1, 64, [x], kernel=ptx.entry)
        s.launch(halve, 1, [x, y])
        s.launch(halve.trace(), 1, {"x": y, "y": z}, programmatic=True)
    assert np.array_equal(z, np.arange(64) / 4)
    assert [len(launch.findings) for launch in s.launches] == [0, 0, 1]


def test_overlapping_arrays_are_one_memory() -> None:
    memory = np.arange(80, dtype=np.float32)
    with warploom.sequence() as s:
        s.launch(halve, 1, [memory[:64], memory[16:]])
        s.launch(halve, 1, [memory[16:], memory[:64]], stream=1)
    assert np.array_equal(memory[:64], np.arange(64) / 4)
    assert {finding.kind for finding in s.launches[1].findings} == {"race"}


def test_refusals() -> None:
    x = np.zeros(64, np.float32)
    with warploom.sequence() as s:
        with pytest.raises(ProblemError, match="earlier launches"):
            s.launch(halve, 1, [x, x.copy()], after=[0])
        with pytest.raises(ProblemError, match="sequence"):
            s.launch_cuda(SOURCE, "produce", 1, 64, [x], seed=1)
        with pytest.raises(ProblemError, match="kernel"):
            s.launch("produce", 1, [x])
    assert s.launches == ()
