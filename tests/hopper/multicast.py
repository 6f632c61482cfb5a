"""The example kernel of clusters, from ``examples/multicast_gemm.py``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

PATH = Path(__file__).parents[2] / "examples" / "multicast_gemm.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("multicast_gemm", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["multicast_gemm"] = module  # annotations are looked up by the module's name
    spec.loader.exec_module(module)
    return module


example = _load()
