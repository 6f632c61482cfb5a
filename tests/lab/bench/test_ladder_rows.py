# pyright: reportInvalidTypeForm=false
"""Ladders: what makes a row wrong, and the reference that judges on the GPU."""

import dataclasses
import types
from typing import Any

import numpy as np
import pytest

from tests.clock import SimulatedClock
from warploom.core.dtypes import bf16, f16
from warploom.core.errors import CompileError, ConfigError
from warploom.kernels.attention.reference import ErrorReport, attention_error, attention_reference
from warploom.lang import Global, Kernel, f32, kernel
from warploom_lab.bench import ladder
from warploom_lab.bench.attention import AttentionFamily, _entry, settled
from warploom_lab.bench.ladder import ErrorEntry, LadderResult, compile_for, missing_compiler, run_ladder
from warploom_lab.inspect import inspect_program
from warploom_lab.kernels.attention.ladder import LADDER
from warploom_lab.kernels.ladder import Rung


@kernel(threads=32)
def copy(k: Kernel, out: Global[f32]) -> None:
    out.store(1.0, k.thread)


def test_what_counts_as_a_problem():
    right = {"metric": "m", "value": 0.5, "bound": 1.0}
    row = {"rung": "1", "error": right, "findings": [], "targets": {"sm_80": {"not_for": "reason"}}, "gpu": None}
    assert LadderResult({}, [row]).problems == []
    for change in (
        {"error": right | {"value": 1.5}},
        {"error": right | {"value": float("nan")}},
        {"findings": [{"message": "a race"}]},
        {"targets": {"sm_80": {"error": "does not compile"}}},
        {"gpu": {"cells": [{"seq": 512, "error": right | {"value": 2.0}}]}},
    ):
        assert len(LadderResult({}, [row | change]).problems) == 1


def gpu_case(label, prepare, **more) -> Any:
    work = types.SimpleNamespace(sets=2, stream=0)
    case = {
        "label": label,
        "flops": 10**12,
        "work": work,
        "pause": 0.0,
        "baselines": [],
        "candidate": prepare,
        "error": lambda config: ErrorEntry("m", 0.5, 1.0),
    }
    return types.SimpleNamespace(**case | more)


@pytest.fixture
def gpu(monkeypatch):
    clock = SimulatedClock()
    monitor = types.SimpleNamespace(sm_clock=lambda: None, state=dict)
    monkeypatch.setattr(ladder, "EventClock", lambda stream: clock)
    monkeypatch.setattr(ladder.GpuMonitor, "of", lambda device: monitor)
    return clock


def test_cells_hold_a_rung_against_the_one_before(gpu, monkeypatch):
    seconds = {"a": 0.04, "b": 0.02, "c": 0.01}

    def prepare(rung):
        if rung.key == "broken":
            raise ConfigError("does not fit")
        return gpu.candidate(rung.key, seconds[rung.key])

    case = gpu_case({"n": 512}, prepare, pause=0.5, baselines=[gpu.candidate("baseline", 0.05)])
    result = LadderResult({}, [])
    rungs = [Rung(key, key, "", None) for key in ("a", "b", "broken", "c")]
    rests: list[float] = []
    monkeypatch.setattr("warploom.measure.timing.time.sleep", rests.append)
    cells = ladder._size(case, rungs, result, ladder.GpuMonitor.of(0), 3, lambda fraction: None)
    assert list(cells) == [0, 1, 3]
    assert rests == [0.5] * 3 * 4, "the GPU rests before each sample"
    assert cells[1]["over_rung_before"] == pytest.approx(2.0)
    assert [i for i in cells if "over_rung_before" in cells[i]] == [1], "c's predecessor was not timed"
    assert cells[3]["ratio"]["baseline"] == pytest.approx(5.0)
    assert "broken" in result.notes[0]


def test_a_rung_may_have_another_configuration_at_each_size_and_progress_rises_to_the_end(gpu, monkeypatch):
    prepared, told = [], []

    def case(family, size, *_):
        def prepare(rung):
            prepared.append((size, rung.config.tile_n))
            return gpu.candidate(rung.key, 0.01)

        return gpu_case({"seq": size}, prepare)

    monkeypatch.setattr(AttentionFamily, "gpu_case", case)
    monkeypatch.setattr(ladder, "missing_compiler", lambda: "not compiled")
    rung = settled(LADDER.rung("2"), 64, f16, {})
    wide = dataclasses.replace(rung, config=dataclasses.replace(rung.config, tile_n=rung.config.tile_n * 2))
    result = run_ladder(
        AttentionFamily(seq=64, head_dim=64, dtype=f16),
        [rung],
        gpu_sizes=[512, 1024],
        at_size=lambda rung, size: wide if size == 1024 else rung,
        progress=lambda _, done: told.append(done),
    )
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert result.problems == []
    assert prepared == [(512, rung.config.tile_n), (1024, wide.config.tile_n)]
    first, second = result.rows[0]["gpu"]["cells"]
    assert "config" not in first
    assert second["config"]["tile_n"] == wide.config.tile_n
    assert (result.rows[0]["config"]["tile_n"], result.rows[0]["config"]["dtype"]) == (rung.config.tile_n, "f16")


def test_the_error_of_an_output_far_from_a_rounding_reference_counts():
    assert _entry(ErrorReport(0.5, 1.0, 1.5)).value == 0.5
    far = _entry(ErrorReport(0.5, 1.0, 3.0))
    assert far.value == 1.5
    assert not far.ok
    lost = _entry(ErrorReport(float("inf"), 1.0, float("inf")))
    assert np.isfinite(lost.value)
    assert not lost.ok


@pytest.mark.skipif(missing_compiler() is not None, reason="needs NVRTC")
def test_resources_of_a_small_kernel(monkeypatch):
    program = copy.trace()
    entry = compile_for(program, "sm_80")
    assert 0 < entry["registers"] < 32
    assert entry["spill_bytes"] == entry["stack_bytes"] == entry["shared_bytes"] == 0
    if "instructions" in entry:  # without what pads the end
        assert entry["instructions"] == len(inspect_program(program, "sm_80").instructions)
    assert "sm_90a" in compile_for(dataclasses.replace(program, requires="sm_90a"), "sm_80")["not_for"]
    assert "shared" in compile_for(dataclasses.replace(program, shared_bytes=200 * 1024), "sm_80")["not_for"]

    def refuse(*_):
        raise CompileError("ptxas says no")

    monkeypatch.setattr("warploom_lab.bench.ladder.compiled", refuse)
    assert compile_for(program, "sm_80") == {"error": "ptxas says no"}


def test_the_torch_reference_agrees_with_numpys(monkeypatch):
    torch = pytest.importorskip("torch")
    from warploom.measure import attention as on_torch

    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 48, 3, 64, generator=generator).to(torch.bfloat16) for _ in range(3))
    out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    arrays = [x.transpose(1, 2).float().numpy() for x in (q, k, v, out)]
    expected = attention_error(arrays[3], attention_reference(*arrays[:3], dtype=bf16), bf16)
    found = on_torch.torch_error(out, q, k, v, bf16)
    assert found.value == pytest.approx(expected.value, rel=1e-6)
    assert found.against_rounded == pytest.approx(expected.against_rounded, rel=1e-6)
    monkeypatch.setattr(on_torch, "_BLOCK_ELEMENTS", 48 * 16)
    assert on_torch.torch_error(out, q, k, v, bf16).value == pytest.approx(expected.value, rel=1e-6)
    out[1, 40, 2, 7] = float("nan")
    assert on_torch.torch_error(out, q, k, v, bf16).value == float("inf")
