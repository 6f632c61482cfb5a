"""The emulator still counts what ncu counted on the H200 (benchmarks/results/h200/profile.json, profile-gemm.json)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.project import ROOT, load
from warploom.checking.report import wavefronts_json
from warploom.emulate import emulate
from warploom_lab.bench.attention import AttentionFamily
from warploom_lab.bench.gemm import GemmFamily
from warploom_lab.bench.ladder import EmulatorCase
from warploom_lab.kernels.attention.ladder import FULL_LADDER
from warploom_lab.kernels.matmul.ladder import LADDER


def evidence(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks/results/h200" / name).read_text(encoding="utf-8"))


GEMM, RUNGS = evidence("profile-gemm.json"), evidence("profile.json")["rungs"]


def counted(case: EmulatorCase) -> dict[str, int]:
    found = wavefronts_json(emulate(case.program, case.grid, case.arguments))
    return {name: wavefronts["actual"] for name, wavefronts in found.items()}


def test_no_rung_was_refused():
    assert not [key for key, one in RUNGS.items() if "refused" in one]


@pytest.mark.parametrize("key", ["0", "4", "8", "best", "h4"])
def test_wavefronts_are_ncus(key):
    """Rungs between these make the same accesses as the one before; of rung 1 the command's test has the numbers."""
    found = counted(AttentionFamily(heads=1, seq=256).emulator_case(FULL_LADDER.rung(key).config, 0))
    for name, pair in RUNGS[key]["wavefronts"].items():
        assert found[name] == pair["emulator"], name
        assert pair["emulator"] == pair["ncu"] or key in load("ladder_counters").MERGED, name


@pytest.mark.parametrize(
    ("key", "product"),
    [
        ("01a", "whole tiles"),
        ("01b", "whole tiles"),
        ("01b", "ragged"),
        ("02", "unaligned"),
        ("07", "ragged"),
        ("best16", "whole tiles"),
    ],
)
def test_wavefronts_of_matmul_are_ncus(key, product):
    """What differs has a reason that was measured."""
    found = counted(GemmFamily(*GEMM["small"][product]).emulator_case(LADDER.rung(key).config, 0))
    pairs = GEMM["rungs"][key]["wavefronts"][product]
    assert set(pairs) == {"ldmatrix", "ld.shared", "st.shared", "cp.async"}
    for name, pair in pairs.items():
        assert found[name] == pair["emulator"], name
        assert pair["emulator"] == pair["ncu"] or load("gemm_page_counters").reason(key, product, name), name
