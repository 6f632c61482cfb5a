"""The hardware counters of a kernel: which are read, what they are called, and how ncu prints them.

The metrics are those of compute capability 8.0 to 9.0 (Nsight Compute 2025.3, "Kernel Profiling Guide: Metrics
Reference"). Each figure has candidates in order of preference, as releases rename metrics; of them, the first that
``ncu --query-metrics`` lists for the GPU is read. What the GPU has none of is left out.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from warploom.core.errors import ConfigError
from warploom_lab.bench.samples import REASONS, Samples
from warploom_lab.inspect.purpose import executed_groups
from warploom_lab.inspect.sass import SassInstruction

_ACTIVE = "avg.pct_of_peak_sustained_active"
_ELAPSED = "avg.pct_of_peak_sustained_elapsed"
_SASS_WAVEFRONTS = "sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_"
_SASS_CONFLICTS = "sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_"
OPCODES = "sass__inst_executed_per_opcode"


def _sass(stem: str, *operations: str) -> tuple[str, ...]:
    return tuple(f"{unit}__{stem}{op}.sum" for op in operations for unit in ("smsp", "sm"))


METRICS: dict[str, dict[str, tuple[str, ...]]] = {
    "time": {
        "nanoseconds": ("gpu__time_duration.sum",),
        "cycles": ("sm__cycles_elapsed.max",),
        "issue slots, %": (f"smsp__issue_active.{_ACTIVE}",),
        "occupancy, %": (f"sm__warps_active.{_ACTIVE}",),
    },
    "stalls": {s: (f"smsp__average_warps_issue_stalled_{s}_per_issue_active.ratio",) for s in REASONS.values()},
    "pipes, %": {
        "tensor": (
            f"sm__pipe_tensor_op_hmma_cycles_active.{_ACTIVE}",
            f"sm__pipe_tensor_subpipe_hmma_cycles_active.{_ACTIVE}",
            f"sm__pipe_tensor_cycles_active.{_ACTIVE}",
        ),
        "fma": (f"sm__pipe_fma_cycles_active.{_ACTIVE}", f"sm__inst_executed_pipe_fma.{_ACTIVE}"),
        "alu": (f"sm__pipe_alu_cycles_active.{_ACTIVE}", f"sm__inst_executed_pipe_alu.{_ACTIVE}"),
        "special function": (f"sm__inst_executed_pipe_xu.{_ACTIVE}",),
        "lsu": (f"sm__inst_executed_pipe_lsu.{_ACTIVE}",),
    },
    "memory, %": {
        "shared loads": (f"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.{_ELAPSED}",),
        "shared stores": (f"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.{_ELAPSED}",),
        "L2 loads": (f"lts__t_sectors_op_read.{_ELAPSED}",),
        "L2 hit rate": ("lts__t_sector_hit_rate.pct",),
        "L2 hit rate, reads": ("lts__t_sector_op_read_hit_rate.pct",),
    },
    "wavefronts": {
        "ldmatrix": _sass(_SASS_WAVEFRONTS, "ldsm"),
        "ld.shared": _sass(_SASS_WAVEFRONTS, "ld"),
        "st.shared": _sass(_SASS_WAVEFRONTS, "st"),
        "cp.async": (
            *_sass(_SASS_WAVEFRONTS, "ldgsts", "ldgsts_cache_bypass"),
            "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ldgsts.sum",
        ),
        "all shared": ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",),
    },
    "bank conflicts": {
        "ldmatrix": _sass(_SASS_CONFLICTS, "ldsm"),
        "st.shared": _sass(_SASS_CONFLICTS, "st"),
        "loads": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",),
        "stores": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",),
        "all shared": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",),
    },
    "instructions": {
        "all": ("smsp__inst_executed.sum",),
        "ldmatrix": ("smsp__sass_inst_executed_op_ldsm.sum", "smsp__inst_executed_op_ldsm.sum"),
        "cp.async": ("smsp__sass_inst_executed_op_ldgsts.sum", "smsp__inst_executed_op_ldgsts.sum"),
        "mma.sync": ("sm__inst_executed_pipe_tensor_op_hmma.sum",),
        "wgmma": ("sm__inst_executed_pipe_tensor_op_gmma.sum",),
    },
}
"""Table → figure → metric names, the preferred first."""

_NUMBER = re.compile(r"-?[\d,]*\.?\d+(?:[eE][+-]?\d+)?")
_INSTANCE = re.compile(r"([A-Z][A-Z0-9_.]*)\s*:\s*([\d,]+)")


@dataclass(frozen=True)
class Profile:
    """Counters of one launch: ``tables`` as in :data:`METRICS`; ``opcodes`` are executed warp instructions.

    ``samples`` say where warps wait and for whom, where ncu took any.
    """

    kernel: str
    tables: dict[str, dict[str, float]]
    opcodes: dict[str, int] = field(default_factory=dict[str, int])
    samples: Samples | None = None

    @property
    def stall_shares(self) -> dict[str, float]:
        """Each reason's share of the cycles that warps spend between two issues, in %, the largest first."""
        stalls = self.tables.get("stalls", {})
        total = sum(stalls.values())
        shares = {name: 100 * value / total for name, value in stalls.items()} if total else {}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    @property
    def groups(self) -> dict[str, int]:
        """Executed warp instructions by purpose; without samples MOV and IMAD count by their mnemonic alone."""
        if self.samples is not None and any(spot.executed for spot in self.samples.spots):
            return self.samples.groups
        return executed_groups((SassInstruction(0, "", opcode, ()), count) for opcode, count in self.opcodes.items())

    def json(self) -> dict[str, Any]:
        """As it is written to files."""
        found = {
            "kernel": self.kernel,
            **self.tables,
            "stall shares, %": self.stall_shares,
            "executed by purpose": self.groups,
            "executed by opcode": self.opcodes,
        }
        return found | ({"samples": self.samples.json()} if self.samples is not None else {})


