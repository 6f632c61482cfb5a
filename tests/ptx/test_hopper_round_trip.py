"""Kernels for sm_90a as PTX of NVRTC: TMA, mbarriers, ``wgmma``, clusters; the same results and findings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.hopper import attention_runs
from tests.hopper.attention_runs import Case, emulated
from tests.ptx.test_round_trip import ptx, reread
from tests.ptx.text import kinds
from warploom.emulate import emulate
from warploom.ir.program import Program
from warploom.kernels.attention.ladder import HOPPER_LADDER

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC")
RUNGS: dict[str, Any] = {rung.key: rung.config for rung in HOPPER_LADDER.rungs}


class _Reread:
    """A plan whose Program has gone through PTX, changed by ``change`` on its way."""

    def __init__(self, plan: Any, change: Any) -> None:
        self.config, self.layout, self.scalars, self.grid = plan.config, plan.layout, plan.scalars, plan.grid
        text = ptx(plan.program, "sm_90a")
        self.program = reread(plan.program, change(text), checked=change(text) == text)


def through_ptx(monkeypatch: pytest.MonkeyPatch, case: Case, change: Any = lambda text: text, seed: int = 0) -> Any:
    plan = attention_runs.plan
    monkeypatch.setattr(attention_runs, "plan", lambda *args, **options: _Reread(plan(*args, **options), change))
    try:
        return emulated(case, seed)
    finally:
        monkeypatch.setattr(attention_runs, "plan", plan)


@pytest.mark.parametrize(("rung", "seed"), [("h1", 0), ("h9", 3)])
def test_attention_by_wgmma_survives(rung: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(RUNGS[rung], 128, 256)
    mine, theirs = emulated(case, seed), through_ptx(monkeypatch, case, seed=seed)
    assert theirs.findings == ()
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
def test_deleted_synchronisation_is_found(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = through_ptx(monkeypatch, Case(RUNGS["h1"], 128, 256), lambda ptx: ptx.replace(text, "", 1))
    assert kinds(found.findings) & MISTAKES[text]


def test_waits_name_the_accumulators_that_they_complete() -> None:
    program = attention_runs.plan(*Case(RUNGS["h1"], 128, 256).inputs(0), config=RUNGS["h1"]).program
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
