"""``warploom check`` of launches in a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warploom.checking.suite import CheckedFile, How, check_target

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC")

SOURCE = """
__device__ unsigned count;
__global__ void scale(float *x) { if (atomicAdd(&count, 1) < 64) x[threadIdx.x] *= 2; }
__global__ void copy(const float *x, float *y) {
#ifdef WAIT
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  y[threadIdx.x] = x[threadIdx.x];
}
"""


def outcome(folder: Path, *launches: dict[str, Any], **arrays: Any) -> Any:
    (folder / "steps.cu").write_text(SOURCE)
    usual: dict[str, Any] = {"grid": 1, "block": 64, "target": "sm_90"}
    said = {"arrays": arrays, "sequence": [{**usual, **launch} for launch in launches]}
    (folder / "steps.launch.json").write_text(json.dumps(said))
    (found,) = check_target(CheckedFile(str(folder / "steps.cu")), How())
    return found


def test_launches_share_arrays_and_are_ordered_as_they_say(tmp_path: Path) -> None:
    x = {"dtype": "f32", "shape": [64], "fill": 1}
    y = {"dtype": "f32", "shape": [64], "fill": "uninitialised", "expect": "y.npy"}
    np.save(tmp_path / "y.npy", np.full(64, 2, np.float32))
    first: dict[str, Any] = {"kernel": "scale", "arguments": ["x"]}
    second: dict[str, Any] = {"kernel": "copy", "arguments": ["x", "y"]}
    for more, ok in (
        ({}, True),
        ({"programmatic": True}, False),
        ({"programmatic": True, "options": ["-DWAIT"]}, True),
        ({"stream": 1}, False),
        ({"stream": "other", "after": [0]}, True),
    ):
        found = outcome(tmp_path, first, second | more, x=x, y=y)
        assert found.error is None
        assert found.kernel == "scale, copy"
        assert found.checked.ok == ok, more
        assert [result.ok for result in found.checked.results] == [True]
        assert {finding.kind for finding in found.checked.emulation.findings} == (set() if ok else {"race"})
    found = outcome(tmp_path, first, first, second, x=x, y=y)  # the count is as the first launch has left it
    assert found.checked.ok


def test_what_is_no_sequence_is_refused(tmp_path: Path) -> None:
    found = outcome(tmp_path, {"kernel": "scale", "arguments": ["z"]}, x={"dtype": "f32", "shape": [64]})
    assert "'z'" in str(found.error)
    assert "list of launches" in str(outcome(tmp_path).error)
    (tmp_path / "steps.launch.json").write_text('{"sequence": [{"grid": 1}], "array": {}}')
    (found,) = check_target(CheckedFile(str(tmp_path / "steps.cu")), How())
    assert 'did you mean "arrays"' in str(found.error)
