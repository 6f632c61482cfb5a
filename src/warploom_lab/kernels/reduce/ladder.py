"""The ladder of the paper's experiment: through shared memory as it describes it, done fairly, and in registers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from warploom_lab.kernels.ladder import Ladder, Rung
from warploom_lab.kernels.reduce.config import ReduceConfig

LADDER = Ladder(
    "reduce",
    (
        Rung(
            "1",
            "baseline (shared memory)",
            "product to shared memory, barrier, one thread reads each row by element",
            ReduceConfig("serial"),
        ),
        Rung(
            "1w",
            "baseline as compiled",
            "the same with reads joined to 16 bytes each, as compilers join them",
            ReduceConfig("serial", wide=True),
        ),
        Rung(
            "2",
            "fair shared memory",
            "swizzled tile, two lanes a row, no conflicts, __syncwarp",
            ReduceConfig("parallel"),
        ),
        Rung(
            "3",
            "Algorithm 3 as printed",
            "in registers; each shuffle names its quad by a mask that is computed",
            ReduceConfig("registers", member_mask="quad"),
        ),
        Rung("4", "Algorithm 3, full mask", "the same with the full mask, a constant", ReduceConfig("registers")),
        Rung(
            "5",
            "in registers, spread",
            "lanes exchange halves: two shuffles instead of four, each lane one maximum",
            ReduceConfig("registers", spread=True),
        ),
    ),
)


@dataclass(frozen=True)
class Setting:
    """A way to run the experiment: repeats inside the kernel, and CTAs of a launch.

    Without ``ctas`` they are ``waves`` times what the GPU holds at once: as a warp ends, another takes its place.
    """

    name: str
    repeats: int
    ctas: int | None
    waves: int = 1

    def of(self, config: ReduceConfig) -> ReduceConfig:
        """The configuration in this setting."""
        return replace(config, repeats=self.repeats)


LAUNCH = Setting("launch", 1, 1)
"""One warp per launch, as the paper times it: mostly the launch."""
LOOP = Setting("loop", 1024, 1)
"""One warp, 1024 dependent operations inside the kernel: cycles per operation."""
GRID = Setting("grid", 512, None, waves=8)
"""Every SM full of such warps: operations per second."""
SETTINGS = LAUNCH, LOOP, GRID
