"""Stream-K: shares that cover every tile once, parts that meet without waiting, equal bits whoever comes last."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.matmul_cases import STREAMED, Case
from tests.kernels.mutate import Mutant, deletions, located_ops, rewritten
from tests.properties import slow_property
from warploom.core.dtypes import bf16, f16, f32
from warploom.ir.statements import Op
from warploom.isa.instruction import named
from warploom.kernels.matmul.shares import StreamShares


# -- shares
@given(st.integers(1, 60), st.integers(1, 40), st.integers(1, 20))
def test_the_segments_of_all_ctas_are_every_tile_once(tiles: int, k_tiles: int, ctas: int) -> None:
    shares = StreamShares.of(tiles, k_tiles, ctas)
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
def test_shares_are_equal_and_few_tiles_are_cut(tiles: int, k_tiles: int, ctas: int) -> None:
    shares = StreamShares.of(tiles, k_tiles, ctas)
    sums = [shares.start(cta + 1) - shares.start(cta) for cta in range(shares.ctas)]
    assert max(sums) - min(sums) <= 1
    assert sum(sums) == shares.cut * k_tiles
    assert shares.cut < 2 * shares.ctas
    assert (shares.cut == 0) == (tiles % shares.ctas == 0)


# -- products
@st.composite
def products(draw: st.DrawFn) -> Case:
    config = replace(
        STREAMED,
        stages=draw(st.integers(2, 4)),
        dtype=draw(st.sampled_from([f16, bf16])),
        block_stride=draw(st.sampled_from([0, 2])),
        min_ctas=draw(st.integers(1, 2)),
    )
    if config.dtype is f16:
        config = replace(config, accumulate=draw(st.sampled_from([f32, f16])))
    extents = draw(st.integers(1, 110)), draw(st.integers(1, 110)), draw(st.integers(1, 260))
    rows = draw(st.booleans()), draw(st.booleans())
    return Case(config, *extents, *rows, out=draw(st.sampled_from([None, f32])), ctas=draw(st.integers(1, 7)))


@slow_property(12)
@given(products(), st.integers(0, 9))
def test_any_product_on_any_number_of_multiprocessors(case: Case, seed: int) -> None:
    """Right and without findings in lock-step and in a random order of the warps, with the same bits."""
    together, apart = case.run(), case.run(seed=seed)
    for outcome in (together, apart):
        assert outcome.fine, outcome
    assert np.array_equal(together.output.view(np.uint8), apart.output.view(np.uint8))


def test_the_sum_is_that_of_the_parts_in_the_order_of_k() -> None:
    """Four parts of one tile, whoever comes last: ((0 + p₀) + p₁) + …, each the bits of a product of its own."""
    shared = Case.of_tiles(STREAMED, 1, 1, 8, out=f32, ctas=4)
    outcomes = [shared.run(seed=seed).output for seed in range(8)]
    assert all(np.array_equal(outcomes[0], other) for other in outcomes)
    whole = replace(shared, ctas=1).run().output
    assert not np.array_equal(outcomes[0], whole), "other sums round otherwise"


# -- order
WIDE = replace(STREAMED, tile_n=64, warp_n=32)
"""A tile of C that its threads read otherwise than they fill the stages under it."""
EIGHT = Case.of_tiles(WIDE, 2, 4, 5)
"""Eight tiles for three CTAs: shares that end within tiles, and whole tiles after them."""
CASES = {
    "16-bit": EIGHT,
    "f32": replace(EIGHT, out=f32),
    "f16 sums": replace(EIGHT, config=replace(WIDE, accumulate=f16)),
    "two stages": replace(EIGHT, config=replace(WIDE, stages=2)),
}


def fine(case: Case, mutant: Mutant) -> bool:
    return all(case.survives(mutant.program, seed) for seed in (None, 0, 1))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_barrier_wait_and_commit_is_needed(case: Case) -> None:
    assert fine(case, Mutant("none", case.program))
    assert WIDE.shares(case.problem, case.ctas).waves > 0
    assert [m.what for m in deletions(case.program) if fine(case, m)] == []


WEAKER = {
    "the count is read relaxed": ("ld.acquire", "relaxed"),
    "arrivals only release": ("atom.acq_rel", "release"),
    "arrivals only acquire": ("atom.acq_rel", "acquire"),
}


@pytest.mark.parametrize("what", WEAKER)
@pytest.mark.parametrize("key", ["16-bit", "f32"])
def test_each_arrival_releases_and_acquires(key: str, what: str) -> None:
    """Between CTAs that come one by one, and between three that share one tile and arrive together."""
    case, (name, weaker) = CASES[key], WEAKER[what]
    one = Case.of_tiles(WIDE, 1, 1, 9, out=case.out)
    assert one.program.digest == case.program.digest

    def strong(op: Op) -> bool:
        return op.instruction.mnemonic.startswith(name)

    def weakened(op: Op) -> Op:
        if not strong(op):
            return op
        made: Any = op.instruction
        other = named(f"{name.split('.')[0]}.{weaker}{made.mnemonic.removeprefix(name)}", made.home)
        return replace(op, instruction=other.at(offset=made.offset))

    assert sum(strong(op) for _, op in located_ops(case.program.body)) == 1
    mutant = Mutant(what, rewritten(case.program, lambda _, op: [weakened(op)]))
    assert not (fine(case, mutant) and one.survives(mutant.program))
