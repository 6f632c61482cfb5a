"""The paper's experiment: row maxima of 16×16 products, through shared memory and in registers.

It has three settings (:data:`warploom_lab.kernels.reduce.ladder.SETTINGS`): a launch of one warp, timed
plainly, as the paper does, and as graph replays; dependent operations inside one warp, in clock cycles; every SM full
of warps, with the power drawn over seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from warploom.core.errors import WarploomError
from warploom.emulate import emulate
from warploom.kernels.source import KernelSource
from warploom.measure.monitor import GpuMonitor
from warploom.measure.pytorch import torch_module
from warploom.measure.timing import Candidate, EventClock, Spread, graphed, measure
from warploom.ops.backends import GpuCall
from warploom_lab.bench.ladder import compile_for
from warploom_lab.bench.power import power_of
from warploom_lab.inspect.report import inspect_program
from warploom_lab.kernels.ladder import Rung
from warploom_lab.kernels.reduce.config import ReduceConfig
from warploom_lab.kernels.reduce.ladder import GRID, LAUNCH, LOOP, Setting
from warploom_lab.kernels.reduce.reference import row_max_reference, row_max_tolerance
from warploom_lab.kernels.reduce.tile import matmul_row_max

PAPER = {
    "H100": {
        "latency_ms": (0.1038, 0.0169),
        "speed_up": 6.1,
        "energy_mj": (8.82, 1.42),
        "energy_gain": 6.2,
        "achieved_occupancy_percent": (1.56, 1.56),
        "registers": (23, 21),
        "shared_bytes": (1024, 0),
        "barriers": (1, 0),
    },
    "RTX 5080": {
        "latency_ms": (0.1309, 0.0113),
        "speed_up": 11.5,
        "energy_mj": (2.91, 0.25),
        "energy_gain": 11.6,
        "achieved_occupancy_percent": (2.05, 1.97),
        "registers": (23, 21),
        "shared_bytes": (1024, 0),
        "barriers": (1, 0),
    },
}
"""The paper's Tables 1 to 3, (baseline, in registers). Its energies are labelled µJ; watts · seconds give mJ."""

GRAPH_LAUNCHES = 100
PROTOCOLS = 9
"""Repetitions of the paper's protocol."""
OPERATIONS_PER_ITERATION = 2
"""Of the loop in the kernel: two tiles take turns in shared memory."""
Row = dict[str, Any]


def row_max_source(config: ReduceConfig) -> KernelSource:
    """The kernel of a configuration."""
    return KernelSource.of("warploom_lab.kernels.reduce.tile:matmul_row_max", matmul_row_max.name, config=config)


def emulated(rung: Rung[ReduceConfig], arch: str = "sm_90a") -> Row:
    """A rung on the emulator and compiled: right or not, findings, conflicts, barriers, shuffles, registers."""
    config = rung.config
    program = row_max_source(config).program
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((2, 16, 16)).astype(config.dtype.numpy) for _ in range(2))
    out = np.full((2, 16), np.nan, np.float32)
    given: dict[str, Any] = {"a": a.view(np.uint16), "b": b.view(np.uint16), "out": out, "zero": 0}
    done = emulate(program, 2, {p.name: given[p.name] for p in program.parameters})
    shared = done.traffic.shared.values()
    ops = [op.instruction for op in program.ops()]
    right = (np.abs(out - row_max_reference(a, b)) <= row_max_tolerance(a, b)).all()
    return {
        "rung": rung.key,
        "name": rung.name,
        "config": str(config),
        "right": bool(right),
        "findings": [str(f) for f in done.findings],
        "wavefronts": sum(w.actual for w in shared) // 2,
        "bank_conflicts": sum(w.conflicts for w in shared) // 2,
        "barriers": sum(i.mnemonic == "bar.sync" for i in ops),
        "shuffles": sum(i.exchange is not None for i in ops),
        "shared_bytes": program.shared_bytes,
        "compiled": compile_for(program, arch),
        "compiled_loop": compile_for(row_max_source(LOOP.of(config)).program, arch),
        "loop_opcodes": loop_opcodes(config, arch),
    }


