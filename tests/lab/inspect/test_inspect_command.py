"""``warploom inspect`` from the command line."""

import json

import pytest

from tests.project import ROOT, needs_nvdisasm

LOOP = """
	.target	sm_80
.text.loop:
.L_x_0:
        /*0000*/                   LDSM.16.M88.4 R4, [R21] ;
        /*0010*/                   HMMA.16816.F32 R8, R4, R12, R8 ;
        /*0020*/               @P0 BRA `(.L_x_0) ;
        /*0030*/                   EXIT ;
"""


@pytest.fixture
def inspect(invoke):
    return lambda *arguments: invoke("inspect", *arguments)


def test_files_of_sass(inspect, tmp_path):
    one, two = tmp_path / "one.sass", tmp_path / "two.sass"
    one.write_text(LOOP)
    two.write_text(LOOP.replace("EXIT ;", "NOP ;"))
    shown = inspect(str(one), "--threads", "128", "--shared", "1024").stdout
    for said in ("at least 22 registers", "4 instructions, 3 of them in the main loop", "limited by warps", "HMMA 1"):
        assert said in shown
    same = inspect(str(one), "--against", str(one)).stdout
    assert "unknown without the threads" in same
    assert "The SASS is the same" in same
    value = json.loads(inspect(str(two), "--against", str(one), "--json", "-").stdout)
    assert value["differences"]["counts"]["EXIT"] == {"before": 1, "after": 0}
    assert value["differences"]["counts"]["HMMA"] == {"before": 1, "after": 1}


@needs_nvdisasm
@pytest.mark.parametrize("against", ["16", "sm_90a", "O1", "swizzle=off"])
def test_a_rung_against_another(inspect, against):
    """Rung 16 has static strides."""
    result = inspect("attention", "--rung", "2", "--against", against)
    assert result.exit_code == 0, result.output
    assert "LDSM address registers" in result.stdout
    assert "opcodes that changed most" in result.stdout


def test_a_kernel_of_a_file_has_no_rungs(inspect):
    result = inspect(str(ROOT / "examples" / "rowmax.py"), "--against", "16")
    assert result.exit_code == 2
    assert "an architecture" in result.stderr


@needs_nvdisasm
def test_source_beside_sass(inspect, tmp_path):
    file = tmp_path / "out.json"
    shown = inspect("attention", "--source", "--json", str(file)).stdout
    (line, *_) = (line for line in shown.splitlines() if "HMMA" in line and ".py:" in line)
    assert "│" in line, "the mma are in the main loop"
    assert json.loads(file.read_text())["counts"]["HMMA"] == 128


@needs_nvdisasm
def test_a_wgmma_rung_is_compiled_for_the_architecture_it_needs(inspect):
    result = inspect("attention", "--rung", "h1")
    assert "for sm_90a" in result.stdout
    assert "HGMMA" in result.stdout
    too_old = inspect("attention", "--rung", "h1", "--arch", "sm_80")
    assert too_old.exit_code == 2
    assert "needs sm_90a" in too_old.stderr


@needs_nvdisasm
def test_rungs_of_gemm(inspect, tmp_path):
    file = tmp_path / "out.json"
    options = f"--rung 03 --against 01b --accumulate f32 --set BK=32 --json {file}"
    assert "gemm, rung 03 for sm_80 BK=32" in inspect("gemm", *options.split()).stdout
    value = json.loads(file.read_text())
    assert value["before"]["counts"]["HMMA"] == value["after"]["counts"]["HMMA"] == 64
