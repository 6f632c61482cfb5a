"""What the tests of the command line share."""

from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from warploom.cli.errors import settings
from warploom.cli.main import app


@pytest.fixture
def no_compiler(monkeypatch):
    """Ladders leave compiling out: it takes most of their time, and has tests of its own."""
    monkeypatch.setattr("warploom.bench.ladder.missing_compiler", lambda: "not compiled")


@pytest.fixture
def invoke() -> Callable:
    """Run ``warploom ARGUMENTS``: the result has exit_code, stdout, stderr and output."""

    def run(*arguments: str):
        settings.debug = False
        return CliRunner().invoke(app, list(arguments))

    return run
