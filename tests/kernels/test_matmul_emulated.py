"""Every rung and every tile that a call or the tuner takes, emulated: right, without findings or conflicts."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.matmul_cases import EVERY_RUNG, RUNGS, SMALL, STREAMED, TOGETHER, TURNS, WGMMA, Case
from tests.properties import slow_property
from warploom.core.dtypes import DType, bf16, f16, f32
from warploom.core.targets import target
from warploom.kernels.matmul.choice import candidates_sm80, candidates_sm90
from warploom.kernels.matmul.problem import MatmulConfig, contiguous_problem
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.kernels.matmul.sm90 import MatmulSm90
from warploom.tune.matmul import tiles_sm80
from warploom_lab.kernels.matmul.ladder import summed_in
from warploom_lab.kernels.matmul.ladder_config import RungGemm

GOAL = target("sm_90a")
LAYOUTS = [(True, True), (True, False), (False, True), (False, False)]
DIRECT, MATRIX, PIPELINED = RUNGS["01a"], RUNGS["01b"], RUNGS["05"]
assert isinstance(MATRIX, RungGemm)
assert isinstance(PIPELINED, RungGemm)
PADDED = replace(MATRIX, padding=8)


def traffic(config: MatmulConfig, **how: Any) -> Any:
    """What moved in a run over two tiles along M and N."""
    return Case.of_tiles(config, **how).run().emulation.traffic


# -- rungs
@pytest.mark.parametrize("key", EVERY_RUNG)
def test_each_rung_is_right_and_clean(key: str) -> None:
    outcome = Case.of_tiles(EVERY_RUNG[key]).run()
    assert outcome.fine, outcome


@pytest.mark.parametrize("key", ["04", "05"])
def test_rungs_whose_fragments_roll_with_f32_sums_are_right_and_without_conflicts(key: str) -> None:
    config = summed_in(RUNGS[key], f32)
    assert isinstance(config, RungGemm)
    assert config.lead
    outcome = Case.of_tiles(config).run()
    assert outcome.fine, outcome
    assert outcome.conflicts == {}


@pytest.mark.parametrize("key", ["02", "03", "04", "05", "06", "07", "best16", "best32"])
def test_swizzled_rungs_take_the_ideal_wavefronts(key: str) -> None:
    """Of every shared access: copies in, fragments, and the epilogue both ways."""
    outcome = Case.of_tiles(RUNGS[key]).run()
    assert set(outcome.emulation.traffic.shared) == {"cp.async", "ldmatrix", "st.shared", "ld.shared"}
    assert outcome.conflicts == {}


def test_without_swizzle_every_ldmatrix_takes_eight_times_as_long() -> None:
    """Rows of 128 and 256 bytes: the eight rows of a matrix begin in one bank."""
    moved = traffic(MATRIX)
    assert moved["ldmatrix"].actual == 8 * moved["ldmatrix"].ideal
    assert moved["st.shared"].actual == 8 * moved["st.shared"].ideal
    assert moved["cp.async"].conflicts == 0


@pytest.mark.parametrize("rows", LAYOUTS, ids=str)
def test_padding_ends_the_conflicts_as_a_swizzle_does(rows: tuple[bool, bool]) -> None:
    """16 bytes behind rows of 64, 128 and 256: the eight rows of a matrix begin in eight groups of banks."""
    assert Case.of_tiles(PADDED, a_rows=rows[0], b_rows=rows[1]).run().conflicts == {}


def test_the_wmma_api_collides_as_its_ldmatrix_does_and_padding_ends_it() -> None:
    """ptxas makes LDSM.x4 of a load and STS of pairs of a store: 00a has the wavefronts of 01b, 00b the ideal ones."""
    opaque, padded, matrix = traffic(RUNGS["00a"]), traffic(RUNGS["00b"]), traffic(MATRIX)
    assert opaque["ldmatrix"].actual == 8 * opaque["ldmatrix"].ideal
    for kind in ("ldmatrix", "st.shared", "ld.shared"):
        assert (opaque[kind].actual, opaque[kind].ideal) == (matrix[kind].actual, matrix[kind].ideal)
        assert (padded[kind].conflicts, padded[kind].ideal) == (0, matrix[kind].ideal)


def test_element_wise_loads_conflict_as_much_and_are_more() -> None:
    """01a asks for two bytes at a time: more accesses than 01b, and conflicts too."""
    direct, matrix = traffic(DIRECT), traffic(MATRIX)
    assert direct["ldmatrix"].accesses == 0
    assert direct["ld.shared"].accesses > 4 * matrix["ldmatrix"].accesses
    assert direct["ld.shared"].conflicts > 0


def test_two_operands_of_b_per_load_halve_its_loads() -> None:
    narrow, wide = traffic(PIPELINED)["ldmatrix"], traffic(RUNGS["06"])["ldmatrix"]
    assert narrow.actual == wide.actual
    assert wide.accesses * 3 == narrow.accesses * 2  # A: 4 per k-step, B: 8 become 4


# -- tiles
def accesses(config: MatmulSm80, rows: tuple[bool, bool]) -> set[Hashable]:
    """What the addresses of a tile's accesses depend on, beyond displacements by constants.

    For A and B the width of the stored rows, how many threads copy and, where warps lie side by side in a row, their
    widths; for C the same of its own tile.
    """
    a_rows, b_rows = rows
    warps = (config.warps_m, config.warps_n)
    a = ("A", config.tile_k, warps) if a_rows else ("A", "columns", config.tile_m, config.warp_m, warps)
    b = ("B", config.tile_n, config.warp_n, warps) if b_rows else ("B", "columns", config.tile_k, warps)
    return {a, b, ("C", config.tile_n, config.warp_n, warps)}


def covering() -> Iterator[Case]:
    """One tile of the tuner's whole space and one layout for every kind of access, the smallest that has it."""
    problem = contiguous_problem(4096, 4096, 4096, f16)
    both = (*tiles_sm80(problem, GOAL), *candidates_sm80(problem))
    tiles = dict.fromkeys(replace(c, split_k=1, stream_k=False, min_ctas=1, stages=2, block_stride=0) for c in both)
    seen: set[Hashable] = set()
    for a_rows, b_rows in LAYOUTS:
        for tile in sorted(tiles, key=lambda c: c.tile_m * c.tile_n * c.tile_k):
            new = accesses(tile, (a_rows, b_rows)) - seen
            case = Case.of_tiles(tile, 1, 1, 1, a_rows=a_rows, b_rows=b_rows)
            if new and not tile.check(GOAL) and not tile.violations(case.problem):
                seen |= new
                yield case


