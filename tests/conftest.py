"""What holds for every test."""

import gc
import os
from collections.abc import Callable

import pytest

# Products of the references are small, and several workers share the cores: threads of BLAS would wait for each other.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
gc.set_threshold(1_000, 5, 100_000)  # young objects, still in the cache, are quick to walk; Programs stay, millions

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX takes three quarters of a GPU otherwise


@pytest.fixture
def invoke() -> Callable:
    """Run ``warploom ARGUMENTS``: the result has exit_code, stdout, stderr and output."""
    from typer.testing import CliRunner

    from warploom.cli.errors import settings
    from warploom.cli.main import app

    def run(*arguments: str):
        settings.debug = False
        return CliRunner().invoke(app, list(arguments))

    return run


@pytest.fixture
def no_compiler(monkeypatch) -> None:
    """Ladders leave compiling out: it takes most of their time, and has tests of its own."""
    monkeypatch.setattr("warploom_lab.bench.ladder.missing_compiler", lambda: "not compiled")


def pytest_sessionfinish() -> None:
    """Spare pytest and Python their walks through all that is left, which the end of the process frees anyway."""
    gc.freeze()
