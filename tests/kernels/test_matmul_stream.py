"""Stream-K: shares that cover every tile once, parts that meet without waiting, equal bits whoever comes last."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.gemm_cases import RUNGS, problem_of, run, traced
from tests.kernels.mutate import Mutant, deletions, located_ops, rewritten
from warploom.core.dtypes import DType, bf16, f16, f32
from warploom.ir.program import Op
from warploom.isa.memory import Atomic, Load
from warploom.kernels.gemm.config import GemmConfig
from warploom.kernels.gemm.problem import GemmProblem
from warploom.kernels.gemm.shares import Shares

SMALL = replace(
    RUNGS["06"], tile_m=32, tile_n=32, tile_k=32, warp_m=16, warp_n=16, accumulate=f32, stream_k=True, block_stride=2
)


# -- shares
@given(st.integers(1, 60), st.integers(1, 40), st.integers(1, 20))
def test_the_segments_of_all_ctas_are_every_tile_once(tiles, k_tiles, ctas):
    shares = Shares.of(tiles, k_tiles, ctas)
    covered = np.zeros((tiles, k_tiles), int)
    parts = np.zeros(tiles, int)
    slots: set[tuple[int, bool]] = set()
    for cta in range(shares.ctas):
        for segment in shares.segments(cta):
            covered[segment.tile, segment.begin : segment.stop] += 1
            parts[segment.tile] += 1
            if segment.stop - segment.begin < k_tiles:
                slot = cta, segment.begin == 0  # where the kernel leaves the part
                assert slot not in slots
                slots.add(slot)
    assert (covered == 1).all()
    assert parts.tolist() == [shares.parts(tile) for tile in range(tiles)]


@given(st.integers(1, 400), st.integers(1, 40), st.integers(1, 140))
def test_shares_are_equal_and_few_tiles_are_cut(tiles, k_tiles, ctas):
    shares = Shares.of(tiles, k_tiles, ctas)
    sums = [shares.start(cta + 1) - shares.start(cta) for cta in range(shares.ctas)]
    assert max(sums) - min(sums) <= 1
    assert sum(sums) == shares.cut * k_tiles
    assert shares.cut < 2 * shares.ctas
    assert (shares.cut == 0) == (tiles % shares.ctas == 0)


# -- products
@st.composite
def products(draw: st.DrawFn) -> tuple[GemmConfig, GemmProblem, int]:
    config = replace(
        SMALL,
        stages=draw(st.integers(1, 4)),
        dtype=draw(st.sampled_from([f16, bf16])),
        block_stride=draw(st.sampled_from([0, 2])),
        min_ctas=draw(st.integers(1, 2)),
    )
    config = replace(config, pipelined=config.stages > 1 and draw(st.booleans()))
    config = replace(config, lead=int(config.pipelined and draw(st.booleans())))
    if config.dtype is f16:
        config = replace(config, accumulate=draw(st.sampled_from([f32, f16])))
    m, n, k = draw(st.integers(1, 110)), draw(st.integers(1, 110)), draw(st.integers(1, 260))
    problem = problem_of(
        config, m, n, k, a_rows=draw(st.booleans()), b_rows=draw(st.booleans()), out=draw(st.sampled_from([None, f32]))
    )
    return config, problem, draw(st.integers(1, 7))


@settings(max_examples=20, deadline=None)
@given(products(), st.integers(0, 9))
def test_any_product_on_any_number_of_multiprocessors(case, seed):
    """Right and without findings in lock-step and in a random order of the warps, with the same bits."""
    config, problem, multiprocessors = case
    together, apart = (run(config, problem, seed=s, multiprocessors=multiprocessors) for s in (None, seed))
    for outcome in (together, apart):
        assert outcome.fine, (outcome.error, *map(str, outcome.emulation.findings))
    assert np.array_equal(together.output.view(np.uint8), apart.output.view(np.uint8))


def test_the_sum_is_that_of_the_parts_in_the_order_of_k():
    """Four parts of one tile, whoever comes last: ((0 + p₀) + p₁) + …, each the bits of a product of its own."""
    problem = problem_of(SMALL, 32, 32, 32 * 8, out=f32)
    whole = run(SMALL, problem, multiprocessors=1)
    outcomes = [run(SMALL, problem, seed=seed, multiprocessors=4).output for seed in range(8)]
    assert all(np.array_equal(outcomes[0], other) for other in outcomes)
    assert not np.array_equal(outcomes[0], whole.output), "other sums round otherwise"


# -- order
WIDE = replace(SMALL, tile_n=64, warp_n=32)
"""A tile of C that its threads read otherwise than they fill the stages under it."""
CASES: dict[str, tuple[GemmConfig, DType | None]] = {
    "16-bit": (WIDE, None),
    "f32": (WIDE, f32),
    "f16 sums": (replace(WIDE, accumulate=f16), None),
    "one stage": (replace(WIDE, stages=1, pipelined=False), f32),
    "unpipelined": (replace(WIDE, stages=2, pipelined=False), None),
    "rolling": (replace(WIDE, lead=2), f32),
}


def case(key: str) -> tuple[GemmConfig, GemmProblem]:
    """Eight tiles for three CTAs: shares that end within tiles, and whole tiles after them."""
    config, out = CASES[key]
    return config, problem_of(config, 64, 256, 32 * 5, out=out)


def fine(key: str, mutant: Mutant) -> bool:
    config, problem = case(key)
    return all(run(config, problem, program=mutant.program, seed=seed).fine for seed in (None, 0, 1))


@pytest.mark.parametrize("key", CASES)
def test_each_barrier_wait_and_commit_is_needed(key):
    config, problem = case(key)
    original = traced(config, problem)
    assert fine(key, Mutant("none", original))
    assert problem.shares(config, 3).waves > 0
    assert [m.what for m in deletions(original) if fine(key, m)] == []


WEAKER = {
    "the count is read relaxed": (Load, "acquire", "relaxed"),
    "arrivals only release": (Atomic, "acq_rel", "release"),
    "arrivals only acquire": (Atomic, "acq_rel", "acquire"),
}


@pytest.mark.parametrize("key", ["16-bit", "f32"])
def test_each_arrival_releases_and_acquires(key):
    """Between CTAs that come one by one, and between three that share one tile and arrive together."""
    original = traced(*case(key))
    config, out = CASES[key]
    one = problem_of(config, 32, 64, 32 * 9, out=out)
    assert traced(config, one).digest == original.digest
    for what, (kind, order, weaker) in WEAKER.items():

        def change(op: Op, kind=kind, order=order, weaker=weaker) -> Op | None:
            if not isinstance(op.instruction, Load | Atomic) or not isinstance(op.instruction, kind):
                return None
            changed = replace(op, instruction=replace(op.instruction, order=weaker))
            return changed if op.instruction.order == order else None

        assert len([op for _, op in located_ops(original.body) if change(op)]) == 1
        mutant = Mutant(what, rewritten(original, lambda _, op, change=change: change(op) or op))
        assert not (fine(key, mutant) and run(config, one, program=mutant.program).fine), what


def test_what_stream_k_does_not_take():
    assert any("split_k" in reason for reason in replace(SMALL, split_k=2).check())
    assert any("K = 0" in reason for reason in problem_of(SMALL, 32, 32, 0).misfits(SMALL))
    huge = problem_of(SMALL, 2**30, 2**30, 64)
    assert any("k-tiles" in reason for reason in huge.misfits(SMALL))
    assert GemmConfig.parse(str(SMALL)) == SMALL
    for out in (None, f32):
        problem = problem_of(SMALL, 64, 64, 64, out=out)
        assert traced(SMALL, problem).shared_bytes == SMALL.shared_bytes(out)
