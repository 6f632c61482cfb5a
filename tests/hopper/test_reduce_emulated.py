"""Row reductions of products on wgmma and TMA: right and clean for every operation, size and order of events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import warploom
from tests.kernels.matmul_cases import TOGETHER, TURNS, padded
from tests.kernels.mutate import deletions, run_calls
from tests.properties import slow_property
from warploom.core.dtypes import DType, bf16, f16
from warploom.core.errors import ConfigError, WarploomError
from warploom.ir.program import Program
from warploom.kernels.matmul.problem import MatmulConfig, Matrix, contiguous_problem
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.kernels.matmul.sm90 import MatmulSm90
from warploom.kernels.matmul_reduce.problem import ExponentialsProblem
from warploom.ops.reduce import plan_matmul_reduce
from warploom_lab.kernels.matmul.ladder_sm90 import RungWgmma

KINDS = {"together": TOGETHER, "turns": TURNS, "alone": MatmulSm90(64, 96, 2, 1, block_stride=4)}


def matrix(rng: np.random.Generator, rows: int, cols: int, dtype: DType = f16, row_major: bool = True) -> Any:
    """A random matrix whose lines, rows or columns, are aligned for the TMA."""
    if not row_major:
        return matrix(rng, cols, rows, dtype).T
    return padded(rng.standard_normal((rows, cols)).astype(dtype.numpy), 8)


def exact(a: Any, b: Any, op: str, scale: float = 1.0, bias: Any = 0.0) -> tuple[Any, Any]:
    """(the reduction in float64, how far float32 sums of its length may be from it)."""
    a64, b64 = (np.asarray(x).astype(np.float64) for x in (a, b))
    x = scale * (a64 @ b64) + bias
    near = a.shape[1] * 2.0**-22 * (abs(scale) * (abs(a64) @ abs(b64)) + abs(bias)).max(1) + 1e-6
    top = x.max(1)
    if op == "max":
        return top, near
    if op == "sum":
        return x.sum(1), near * x.shape[1] + 2.0**-20 * abs(x).sum(1)
    total = np.exp(x - top[:, None]).sum(1)
    return top + np.log(total), 2 * near + 2.0**-19 * (1 + abs(top))


@slow_property(20)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    op=st.sampled_from(["max", "sum", "logsumexp"]),
    size=st.tuples(st.integers(1, 200), st.integers(1, 200), st.integers(2, 200)),
    row_major=st.tuples(st.booleans(), st.booleans()),
    dtype=st.sampled_from([f16, bf16]),
    combined=st.booleans(),
)
def test_any_size_layout_and_operation(
    kind: str, op: Any, size: tuple[int, int, int], row_major: tuple[bool, bool], dtype: DType, combined: bool
) -> None:
    m, n, k = size
    rng = np.random.default_rng(m + 256 * n + 65536 * k)
    a = matrix(rng, m, k, dtype, row_major[0])
    b = matrix(rng, k, n, dtype, row_major[1])
    bias = rng.standard_normal(n).astype(dtype.numpy) if combined else None
    scale = -0.25 if combined else 1.0
    got = warploom.matmul_reduce(a, b, op, scale=scale, bias=bias, config=replace(KINDS[kind], dtype=dtype))
    want, near = exact(a, b, op, scale, 0.0 if bias is None else bias.astype(np.float64))
    assert got.dtype == np.float32
    assert (abs(got - want) <= near).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_column_of_the_maximum_is_the_first(kind: str) -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-3, 4, shape).astype(np.float16) for shape in ((150, 40), (40, 304)))
    values, columns = warploom.matmul_reduce(a, b, "max", return_index=True, config=KINDS[kind])
    x = a.astype(np.float64) @ b.astype(np.float64)
    assert (columns == x.argmax(1)).all()
    assert (values == x.max(1)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_rings_that_wrap_over_several_tiles_in_every_order(kind: str, seed: int | None) -> None:
    config = KINDS[kind]
    rng = np.random.default_rng(2)
    a = matrix(rng, 2 * config.tile_m, 5 * config.tile_k)
    b = matrix(rng, 5 * config.tile_k, 3 * config.tile_n, row_major=False)
    made = plan_matmul_reduce(a, b, "max", config=config)
    out = np.full(a.shape[0], np.nan, np.float32)
    for emulation in run_calls(made.calls, {"a": a, "b": b.T, "out": out}, seed):
        assert emulation.findings == ()
    want, near = exact(a, b, "max")
    assert (abs(out - want) <= near).all()


def test_each_way_to_hand_on_a_turn_is_needed() -> None:
    """Of log-sum-exps a turn lasts until its products are done where K is short, else the next one's begin before."""

    def wrong(depth: int, mutant: Program | None = None) -> bool:
        rng = np.random.default_rng(depth)
        a, b = matrix(rng, 2 * TURNS.tile_m, depth), matrix(rng, depth, 3 * TURNS.tile_n, row_major=False)
        made = plan_matmul_reduce(a, b, "logsumexp", config=TURNS)
        out = np.full(a.shape[0], np.nan, np.float32)
        try:
            done = run_calls(made.calls, {"a": a, "b": b.T, "out": out}, program=mutant)
        except WarploomError:
            return True
        want, near = exact(a, b, "logsumexp")
        return any(x.findings for x in done) or not (abs(out - want) <= near).all()

    depths = [TURNS.tile_k * tiles for tiles in (1, 3, 5)]
    assert not any(map(wrong, depths))
    program = plan_matmul_reduce(
        np.ones((64, 128), f16.numpy), np.ones((128, 64), f16.numpy), "logsumexp", config=TURNS
    )
    arrivals = [mutant for mutant in deletions(program.program) if "bar.arrive" in mutant.what]
    assert len(arrivals) == 3  # the first turn's, and one for each way
    assert all(any(wrong(depth, mutant.program) for depth in depths) for mutant in arrivals)


