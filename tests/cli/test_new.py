"""``warploom new kernel``: what it writes checks at once, and its test passes."""

import subprocess
import sys

import pytest


def test_a_new_kernel_checks_and_its_test_passes(invoke, tmp_path):
    assert invoke("new", "kernel", "row_max", "--folder", str(tmp_path)).exit_code == 0
    checked = invoke("check", str(tmp_path / "row_max.py"))
    assert checked.exit_code == 0, checked.output
    assert "row_max: no findings" in checked.stdout
    assert "* 2.0f" in invoke("show", str(tmp_path / "row_max.py"), "--set", "tile=64").stdout
    file = tmp_path / "row_max.py"  # of its arguments, one comes with its strides
    own = file.read_text().replace("x: Global[f32]", "x: Strided[f32, 1]").replace("x.load(i)", "x.at(i).load()")
    file.write_text(own.replace("Launch, f32", "Launch, Strided, f32"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_row_max.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout


def test_its_test_fails_where_the_kernel_is_wrong(invoke, tmp_path):
    invoke("new", "kernel", "row_max", "--folder", str(tmp_path))
    file = tmp_path / "row_max.py"
    file.write_text(file.read_text().replace("with k.when(i < n):", "with k.when(i < n + 1):"))
    assert "bounds" in invoke("check", str(file)).stdout


@pytest.mark.parametrize("name", ["row-max", "class", "numbers", "row_max"])
def test_names_that_cannot_be(invoke, tmp_path, name):
    (tmp_path / "row_max.py").write_text("# mine\n")
    result = invoke("new", "kernel", name, "--folder", str(tmp_path))
    assert result.exit_code == 2
    assert "another name" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["row_max.py"]
    assert (tmp_path / "row_max.py").read_text() == "# mine\n"
