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

from warploom.core.dtypes import f16, f32
from warploom.inspect.subjects import gemm_program
from warploom.kernels.matmul.ladder import BEST, LADDER, summed_in
from warploom.kernels.matmul.problem import MatmulConfig

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "benchmarks" / "results" / "static" / "gemm.json"


@dataclass(frozen=True)
class Subject:
    """One compilation: a rung's configuration for a target."""

    key: str
    config: MatmulConfig
    arch: str

    @property
    def name(self) -> str:
        """``"02 f16 sm_80"``."""
        return f"{self.key} {self.config.accumulate} {self.arch}"

    def figures(self) -> dict[str, Any]:
        """Compile and count."""
        program = gemm_program(self.config)
        return figures_of(program, self.arch, program.opt_level)


def subjects() -> Iterator[Subject]:
    """Every ``mma.sync`` rung with both accumulators (the best with their own) for both targets."""
    for rung in LADDER.rungs:
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
