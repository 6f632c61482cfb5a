"""``warploom check`` on several files, folders and patterns: one report, one exit code."""

import json
import os

import numpy as np
import pytest
from tests.ptx.text import kernel

from warploom.checking import suite
from warploom.checking.suite import CheckedFile, CheckOutcome, How, check_all

PYTHON = """
import numpy as np
from warploom.lang import Global, Kernel, Launch, f32, kernel
from shared_constants import FACTOR

@kernel(threads=32)
def scaled(k: Kernel, out: Global[f32]) -> None:
    out.store(FACTOR, k.lane)

@scaled.example
def launch(rng: np.random.Generator) -> Launch:
    return Launch(1, [np.zeros(32, np.float32)], {"out": (np.full(32, EXPECTED, np.float32), 0.0)})
"""
STORE = "mov.u32 %r0, %tid.x; mul.wide.u32 %d20, %r0, 4; add.s64 %d21, %d0, %d20; st.global.u32 [%d21], %r0;"
LAUNCH = {"grid": 1, "block": 32, "arguments": [{"dtype": "u32", "shape": [32]}]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with two kernels in Python, whose folders have modules of one name, and one in PTX."""
    monkeypatch.chdir(tmp_path)
    for name, factor in (("two", 2.0), ("three", 3.0)):
        inside = tmp_path / name
        inside.mkdir()
        (inside / "kernels.py").write_text(PYTHON.replace("EXPECTED", str(factor)))
        (inside / "shared_constants.py").write_text(f"FACTOR = {factor}\n")
        (inside / "setup.py").write_text("raise SystemExit('a folder is no reason to run me')\n")
    (tmp_path / "store.ptx").write_text(kernel(STORE, ["u64"]))
    (tmp_path / "store.launch.json").write_text(json.dumps(LAUNCH))
    return tmp_path


def found_by(invoke, *arguments):
    result = invoke("check", *arguments, "--json", "--seed", "1")
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_folder_is_one_report(invoke, folder, jobs):
    code, found = found_by(invoke, ".", "--jobs", jobs)
    assert code == 0
    names = [(one["file"], one["kernel"], one["ok"]) for one in found["kernels"]]
    assert names == [
        ("store.ptx", "store", True),
        ("three/kernels.py", "scaled", True),
        ("two/kernels.py", "scaled", True),
    ]
    assert not found["errors"]


def test_files_folders_and_patterns_are_each_checked_once(invoke, folder):
    code, found = found_by(invoke, "two", "*/kernels.py", "store.ptx", str(folder / "store.ptx"), "--jobs", "1")
    assert code == 0
    assert sorted(one["file"] for one in found["kernels"]) == ["store.ptx", "three/kernels.py", "two/kernels.py"]


def test_a_broken_file_is_reported_and_the_others_go_on(invoke, folder):
    (folder / "broken.py").write_text("import warploom\nkernel.example(\n")
    (folder / "store.launch.json").write_text(json.dumps([LAUNCH, LAUNCH | {"block": 64}, LAUNCH | {"blok": 1}]))
    code, found = found_by(invoke, ".", "--jobs", "1")
    assert code == 2
    assert [(one["kernel"], one["ok"]) for one in found["kernels"][:2]] == [
        ("store, launch 1", True),
        ("store, launch 2", False),
    ]
    assert len(found["kernels"]) == 4
    broken, launch = found["errors"]
    assert broken["file"].endswith("broken.py")
    assert launch["kernel"] == "store, launch 3"
    shown = invoke("check", ".", "--jobs", "1")
    assert shown.exit_code == 2
    assert "scaled: no findings" in shown.stdout
    assert "error: broken.py" in shown.stderr
    assert "blok" in shown.stderr


def test_an_error_is_exit_code_1(invoke, folder):
    (folder / "store.launch.json").write_text(json.dumps(LAUNCH | {"block": 64}))
    assert invoke("check", "two", "store.ptx", "--jobs", "1").exit_code == 1


def test_a_kernel_without_a_launch_is_skipped_in_a_folder_and_refused_by_name(invoke, folder):
    (folder / "store.launch.json").unlink()
    code, found = found_by(invoke, ".", "--jobs", "1")
    assert code == 0
    assert [one["file"] for one in found["skipped"]] == ["store.ptx"]
    refused = invoke("check", "store.ptx")
    assert refused.exit_code == 2
    assert "store.launch.json" in refused.stderr


def test_a_folder_without_kernels_and_a_launch_for_several_are_refused(invoke, folder):
    (folder / "empty").mkdir()
    for arguments, says in (
        (["empty"], "nothing to check"),
        (["*.cu"], "nothing to check"),
        (["store.ptx", "two", "--launch", "store.launch.json"], "NAME.launch.json"),
    ):
        refused = invoke("check", *arguments)
        assert refused.exit_code == 2
        assert says in refused.stderr


def test_a_killed_process_costs_the_outcome_of_its_file_alone(folder, monkeypatch):
    (folder / "fatal.py").write_text("import os\nos._exit(1)\n")
    found = list(check_all([CheckedFile("fatal.py"), CheckedFile("store.ptx")], How(seed=1), jobs=2))
    (killed,), (fine,) = found
    assert "was killed" in str(killed.error)
    assert fine.exit_code == 0


def test_a_mistake_of_the_checker_is_no_finding(folder, monkeypatch):
    monkeypatch.setattr(suite, "kernels_of", lambda _: np.zeros(1)[2])
    (outcome,) = suite.check_target(CheckedFile(os.path.join("two", "kernels.py")), How())
    assert isinstance(outcome, CheckOutcome)
    assert outcome.exit_code == 2
    assert "IndexError" in str(outcome.error)
