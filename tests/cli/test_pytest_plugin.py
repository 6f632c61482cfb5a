"""The fixture ``warploom_check``: tests fail with findings, and a run has a baseline and SARIF."""

import json
from pathlib import Path

import pytest
from tests.ptx.text import kernel

pytest_plugins = ["pytester"]

SWAP = """mov.u32 %r0, %tid.x; shl.b32 %r1, %r0, 2; mov.u32 %r2, TILE; add.u32 %r3, %r2, %r1;
mul.wide.u32 %d20, %r0, 4; add.s64 %d22, %d0, %d20;
st.shared.u32 [%r3], %r0;
BARRIER
xor.b32 %r4, %r1, 4; add.u32 %r5, %r2, %r4; ld.shared.u32 %r6, [%r5];
st.global.u32 [%d22], %r6;"""
TESTS = """
import numpy as np
import pytest
from pathlib import Path
from warploom.core.errors import EmulationError
from warploom.lang import Global, Kernel, Launch, f32, kernel

HERE = Path(__file__).parent

def run(check, name):
    return check.ptx(HERE / f"{name}.ptx", 1, 64, [np.zeros(64, np.uint32)])

def test_right(warploom_check):
    assert run(warploom_check, "right").findings == ()

def test_review(warploom_check):
    run(warploom_check, "review")

def test_race(warploom_check):
    run(warploom_check, "race")

def test_expected(warploom_check):
    with pytest.raises(EmulationError):
        run(warploom_check, "race")

@kernel(threads=32)
def scaled(k: Kernel, out: Global[f32]) -> None:
    out.store(2.0, k.lane)

@scaled.example
def launch(rng):
    return Launch(1, [np.zeros(32, np.float32)], {"out": (np.full(32, 3, np.float32), 0.0)})

def test_own(warploom_check):
    warploom_check.kernel(scaled)
"""


@pytest.fixture
def project(pytester):
    for name, barrier, tile in (("right", "bar.sync 0;", "tile"), ("review", "", "global_smem"), ("race", "", "tile")):
        body = SWAP.replace("BARRIER", barrier).replace("TILE", tile).replace("%r6", "%r7" if name == "race" else "%r6")
        text = kernel(body, ["u64"], f".shared .b8 {tile}[256];")
        (pytester.path / f"{name}.ptx").write_text(text)
    (pytester.path / ".git").mkdir()
    pytester.makepyfile(test_kernels=TESTS)
    return pytester


def test_an_error_fails_a_test_with_its_lines_and_none_of_the_package(project):
    result = project.runpytest_subprocess()
    result.assert_outcomes(passed=3, failed=2)
    text = result.stdout.str()
    assert "32 of 32 elements are wrong" in text
    assert "ld.shared.u32 %r7, [%r5];" in text
    assert "test_kernels.py:10: EmulationError" in text
    assert "pytest_plugin.py" not in text


def test_strict_and_sarif_also_from_several_processes(project):
    result = project.runpytest_subprocess("-n", "2", "--warploom-strict", "--warploom-sarif=found.sarif")
    result.assert_outcomes(passed=2, failed=3)
    results = json.loads(Path("found.sarif").read_text())["runs"][0]["results"]
    places = [one["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for one in results]
    assert sorted(places) == ["race.ptx", "review.ptx", "test_kernels.py"]


def test_a_baseline(project):
    def run(*options):
        result = project.runpytest_subprocess("--warploom-baseline=accepted.json", "-k", "race or review", *options)
        result.assert_outcomes(passed=2)
        return result.stdout.str()

    run("--warploom-write-baseline")
    entries = json.loads(Path("accepted.json").read_text())["accepted"]
    assert [(entry["rule"], entry["file"]) for entry in entries] == [("race", "test_kernels.py")] * 2
    (project.path / "race.ptx").write_text((project.path / "right.ptx").read_text())
    assert run("--warploom-strict").count("no longer occurs: race") == 1


def test_options_that_do_not_fit_are_refused(project):
    (project.path / "none.json").write_text("{}")
    for options in (["--warploom-write-baseline"], ["--warploom-baseline=none.json"]):
        result = project.runpytest_subprocess(*options)
        assert result.ret != 0
        assert "-write-baseline" in result.stdout.str() + result.stderr.str()


def test_a_report_that_cannot_be_written_is_one_line(project):
    (project.path / "folder").mkdir()
    result = project.runpytest_subprocess("--warploom-sarif=folder", "-k", "right")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "folder: Is a directory" in result.stderr.str()
    assert "Traceback" not in result.stdout.str() + result.stderr.str()
