"""The paper's experiment, and ``matmul_reduce`` beside PyTorch.

The experiment has three settings (:data:`warploom.kernels.reduce.ladder.SETTINGS`): a launch of one warp, timed
plainly, as the paper does, and as graph replays; dependent operations inside one warp, in clock cycles; every SM full
of warps, with the power drawn over seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from warploom.bench.monitor import GpuMonitor
from warploom.bench.peers import torch_module
from warploom.bench.power import power_of
from warploom.bench.resources import compile_for
from warploom.bench.timing import Candidate, EventClock, Spread, graphed, measure
from warploom.emulate import emulate
from warploom.ir.program import Program
from warploom.isa.sync import BarSync
from warploom.isa.warp import Shuffle
from warploom.kernels.ladder import Rung
from warploom.kernels.reduce.config import ReduceConfig
from warploom.kernels.reduce.ladder import SETTINGS, Setting
from warploom.kernels.reduce.reference import row_max_reference, row_max_tolerance
from warploom.kernels.reduce.tile import matmul_row_max
from warploom.ops.backends import GpuCall

PAPER = {
    "H100": {"latency_ms": (0.1038, 0.0169), "speed_up": 6.1, "energy_mj": (8.82, 1.42)},
    "RTX 5080": {"latency_ms": (0.1309, 0.0113), "speed_up": 11.5, "energy_mj": (2.91, 0.25)},
}
"""The paper's Tables 1 and 3, (baseline, in registers). Its energies are labelled µJ; watts · seconds give mJ."""

GRAPH_LAUNCHES = 100
Row = dict[str, Any]


def emulated(rung: Rung[ReduceConfig], arch: str = "sm_90a") -> Row:
    """A rung on the emulator and compiled: right or not, findings, conflicts, barriers, shuffles, registers."""
    config = rung.config
    program = matmul_row_max.trace(config=config)
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((2, 16, 16)).astype(config.dtype.numpy) for _ in range(2))
    out = np.full((2, 16), np.nan, np.float32)
    given: dict[str, Any] = {"a": a.view(np.uint16), "b": b.view(np.uint16), "out": out, "zero": 0}
    done = emulate(program, 2, {p.name: given[p.name] for p in program.parameters})
    shared = done.traffic.shared.values()
    ops = [op.instruction for op in program.ops()]
    right = (np.abs(out - row_max_reference(a, b)) <= row_max_tolerance(a, b)).all()
    return {
        "rung": rung.key, "name": rung.name, "config": str(config), "right": bool(right),
        "findings": [str(f) for f in done.findings],
        "wavefronts": sum(w.actual for w in shared) // 2, "bank_conflicts": sum(w.conflicts for w in shared) // 2,
        "barriers": sum(isinstance(i, BarSync) for i in ops), "shuffles": sum(isinstance(i, Shuffle) for i in ops),
        "shared_bytes": program.shared_bytes, "compiled": compile_for(program, arch),
        "compiled_loop": compile_for(matmul_row_max.trace(config=SETTINGS[1].of(config)), arch),
    }  # fmt: skip


@dataclass
class _Prepared:
    """A rung in one setting on the GPU, with its arrays."""

    call: GpuCall
    candidate: Candidate
    cycles: Any
    operations: int
    warps_per_sm: int


