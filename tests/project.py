"""Where the project lies, and its scripts as modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def load(name: str, folder: str = "benchmarks") -> Any:
    """The module of a script in a folder of the project, which may import others from there; loaded once."""
    path = str(ROOT / folder)
    sys.path.insert(0, path)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(path)
