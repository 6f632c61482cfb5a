"""``benchmarks/h200.py``: sections fail by themselves, and the summary comes last."""

import sys

from tests.project import load


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_failing_and_a_hanging_section_stop_no_other(tmp_path, monkeypatch, capsys):
    script = load("h200")
    sections = [
        script.Section("broken", python("raise SystemExit('no luck')"), 20),
        script.Section("hanging", python("import time; print('started', flush=True); time.sleep(60)"), 1),
        script.Section("good", python("print('x is 7')"), 20),
    ]
    monkeypatch.setattr(script, "sections", lambda out: sections)
    monkeypatch.setattr(sys, "argv", ["h200.py", "--out", str(tmp_path)])
    assert script.main() == 1
    summary = capsys.readouterr().out.split("\n\n")[-1]
    assert "broken: FAILED (exit code 1)" in summary
    assert "no luck" in summary
    assert "hanging: STOPPED after 1 s" in summary
    assert summary.rstrip().endswith("x is 7")
    assert "started" in (tmp_path / "log.txt").read_text()