def loop_opcodes(config: ReduceConfig, arch: str) -> dict[str, float] | None:
    """SASS instructions of one operation in the main loop of the second setting; None without nvdisasm."""
    program = row_max_source(LOOP.of(config)).program
    try:
        counts = inspect_program(program, arch).loop_counts
    except WarploomError:
        return None
    return {name: count / OPERATIONS_PER_ITERATION for name, count in sorted(counts.items()) if count}


@dataclass
class _Prepared:
    """A rung in one setting on the GPU, with its arrays."""

    candidate: Candidate
    cycles: Any
    operations: int
    warps_per_sm: int


class Experiment:
    """The experiment on GPU 0. Raises UnsupportedDeviceError without a GPU and PyTorch."""

    def __init__(self) -> None:
        self._torch = torch_module()
        self._sms = int(self._torch.cuda.get_device_properties(0).multi_processor_count)
        self._monitor = GpuMonitor.of(0)
        self._clock = EventClock(int(self._torch.cuda.current_stream(0).cuda_stream))

    def call(self, key: str, config: ReduceConfig, ctas: int) -> GpuCall:
        """The kernel of the rung ``key`` with this configuration, as a launch of so many CTAs."""
        return GpuCall.prepare(row_max_source(config), (ctas, 1, 1), {"zero": 0}, 0)

    def prepare(self, rung: Rung[ReduceConfig], setting: Setting) -> _Prepared:
        """Compile, load, make inputs and check the result once."""
        torch, config = self._torch, setting.of(rung.config)
        per_sm = self.call(rung.key, config, 1).queued.resident()
        ctas = setting.ctas or self._sms * per_sm * setting.waves
        tiles = ctas * config.num_warps
        torch.manual_seed(0)
        kind = {"bf16": torch.bfloat16, "f16": torch.float16}[config.dtype.name]
        a, b = (torch.randn(tiles, 16, 16, device="cuda", dtype=kind) for _ in range(2))
        out = torch.full((tiles, 16), float("nan"), device="cuda")
        cycles = torch.zeros(tiles, dtype=torch.int64, device="cuda")
        call = self.call(rung.key, config, ctas)
        arrays = {"a": a, "b": b, "out": out, "cycles": cycles}
        pointers = tuple(arrays[name].data_ptr() for name in call.arrays)

        def run(_: int) -> object:
            call.launch_again(pointers, "torch")
            return arrays  # they live as long as this does

        run(0)
        expected = (a.double() @ b.double().transpose(1, 2)).amax(-1)
        bound = 16 * 2.0**-22 * (a.abs().double() @ b.abs().double().transpose(1, 2)).amax(-1)
        if not bool(((out.double() - expected).abs() <= bound).all()):
            raise ArithmeticError(f"{rung.name} in the setting {setting.name} gives wrong maxima on this GPU")
        return _Prepared(
            Candidate(f"{rung.key}.{setting.name}", run),
            cycles,
            tiles * config.repeats,
            (per_sm if setting.ctas is None else 1) * config.num_warps,
        )

    def launches(self, rungs: Sequence[Rung[ReduceConfig]]) -> dict[str, Row]:
        """The first setting: medians of plain launches and of graph replays, and the paper's own protocol."""
        ready = {rung.key: self.prepare(rung, LAUNCH) for rung in rungs}
        plain = measure([p.candidate for p in ready.values()], 1, self._clock, monitor=self._monitor)
        graphs = [graphed(p.candidate, GRAPH_LAUNCHES, self._torch) for p in ready.values()]
        replayed = measure(graphs, 1, self._clock, monitor=self._monitor)
        idle = self.idle_watts()
        rows: dict[str, Row] = {}
        for key, p in ready.items():
            one = replayed[p.candidate.name].seconds
            count = GRAPH_LAUNCHES
            per = Spread(one.median / count, one.low / count, one.high / count, one.count)
            protocol = self._papers(p.candidate)
            rows[key] = {
                "launch_s": plain[p.candidate.name].seconds.json(),
                "graph_s": per.json(),
                "paper_protocol_s": protocol.json(),
                "sm_occupancy": p.warps_per_sm / 64,
            } | self._energy(p, idle, 1.0, protocol.median)
        return rows

    def _papers(self, candidate: Candidate) -> Spread:
        """The mean of 1000 launches after 100, by events, which is what the paper reports; several such means."""
        means: list[float] = []
        for _ in range(PROTOCOLS):
            for _ in range(100):
                candidate.run(0)
            start = self._clock.mark()
            for _ in range(1000):
                candidate.run(0)
            means.append(self._clock.seconds(start, self._clock.mark()) / 1000)
        return Spread.of(means)

    def loops(self, rungs: Sequence[Rung[ReduceConfig]]) -> dict[str, Row]:
        """The second setting: clock cycles of one dependent operation in one warp."""
        rows: dict[str, Row] = {}
        for rung in rungs:
            p = self.prepare(rung, LOOP)
            samples: list[float] = []
            for _ in range(50):
                p.candidate.run(0)
                self._torch.cuda.synchronize()
                samples.append(float(p.cycles.item()) / p.operations)
            rows[rung.key] = {"cycles_per_operation": Spread.of(samples).json()}
        return rows

    def grids(self, rungs: Sequence[Rung[ReduceConfig]], watch_seconds: float = 2.0) -> dict[str, Row]:
        """The third setting: operations per second of the whole GPU, and the energy of each."""
        idle = self.idle_watts()
        ready = {rung.key: self.prepare(rung, GRID) for rung in rungs}
        times = measure([p.candidate for p in ready.values()], 1, self._clock, monitor=self._monitor)
        first = times[next(iter(ready.values())).candidate.name]
        rows: dict[str, Row] = {}
        for key, p in ready.items():
            found = times[p.candidate.name]
            # Rounds of two rungs belong together, but their warps may differ in number.
            ratios = np.asarray(first.samples) / np.asarray(found.samples)
            rows[key] = {
                "operations_per_s": found.seconds.rate(p.operations).json(),
                "warps_per_sm": p.warps_per_sm,
                "speed_up": Spread.of((ratios * p.operations / ready[rungs[0].key].operations).tolist()).json(),
                "sm_mhz": None if found.clock_mhz is None else found.clock_mhz.json(),
            } | self._energy(p, idle, watch_seconds)
        return rows

    def idle_watts(self) -> float | None:
        """The board's power after a pause, in W."""
        self._torch.cuda.synchronize()
        time.sleep(1.5)
        found = self._monitor.state().get("watts")
        return None if found is None else float(found)

    def _energy(self, p: _Prepared, idle: float | None, window: float, latency: float | None = None) -> Row:
        """Power under a load of ``window`` seconds, and the energy of an operation; above idle, too.

        With ``latency`` the energy is the paper's: average power times the latency of a launch.
        """
        power = power_of(p.candidate, 1, self._clock, self._monitor, window=window)
        if power is None:
            return {"idle_watts": idle, "watts": None}
        seconds = latency if latency is not None else power.seconds_per_call / p.operations
        row: Row = {
            "idle_watts": idle,
            "watts": round(power.watts, 1),
            "load_sm_mhz": power.sm_mhz,
            "energy_per_operation_j": float(f"{power.watts * seconds:.4g}"),
        }
        if idle is not None:
            row["energy_above_idle_j"] = float(f"{(power.watts - idle) * seconds:.4g}")
        return row


def run_experiment(rungs: Sequence[Rung[ReduceConfig]], on_gpu: bool, progress: Callable[[str, float], None]) -> Row:
    """Every rung on the emulator and compiled; with a GPU the three settings as well."""
    rows: list[Row] = []
    for number, rung in enumerate(rungs):
        progress(rung.name, number / len(rungs) * (0.3 if on_gpu else 1.0))
        rows.append(emulated(rung))
    found: Row = {"rungs": rows, "paper": PAPER}
    if not on_gpu:
        return found
    experiment = Experiment()
    parts = (("launch", experiment.launches), ("loop", experiment.loops), ("grid", experiment.grids))
    for number, (name, part) in enumerate(parts):
        progress(f"setting {name}", 0.3 + 0.7 * number / len(parts))
        measured = part(rungs)
        for row in rows:
            row[name] = measured[row["rung"]]
    return found
