"""The online softmax and its variants on accumulators, alone, against float64."""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial, reduce
from operator import or_
from typing import Any

import numpy as np
import pytest

from tests.tile.support import SEEDS, normal
from warploom.core.dtypes import DType, bf16, f16
from warploom.core.errors import TraceError
from warploom.emulate import Emulation, emulate
from warploom.kernels.attention.reference import UNIT_ROUNDOFF
from warploom.lang import Global, Kernel, Traced, f32, kernel, u16, u32
from warploom.tile.copies import RowCopy, Rows
from warploom.tile.epilogue import OutputMatrix, Sums, store_registers, store_row_values
from warploom.tile.pipeline import operand_tile
from warploom.tile.product import MmaSync, zero
from warploom.tile.softmax import SUM_COLS, OnlineSoftmax, StaleSoftmax, capped, nothing, put_ones

BLOCKS, KEYS, COLS, WARPS = 5, 32, 64, 2
ROWS = 16 * WARPS
MODES = ("step", "deferred", "always rescaled", "stale")


@dataclass(frozen=True)
class Capped:
    """A soft cap, as a change of scaled scores."""

    k: Kernel
    cap: float

    def scores(self, scaled: Iterable[Traced]) -> Iterator[Traced]:
        return (capped(self.k, x, self.cap) for x in scaled)

    def slopes(self, exponents: Iterable[Traced]) -> Iterator[Traced]:
        raise NotImplementedError


class Scores:
    """The scores of a warp's rows, block by block; those that are -inf in memory are masked ones."""

    def __init__(self, k: Kernel, scores: Global[f32], s: Any, recomputed: Global[u32]) -> None:
        self.k, self.scores, self.s, self.recomputed = k, scores, s, recomputed

    def of(self, block: int) -> list[tuple[Any, Traced]]:
        k = self.k
        places = [self.s.layout.coordinates(k.lane, element) for element in range(len(self.s.registers))]
        found = [self.scores.load((k.warp * 16 + row) * (BLOCKS * KEYS) + (col + block * KEYS)) for row, col in places]
        return list(zip(self.s.mutable, found, strict=True))

    def look(self, block: int) -> None:
        for register, score in self.of(block):
            register.set(self.k.select(score == -math.inf, self.k.value(1.0, f32), score))

    def mask(self, block: int) -> None:
        for register, score in self.of(block):
            register.set(self.k.select(score == -math.inf, score, register.get()))

    def cuts(self, block: int) -> Traced:
        """Whether the warp has scores to mask."""
        return self.k.vote_any(reduce(or_, [score == -math.inf for _, score in self.of(block)]))

    def again(self, block: int) -> None:
        """A second look, which is counted."""
        self.look(block)
        with self.k.when(self.k.lane == 0):
            self.recomputed.store(self.recomputed.load(self.k.warp) + 1, self.k.warp)


def block_by_block(
    seen: Scores, softmax: OnlineSoftmax, left: Callable[[], Any], multiply: Callable[..., None]
) -> None:
    """P·V of each block behind its softmax."""
    softmax.begin()
    for block in range(BLOCKS):
        seen.look(block)
        softmax.step(partial(seen.mask, block))
        multiply(left(), block)
    softmax.keep()


def beside_the_next(
    seen: Scores, softmax: OnlineSoftmax, left: Callable[[], Any], multiply: Callable[..., None], mode: str
) -> None:
    """P·V of each block, which is still written meanwhile, beside the softmax of the next."""
    stale = StaleSoftmax(seen.k, softmax)
    seen.look(0)
    softmax.first(partial(seen.mask, 0))
    p = left()
    for block in range(1, BLOCKS):
        seen.look(block)
        mask = partial(seen.mask, block)
        if mode == "stale":
            rescale = stale.step(seen.cuts(block), mask, partial(seen.again, block), nothing)
        else:
            rescale = partial(softmax.rescale, softmax.deferred(mask, lazy=mode == "deferred"))
        multiply(p, block - 1)
        rescale()
        p = left()
    softmax.keep()
    multiply(p, BLOCKS - 1)


