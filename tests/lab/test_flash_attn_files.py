"""The plugin of pytest that runs FlashAttention's own test files on these kernels: what it says of every case."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project import ROOT

pytest.importorskip("torch")
FILE = """
import pytest, torch
from flash_attn_interface import flash_attn_func

@pytest.mark.parametrize("length", range(1, 5))
def test_flash_attn_output(length):
    q = torch.ones(1, length, 1, 16, device="cuda", dtype=torch.float16)
    assert flash_attn_func(q, q, q).shape == q.shape

@pytest.mark.parametrize("rate", [0.5])
def test_dropout(rate):
    q = torch.ones(1, 4, 1, 16, device="cuda", dtype=torch.float16)
    flash_attn_func(q, q, q, rate)

def test_wrong(): assert 1 == 2, "one is two"

def test_raw(): flash_attn_func(7)

def test_flash3_bw_compatibility(): raise ImportError
"""


def outcomes(tmp_path: Path, folder: str, *options: str) -> list[dict[str, str]]:
    checkout = tmp_path / folder / "test_flash_attn.py"
    checkout.parent.mkdir(exist_ok=True)
    checkout.write_text(FILE, encoding="utf-8")
    out = tmp_path / "cases.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "flash_attn_files"]
    where = os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks")])
    done = subprocess.run(
        [*command, f"--rootdir={tmp_path}", str(checkout), "--cases-out", str(out), *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": where, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert out.is_file(), done.stdout + done.stderr
    return json.loads(out.read_text(encoding="utf-8"))["cases"]


def test_every_case_has_its_outcome_and_files_add_up(tmp_path: Path) -> None:
    found = {x["test"]: (x["outcome"], x["said"]) for x in outcomes(tmp_path, "hopper", "--cases", "2")}
    assert found["test_flash_attn_output"] == ("passed", "")
    assert found["test_dropout"][0] == "refused"
    assert "dropout_p is 0.5" in found["test_dropout"][1]
    assert found["test_wrong"][0] == found["test_raw"][0] == "failed"
    assert found["test_flash3_bw_compatibility"][0] == "left out"
    both = outcomes(tmp_path, "tests", "--cases", "3", "-k", "output")
    assert [x["test"] for x in both if x["file"] == "hopper/test_flash_attn.py"].count("test_flash_attn_output") == 2
    assert [x["outcome"] for x in both if x["file"] == "tests/test_flash_attn.py"] == ["passed"] * 3


def test_cases_that_do_not_begin_in_time_are_left_out(tmp_path: Path) -> None:
    found = outcomes(tmp_path, "hopper", "--cases-seconds", "-1")
    assert {x["outcome"] for x in found} == {"left out"}
    assert len(found) == 8
