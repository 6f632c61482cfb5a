"""Where the project lies, its scripts as modules, and what a test of compiled code needs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from warploom.cuda.cubin import find_nvdisasm
from warploom_lab.bench.ladder import missing_compiler

ROOT = Path(__file__).resolve().parents[1]
needs_nvdisasm = pytest.mark.skipif(
    missing_compiler() is not None or find_nvdisasm() is None, reason="needs NVRTC and nvdisasm"
)


def load(name: str, folder: str = "benchmarks") -> Any:
    """The module of a script in a folder of the project, which may import others from there; loaded once."""
    path = str(ROOT / folder)
    sys.path.insert(0, path)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(path)