@kernel(threads=32 * WARPS, requires="sm_90a")
def weigh(
    k: Kernel,
    scores: Global[f32],
    v: Global[u16],
    out: Global[f32],
    lse: Global[f32],
    recomputed: Global[u32],
    sinks: Global[f32],
    *,
    mode: str,
    dtype: DType = f16,
    scale: float = 0.25,
    cap: float | None = None,
    column: bool = False,
    sunk: bool = False,
) -> None:
    """out = softmax(scale · scores)·V for 16 rows a warp; ``recomputed`` counts a warp's second looks at scores.

    ``sunk``: each warp's rows have a sink.
    """
    values = operand_tile(k, dtype, KEYS, COLS, name="V", stages=BLOCKS, spare_cols=SUM_COLS if column else 0)
    copy = RowCopy(k, values, Rows(v, COLS, None, COLS), 32 * WARPS)
    for block in range(BLOCKS):
        copy.load((block * KEYS, 0), block)
    k.commit_group()
    k.wait_group(0)
    if column:
        put_ones(k, values, COLS, dtype)
    k.syncthreads()
    cores = MmaSync(k, dtype)
    s = cores.accumulator(16, KEYS, "s")
    o = cores.accumulator(16, COLS + (SUM_COLS if column else 0), "o")
    product = cores.product(o, s, values, transposed_b=True)
    softmax = OnlineSoftmax(
        k, s, o, scale, dtype, change=None if cap is None else Capped(k, cap), column=column, lse=not column, sink=sunk
    )
    zero(o)
    seen = Scores(k, scores, s, recomputed)

    def multiply(p: Any, block: int) -> None:
        product.start(p, values.stage(block))

    if mode == "step":
        block_by_block(seen, softmax, partial(cores.left, s), multiply)
    else:
        beside_the_next(seen, softmax, partial(cores.left, s), multiply, mode)
    logs = softmax.finish(sinks.load(k.warp) if sunk else None)
    row = k.warp * 16
    if logs:
        store_row_values(k, lse, logs, s, row, ROWS)
    kept = cores.accumulator(16, COLS, "kept")
    for register, value in zip(kept.mutable, o.registers, strict=False):
        register.set(value)
    store_registers(Sums(k, kept, row, k.value(0, u32)), OutputMatrix(k, out, COLS, f32))


traced = cache(weigh.trace)


def run(
    scores: Any, dtype: DType = f16, seed: int | None = None, sinks: Any = None, **options: Any
) -> tuple[Emulation, Any, Any, Any, Any]:
    """The emulation, O, log-sum-exps, how often each warp looked again, and V."""
    v = normal(BLOCKS * KEYS, COLS, dtype=dtype)
    out, lse = np.full((ROWS, COLS), np.nan, np.float32), np.full(ROWS, np.nan, np.float32)
    again = np.zeros(WARPS, np.uint32)
    program = traced(dtype=dtype, sunk=sinks is not None, **options)
    of_warps = np.array((0.0,) * WARPS if sinks is None else sinks, np.float32)
    given = {"scores": scores, "v": v.view(np.uint16), "out": out, "lse": lse, "recomputed": again, "sinks": of_warps}
    found = emulate(program, 1, {p.name: given[p.name] for p in program.parameters}, seed=seed)
    return found, out, lse, again, v.astype(np.float64)


def expected(scores: Any, v: Any, scale: float, cap: float | None, sinks: Any = -np.inf) -> tuple[Any, Any, Any]:
    """O, Σ p·|v| and the log-sum-exp in float64; rows with scores of -inf alone give 0 and -inf, or the sink."""
    x = np.where(np.isneginf(scores), 0.0, scores) * scale
    x = np.where(np.isneginf(scores), -np.inf, x if cap is None else cap * np.tanh(x / cap))
    sink = np.repeat(np.broadcast_to(np.float64(sinks), WARPS), 16)[:, None]
    top = np.maximum(x.max(1, keepdims=True), sink)
    finite = np.where(np.isneginf(top), 0.0, top)
    weights = np.exp(x - finite)
    total = weights.sum(1, keepdims=True) + np.exp(sink - finite)
    p = weights / np.where(total == 0.0, 1.0, total)
    with np.errstate(divide="ignore"):
        return p @ v, p @ np.abs(v), np.log(total[:, 0]) + finite[:, 0]


def noise() -> Any:
    return np.random.default_rng(5).standard_normal((ROWS, BLOCKS * KEYS)).astype(np.float32)


def changed(rows: Any, blocks: Any, change: Callable[[Any], Any]) -> Any:
    """Noise, of which some rows and blocks are changed."""
    scores = noise()
    part = scores.reshape(ROWS, BLOCKS, KEYS)
    part[rows, blocks] = change(part[rows, blocks])
    return scores


EVERY = slice(None)
STEPS = np.arange(BLOCKS)[None, :, None]
SCORES = {
    "noise": noise(),
    "growing": changed(EVERY, EVERY, lambda x: x + 60.0 * STEPS),
    "growing a little": changed(EVERY, EVERY, lambda x: x + 6.0 * STEPS),
    "shrinking": changed(EVERY, EVERY, lambda x: x - 80.0 * STEPS),
    "one row grows": changed(5, 3, lambda x: x + 200.0),
    "huge": changed(EVERY, EVERY, lambda x: x * 1e4),
    "masked first": changed(EVERY, 0, lambda x: x * 0 - np.inf),
    "masked last": changed(EVERY, slice(2, None), lambda x: x * 0 - np.inf),
    "rows see nothing": changed(slice(3, 20), EVERY, lambda x: x * 0 - np.inf),
    "a row begins late": changed(7, slice(0, 4), lambda x: x * 0 - np.inf),
    "far below zero": changed(EVERY, EVERY, lambda x: x - 3e4),
}


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cap": {"cap": 6.0},
    "minus": {"scale": -0.5},
    "column": {"dtype": bf16, "column": True},
}
WAYS = [
    (mode, scores, options)
    for mode, scores, options in itertools.product(MODES, SCORES, OPTIONS)
    if options == "plain" or scores in ("growing", "one row grows", "masked first", "rows see nothing", "huge")
]


