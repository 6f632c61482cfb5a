"""What ncu counts of the paper's experiment: occupancy, stalls, bank conflicts, executed instructions."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from warploom.core.errors import UnsupportedDeviceError, WarploomError
from warploom.ops.backends import GpuCall, multiprocessors
from warploom_lab.bench.counters import OPCODES, Profile, choose_metrics, parse_profiles
from warploom_lab.bench.ncu import available_metrics, find_ncu, record
from warploom_lab.kernels.reduce.ladder import LADDER, SETTINGS, Setting
from warploom_lab.kernels.reduce.tile import matmul_row_max

Row = dict[str, Any]
MIO = ("mio_throttle", "short_scoreboard")
"""Stalls on the memory input/output queue and on what it returns: shared memory and shuffles go through it."""
RESIDENT = 32
"""One-warp CTAs that an SM holds at a time (compute capability 8.0 and 9.0)."""


def count(rungs: Sequence[str], seconds: float = 120.0) -> dict[str, dict[str, Row]]:
    """Rung → setting → figures, each setting launched once by one process that ncu watches.

    Raises UnsupportedDeviceError where ncu is missing or refuses.
    """
    ncu = find_ncu()
    chosen = choose_metrics(available_metrics(ncu))
    wanted = [*(m for table in chosen.values() for m in table.values()), OPCODES]
    driver = [sys.executable, __file__, *rungs]
    profiles = parse_profiles(record(ncu, wanted, driver, samples=False, seconds=seconds)[0], chosen)
    names = [(rung, setting) for rung in rungs for setting in SETTINGS]
    if len(profiles) != len(names):
        raise UnsupportedDeviceError(f"ncu saw {len(profiles)} kernels where {len(names)} were launched")
    found: dict[str, dict[str, Row]] = {}
    for (rung, setting), profile in zip(names, profiles, strict=True):
        found.setdefault(rung, {})[setting.name] = figures(profile, operations(setting, multiprocessors(0)))
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


def launch(rungs: Sequence[str]) -> None:
    """Run every setting of every rung once on random tiles: the process that ncu watches."""
    rng = np.random.default_rng(0)
    for rung in rungs:
        for setting in SETTINGS:
            config = setting.of(LADDER.rung(rung).config)
            grid = ctas(setting, multiprocessors(0))
            program = matmul_row_max.trace(config=config)
            a, b = (rng.standard_normal((grid, 16, 16)).astype(config.dtype.numpy).view(np.uint16) for _ in range(2))
            arrays: dict[str, np.ndarray[Any, Any]] = {
                "a": a,
                "b": b,
                "out": np.full((grid, 16), np.nan, np.float32),
                "cycles": np.zeros(grid, np.uint64),
            }
            given = [arrays[p.name] for p in program.parameters if p.kind == "pointer"]
            call = GpuCall.prepare(program, (grid, 1, 1), {"zero": 0}, 0)
            call.run_from_host(given[:2], given[2:])


if __name__ == "__main__":
    launch(sys.argv[1:])