class Experiment:
    """The experiment on GPU 0. Raises UnsupportedDeviceError without a GPU and PyTorch."""

    def __init__(self) -> None:
        from warploom.cuda.device import cuda_core

        self._torch = torch_module()
        device = cuda_core().Device(0)
        self._sms = int(self._torch.cuda.get_device_properties(0).multi_processor_count)
        self._monitor = GpuMonitor(device.pci_bus_id)
        self._clock = EventClock(int(self._torch.cuda.current_stream(0).cuda_stream))

    def prepare(self, rung: Rung[ReduceConfig], setting: Setting) -> _Prepared:
        """Compile, load, make inputs and check the result once."""
        torch, config = self._torch, setting.of(rung.config)
        program = matmul_row_max.trace(config=config)
        probe = GpuCall.prepare(program, (1, 1, 1), {"zero": 0}, 0)
        per_sm = probe.kernel.occupancy(program.threads, program.shared_bytes)
        ctas = setting.ctas or self._sms * per_sm
        tiles = ctas * config.num_warps
        torch.manual_seed(0)
        kind = {"bf16": torch.bfloat16, "f16": torch.float16}[config.dtype.name]
        a, b = (torch.randn(tiles, 16, 16, device="cuda", dtype=kind) for _ in range(2))
        out = torch.full((tiles, 16), float("nan"), device="cuda")
        cycles = torch.zeros(tiles, dtype=torch.int64, device="cuda")
        call = GpuCall.prepare(program, (ctas, 1, 1), {"zero": 0}, 0)
        arrays = {"a": a, "b": b, "out": out, "cycles": cycles}
        pointers = tuple(arrays[n].data_ptr() for n in _pointer_names(program))
        keep = (a, b, out, cycles)

        def run(_: int) -> object:
            return call.launch_again(pointers, "torch") and keep

        run(0)
        expected = (a.double() @ b.double().transpose(1, 2)).amax(-1)
        bound = 16 * 2.0**-22 * (a.abs().double() @ b.abs().double().transpose(1, 2)).amax(-1)
        if not bool(((out.double() - expected).abs() <= bound).all()):
            raise ArithmeticError(f"{rung.name} in the setting {setting.name} gives wrong maxima on this GPU")
        return _Prepared(call, Candidate(f"{rung.key}.{setting.name}", run), cycles, tiles * config.repeats,
                         (per_sm if setting.ctas is None else 1) * config.num_warps)  # fmt: skip

    def launches(self, rungs: Sequence[Rung[ReduceConfig]]) -> dict[str, Row]:
        """The first setting: medians of plain launches and of graph replays, and the paper's own protocol."""
        ready = {rung.key: self.prepare(rung, SETTINGS[0]) for rung in rungs}
        plain = measure([p.candidate for p in ready.values()], 1, self._clock, monitor=self._monitor)
        graphs = [graphed(p.candidate, GRAPH_LAUNCHES, self._torch) for p in ready.values()]
        replayed = measure(graphs, 1, self._clock, monitor=self._monitor)
        rows: dict[str, Row] = {}
        for key, p in ready.items():
            one = replayed[p.candidate.name].seconds
            count = GRAPH_LAUNCHES
            per = Spread(one.median / count, one.low / count, one.high / count, one.count)
            rows[key] = {
                "launch_s": plain[p.candidate.name].seconds.json(), "graph_s": per.json(),
                "paper_protocol_s": self._papers(p.candidate), "sm_occupancy": p.warps_per_sm / 64,
            }  # fmt: skip
        return rows

    def _papers(self, candidate: Candidate) -> float:
        """The mean of 1000 launches after 100, by events: what the paper reports."""
        for _ in range(100):
            candidate.run(0)
        start = self._clock.mark()
        for _ in range(1000):
            candidate.run(0)
        return self._clock.seconds(start, self._clock.mark()) / 1000

    def loops(self, rungs: Sequence[Rung[ReduceConfig]]) -> dict[str, Row]:
        """The second setting: clock cycles of one dependent operation in one warp."""
        rows: dict[str, Row] = {}
        for rung in rungs:
            p = self.prepare(rung, SETTINGS[1])
            samples: list[float] = []
            for _ in range(50):
                p.candidate.run(0)
                self._torch.cuda.synchronize()
                samples.append(float(p.cycles.item()) / p.operations)
            rows[rung.key] = {"cycles_per_operation": Spread.of(samples).json()}
        return rows

    def grids(self, rungs: Sequence[Rung[ReduceConfig]], watch_seconds: float = 2.0) -> dict[str, Row]:
        """The third setting: operations per second of the whole GPU, and the energy of each."""
        time.sleep(1.0)
        idle = self._watts()
        ready = {rung.key: self.prepare(rung, SETTINGS[2]) for rung in rungs}
        times = measure([p.candidate for p in ready.values()], 1, self._clock, monitor=self._monitor)
        rows: dict[str, Row] = {}
        for key, p in ready.items():
            seconds = times[p.candidate.name].seconds
            power = power_of(p.candidate, 1, self._clock, self._monitor, window=watch_seconds)
            watts = None if power is None else round(power.watts, 1)
            row: Row = {
                "operations_per_s": seconds.rate(p.operations).json(), "warps_per_sm": p.warps_per_sm,
                "idle_watts": idle, "watts": watts,
            }  # fmt: skip
            if power is not None:
                row["energy_per_operation_j"] = float(f"{power.joules_per_call / p.operations:.4g}")
            rows[key] = row
        return rows

    def _watts(self) -> float | None:
        found = self._monitor.state().get("watts")
        return None if found is None else float(found)


