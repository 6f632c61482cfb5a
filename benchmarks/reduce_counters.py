"""What ncu counts of the paper's experiment: occupancy, stalls, bank conflicts, executed instructions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from warploom.core.errors import WarploomError
from warploom.ir.program import Program
from warploom.ops.backends import multiprocessors
from warploom.ops.launch import launch
from warploom_lab.bench.counters import Profile
from warploom_lab.bench.profile import profile_launches
from warploom_lab.kernels.reduce.config import ReduceConfig
from warploom_lab.kernels.reduce.ladder import LADDER, SETTINGS, Setting
from warploom_lab.kernels.reduce.tile import matmul_row_max

Row = dict[str, Any]
MIO = ("mio_throttle", "short_scoreboard")
"""Stalls on the memory input/output queue and on what it returns: shared memory and shuffles go through it."""
BY_NAME = {setting.name: setting for setting in SETTINGS}
RESIDENT = 32
"""One-warp CTAs that an SM holds at a time (compute capability 8.0 and 9.0)."""


@dataclass(frozen=True)
class ReduceLaunch:
    """One launch of a rung in a setting, on random tiles."""

    rung: str
    setting: str

    @property
    def config(self) -> ReduceConfig:
        """The rung's configuration in the setting."""
        return BY_NAME[self.setting].of(LADDER.rung(self.rung).config)

    @property
    def program(self) -> Program:
        """The Program that runs."""
        return matmul_row_max.trace(config=self.config)

    def run(self) -> None:
        """Launch it once."""
        rng, grid = np.random.default_rng(0), ctas(BY_NAME[self.setting], multiprocessors(0))
        kind = self.config.dtype.numpy
        a, b = (rng.standard_normal((grid, 16, 16)).astype(kind).view(np.uint16) for _ in range(2))
        out, cycles = np.full((grid, 16), np.nan, np.float32), np.zeros(grid, np.uint64)
        arrays: dict[str, np.ndarray[Any, Any]] = {"a": a, "b": b, "out": out, "cycles": cycles}
        launch(self.program, grid, {p.name: arrays.get(p.name, 0) for p in self.program.parameters})


def count(rungs: Sequence[str], seconds: float = 120.0) -> dict[str, dict[str, Row]]:
    """Rung → setting → figures, each setting launched once by one process that ncu watches.

    Raises UnsupportedDeviceError where ncu is missing or refuses.
    """
    launches = [ReduceLaunch(rung, setting) for rung in rungs for setting in BY_NAME]
    profiles = profile_launches(launches, samples=False, seconds=seconds, module="benchmarks.reduce_counters")
    found: dict[str, dict[str, Row]] = {}
    for one, profile in zip(launches, profiles, strict=True):
        done = operations(BY_NAME[one.setting], multiprocessors(0))
        found.setdefault(one.rung, {})[one.setting] = figures(profile, done)
    return found


def add_counters(experiment: Row) -> None:
    """Give the rows of ``warploom_lab.bench.reduce.run_experiment`` their counters, or say why there are none."""
    rows = experiment["rungs"]
    try:
        counted = count([row["rung"] for row in rows])
    except WarploomError as error:
        experiment["counters_refused"] = str(error)
        return
    for row in rows:
        row["counters"] = counted[row["rung"]]


def operations(setting: Setting, multiprocessors: int) -> int:
    """Products and reductions in one launch of a setting."""
    return setting.repeats * ctas(setting, multiprocessors)


def ctas(setting: Setting, multiprocessors: int) -> int:
    """CTAs of one launch of a setting, each of one warp."""
    return setting.ctas or multiprocessors * RESIDENT * setting.waves


def figures(profile: Profile, operations: int) -> Row:
    """The counters of one launch; what grows with the work is of one operation."""
    tables = profile.tables

    def each(table: str) -> dict[str, float]:
        return {name: round(x / operations, 3) for name, x in tables.get(table, {}).items() if x}

    shares = profile.stall_shares
    return {
        "achieved_occupancy_percent": tables.get("time", {}).get("occupancy, %"),
        "cycles": tables.get("time", {}).get("cycles"),
        "issue_percent": tables.get("time", {}).get("issue slots, %"),
        "pipes_percent": tables.get("pipes, %", {}),
        "stall_shares_percent": {name: round(x, 1) for name, x in shares.items() if x >= 1},
        "mio_stalls_percent": round(sum(shares.get(name, 0.0) for name in MIO), 1),
        "bank_conflicts": each("bank conflicts"),
        "wavefronts": each("wavefronts"),
        "instructions": round(tables.get("instructions", {}).get("all", 0.0) / operations, 2),
        "opcodes": {op: round(n / operations, 2) for op, n in profile.opcodes.items() if n / operations >= 0.1},
    }
