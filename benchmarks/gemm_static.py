"""The static evidence of docs/evidence/ladder-gemm.md: what every rung compiles to, as figures in JSON.

    python benchmarks/gemm_static.py [--out DIR]

Needs NVRTC and nvdisasm, no GPU; takes about a minute on two cores.
"""

from __future__ import annotations

from typing import Any

from ladder_static import RESULTS, write

from warploom.core.dtypes import f16, f32
from warploom_lab.bench.cells import parser_of
from warploom_lab.inspect.subjects import gemm_program
from warploom_lab.kernels.matmul.ladder import BEST, LADDER, summed_in


def main() -> None:
    """Write the file: every ``mma.sync`` rung with both accumulators (the best with their own) for both targets."""
    parser = parser_of(__doc__)
    parser.set_defaults(out=RESULTS)
    subjects: dict[str, tuple[Any, str, int | None]] = {}
    for rung in LADDER.rungs:
        for accumulate in (rung.config.accumulate,) if rung.config in BEST.values() else (f16, f32):
            config = summed_in(rung.config, accumulate)
            subjects |= {f"{rung.key} {accumulate} {arch}": (config, arch, None) for arch in ("sm_80", "sm_90a")}
    write(subjects, gemm_program, parser.parse_args().out / "gemm.json")


if __name__ == "__main__":
    main()
