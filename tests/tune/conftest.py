"""Tuned configurations of a test lie in a folder of its own."""

from pathlib import Path

import pytest

from warploom.ops import tuned


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path))
    return tuned.folder()