COVERING = list(covering())


def test_many_kinds_of_accesses_are_covered() -> None:
    assert len(COVERING) > 50


@pytest.mark.parametrize("case", COVERING, ids=lambda c: f"{c.config} {c.a_rows} {c.b_rows}")
def test_every_access_of_the_tuning_space_is_free_of_conflicts(case: Case) -> None:
    outcome = case.run()
    assert outcome.fine, outcome
    assert outcome.conflicts == {}


def candidates() -> list[MatmulConfig]:
    """Tiles that calls choose from, and one for three consumers."""
    problem = contiguous_problem(4096, 4096, 4096, f16, b_rows=False)
    general = (replace(c, stream_k=False, min_ctas=1) for c in candidates_sm80(problem) if c.split_k == 1)
    bulk = (c for c in candidates_sm90(problem) if c.split_k == 1)
    return list(dict.fromkeys((*general, *bulk, MatmulSm90(192, 192, 4, 3))))


@pytest.mark.parametrize(("number", "config"), list(enumerate(candidates())), ids=str)
def test_each_candidate_is_right_and_free_of_conflicts(number: int, config: MatmulConfig) -> None:
    outcome = Case.of_tiles(config, 1, 1, 3, a_rows=number % 2 == 0, b_rows=number % 2 == 1).run()
    assert outcome.fine, outcome
    assert outcome.conflicts == {}


# -- products
STRIDED = replace(PIPELINED, tile_m=64, tile_n=64, tile_k=32, warp_m=32, warp_n=32, accumulate=f32)
OPAQUE = RungGemm(64, 64, 32, 32, 32, wmma=True)
VARIANTS: dict[str, MatmulConfig] = {
    "sm80": SMALL,
    "sm80, bf16": replace(SMALL, dtype=bf16),
    "sm80, f16 sums": replace(SMALL, accumulate=f16),
    "sm80, two stages, row by row": replace(SMALL, stages=2, block_stride=0),
    "stream-K": STREAMED,
    "rung 05": STRIDED,
    "rung 04": replace(STRIDED, block_stride=0),
    "fragments that roll": replace(STRIDED, lead=4),
    "one stage": replace(STRIDED, stages=1, pipelined=False),
    "element-wise": replace(STRIDED, ldmatrix=False, swizzle=False, stages=2, pipelined=False),
    "padded": replace(STRIDED, swizzle=False, padding=8),
    "wmma": replace(OPAQUE, accumulate=f16, stages=2),
    "wmma, padded, f32 sums": replace(OPAQUE, padding=8),
}


