"""Kernels for sm_90a as PTX of NVRTC: TMA, mbarriers, ``wgmma``, clusters; the same results and findings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.attention_cases import EVERY_RUNG, Case
from tests.ptx.test_round_trip import ptx, reread
from tests.ptx.text import kinds
from warploom.emulate import emulate
from warploom.ir.program import Program

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC")
CASES = {key: Case(EVERY_RUNG[key], 128, 256) for key in ("h1", "h9")}


def through_ptx(case: Case, change: Any = lambda text: text, seed: int | None = None) -> Any:
    """A run of the case's Program that has gone through PTX, changed on its way."""
    text = ptx(case.program, "sm_90a")
    changed = change(text)
    return case.run(program=reread(case.program, changed, checked=changed == text), seed=seed)


@pytest.mark.parametrize(("rung", "seed"), [("h1", None), ("h9", 3)])
def test_attention_by_wgmma_survives(rung: str, seed: int | None) -> None:
    mine, theirs = CASES[rung].run(seed=seed), through_ptx(CASES[rung], seed=seed)
    assert theirs.fine
    assert np.array_equal(mine.out.view(np.uint16), theirs.out.view(np.uint16))


MISTAKES = {
    "wgmma.wait_group.sync.aligned 0;": {"in_flight"},
    "wgmma.fence.sync.aligned;": {"race"},
    "wgmma.commit_group.sync.aligned;": {"in_flight", "leak"},
    "fence.proxy.async.shared::cta;": {"proxy"},
    "fence.mbarrier_init.release.cluster;": {"mbarrier"},
    "cp.async.bulk.commit_group;": {"leak"},
}


@pytest.mark.parametrize("text", MISTAKES)
def test_deleted_synchronisation_is_found(text: str) -> None:
    found = through_ptx(CASES["h1"], lambda ptx: ptx.replace(text, "", 1))
    assert kinds(found.emulation.findings) & MISTAKES[text]


def test_waits_name_the_accumulators_that_they_complete() -> None:
    program = CASES["h1"].program
    mine, theirs = (
        sorted(len(op.results) for op in p.ops() if op.instruction.mnemonic.startswith("wgmma.wait_group"))
        for p in (program, reread(program, ptx(program, "sm_90a")))
    )
    assert set(theirs) == set(mine)


def test_a_cluster_with_multicast_survives() -> None:
    from tests.hopper.multicast import example

    function: Any = example.multicast_gemm
    program: Program = function.trace()
    launch = function.example_launch(np.random.default_rng(0))
    again = reread(program, ptx(program, "sm_90a"))
    assert emulate(again, launch.grid, launch.arguments).findings == ()
    for name, (wanted, tolerance) in launch.expect.items():
        position = [p.name for p in program.parameters].index(name)
        given = launch.arguments[position]
        array = given[0] if isinstance(given, tuple) else given
        assert np.abs(np.asarray(array, np.float64) - np.asarray(wanted, np.float64)).max() <= max(tolerance, 1e-9)
