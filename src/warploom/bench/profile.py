"""Hardware counters of one attention rung, read by Nsight Compute (``ncu``) from a process that launches it once.

The metrics are those of compute capability 8.0 to 9.0 (Nsight Compute 2025.3, "Kernel Profiling Guide: Metrics
Reference"). Each figure has candidates in order of preference, as releases rename metrics; of them, the first that
``ncu --query-metrics`` lists for the GPU is read. What the GPU has none of is left out.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from warploom.core.errors import ConfigError, UnsupportedDeviceError
from warploom.inspect.purpose import GROUPS, purpose
from warploom.inspect.sass import Instruction

STALLS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "selected",
    "short_scoreboard", "sleeping", "tex_throttle", "wait",
)  # fmt: skip
"""Why a resident warp does not issue; ``selected`` is the one that does."""

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
    },
    "stalls": {s: (f"smsp__average_warps_issue_stalled_{s}_per_issue_active.ratio",) for s in STALLS},
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
_BASE_NAME = re.compile(r"^([a-z][a-z0-9]*__\w+)", re.MULTILINE)


@dataclass(frozen=True)
class Profile:
    """Counters of one launch: ``tables`` as in :data:`METRICS`; ``opcodes`` are executed warp instructions."""

    kernel: str
    tables: dict[str, dict[str, float]]
    opcodes: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def stall_shares(self) -> dict[str, float]:
        """Each reason's share of the cycles that warps spend between two issues, in %, the largest first."""
        stalls = self.tables.get("stalls", {})
        total = sum(stalls.values())
        shares = {name: 100 * value / total for name, value in stalls.items()} if total else {}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    @property
    def groups(self) -> dict[str, int]:
        """Executed warp instructions by purpose. MOV and IMAD count by their mnemonic: operands are not known here."""
        found: dict[str, int] = {}
        for opcode, count in self.opcodes.items():
            group = purpose(Instruction(0, "", opcode, ()))
            found[group] = found.get(group, 0) + count
        return {group: found[group] for group in GROUPS if group in found}

    def json(self) -> dict[str, Any]:
        """As it is written to files."""
        return {"kernel": self.kernel, **self.tables, "stall shares, %": self.stall_shares,
                "executed by purpose": self.groups, "executed by opcode": self.opcodes}  # fmt: skip


def find_ncu() -> str:
    """The path of ``ncu``: on PATH, else the newest below /usr/local/cuda or /opt/nvidia.

    Raises UnsupportedDeviceError where there is none.
    """
    if (found := shutil.which("ncu")) is not None:
        return found
    for folder, pattern in (("/usr/local", "cuda*/bin/ncu"), ("/opt/nvidia/nsight-compute", "*/ncu")):
        if places := sorted(Path(folder).glob(pattern)):
            return str(places[-1])
    raise UnsupportedDeviceError(
        "hardware counters need Nsight Compute's ncu, which is neither on PATH nor in /usr/local/cuda*/bin or "
        "/opt/nvidia/nsight-compute: install the package nsight-compute of the CUDA toolkit. Without it, "
        "`warploom inspect` and `warploom ladder` count instructions and bank conflicts without a GPU"
    )


def profile_attention(rung: str, *, seq: int, batch: int = 1, heads: int = 1, settings: Sequence[str] = (),
                      seconds: float = 120.0) -> Profile:  # fmt: skip
    """Counters of one launch of an attention rung: full, head_dim 128, bf16, on random inputs; clocks as they are.

    ``settings`` are FLAG=VALUE. Raises UnsupportedDeviceError where ncu is missing or refuses, ConfigError for a rung
    that does not exist.
    """
    ncu = find_ncu()
    chosen = choose_metrics(available_metrics(ncu))
    driver = [sys.executable, "-m", "warploom.bench.profile", "--rung", rung, "--seq", str(seq), "--batch", str(batch),
              "--heads", str(heads), *(f"--set={text}" for text in settings)]  # fmt: skip
    command = [ncu, "--clock-control", "none", "--target-processes", "all", "--launch-count", "1", "--csv", "--page",
               "raw", "--print-units", "base", "--print-metric-instances", "details",
               "--metrics", ",".join([*(m for table in chosen.values() for m in table.values()), OPCODES]),
               *driver]  # fmt: skip
    done = _run(command, seconds)
    if done.returncode != 0 or '"ID"' not in done.stdout:
        raise UnsupportedDeviceError(refusal(done.stdout + done.stderr))
    return parse_profile(done.stdout, chosen)