def choose_metrics(available: frozenset[str]) -> dict[str, dict[str, str]]:
    """Table → figure → the first candidate that is available; the preferred one of each where nothing is known."""
    chosen: dict[str, dict[str, str]] = {}
    for table, figures in METRICS.items():
        for name, candidates in figures.items():
            known = [c for c in candidates if not available or c.partition(".")[0] in available]
            if known:
                chosen.setdefault(table, {})[name] = known[0]
    return chosen


def parse_profiles(text: str, chosen: Mapping[str, Mapping[str, str]]) -> list[Profile]:
    """The kernels in what ``ncu --csv`` printed, as page "raw" (a column a metric) or "details" (a row a metric).

    ``chosen`` is table → figure → metric name. Metrics that are missing, "n/a" or not a number are left out. Raises
    ConfigError where there is no CSV, or no kernel in it.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ConfigError('this is no CSV of ncu: no line starts with "ID"')
    rows = [row for row in csv.reader(io.StringIO("\n".join(lines[start:]))) if row]
    header, body = rows[0], [row for row in rows[1:] if len(row) == len(rows[0]) and row[0].isdigit()]
    kernels: dict[str, dict[str, str]] = {}
    for row in body:
        values = dict(zip(header, row, strict=True))
        of_kernel = kernels.setdefault(row[0], {"Kernel Name": values["Kernel Name"]})
        of_kernel.update({values["Metric Name"]: values["Metric Value"]} if "Metric Name" in values else values)
    if not kernels:
        raise ConfigError("this CSV of ncu holds no kernel")
    return [_profile(values, chosen) for values in kernels.values()]


def _profile(values: Mapping[str, str], chosen: Mapping[str, Mapping[str, str]]) -> Profile:
    tables: dict[str, dict[str, float]] = {}
    for table, figures in chosen.items():
        for name, metric in figures.items():
            if (number := _number(values.get(metric, ""))) is not None:
                tables.setdefault(table, {})[name] = number
    opcodes = {op: int(n.replace(",", "")) for op, n in _INSTANCE.findall(values.get(OPCODES, ""))}
    return Profile(values["Kernel Name"], tables, opcodes)


def _number(text: str) -> float | None:
    match = _NUMBER.match(text.strip())
    return float(match[0].replace(",", "")) if match else None


def compare_wavefronts(profile: Profile, emulated: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, float]]:
    """Class of access → {"emulator", "ncu"}, for the classes both count; ``emulated`` as in a ladder's rows."""
    counted = profile.tables.get("wavefronts", {})
    return {name: {"emulator": emulated[name]["actual"], "ncu": counted[name]} for name in emulated if name in counted}
