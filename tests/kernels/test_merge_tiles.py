"""The kernel that merges the states of a product's tiles, on the emulator."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.mutate import deletions
from warploom.emulate import emulate
from warploom.kernels.matmul_reduce.merge_kernel import merge_tiles
from warploom.kernels.matmul_reduce.states import MERGE_ROWS

ROWS = 40  # the last block is not full


def merged(program, tiles, op):
    """(what the kernel writes, what it should, findings) for random states."""
    rng = np.random.default_rng(tiles)
    first = rng.standard_normal((tiles, ROWS)).astype(np.float32)
    second = rng.random((tiles, ROWS)).astype(np.float32) + 0.5
    columns = np.cumsum(rng.integers(1, 9, (tiles, ROWS), dtype=np.uint32), 0, dtype=np.uint32)
    best = first.argmax(0), np.arange(ROWS)
    expected = {
        "max": first.max(0),
        "argmax": first.max(0),
        "sum": first.astype(np.float64).sum(0),
        "logsumexp": np.log((np.exp(first.astype(np.float64)) * second).sum(0)),
    }[op]
    out, index = np.full(ROWS, np.nan, np.float32), np.zeros(ROWS, np.uint32)
    given = {"first": first, "second": columns if op == "argmax" else second, "out": out, "index": index}
    given |= {"m": ROWS, "tiles": tiles}
    done = emulate(program, -(-ROWS // MERGE_ROWS), {p.name: given[p.name] for p in program.parameters})
    right = np.abs(out - expected).max() < 1e-4 and (op != "argmax" or (index == columns[best]).all())
    return right, done.findings


@pytest.mark.parametrize("op", ["max", "argmax", "sum", "logsumexp"])
@pytest.mark.parametrize("tiles", [1, 7, 75, 136])
def test_every_number_of_tiles_merges(tiles, op):
    right, findings = merged(merge_tiles.trace(op=op, with_index=op == "argmax"), tiles, op)
    assert findings == ()
    assert right


def test_its_barrier_is_needed():
    mutants = list(deletions(merge_tiles.trace(op="logsumexp")))
    assert mutants
    for mutant in mutants:
        right, findings = merged(mutant.program, 20, "logsumexp")
        assert findings or not right, mutant.what