EXTENTS = [(64, 64, 64), (72, 88, 104), (70, 66, 98), (33, 51, 37), (5, 3, 7), (1, 130, 1)]
"""Multiples of the tile; of 8, 4 and 2 elements; odd ones; less than a tile."""
PRODUCTS = [
    (variant, rows, extents)
    for (i, variant), (j, rows), (n, extents) in product(enumerate(VARIANTS), enumerate(LAYOUTS), enumerate(EXTENTS))
    if variant == "sm80" or j == (i + n) % len(LAYOUTS)
]
"""Every pair of two of them, and all three of the production kernel."""


@pytest.mark.parametrize(("variant", "rows", "extents"), PRODUCTS, ids=str)
def test_any_extents_and_layouts(variant: str, rows: tuple[bool, bool], extents: tuple[int, int, int]) -> None:
    outcome = Case(VARIANTS[variant], *extents, *rows, out=f32 if extents[0] == 33 else None).run()
    assert outcome.fine, outcome


@slow_property(32)
@given(
    kind=st.sampled_from(sorted(WGMMA)),
    size=st.tuples(st.integers(1, 200), st.integers(1, 200), st.integers(2, 200)),
    row_major=st.tuples(st.booleans(), st.booleans()),
    dtype=st.sampled_from([f16, bf16]),
    out=st.sampled_from([None, f32]),
    split=st.booleans(),
    seed=st.sampled_from([None, 0, 1, 2]),
)
def test_any_size_layout_and_type_of_wgmma(
    kind: str,
    size: tuple[int, int, int],
    row_major: tuple[bool, bool],
    dtype: DType,
    out: DType | None,
    split: bool,
    seed: int | None,
) -> None:
    config = replace(WGMMA[kind], dtype=dtype, split_k=2 if split and size[2] > 64 else 1)
    outcome = Case(config, *size, *row_major, out=out).run(seed=seed)
    assert outcome.fine, outcome


@pytest.mark.parametrize("kind", WGMMA)
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_rings_that_wrap_twice_over_several_tiles(kind: str, seed: int | None) -> None:
    config = WGMMA[kind]
    outcome = Case(config, 5 * config.tile_m - 40, 128, 5 * config.tile_k, b_rows=False, ctas=2).run(seed=seed)
    assert outcome.fine, outcome
    assert outcome.conflicts == {}


@pytest.mark.parametrize("kind", ["turns", "alone"])
@pytest.mark.parametrize("n", [13, 30, 36])
def test_results_whose_lines_the_tma_does_not_reach(kind: str, n: int) -> None:
    outcome = Case(WGMMA[kind], 100, n, 72, b_rows=False).run()
    assert outcome.fine, outcome


@pytest.mark.parametrize("config", [TURNS, TOGETHER, replace(TOGETHER, split_k=2)], ids=str)
def test_equal_calls_give_equal_bits_whatever_the_schedule(config: MatmulSm90) -> None:
    ways = [Case(config, 200, 72, 200, ctas=ctas).run(seed=seed).output for seed, ctas in ((None, 1), (1, 2), (2, 3))]
    assert all((way == ways[0]).all() for way in ways)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_adversarial_orders_of_the_warps(seed: int) -> None:
    assert Case(SMALL, 64, 64, 32 * 8).run(seed=seed).fine


@pytest.mark.parametrize(
    "config",
    [
        MatmulSm80(16, 32, 32, 16, 32, 2, block_stride=8),
        RungGemm(16, 32, 32, 16, 32, ldmatrix=True, swizzle=True, block_stride=8),
        replace(TURNS, tile_n=32, block_stride=8),
    ],
    ids=str,
)
def test_groups_of_rows_visit_every_tile_once(config: MatmulConfig) -> None:
    """Groups of 8 rows of tiles, the last one lower: any tile left out would stay NaN."""
    assert Case(config, config.tile_m * 11, config.tile_n * 3, 64).run().fine
