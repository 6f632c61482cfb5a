"""``warploom ladder gemm``: rows, the seeds' words, and bad input."""

import json

import numpy as np
import pytest

from warploom.core.dtypes import f16, f32
from warploom.core.errors import ConfigError
from warploom.kernels.matmul.reference import gemm_error, gemm_reference
from warploom.measure.matmul import torch_error
from warploom_lab.bench.gemm import GemmFamily, settled
from warploom_lab.bench.ladder import run_ladder
from warploom_lab.kernels.matmul.ladder import BEST16, BEST32, FULL_LADDER, HOPPER_LADDER, LADDER

SMALL = "--m 64 --n 64 --k 128 --set BM=64 --set BN=64 --set WM=32 --set WN=32"
pytestmark = pytest.mark.usefixtures("no_compiler")


@pytest.fixture
def rows(invoke):
    def run(words: str, on: str = "cpu"):
        result = invoke("ladder", "gemm", "--on", on, "--json", "-", *words.split())
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["rows"]

    return run


def test_every_rung_is_right_and_the_swizzle_ends_the_conflicts(rows):
    found = rows(SMALL)
    assert [row["rung"] for row in found] == [rung.key for rung in LADDER.rungs]
    for row in found:
        assert set(row) == {"rung", "name", "config", "digest", "error", "findings", "wavefronts", "targets", "gpu"}
        assert row["findings"] == []
        assert 0 < row["error"]["value"] <= row["error"]["bound"]
        conflicts = [w["actual"] - w["ideal"] for w in row["wavefronts"].values()]
        assert any(conflicts) == (row["rung"] in ("00a", "01a", "01b"))
    waves = {row["rung"]: row["wavefronts"]["ldmatrix"] for row in found}
    assert waves["01a"]["ideal"] == 0
    assert waves["01b"]["actual"] > 2 * waves["02"]["actual"] == 2 * waves["02"]["ideal"]


def test_the_wgmma_rungs_are_right_and_free_of_conflicts(rows):
    keys = [rung.key for rung in HOPPER_LADDER.rungs]
    found = rows(f"--rung {','.join(keys)} --k 192")
    assert [row["rung"] for row in found] == keys
    for row in found:
        assert row["findings"] == []
        assert 0 < row["error"]["value"] <= row["error"]["bound"]
        assert all(w["actual"] == w["ideal"] for w in row["wavefronts"].values())


def test_flags_of_mma_sync_leave_the_wgmma_rungs_out_and_twins_are_one():
    assert [r.key for r in settled(FULL_LADDER.rungs, None, {"WM": "32"})] == [r.key for r in LADDER.rungs]
    assert [r.key for r in settled(FULL_LADDER.rungs, None, {"STAGES": "2"})] == [r.key for r in FULL_LADDER.rungs]
    assert [r.key for r in settled(LADDER.rungs[-2:], f16, {})] == ["best16"]
    assert [r.config for r in settled(LADDER.rungs[-2:], None, {})] == [BEST16, BEST32]
    with pytest.raises(ConfigError, match="accumulates in f32"):
        settled(HOPPER_LADDER.rungs, f16, {})
    with pytest.raises(ConfigError, match=r"no flag of matmul_wgmma"):
        settled(HOPPER_LADDER.rungs, None, {"WM": "32"})


def test_accumulate_and_seed(rows):
    found = rows(f"--rung 02,best16,best32 {SMALL} --accumulate f32 --seed 3")
    assert [row["rung"] for row in found] == ["02", "best32"], "best16 would be best32 once more"
    assert {row["config"]["accumulate"] for row in found} == {"f32"}
    assert found[0]["error"]["value"] > 0.2, "the rounding of the output is most of what is allowed"


@pytest.mark.parametrize(("flag", "value"), [("split_k", 2), ("stream_k", True)])
def test_what_shares_a_sum_is_a_flag_like_any_other_and_judged_by_the_whole(rows, flag, value):
    (row,) = rows(f"--rung best32 {SMALL} --set {flag}={str(value).lower()}")
    assert row["config"][flag] == value
    assert row["error"]["value"] <= 1


def test_a_wrong_kernel_ends_with_exit_code_1(invoke, monkeypatch):
    monkeypatch.setattr("warploom_lab.bench.gemm.gemm_reference", lambda a, b: gemm_reference(a, -b))
    result = invoke("ladder", "gemm", "--rung", "02", "--on", "cpu", *SMALL.split())
    assert result.exit_code == 1
    assert "over its bound" in result.stderr


def test_the_reference_on_the_gpu_is_the_one_of_the_emulator():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(s).astype(np.float16) for s in ((50, 96), (96, 40)))
    out = (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float16)
    out[3, 7] += np.float16(0.5)
    for accumulate in (f16, f32):
        expected = gemm_error(out, gemm_reference(a, b), f16, accumulate).value
        found = torch_error(torch.from_numpy(out), torch.from_numpy(a), torch.from_numpy(b), accumulate)
        assert found.value == pytest.approx(expected)
    out[0, 0] = np.nan
    assert torch_error(torch.from_numpy(out), torch.from_numpy(a), torch.from_numpy(b), f32).value == float("inf")


@pytest.mark.gpu
def test_rungs_are_checked_and_timed_on_the_gpu(rows):
    pytest.importorskip("torch")
    for row in rows("--rung 02,best32 --gpu-n 512,1024", "gpu"):
        assert [cell["n"] for cell in row["gpu"]["cells"]] == [512, 1024]
        for cell in row["gpu"]["cells"]:
            assert cell["ratio"]["cublas"] > 0.02
            assert cell["error"]["value"] <= cell["error"]["bound"]


def test_the_whole_problem_of_the_default_fits_every_rung():
    family = GemmFamily()
    seconds = sum(family.expected_seconds(rung.config) for rung in LADDER.rungs)
    assert seconds < 20
    assert run_ladder(GemmFamily(40, 24, 72), settled(LADDER.rungs[:1], None, {})).problems == []