def _pointer_names(program: Program) -> list[str]:
    return [p.name for p in program.parameters if p.kind == "pointer"]


def run_experiment(rungs: Sequence[Rung[ReduceConfig]], on_gpu: bool, progress: Callable[[str, float], None]) -> Row:
    """Every rung on the emulator and compiled; with a GPU, the three settings as well."""
    rows: list[Row] = []
    for number, rung in enumerate(rungs):
        progress(rung.name, number / len(rungs) * (0.3 if on_gpu else 1.0))
        rows.append(emulated(rung))
    if on_gpu:
        experiment = Experiment()
        parts = (("launch", experiment.launches), ("loop", experiment.loops), ("grid", experiment.grids))
        for number, (name, part) in enumerate(parts):
            progress(f"setting {name}", 0.3 + 0.7 * number / len(parts))
            found = part(rungs)
            for row in rows:
                row[name] = found[row["rung"]]
    return {"rungs": rows, "paper": PAPER}


PRODUCTS = ((8192, 131072, 4096), (16384, 16384, 128))
"""(m, n, k) of the comparison with PyTorch."""


def against_torch(rounds: int = 9) -> list[Row]:
    """``matmul_reduce`` beside PyTorch eager and ``torch.compile``: seconds, and memory beyond inputs and result."""
    import warploom

    torch = torch_module()
    clock = EventClock(int(torch.cuda.current_stream(0).cuda_stream))
    rows: list[Row] = []
    for m, n, k in PRODUCTS:
        torch.manual_seed(0)
        a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16) / k**0.5
        b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16).T
        for op in ("max", "logsumexp"):
            eager = _eager(torch, op)
            fused = torch.compile(eager)
            calls: dict[str, Callable[[], Any]] = {
                "warploom": lambda op=op, a=a, b=b: warploom.matmul_reduce(a, b, op),
                "torch": lambda f=eager, a=a, b=b: f(a, b),
                "torch.compile": lambda f=fused, a=a, b=b: f(a, b),
            }
            row: Row = {"op": op, "m": m, "n": n, "k": k}
            usable: list[Candidate] = []
            for name, call in calls.items():
                try:
                    row[f"{name}_extra_bytes"] = _extra_bytes(torch, call)
                except Exception as error:  # a peer that cannot run here is reported, not hidden
                    row[f"{name}_error"] = str(error).splitlines()[0][:200]
                else:
                    usable.append(Candidate(name, lambda _, call=call: call()))
            for name, measured in measure(usable, 1, clock, rounds=rounds).items():
                row[f"{name}_s"] = measured.seconds.json()
            row["error"] = float((warploom.matmul_reduce(a, b, op)[:256] - _exact(torch, a[:256], b, op)).abs().max())
            rows.append(row)
    return rows


def _eager(torch: Any, op: str) -> Callable[[Any, Any], Any]:
    if op == "max":
        return lambda x, y: (x @ y).amax(-1)
    return lambda x, y: torch.logsumexp(x @ y, -1)


def _exact(torch: Any, a: Any, b: Any, op: str) -> Any:
    product = a.float() @ b.float()
    return product.amax(-1) if op == "max" else torch.logsumexp(product, -1)


def _extra_bytes(torch: Any, call: Callable[[], Any]) -> int:
    """Peak memory of a call beyond what was there before it."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)
