"""Run a family's ladder: every rung through the emulator, both compilers' targets and, where there is one, the GPU.

What differs between attention, matmul and reductions is behind :class:`Family`; the rows are the same for all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from warploom.checking.report import finding_json, wavefronts_json
from warploom.core.dtypes import DType
from warploom.core.errors import CompileError, ConfigError, UnsupportedDeviceError, WarploomError
from warploom.core.targets import target
from warploom.cuda.compile import available_cores
from warploom.cuda.cubin import disassemble
from warploom.emulate import Emulation, emulate
from warploom.ir.program import Program
from warploom.measure.monitor import GpuMonitor
from warploom.measure.timing import Candidate, EventClock, Measured, measure, paired_ratio
from warploom.measure.workload import OnGpu
from warploom.ops.backends import compiled
from warploom_lab.bench.evidence import environment
from warploom_lab.inspect.flow import control_flow
from warploom_lab.inspect.sass import parse_sass
from warploom_lab.kernels.ladder import Rung

Config = TypeVar("Config")
Progress = Callable[[str, float], None]
"""Told what is being done and the fraction done of the whole."""

TargetEntry = dict[str, Any]
"""What :func:`compile_for` says of a Program for a target."""

TARGETS = ("sm_80", "sm_90a")
EMULATION_SHARE = 0.4
"""Of the time on the CPU, where the rest is compiling."""


@dataclass(frozen=True)
class ErrorEntry:
    """How far a result is from the reference: right when ``value`` is at most ``bound``."""

    metric: str
    value: float
    bound: float

    @property
    def ok(self) -> bool:
        """False for NaN too."""
        return self.value <= self.bound


@dataclass(frozen=True)
class EmulatorCase:
    """One rung on the emulator: run ``program``, then :attr:`errors` judges what came out."""

    program: Program
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    errors: Callable[[], ErrorEntry]


@dataclass(frozen=True)
class GpuCase(Generic[Config]):
    """One problem size on the GPU: the work, with its inputs in place, and the calls of others that are timed with it.

    ``label`` says the size in the result ({"seq": 4096, …}), ``flops`` the work of one call, ``error`` how far a
    configuration's result is from the reference on fresh inputs. ``pause``: seconds that the GPU rests before each
    sample (:func:`warploom.measure.timing.measure`).
    """

    label: Mapping[str, Any]
    flops: int
    work: OnGpu
    baselines: Sequence[Candidate]
    error: Callable[[Config], ErrorEntry]
    pause: float = 0.0

    def candidate(self, rung: Rung[Config]) -> Candidate:
        """The rung, compiled and loaded. Raises ConfigError where it does not fit the size or the GPU."""
        return Candidate(f"rung {rung.key}", self.work.prepare(rung.config))


class Family(Protocol[Config]):
    """What a kernel family brings to its ladder."""

    @property
    def name(self) -> str:
        """The family's word on the command line."""
        ...

    def emulator_case(self, config: Config, seed: int) -> EmulatorCase:
        """Random inputs and poisoned outputs for one run on the CPU. Raises ConfigError where the rung does not fit."""
        ...

    def expected_seconds(self, config: Config) -> float:
        """About how long the emulator takes."""
        ...

    def gpu_case(self, size: Any, device: int, seed: int) -> GpuCase[Config]:
        """The GPU's part at one size: a number, or whatever the family takes for one."""
        ...


@dataclass
class LadderResult:
    """``environment`` and ``rows`` as they stand in the JSON; ``notes`` say what was left out and why."""

    environment: dict[str, Any]
    rows: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list[str])

    @property
    def problems(self) -> list[str]:
        """What is wrong with the kernels: findings, errors over their bound, code that does not compile."""
        found: list[str] = []
        for row in self.rows:
            who = f"rung {row['rung']}"
            if not row["error"]["value"] <= row["error"]["bound"]:
                found.append(f"{who}: error {row['error']['value']:.3g} is over its bound {row['error']['bound']:.3g}")
            found += [f"{who}: {finding['message']}" for finding in row["findings"]]
            found += [f"{who} on {t}: {entry['error']}" for t, entry in row["targets"].items() if "error" in entry]
            for cell in (row["gpu"] or {}).get("cells", ()):
                if not cell["error"]["value"] <= cell["error"]["bound"]:
                    found.append(f"{who} on the GPU at {cell.get('seq', cell.get('n', cell))}: wrong results")
        return found

    def json(self) -> dict[str, Any]:
        """The result as it is written to files."""
        return {"environment": self.environment, "rows": self.rows}


