"""How ``matmul_reduce`` launches: the short path of repeated calls, and what each barrier of its kernel is for."""

from __future__ import annotations

import numpy as np
import pytest

import warploom
import warploom.ops.reduce as ops
from tests.kernels.mutate import deletions
from tests.ops.emulated_gpu import EmulatedGpu
from warploom.core.dtypes import bf16, f32
from warploom.core.errors import WarploomError
from warploom.emulate import emulate
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.ops import reduce as of_reduce

SMALL = MatmulSm80(32, 32, 32, 16, 16, stages=2, dtype=bf16)


def inputs(m, n, k, seed):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((m, k)).astype(bf16.numpy), rng.standard_normal((k, n)).astype(bf16.numpy)


@pytest.fixture
def prepared(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arrays of NumPy claim to be on a GPU; the names of the kernels prepared for it."""
    gpu.hold(monkeypatch)
    return gpu.prepared


def test_repeated_calls_prepare_nothing_and_read_their_own_arrays(prepared):
    for trial in range(3):
        a, b = inputs(40, 70, 48, trial)
        bias = inputs(1, 70, 1, trial)[1][0]
        values, index = ops.matmul_reduce(a, b, return_index=True, bias=bias)
        product = a.astype(np.float64) @ b.astype(np.float64) + bias.astype(np.float64)
        assert np.abs(values - product.max(1)).max() < 1e-4
        assert (index == product.argmax(1)).all()
        assert len(prepared) == 2


def test_repeated_losses_too(prepared):
    for trial in range(2):
        x, w = inputs(33, 50, 32, trial)
        w = np.ascontiguousarray(w.T)
        chosen = np.random.default_rng(trial).integers(0, 50, 33).astype(np.int32)
        logits = x.astype(np.float64) @ w.astype(np.float64).T
        expected = np.log(np.exp(logits).sum(1)) - logits[np.arange(33), chosen]
        assert np.abs(warploom.linear_cross_entropy(x, w, chosen) - expected).max() < 1e-4
        assert len(prepared) == 3


def test_another_scale_or_shape_is_another_call(prepared):
    a, b = inputs(32, 64, 32, 0)
    ops.matmul_reduce(a, b)
    ops.matmul_reduce(a, b, scale=2.0)
    ops.matmul_reduce(a[:16], b)
    assert len(prepared) == 6


def test_one_array_twice_is_not_confused_with_two(prepared):
    square = inputs(32, 32, 32, 0)[0]
    other = inputs(32, 32, 32, 1)[0]
    ops.matmul_reduce(square, square)
    found = ops.matmul_reduce(square, other)
    assert np.abs(found - (square.astype(np.float64) @ other.astype(np.float64)).max(1)).max() < 1e-4


@pytest.mark.parametrize("op", ["max", "sum", "logsumexp"])
def test_rows_in_blocks_give_the_same_bits(monkeypatch, op):
    monkeypatch.setattr(of_reduce, "LEAST_ROWS", 16)
    a, b = inputs(70, 90, 24, 0)
    bias = inputs(1, 90, 1, 1)[1][0]
    expected = ops.matmul_reduce(a, b, op, bias=bias, config=SMALL)
    monkeypatch.setattr(of_reduce, "WORKSPACE_BYTES", 1 << 9)
    plan = ops.plan_matmul_reduce(a, b, op, bias=bias, config=SMALL)
    assert plan.block_rows < 70
    assert plan.workspace_bytes <= 1 << 9
    assert (ops.matmul_reduce(a, b, op, bias=bias, config=SMALL) == expected).all()


def test_blocks_of_rows_on_a_gpu_read_their_own_rows(prepared, monkeypatch):
    monkeypatch.setattr(of_reduce, "LEAST_ROWS", 16)
    monkeypatch.setattr(of_reduce, "WORKSPACE_BYTES", 1 << 8)
    for trial in range(2):
        a, b = inputs(40, 70, 48, trial)
        values, index = ops.matmul_reduce(a, b, return_index=True)
        product = a.astype(np.float64) @ b.astype(np.float64)
        assert np.abs(values - product.max(1)).max() < 1e-4
        assert (index == product.argmax(1)).all()
        chosen = np.arange(40, dtype=np.int32) % 70
        losses = warploom.linear_cross_entropy(a, np.ascontiguousarray(b.T), chosen)
        expected = np.logaddexp.reduce(product, 1) - product[np.arange(40), chosen]
        assert np.abs(losses - expected).max() < 1e-4


@pytest.mark.parametrize("op", ["max", "logsumexp"])
def test_each_barrier_and_wait_is_needed(op):
    a, b = inputs(40, 70, 96, 0)
    plan = ops.plan_matmul_reduce(a, b, op, config=SMALL)

    def run(program):
        parts = [np.full((plan.tiles, 40), np.nan, f32.numpy) for _ in range(2)]
        given = {"a": a, "b": b, "result_first": parts[0], "result_second": parts[1]} | dict(plan.calls[0].scalars)
        done = emulate(program, plan.grid, {p.name: given[p.name] for p in program.parameters})
        return parts, done.findings

    expected, findings = run(plan.program)
    assert findings == ()
    escaped: list[str] = []
    for mutant in deletions(plan.program):
        try:
            parts, findings = run(mutant.program)
        except WarploomError:
            continue
        if not findings and all(np.array_equal(x, y, equal_nan=True) for x, y in zip(parts, expected, strict=True)):
            escaped.append(mutant.what)
    assert escaped == []
