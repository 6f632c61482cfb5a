"""The emulator still counts what ncu counted on the H200 (benchmarks/results/h200/profile.json, profile-gemm.json)."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from warploom.bench.attention import AttentionFamily
from warploom.bench.gemm import GemmFamily
from warploom.bench.ladder import wavefronts_json
from warploom.emulate import emulate
from warploom.kernels.attention.ladder import FULL_LADDER
from warploom.kernels.matmul.ladder import LADDER

ROOT = Path(__file__).resolve().parents[2]
GEMM = json.loads((ROOT / "benchmarks/results/h200/profile-gemm.json").read_text(encoding="utf-8"))
RUNGS = json.loads((ROOT / "benchmarks/results/h200/profile.json").read_text(encoding="utf-8"))["rungs"]


def test_no_rung_was_refused():
    assert set(RUNGS) <= {rung.key for rung in FULL_LADDER.rungs}
    assert not [key for key, one in RUNGS.items() if "refused" in one]


@pytest.mark.parametrize("key", ["0", "1", "4", "8", "9", "15", "best", "h4", "h7"])
def test_wavefronts_are_ncus(key, monkeypatch):
    """Rungs between these make the same accesses as the one before."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    merged = importlib.import_module("ladder_counters").MERGED
    case = AttentionFamily(heads=1, seq=256).emulator_case(FULL_LADDER.rung(key).config, 0)
    counted = wavefronts_json(emulate(case.program, case.grid, case.arguments))
    for name, pair in RUNGS[key]["wavefronts"].items():
        assert counted[name]["actual"] == pair["emulator"], name
        assert pair["emulator"] == pair["ncu"] or key in merged, name


@pytest.mark.parametrize("product", GEMM["small"])
@pytest.mark.parametrize("key", ["01a", "01b", "02", "04", "06", "07", "best16"])
def test_wavefronts_of_matmul_are_ncus(key, product, monkeypatch):
    """On whole and on ragged tiles; what differs has a reason that was measured."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    reason = importlib.import_module("gemm_page_counters").reason
    case = GemmFamily(*GEMM["small"][product]).emulator_case(LADDER.rung(key).config, 0)
    counted = wavefronts_json(emulate(case.program, case.grid, case.arguments))
    pairs = GEMM["rungs"][key]["wavefronts"][product]
    assert set(pairs) == {"ldmatrix", "ld.shared", "st.shared", "cp.async"}
    for name, pair in pairs.items():
        assert counted[name]["actual"] == pair["emulator"], name
        assert pair["emulator"] == pair["ncu"] or reason(key, product, name), name