EXPONENTIALS = {
    "mma.sync": MatmulSm80(32, 32, 32, 16, 16, stages=2),
    "alone": MatmulSm90(64, 96, 2, 1),
    "turns": MatmulSm90(64, 64, 2, 2, pingpong=True),
}


class Exponentials:
    """Exponentials of a product of some k-tiles, by a kernel of such a kind."""

    def __init__(self, kind: str, k_tiles: int) -> None:
        self._config = config = EXPONENTIALS[kind]
        m, n, depth = 2 * config.tile_m - 7, 3 * config.tile_n - 9, k_tiles * config.tile_k
        rng = np.random.default_rng(6)
        self._a, self._b = matrix(rng, m, depth), matrix(rng, n, depth)
        out = Matrix(True, -(-n // 8) * 8)
        self._problem = ExponentialsProblem(replace(contiguous_problem(m, n, depth, f16, b_rows=False), out=out))
        part, parts = self._problem.part(config), self._problem.parts(config)
        self._x = np.full((m, parts * part), -np.inf)
        self._x[:, :n] = self._a.astype(np.float64) @ self._b.astype(np.float64).T
        tops = self._x.reshape(m, parts, part).max(2)
        self._expected = np.exp(self._x - np.where(np.isinf(tops), 0, tops).repeat(part, 1))[:, :n]

    @property
    def program(self) -> Program:
        """The kernel of the product."""
        return self._problem.calls(self._config, 2)[0].source.program

    def wrong(self, mutant: Program | None = None, seed: int | None = None) -> bool:
        """Whether a run has a finding, or an element beyond its bound."""
        (m, n), lines = self._expected.shape, self._problem.product.out.stride
        lse = np.full(m, np.nan, np.float32)
        given = {"a": self._a, "b": self._b, "out": np.full((m, lines), np.nan, np.float16), "lse": lse}
        try:
            done = run_calls(self._problem.calls(self._config, 2), given, seed, mutant)
        except WarploomError:
            return True
        near = abs(given["out"][:, :n] - self._expected) <= 2.0**-11 * self._expected + 1e-4
        exact = np.logaddexp.reduce(self._x, 1)
        return any(found.findings for found in done) or not near.all() or not (abs(lse - exact) < 1e-3).all()


@pytest.mark.parametrize("kind", EXPONENTIALS)
def test_each_synchronisation_of_exponentials_is_needed(kind: str) -> None:
    cases = [Exponentials(kind, k_tiles) for k_tiles in ((3, 5) if kind == "turns" else (3,))]
    assert not any(case.wrong(seed=seed) for case in cases for seed in (None, 0, 1))
    mutants = deletions(cases[0].program)
    assert len(mutants) > 4
    assert [m.what for m in mutants if not any(case.wrong(m.program) for case in cases)] == []


def test_the_vocabulary_loss() -> None:
    rng = np.random.default_rng(3)
    x, w = matrix(rng, 70, 72), matrix(rng, 200, 72)
    target = rng.integers(0, 200, 70)
    logits = x.astype(np.float64) @ w.astype(np.float64).T
    want = exact(x, w.T, "logsumexp")[0] - logits[np.arange(70), target]
    np.testing.assert_allclose(warploom.linear_cross_entropy(x, w, target, config=TURNS), want, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "says"), [(replace(TURNS, split_k=2), "needs whole"), (RungWgmma(), "no kernel that reduces rows")]
)
def test_kernels_that_do_not_reduce_rows_are_refused(config: MatmulConfig, says: str) -> None:
    a = np.ones((64, 512), np.float16)
    with pytest.raises(ConfigError, match=says):
        warploom.matmul_reduce(a, a.T, config=config)
