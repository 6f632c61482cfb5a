"""Kernels of CuTe DSL: its PTX, compiled without a GPU, under all checks."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cutlass")

import warploom
from tests.ptx.text import kinds
from tests.with_cute import kernels


@pytest.mark.parametrize("meets", [True, False])
def test_a_kernel_and_its_barrier(meets: bool, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # where the package leaves its files
    x, y = np.arange(128, dtype=np.float32), np.full(128, np.nan, np.float32)
    found = warploom.check_ptx(kernels.ptx_of_reverse(meets), 1, 128, [[x], [y]], shared_bytes=512)
    assert kinds(found.findings) == (set() if meets else {"race"})
    assert np.array_equal(y, x[::-1])
    assert all(f.where.file.endswith("kernels.py") for f in found.findings)