def available_metrics(ncu: str) -> frozenset[str]:
    """Base names of the metrics that this machine's GPU has; empty where ncu does not tell."""
    return frozenset(_BASE_NAME.findall(_run([ncu, "--query-metrics"], 60).stdout))


def choose_metrics(available: frozenset[str]) -> dict[str, dict[str, str]]:
    """Table → figure → the first candidate that is available; the preferred one of each where nothing is known."""
    chosen: dict[str, dict[str, str]] = {}
    for table, figures in METRICS.items():
        for name, candidates in figures.items():
            known = [c for c in candidates if not available or c.partition(".")[0] in available]
            if known:
                chosen.setdefault(table, {})[name] = known[0]
    return chosen


def _run(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(list(command), capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise UnsupportedDeviceError(f"ncu did not end within {seconds:.0f} s: {' '.join(command[:3])} …") from None


def refusal(output: str) -> str:
    """What to do about output of ncu that holds no counters."""
    tail = "\n".join(output.strip().splitlines()[-6:])
    if "ERR_NVGPUCTRPERM" in output:
        return (
            "the driver lets only administrators read performance counters (ERR_NVGPUCTRPERM): run as root (in a "
            "container with --cap-add SYS_ADMIN), or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
        )
    if "No kernels were profiled" in output:
        return f"ncu saw no kernel: the process that launches it failed, or found no GPU.\n{tail}"
    return f"ncu gave no counters here (a driver, virtual machine or GPU it cannot profile):\n{tail}"


def parse_profile(text: str, chosen: Mapping[str, Mapping[str, str]]) -> Profile:
    """The first kernel in what ``ncu --csv`` printed, as page "raw" (a column a metric) or "details" (a row a metric).

    ``chosen`` is table → figure → metric name. Metrics that are missing, "n/a" or not a number are left out. Raises
    ConfigError where there is no CSV.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ConfigError('this is no CSV of ncu: no line starts with "ID"')
    rows = [row for row in csv.reader(io.StringIO("\n".join(lines[start:]))) if row]
    header, body = rows[0], [row for row in rows[1:] if len(row) == len(rows[0]) and row[0].isdigit()]
    if not body:
        raise ConfigError("this CSV of ncu holds no kernel")
    kernel = body[0][header.index("Kernel Name")]
    if "Metric Name" in header:
        name, value = header.index("Metric Name"), header.index("Metric Value")
        values = {row[name]: row[value] for row in body if row[0] == body[0][0]}
    else:
        values = dict(zip(header, body[0], strict=True))
    tables: dict[str, dict[str, float]] = {}
    for table, figures in chosen.items():
        for name, metric in figures.items():
            if (number := _number(values.get(metric, ""))) is not None:
                tables.setdefault(table, {})[name] = number
    opcodes = {op: int(n.replace(",", "")) for op, n in _INSTANCE.findall(values.get(OPCODES, ""))}
    return Profile(kernel, tables, opcodes)


def _number(text: str) -> float | None:
    match = _NUMBER.match(text.strip())
    return float(match[0].replace(",", "")) if match else None


def compare_wavefronts(profile: Profile, emulated: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, float]]:
    """Class of access → {"emulator", "ncu"}, for the classes both count; ``emulated`` as in a ladder's rows."""
    counted = profile.tables.get("wavefronts", {})
    return {name: {"emulator": emulated[name]["actual"], "ncu": counted[name]} for name in emulated if name in counted}


def launch(rung: str, seq: int, batch: int, heads: int, settings: Sequence[str] = ()) -> None:
    """Run a rung once on random NumPy arrays: the process that ncu watches."""
    import numpy as np

    from warploom.bench.attention import settled
    from warploom.core.dtypes import bf16
    from warploom.cuda.device import require_driver
    from warploom.kernels.attention.ladder import FULL_LADDER
    from warploom.ops.attention import attention

    require_driver()
    flags = dict(text.split("=", 1) for text in settings)
    config = settled(FULL_LADDER.rung(rung), 128, bf16, flags).config
    rng = np.random.default_rng(0)
    shape = (batch, seq, heads, config.head_dim)
    q, k, v = (rng.standard_normal(shape, np.float32).astype(config.dtype.numpy) for _ in range(3))
    attention(q, k, v, config=config)


def main() -> None:
    """``python -m warploom.bench.profile --rung RUNG --seq N``: one launch."""
    parser = argparse.ArgumentParser(description="Launch one attention kernel once, for a profiler to watch.")
    parser.add_argument("--rung", required=True)
    for name, default in (("seq", 256), ("batch", 1), ("heads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    launch(options.rung, options.seq, options.batch, options.heads, options.set)


if __name__ == "__main__":
    main()