def fitting(family: Family[Config], rungs: Sequence[Rung[Config]]) -> tuple[list[Rung[Config]], list[str]]:
    """The rungs that take the emulator's problem, and why the others do not."""
    kept: list[Rung[Config]] = []
    reasons: list[str] = []
    for rung in rungs:
        try:
            family.emulator_case(rung.config, 0)
            kept.append(rung)
        except ConfigError as error:
            reasons.append(f"rung {rung.key} is left out: {error}")
    return kept, reasons


def config_json(config: Any) -> dict[str, Any]:
    """The flags of a configuration; types by their names."""
    flags = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return {name: value.name if isinstance(value, DType) else value for name, value in flags.items()}


def run_ladder(
    family: Family[Config],
    rungs: Sequence[Rung[Config]],
    *,
    seed: int | None = None,
    gpu_sizes: Sequence[Any] = (),
    device: int = 0,
    progress: Progress | None = None,
    rounds: int = 15,
    at_size: Callable[[Rung[Config], Any], Rung[Config]] = lambda rung, size: rung,
) -> LadderResult:
    """Every rung on the emulator and through the compiler, and at ``gpu_sizes`` on GPU ``device``.

    A row is ``{"rung", "name", "config", "digest" (of the Program), "error": {"metric", "value", "bound"},
    "findings", "wavefronts",
    "targets": {"sm_80": {"registers", "spill_bytes", "stack_bytes", "shared_bytes", "instructions"}, …},
    "gpu": {"seq", "tflops", "ratio", …, "cells": [one for each size]} or None}``; the fields of ``gpu`` beside its
    cells are those of its last cell. ``seed`` draws other inputs and runs the warps in an adversarial order.
    ``at_size`` gives a rung the configuration that is timed at a size; a cell whose configuration is not its row's says
    it in ``"config"``.

    Raises ConfigError where a rung does not fit the emulator's problem.
    """
    tell = progress or (lambda text, fraction: None)
    result = LadderResult(environment(device if gpu_sizes else None), [])
    weights = [family.expected_seconds(rung.config) for rung in rungs]
    share = 1.0 if not gpu_sizes else sum(weights) / (sum(weights) + 10.0 * len(gpu_sizes))
    missing = missing_compiler()
    emulated = share if missing else share * EMULATION_SHARE
    if missing:
        result.notes.append(missing)
    cases = [family.emulator_case(rung.config, seed or 0) for rung in rungs]
    with ThreadPoolExecutor(available_cores(), thread_name_prefix="warploom-ladder") as pool:
        compiling: list[dict[str, Future[TargetEntry]]] = [
            {} if missing else {arch: pool.submit(compile_for, case.program, arch) for arch in TARGETS}
            for case in cases
        ]
        done = 0.0
        for rung, case, jobs, weight in zip(rungs, cases, compiling, weights, strict=True):
            each = emulated / sum(weights)
            part = _part(tell, f"rung {rung.key} on the emulator", each * done, each * weight)
            part(0.0)
            emulation = emulate(case.program, case.grid, case.arguments, seed=seed, progress=part)
            done += weight
            result.rows.append(_row(rung, case, emulation) | {"targets": jobs})  # replaced below, once compiled
        for number, row in enumerate(result.rows):
            tell("compiling", emulated + (share - emulated) * number / len(result.rows))
            row["targets"] = {arch: job.result() for arch, job in row["targets"].items()}
    if gpu_sizes:
        places = [(size, [at_size(rung, size) for rung in rungs]) for size in gpu_sizes]
        _time_on_gpu(family, places, result, device, seed or 0, rounds, lambda t, f: tell(t, share + (1 - share) * f))
    tell("done", 1.0)
    return result


def missing_compiler() -> str | None:
    """Why nothing can be compiled here, with what to do; None where NVRTC is at hand."""
    from warploom.cuda.device import nvrtc_version

    try:
        nvrtc_version()
    except UnsupportedDeviceError as error:
        return f"not compiled: {error}"
    return None


def compile_for(program: Program, arch: str) -> TargetEntry:
    """``registers`` and ``stack_bytes`` per thread, ``spill_bytes`` (stores plus loads), ``shared_bytes`` per CTA and,
    with nvdisasm, the number of SASS ``instructions``; or ``{"error"}`` (no compiler, say) or ``{"not_for"}`` with the
    reason.
    """
    limits = target(arch)
    if target(program.requires).compute_capability > limits.compute_capability:
        return {"not_for": f"the kernel needs {program.requires}"}
    if program.shared_bytes > limits.shared_per_block:
        return {"not_for": f"{program.shared_bytes} bytes of shared memory, {arch} has {limits.shared_per_block}"}
    try:
        kernel = compiled(program, arch)
    except (CompileError, UnsupportedDeviceError) as error:
        return {"error": str(error)}
    needs = kernel.resources
    entry: TargetEntry = {
        "registers": needs.registers,
        "spill_bytes": needs.spill_bytes,
        "stack_bytes": needs.stack_bytes,
        "shared_bytes": needs.static_shared_bytes + program.shared_bytes,
    }
    try:
        (listing,) = parse_sass(disassemble(kernel.cubin))
    except (WarploomError, ValueError):
        return entry
    return entry | {"instructions": len(control_flow(listing).instructions)}


