"""What the tests of the command line share."""

import pytest


@pytest.fixture
def no_compiler(monkeypatch):
    """Ladders leave compiling out: it takes most of their time, and has tests of its own."""
    monkeypatch.setattr("warploom.bench.ladder.missing_compiler", lambda: "not compiled")
