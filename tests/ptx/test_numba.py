"""Kernels that Numba compiles to PTX, where it is installed; it needs no GPU for that."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import warploom
from tests.ptx.text import kinds

cuda: Any = pytest.importorskip("numba.cuda")
numba: Any = pytest.importorskip("numba")
THREADS = 64


def block_sums(x, out):
    tile = cuda.shared.array(THREADS, numba.float32)
    t = cuda.threadIdx.x
    tile[t] = x[cuda.blockIdx.x * THREADS + t]
    cuda.syncthreads()
    step = THREADS // 2
    while step > 0:
        if t < step:
            tile[t] += tile[t + step]
        cuda.syncthreads()
        step //= 2
    if t == 0:
        out[cuda.blockIdx.x] = tile[0]


def compiled() -> str:
    array = numba.types.Array(numba.float32, 1, "C")
    try:
        text, _ = cuda.compile_ptx(block_sums, (array, array), lineinfo=True, cc=(8, 0))
    except cuda.cudadrv.error.NvvmSupportError as error:
        pytest.skip(f"Numba has no compiler here: {error}")
    return text


def passed(x: np.ndarray) -> list[Any]:
    """An array as Numba passes it: owner, parent, count, bytes of an element, data, shape, strides."""
    return [0, 0, x.size, x.itemsize, x, x.size, x.itemsize]


@pytest.mark.parametrize("seed", [None, 3])
def test_a_reduction(seed: int | None) -> None:
    x, out = np.arange(128, dtype=np.float32), np.zeros(2, np.float32)
    found = warploom.check_ptx(compiled(), 2, THREADS, [*passed(x), *passed(out)], seed=seed)
    assert found.findings == ()
    assert out.tolist() == x.reshape(2, THREADS).sum(1).tolist()


def test_a_missing_barrier_is_found_at_the_line_of_the_python() -> None:
    lines = compiled().splitlines()
    first = min(i for i, line in enumerate(lines) if "bar.sync" in line or "barrier.sync" in line)
    text = "\n".join([*lines[:first], "", *lines[first + 1 :]])
    x, out = np.arange(128, dtype=np.float32), np.zeros(2, np.float32)
    found = warploom.check_ptx(text, 2, THREADS, [*passed(x), *passed(out)])
    assert kinds(found.findings) == {"race"}
    assert {f.where.file for f in found.findings} == {__file__}
