"""``benchmarks/ptx_sanitizer_h200.py``: a mutant that ends or stops its process costs no other; what is run of many."""

from __future__ import annotations

import stat
import time
from pathlib import Path
from typing import Any

import pytest

from tests.project import load

TOOL = """#!/bin/sh
for last; do :; done
sleep 30 & echo "PROCESS $!"
trap "kill $! 2>/dev/null" EXIT
for n in $(echo $last | tr , ' '); do
    echo "LAUNCH $n"
    case $2$n in
        racecheck1) echo "========= Error: Race reported between Write access at 0x1b0 and thread (1,0,0)"
                    echo "=========     at kernel.cu:3" ;;
        *2) exit 7 ;;
        *3) wait; echo "========= Barrier error detected."; echo "========= Target application returned an error"
            echo "========= Error: couldn't find exit code."; exit 1 ;;
        *4) echo "========= Invalid read of size 4"; echo "FAILED $n: gone"; exit 1 ;;
    esac
    echo "RAN $n"
done
"""


def rows(count: int) -> list[dict[str, Any]]:
    kinds = [{"verdict": "found", "kinds": ["race"]}, {"verdict": "found", "kinds": ["deadlock"]}]
    plain = {"kernel": "k", "change": "as it is", "verdict": "", "kinds": []}
    return [plain, *({"kernel": "k", "change": "without " + 40 * "x", **kinds[i % 2]} for i in range(count - 1))]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL, encoding="utf-8")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    script = load("ptx_sanitizer_h200")
    monkeypatch.setattr(script, "TOOLS", ("racecheck", "memcheck"))
    return script


def test_each_launch_is_noted_whatever_becomes_of_the_others(script: Any, tmp_path: Path) -> None:
    found, saved = rows(7), list[int]()
    script.under_tools(found, tmp_path, 3, (20.0, 0.2), lambda: saved.append(1))
    ended = ["ran", "ran", "dies", "hangs", "failed", "ran", "ran"]
    for tool in ("racecheck", "memcheck"):
        assert [row["ended"][tool] for row in found] == ended
    race = {"Error: Race reported between Write access at … and thread …": 1}
    stopped, read = {"Barrier error detected.": 1}, {"Invalid read of size …": 1}
    assert [row["tools"]["racecheck"] for row in found] == [{}, race, {}, stopped, read, {}, {}]
    assert [row["tools"]["memcheck"] for row in found] == [{}, {}, {}, stopped, read, {}, {}]
    assert len(saved) > 2
    table = script.summary(found).splitlines()
    assert max(map(len, table)) <= 80
    assert table[-2].split()[:8] == ["all", "mutants", "6", "6", "3", "2", "3", "1"]


def test_no_launch_outlasts_the_time_of_all(script: Any, tmp_path: Path) -> None:
    found, start = rows(4), time.monotonic()
    script.under_tools(found, tmp_path, 2, (0.3, 20.0), lambda: None)
    assert time.monotonic() - start < 5
    assert [row["ended"]["memcheck"] for row in found] == ["ran", "ran", None, None]
