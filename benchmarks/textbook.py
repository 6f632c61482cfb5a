"""The reduction paper's own baseline, seeds/textbook_row_max.cu, timed beside rungs 1 and 1w of the ladder.

It multiplies by ``wmma``, stores and loads fragments by ``wmma``, and is in no way ours. ``reduce_h200.py --only
textbook`` runs it on a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from warploom.core.dtypes import u32
from warploom.cuda.compile import compile_source
from warploom.cuda.launch import load, scalar
from warploom.cuda.store import CompiledKernel
from warploom.ops.backends import GpuCall, gpu_target
from warploom_lab.bench.reduce import Experiment
from warploom_lab.kernels.ladder import Rung
from warploom_lab.kernels.reduce.config import ReduceConfig
from warploom_lab.kernels.reduce.ladder import LADDER

SOURCE = Path(__file__).resolve().parent / "seeds" / "textbook_row_max.cu"
NAME = "textbook_row_max"
TEXTBOOK = Rung("wmma", "textbook WMMA", "the baseline in textbook CUDA, by wmma", ReduceConfig("serial", wide=True))
RUNGS = (LADDER.rung("1"), LADDER.rung("1w"), TEXTBOOK)


def compiled(repeats: int, arch: str) -> CompiledKernel:
    """The kernel with so many operations of a warp, each dependent on the one before."""
    source = f"#define REPEATS {repeats}\n{SOURCE.read_text(encoding='utf-8')}"
    return compile_source(source, NAME, arch=arch)


class BesideTextbook(Experiment):
    """The experiment's settings, with :data:`TEXTBOOK` among the rungs they take."""

    def call(self, key: str, config: ReduceConfig, ctas: int) -> GpuCall:
        """The kernel of a rung, or the textbook's."""
        if key != TEXTBOOK.key:
            return super().call(key, config, ctas)
        loaded = load(compiled(config.repeats, gpu_target(0).name), 0)
        names = ("a", "b", "out", "cycles")
        return GpuCall(loaded.configure((ctas, 1, 1), config.threads), (scalar(u32, 0),), 0, arrays=names)


def measured() -> dict[str, dict[str, Any]]:
    """Rung → setting → figures, as ``warploom_lab.bench.reduce`` gives them; each is checked before it is timed."""
    experiment = BesideTextbook()
    parts = {"launch": experiment.launches(RUNGS), "loop": experiment.loops(RUNGS), "grid": experiment.grids(RUNGS)}
    return {rung.key: {setting: rows[rung.key] for setting, rows in parts.items()} for rung in RUNGS}