@pytest.mark.parametrize(("mode", "scores", "way"), WAYS)
def test_every_way_through_the_blocks_is_softmax(mode: str, scores: str, way: str) -> None:
    options = OPTIONS[way]
    dtype, column = options.get("dtype", f16), options.get("column", False)
    found, out, lse, _, v = run(SCORES[scores], mode=mode, **options)
    assert found.findings == ()
    exact, magnitude, logs = expected(SCORES[scores], v, options.get("scale", 0.25), options.get("cap"))
    bound = UNIT_ROUNDOFF[dtype.name] * magnitude * (2 if column else 1) + 2.0**-18 * magnitude
    assert (np.abs(out - exact) <= bound).all()
    if column:
        return
    finite = np.isfinite(logs)
    assert np.array_equal(lse[~finite], logs[~finite])
    assert np.abs(lse[finite] - logs[finite]).max(initial=0.0) <= 2e-6 * max(1.0, np.abs(logs[finite]).max(initial=0.0))


SINKS = {"growing": (0.5, 700.0), "rows see nothing": (-np.inf, -3.0), "noise": (-2e4, 3e7)}


@pytest.mark.parametrize("way", OPTIONS)
@pytest.mark.parametrize("scores", SINKS)
def test_a_sink_is_one_more_score_without_a_value(scores: str, way: str) -> None:
    options, sinks = OPTIONS[way], SINKS[scores]
    dtype, column = options.get("dtype", f16), options.get("column", False)
    found, out, lse, _, v = run(SCORES[scores], mode="step", sinks=sinks, **options)
    assert found.findings == ()
    exact, magnitude, logs = expected(SCORES[scores], v, options.get("scale", 0.25), options.get("cap"), sinks)
    bound = UNIT_ROUNDOFF[dtype.name] * magnitude * (2 if column else 1) + 2.0**-18 * magnitude + 2.0**-120
    assert (np.abs(out - exact) <= bound).all()
    if not column:
        np.testing.assert_allclose(lse, logs, rtol=2e-6, atol=2e-6)


def test_sinks_that_are_no_number() -> None:
    _, out, lse, *_ = run(SCORES["rows see nothing"], mode="step", sinks=(np.inf, np.nan))
    assert (out[:16] == 0.0).all()
    assert (lse[:16] == np.inf).all()
    assert np.isnan(out[16:]).all()
    assert np.isnan(lse[16:]).all()
    scores = noise()
    scores[9, 5] = np.inf
    with np.errstate(invalid="ignore"):
        _, out, lse, *_ = run(scores, mode="step", sinks=(5.0, 5.0))
    assert np.isnan(out[9]).all()
    assert np.isfinite(np.delete(out, 9, axis=0)).all()
    assert lse[9] == np.inf


def test_scores_are_looked_at_again_by_the_warp_whose_rows_grew() -> None:
    for scores, times in (("noise", [0, 0]), ("shrinking", [0, 0]), ("one row grows", [1, 0]), ("growing", [1, 1])):
        assert run(SCORES[scores], mode="stale")[3].tolist() == times, scores
    # Rows without a maximum have nothing to go by: they grow from nothing. Masked blocks are not even tried.
    for scores, times in (("masked first", [1, 1]), ("a row begins late", [1, 0]), ("masked last", [0, 0])):
        assert run(SCORES[scores], mode="stale")[3].tolist() == times, scores


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("column", [False, True])
def test_what_is_no_number_spoils_its_row_alone(mode: str, bad: float, column: bool) -> None:
    for block in (0, 2, BLOCKS - 1):
        scores = noise()
        scores[9, block * KEYS + 5] = bad
        with np.errstate(invalid="ignore"):
            _, out, *_ = run(scores, mode=mode, column=column, dtype=bf16 if column else f16)
        assert np.isnan(out[9]).all()
        assert np.isfinite(np.delete(out, 9, axis=0)).all()


def test_any_order_of_warps_gives_the_same_bits() -> None:
    outs = [run(SCORES["growing"], mode="stale", seed=seed)[1] for seed in SEEDS]
    assert all(np.array_equal(out, outs[0]) for out in outs)


def test_values_are_no_accumulator() -> None:
    @kernel(threads=32)
    def wrong(k: Kernel) -> None:
        s = MmaSync(k, f16).accumulator(16, 8, "s")
        OnlineSoftmax(k, s.map(lambda x: x + 0.0), s, 1.0, f16)

    with pytest.raises(TraceError, match="only an accumulator"):
        wrong.trace()
