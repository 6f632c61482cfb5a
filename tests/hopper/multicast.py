"""The example kernel of clusters, from ``examples/multicast_gemm.py``."""

from __future__ import annotations

from tests.project import load

example = load("multicast_gemm", "examples")
