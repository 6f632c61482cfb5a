"""The GPU's part of the matmul ladder, its launches run by the emulator: addresses, split sums, types, the check."""

import ctypes
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.ops.emulated_gpu import queue_on, repeated
from tests.tune.workloads import CpuTorch
from warploom.core.dtypes import bf16, f16, f32
from warploom.core.errors import ProblemError
from warploom.interop.arrays import describe
from warploom.kernels.matmul.problem import Matrix, contiguous_problem
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.measure import matmul, workload
from warploom.ops import steps
from warploom.ops.backends import run_on_emulator
from warploom_lab.bench import gemm as bench
from warploom_lab.kernels.ladder import Rung

torch = pytest.importorskip("torch")

SIZE, STREAM = 64, 7
CONFIG = MatmulSm80(tile_m=64, tile_n=64, tile_k=32, warp_m=32, warp_n=32, stages=2)
CONFIGS = {
    "f16": replace(CONFIG, accumulate=f16),
    "bf16": replace(CONFIG, dtype=bf16),
    "split": replace(CONFIG, split_k=2),
    "stream": replace(CONFIG, stream_k=True),
}


class Emulated:
    """A GpuCall that reads and writes at the addresses it is given."""

    device = 0

    def __init__(self, call, workspace):
        self.call, self.workspace = call, workspace

    def queueable(self, stream, pointers):
        assert stream == STREAM
        return partial(self.run, pointers), None

    def launch_again(self, pointers, kind):
        assert kind == "torch"
        self.run(pointers)

    def run(self, pointers):
        views = [describe(self._memory(*one)) for one in zip(self.call.arrays, pointers, strict=True)]
        run_on_emulator(self.call.source.program, self.call.grid, views, self.call.scalars, self.call.maps)

    def _memory(self, name, at):
        m, n, depth = (self.call.scalars[extent] for extent in ("result_m", "result_n", "depth"))
        sizes, words = {"a": m * depth, "b": depth * n, "out": m * n}, self.workspace.get(name)
        kind, count = (ctypes.c_uint16, sizes[name]) if words is None else (ctypes.c_uint32, words)
        return np.ctypeslib.as_array((kind * count).from_address(at))


@pytest.fixture
def on_cpu(monkeypatch):
    stand_in, workspace = CpuTorch(torch), {}
    stand_in.cuda.current_stream = lambda device: SimpleNamespace(cuda_stream=STREAM)

    def prepared(call, device):
        workspace.update(call.workspace)
        return Emulated(call, dict(workspace))

    for room in (bench, workload):
        monkeypatch.setattr(room, "torch_module", lambda: stand_in)
    monkeypatch.setattr(steps, "GpuCall", SimpleNamespace(of=prepared))
    monkeypatch.setattr(matmul, "current_stream", lambda kind, device: STREAM)
    monkeypatch.setattr(steps, "repeated", repeated)
    monkeypatch.setattr(steps, "compile_together", lambda *_: None)
    monkeypatch.setattr(steps, "zeroing", lambda at, words, _: (partial(ctypes.memset, at, 0, 4 * words), None))
    monkeypatch.setattr(steps, "queue_on", queue_on)


@pytest.fixture
def case(on_cpu):
    return bench.GemmFamily().gpu_case(bench.Square(SIZE), 0, 1)


def test_matrices_hold_what_was_asked_for(on_cpu):
    """The seed's data are uniform in [0, 1): what is timed and what results are checked on."""
    for data, least in (("uniform", 0.0), ("normal", -2.0)):
        case = bench.GemmFamily().gpu_case(bench.Square(SIZE, data), 0, 1)
        assert case.label["data"] == data
        work: Any = case.work
        for matrix in (*work.inputs[0], *work._fresh(work._problem)):
            values = matrix.float()
            assert values.shape == (SIZE, SIZE)
            assert (values.min() < least) == (data == "normal")
            assert (values.max() > 2.0) == (data == "normal")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_rung_is_right_and_a_wrong_one_is_seen(on_cpu, name, monkeypatch):
    rung: Rung[Any] = Rung(name, name, "", CONFIGS[name])
    case = bench.GemmFamily(dtype=rung.config.dtype).gpu_case(bench.Square(SIZE), 0, 1)
    candidate = case.candidate(rung)
    assert candidate.name == f"rung {name}"
    entry = case.error(rung.config)
    assert entry.ok
    assert entry.value > 0.001
    work: Any = case.work
    inputs, out = work.inputs, work.output
    for index in range(case.work.sets):
        candidate.run(index)
        a, b = inputs[index]
        assert matmul.torch_error(out, a, b, rung.config.accumulate).ok
    monkeypatch.setattr(Emulated, "run", lambda *_: True)
    assert not case.error(rung.config).ok


@pytest.mark.parametrize("name", ["f16", "split"])
def test_a_small_problem_tells_what_is_wrong(on_cpu, name, monkeypatch):
    config = CONFIGS[name]
    problem = contiguous_problem(72, 40, 104, f16, config.accumulate, b_rows=False)
    work = matmul.MatmulOnGpu(problem, 0)
    assert work.answers()
    assert work.fault(config) is None
    monkeypatch.setattr(Emulated, "run", lambda *_: True)
    assert "wrong results (error inf" in str(work.fault(config))
    with pytest.raises(ProblemError, match="row-major A"):
        matmul.MatmulOnGpu(replace(problem, a=Matrix(False, 72)), 0)


def test_the_case_says_its_size_and_has_the_baseline(case):
    assert dict(case.label) == {"n": SIZE, "data": "normal", "load": "rested"}
    assert case.pause > bench.GemmFamily().gpu_case(bench.Square(SIZE, load="sustained"), 0, 1).pause == 0.0
    assert case.flops == 2 * SIZE**3
    assert case.work.sets >= 2
    assert case.work.stream == 7
    (baseline,) = case.baselines
    assert baseline.name == "cublas"
    inputs, out = case.work.inputs, case.work.output
    baseline.run(1)
    a, b = inputs[1]
    assert matmul.torch_error(out, a, b, f32).ok
