"""CUDA C++ that CuPy compiles at run time, taken from the installed package: NumPy's results, no findings, no GPU."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import warploom
from tests.ptx.text import kinds

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC")
CUPY = importlib.util.find_spec("cupy")
if CUPY is None or CUPY.origin is None:
    pytest.skip("needs CuPy", allow_module_level=True)
PACKAGE = Path(CUPY.origin).parent
SPARSE = "scipy/sparse/_compressed.py"


def text_of(file: str, name: str) -> str:
    """A string that a module of ``cupyx`` gives a name. The module is not imported: it looks for libraries of CUDA."""
    tree = ast.parse((PACKAGE.parent / "cupyx" / file).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and [t.id for t in node.targets if isinstance(t, ast.Name)] == [name]:
            return str(ast.literal_eval(node.value))
    raise AssertionError(f"cupyx/{file} has no {name}")


def matrix(rng: np.random.Generator) -> tuple[Any, Any, Any, Any]:
    """A sparse matrix of 4 x 300 in compressed rows, and the dense one."""
    dense = rng.standard_normal((4, 300)).astype(np.float32) * (rng.random((4, 300)) < 0.6)
    rows = [np.flatnonzero(row).astype(np.int32) for row in dense]
    starts = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    return starts, np.concatenate(rows), dense[dense != 0], dense


def test_how_many_columns_a_selection_keeps() -> None:
    rng = np.random.default_rng(0)
    starts, columns, _, dense = matrix(rng)
    counts = rng.integers(0, 3, 300).astype(np.int32)
    kept = np.zeros(5, np.int32)
    source = text_of(SPARSE, "_calc_Bp_kernel")
    found = warploom.check_cuda(source, "row_kept_count<int>", 4, 128, [4, starts, columns, counts, kept])
    assert found.findings == ()
    assert kept[1:].tolist() == ((dense != 0) @ counts).tolist()
    without = source.replace("__syncthreads();", "")
    found = warploom.check_cuda(without, "row_kept_count<int>", 4, 128, [4, starts, columns, counts, kept])
    assert kinds(found.findings) == {"race"}


def test_the_columns_that_a_selection_keeps() -> None:
    rng = np.random.default_rng(1)
    starts, columns, values, dense = matrix(rng)
    picked = rng.integers(0, 300, 90)
    counts, order = np.bincount(picked, minlength=300).astype(np.int32), np.argsort(picked, kind="stable")
    kept = np.concatenate([[0], np.cumsum((dense != 0) @ counts)]).astype(np.int32)
    to, out = np.full(kept[-1], -1, np.int32), np.full(kept[-1], np.nan, np.float32)
    found = warploom.check_cuda(
        text_of(SPARSE, "_fill_B_kernel"),
        "fill_B<float, int>",
        4,
        64,
        [
            4,
            starts,
            columns,
            values,
            np.cumsum(counts).astype(np.int32),
            order.astype(np.int32),
            kept,
            to,
            out,
        ],
    )
    assert found.findings == ()
    result = np.zeros((4, 90), np.float32)
    for row in range(4):
        result[row, to[kept[row] : kept[row + 1]]] = out[kept[row] : kept[row + 1]]
    assert np.array_equal(result, dense[:, picked])


def test_factors_of_a_recursive_filter() -> None:
    source = text_of("scipy/signal/_iir_utils.py", "IIR_KERNEL")
    b = np.array([0.5, -0.25, 0.125], np.float32)
    factors = np.zeros((3, 3 + 40), np.float32)
    factors[np.arange(3), 2 - np.arange(3)] = 1
    wanted = factors.astype(np.float64)
    for i in range(3, 43):
        wanted[:, i] = sum(float(b[j]) * wanted[:, i - j - 1] for j in range(3))
    found = warploom.check_cuda(
        source,
        "compute_correction_factors<float, float>",
        1,
        32,
        [40, 3, b, factors],
        options=[f"-I{PACKAGE / '_core' / 'include'}", "-std=c++17"],
    )
    assert found.findings == ()
    assert np.abs(factors - wanted).max() < 1e-6
