"""The static evidence of docs/evidence/ladder-gemm.md: what every rung compiles to, as figures in JSON.

    python benchmarks/gemm_static.py [--out FILE]

Needs NVRTC and nvdisasm, no GPU; takes about a minute on two cores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from ladder_static import figures_of, write
from warploom.kernels.gemm.config import GemmConfig
from warploom.kernels.gemm.ladder import BEST, LADDER, summed_in

from warploom.core.dtypes import f16, f32
from warploom.inspect.subjects import gemm_program

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "benchmarks" / "results" / "static" / "gemm.json"


@dataclass(frozen=True)
class Subject:
    """One compilation: a rung's configuration for a target."""

    key: str
    config: GemmConfig
    arch: str

    @property
    def name(self) -> str:
        """``"02 f16 sm_80"``."""
        return f"{self.key} {self.config.accumulate} {self.arch}"

    def figures(self) -> dict[str, Any]:
        """Compile and count."""
        return figures_of(gemm_program(self.config), self.arch, self.config.opt_level)


def subjects() -> Iterator[Subject]:
    """Every ``mma.sync`` rung with both accumulators (the best with their own) for both targets."""
    for rung in LADDER.rungs:
        if not isinstance(rung.config, GemmConfig):
            continue
        for accumulate in (rung.config.accumulate,) if rung.config in BEST.values() else (f16, f32):
            for arch in ("sm_80", "sm_90a"):
                yield Subject(rung.key, summed_in(rung.config, accumulate), arch)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=EVIDENCE)
    write({s.name: s.figures for s in subjects()}, parser.parse_args().out)


if __name__ == "__main__":
    main()
