"""Hardware counters of attention rungs, read by Nsight Compute (``ncu``) from a process that launches each once.

The metrics are those of compute capability 8.0 to 9.0 (Nsight Compute 2025.3, "Kernel Profiling Guide: Metrics
Reference"). Each figure has candidates in order of preference, as releases rename metrics; of them, the first that
``ncu --query-metrics`` lists for the GPU is read. What the GPU has none of is left out.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from warploom.bench.samples import Samples, locate, parse_source_page
from warploom.core.errors import ConfigError, UnsupportedDeviceError
from warploom.cuda.device import target_of
from warploom.inspect import SassReport, inspect_program
from warploom.inspect.purpose import GROUPS, purpose
from warploom.inspect.sass import Instruction
from warploom.kernels.attention.problem import AnyConfig

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
SAMPLED = "SourceCounters"
"""The section with the samples of warp states, instruction by instruction."""


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
        found: dict[str, int] = {}
        for opcode, count in self.opcodes.items():
            group = purpose(Instruction(0, "", opcode, ()))
            found[group] = found.get(group, 0) + count
        return {group: found[group] for group in GROUPS if group in found}

    def json(self) -> dict[str, Any]:
        """As it is written to files."""
        found = {"kernel": self.kernel, **self.tables, "stall shares, %": self.stall_shares,
                 "executed by purpose": self.groups, "executed by opcode": self.opcodes}  # fmt: skip
        return found | ({"samples": self.samples.json()} if self.samples is not None else {})


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


@dataclass(frozen=True)
class Launch:
    """One launch to profile: a rung on random inputs (full, head_dim 128, bf16); ``settings`` are FLAG=VALUE."""

    rung: str
    seq: int
    batch: int = 1
    heads: int = 1
    settings: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, seq, heads, head_dim) of q, k and v."""
        return self.batch, self.seq, self.heads, self.config.head_dim

    @property
    def config(self) -> AnyConfig:
        """The rung's configuration with the settings. Raises ConfigError for a rung or a flag that does not exist."""
        from warploom.bench.attention import settled
        from warploom.core.dtypes import bf16
        from warploom.kernels.attention.ladder import FULL_LADDER

        flags = dict(text.split("=", 1) for text in self.settings)
        return settled(FULL_LADDER.rung(self.rung), 128, bf16, flags).config

    def report(self) -> SassReport | None:
        """What the launched Program compiles to, with lines and encodings; None where nvdisasm is missing."""
        import numpy as np

        from warploom.ops.attention import plan

        q = np.empty(self.shape, self.config.dtype.numpy)  # never touched: planning reads shapes and strides
        program = plan(q, q, q, config=self.config).program
        try:
            return inspect_program(program, target_of(0).name, with_source=True)
        except UnsupportedDeviceError:
            return None


def profile_attention(launches: Sequence[Launch], *, seconds: float = 120.0) -> list[Profile]:
    """Counters and samples of each launch, from one process that ncu watches; clocks as they are.

    Raises UnsupportedDeviceError where ncu is missing, refuses or takes longer than ``seconds``, ConfigError for a rung
    or flag that does not exist.
    """
    ncu = find_ncu()
    for one in launches:
        one.config  # noqa: B018  # a mistake is told before anything runs
    chosen = choose_metrics(available_metrics(ncu))
    wanted = [*(m for table in chosen.values() for m in table.values()), OPCODES]
    with tempfile.TemporaryDirectory(prefix="warploom-") as folder:
        file = str(Path(folder) / "report.ncu-rep")
        driver = [sys.executable, "-m", "warploom.bench.profile", json.dumps([asdict(one) for one in launches])]
        done = _run([ncu, "--clock-control", "none", "--target-processes", "all", "-f", "-o", file,
                     "--section", SAMPLED, "--metrics", ",".join(wanted), *driver], seconds)  # fmt: skip
        if done.returncode != 0 or not Path(file).exists():
            raise UnsupportedDeviceError(refusal(done.stdout + done.stderr))
        shown = [ncu, "--import", file, "--csv", "--print-units", "base"]
        raw = _run([*shown, "--page", "raw", "--print-metric-instances", "details"], seconds).stdout
        source = _run([*shown, "--page", "source", "--print-source", "sass"], seconds).stdout
    if '"ID"' not in raw:
        raise UnsupportedDeviceError(refusal(raw))
    profiles = parse_profiles(raw, chosen)
    if len(profiles) != len(launches):
        raise UnsupportedDeviceError(f"ncu saw {len(profiles)} kernels where {len(launches)} were launched")
    return with_samples(profiles, source, launches)


def with_samples(profiles: Sequence[Profile], source: str, launches: Sequence[Launch]) -> list[Profile]:
    """The profiles with the samples of ncu's source page; as they are where ncu took none."""
    try:
        kernels = parse_source_page(source)
    except ConfigError:
        return list(profiles)
    if len(kernels) != len(profiles):
        return list(profiles)
    joined = zip(profiles, kernels, launches, strict=True)
    return [replace(profile, samples=locate(sampled, one.report())) for profile, sampled, one in joined]


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


def run_launches(launches: Sequence[Launch]) -> None:
    """Run each once on random NumPy arrays: the process that ncu watches."""
    import numpy as np

    from warploom.cuda.device import require_driver
    from warploom.ops.attention import attention

    require_driver()
    rng = np.random.default_rng(0)
    inputs: dict[tuple[int, ...], list[Any]] = {}
    for one in launches:
        if one.shape not in inputs:
            inputs.clear()  # of one problem at a time: a long one fills a gigabyte
            kind = one.config.dtype.numpy
            inputs[one.shape] = [rng.standard_normal(one.shape, np.float32).astype(kind) for _ in range(3)]
        attention(*inputs[one.shape], config=one.config)


def main() -> None:
    """``python -m warploom.bench.profile '[{"rung": "1", "seq": 256}, …]'``: one launch of each."""
    parser = argparse.ArgumentParser(description="Launch attention kernels, each once, for a profiler to watch.")
    parser.add_argument("launches", help='as JSON: [{"rung": "1", "seq": 256, "batch": 1, "heads": 1}, …]')
    described: list[dict[str, Any]] = json.loads(parser.parse_args().launches)
    run_launches([Launch(**{**one, "settings": tuple(one.get("settings", ()))}) for one in described])


if __name__ == "__main__":
    main()
