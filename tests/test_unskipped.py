"""Continuous integration fails where a test is skipped for a package that is not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.project import ROOT

SKIPPED = "import pytest\npytest.skip('today', allow_module_level=True)\n"
WITHOUT = "import pytest\ndef test(): pytest.importorskip('no_such_package')\n"
WITHOUT_COMPILER = "import pytest\npytest.importorskip('no_such_package', reason='needs NVRTC')\n"
RUNS = "def test(): pass\n"
ALLOWED = {"tests/with_triton/test_it.py": RUNS, "tests/ptx/test_other.py": SKIPPED}
FORBIDDEN = {
    "tests/with_triton/test_kernels.py": SKIPPED,
    "tests/ptx/test_numba.py": SKIPPED,
    "tests/ops/test_call.py": WITHOUT,
    "tests/cuda/test_text.py": WITHOUT_COMPILER,
}


@pytest.mark.parametrize("forbidden", [{}, FORBIDDEN])
def test_tests_that_are_skipped_for_a_package(forbidden: dict[str, str], tmp_path: Path) -> None:
    for file, text in (ALLOWED | forbidden).items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text, encoding="utf-8")
    options = ["-q", "-ra", "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "--import-mode=importlib"]
    command = [sys.executable, "-m", "pytest", *options, "tests"]
    printed = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, encoding="utf-8").stdout
    check = [sys.executable, str(ROOT / ".ci" / "unskipped")]
    checked = subprocess.run(check, input=printed, encoding="utf-8", stderr=subprocess.PIPE)
    assert checked.returncode == (1 if forbidden else 0)
    assert {file for file in ALLOWED | FORBIDDEN if file in checked.stderr} == set(forbidden)