def _part(tell: Progress, what: str, start: float, width: float) -> Callable[[float], None]:
    return lambda fraction: tell(what, start + width * fraction)


def _row(rung: Rung[Any], case: EmulatorCase, emulation: Emulation) -> dict[str, Any]:
    return {
        "rung": rung.key,
        "name": rung.name,
        "config": config_json(rung.config),
        "digest": case.program.digest,
        "error": dataclasses.asdict(case.errors()),
        "findings": [finding_json(f) for f in emulation.findings],
        "wavefronts": wavefronts_json(emulation),
        "targets": {},
        "gpu": None,
    }


def _time_on_gpu(
    family: Family[Config],
    places: Sequence[tuple[Any, Sequence[Rung[Config]]]],
    result: LadderResult,
    device: int,
    seed: int,
    rounds: int,
    tell: Progress,
) -> None:
    """Check and time all rungs and baselines, size by size, and put the cells into the rows."""
    monitor = GpuMonitor.of(device)
    clocks: dict[str, Any] = {"before": monitor.state()}
    cells: list[list[dict[str, Any]]] = [[] for _ in result.rows]
    for number, (size, rungs) in enumerate(places):
        part = _part(tell, f"GPU, size {size}", number / len(places), 1 / len(places))
        part(0.0)
        case = family.gpu_case(size, device, seed + number)
        timed = _size(case, rungs, result, monitor, rounds, part)
        clocks["under_load"] = monitor.state()
        for index, cell in timed.items():
            timed_config = config_json(rungs[index].config)
            own = timed_config == result.rows[index]["config"]
            cells[index].append(cell if own else cell | {"config": timed_config})
    clocks["after"] = monitor.state()
    result.environment["clocks"] = clocks
    for row, of_row in zip(result.rows, cells, strict=True):
        if of_row:
            row["gpu"] = {**of_row[-1], "cells": of_row}


def _size(
    case: GpuCase[Config],
    rungs: Sequence[Rung[Config]],
    result: LadderResult,
    monitor: GpuMonitor,
    rounds: int,
    progress: Callable[[float], None],
) -> dict[int, dict[str, Any]]:
    """The cells of one size by the rung's index; a rung that does not fit is noted and has none."""
    candidates: dict[int, Candidate] = {}
    errors: dict[int, ErrorEntry] = {}
    for index, rung in enumerate(rungs):
        try:
            candidates[index] = case.candidate(rung)
        except ConfigError as error:
            result.notes.append(f"rung {rung.key} is not timed at {dict(case.label)}: {error}")
            continue
        errors[index] = case.error(rung.config)
    times = measure(
        [*candidates.values(), *case.baselines],
        case.work.sets,
        EventClock(case.work.stream),
        rounds=rounds,
        pause_seconds=case.pause,
        monitor=monitor,
        progress=progress,
    )
    baselines = {baseline.name: times[baseline.name] for baseline in case.baselines}
    cells: dict[int, dict[str, Any]] = {}
    for index, candidate in candidates.items():
        cells[index] = _cell(case, times[candidate.name], baselines, errors[index])
        if index - 1 in candidates:
            before = paired_ratio(times[candidate.name], times[candidates[index - 1].name])
            cells[index]["over_rung_before"] = round(before, 4)
    return cells


def _cell(case: GpuCase[Any], ours: Measured, baselines: Mapping[str, Measured], error: ErrorEntry) -> dict[str, Any]:
    def tflops(m: Measured) -> dict[str, float]:
        return m.seconds.rate(case.flops / 1e12).json()

    return {
        **case.label,
        "tflops": tflops(ours),
        "ratio": {name: round(paired_ratio(ours, baseline), 4) for name, baseline in baselines.items()},
        "milliseconds": {k: v * 1000 for k, v in ours.seconds.json().items()},
        "clock_mhz": ours.clock_mhz.json() if ours.clock_mhz else None,
        "samples": ours.seconds.count,
        "baselines": {name: {"tflops": tflops(baseline)} for name, baseline in baselines.items()},
        "error": dataclasses.asdict(error),
    }
