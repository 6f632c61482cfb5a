"""Every rung and every tile of the tuning space on the emulator: right, without findings, and without conflicts."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace

import pytest

from tests.kernels.gemm_cases import RUNGS, problem_of, run
from warploom.core.dtypes import bf16, f16, f32
from warploom.core.targets import target
from warploom.kernels.gemm.choice import candidates
from warploom.kernels.gemm.config import GemmConfig
from warploom.kernels.gemm.ladder import summed_in
from warploom.kernels.gemm.problem import contiguous_problem
from warploom.tune.gemm import GemmFamily, GemmSpace

CLEAN = [key for key, config in RUNGS.items() if config.swizzle]
SMALL = replace(RUNGS["06"], tile_m=64, tile_n=64, tile_k=32, warp_m=32, warp_n=32, accumulate=f32)
WMMA = replace(RUNGS["00a"], tile_m=64, tile_n=64, tile_k=32, warp_m=32, warp_n=32, accumulate=f32)


def two_tiles(config: GemmConfig, **options):
    """Two tiles along M and N, and enough along K that every ring of stages wraps twice."""
    depth = config.tile_k * (2 * config.stages + 1)
    return problem_of(config, 2 * config.tile_m, 2 * config.tile_n, depth, **options)


@pytest.mark.parametrize("key", RUNGS)
def test_each_rung_is_right_and_clean(key):
    config = RUNGS[key]
    outcome = run(config, two_tiles(config))
    assert outcome.fine, (outcome.error, *map(str, outcome.emulation.findings))


@pytest.mark.parametrize("key", ["04", "05"])
def test_rungs_whose_fragments_roll_with_f32_sums_are_right_and_without_conflicts(key):
    config = summed_in(RUNGS[key], f32)
    assert config.lead
    outcome = run(config, two_tiles(config))
    assert outcome.fine, (outcome.error, *map(str, outcome.emulation.findings))
    shared = outcome.emulation.traffic.shared
    assert {name: w.conflicts for name, w in shared.items()} == dict.fromkeys(shared, 0)


@pytest.mark.parametrize("key", CLEAN)
def test_swizzled_rungs_take_the_ideal_wavefronts(key):
    """Of every shared access: copies in, fragments, and the epilogue both ways."""
    config = RUNGS[key]
    traffic = run(config, two_tiles(config)).emulation.traffic
    assert set(traffic.shared) == {"cp.async", "ldmatrix", "st.shared", "ld.shared"}
    assert {name: w.conflicts for name, w in traffic.shared.items()} == dict.fromkeys(traffic.shared, 0)


def test_without_swizzle_every_ldmatrix_takes_eight_times_as_long():
    """Rows of 128 and 256 bytes: the eight rows of a matrix begin in one bank."""
    traffic = run(RUNGS["01b"], two_tiles(RUNGS["01b"])).emulation.traffic
    assert traffic["ldmatrix"].actual == 8 * traffic["ldmatrix"].ideal
    assert traffic["st.shared"].actual == 8 * traffic["st.shared"].ideal
    assert traffic["cp.async"].conflicts == 0


@pytest.mark.parametrize("rows", [(True, True), (True, False), (False, True), (False, False)], ids=str)
def test_padding_ends_the_conflicts_as_a_swizzle_does(rows):
    """16 bytes behind rows of 64, 128 and 256: the eight rows of a matrix begin in eight groups of banks."""
    config = replace(RUNGS["01b"], padding=8)
    traffic = run(config, two_tiles(config, a_rows=rows[0], b_rows=rows[1])).emulation.traffic
    assert {name: w.conflicts for name, w in traffic.shared.items()} == dict.fromkeys(traffic.shared, 0)


def test_element_wise_loads_conflict_as_much_and_are_more():
    """01a asks for two bytes at a time: more accesses than 01b, and conflicts too."""
    direct, matrix = (run(RUNGS[key], two_tiles(RUNGS[key])).emulation.traffic for key in ("01a", "01b"))
    assert direct["ldmatrix"].accesses == 0
    assert direct["ld.shared"].accesses > 4 * matrix["ldmatrix"].accesses
    assert direct["ld.shared"].conflicts > 0


def test_wide_b_halves_the_loads_of_b():
    narrow, wide = RUNGS["05"], RUNGS["06"]
    counts = [run(c, two_tiles(c)).emulation.traffic["ldmatrix"] for c in (narrow, wide)]
    assert counts[0].actual == counts[1].actual
    assert counts[1].accesses * 3 == counts[0].accesses * 2  # A: 4 per k-step, B: 8 become 4


def _tuning_space() -> dict[str, GemmConfig]:
    problem = problem_of(GemmConfig(), 512, 512, 4096)
    found = {}
    for config in candidates(problem):
        tile = replace(config, split_k=1, block_stride=0)
        found[f"{tile.tile_m}x{tile.tile_n}x{tile.tile_k}"] = tile
    base = GemmConfig(ldmatrix=True, swizzle=True, strided=True)
    for tile_m, tile_n, tile_k in ((64, 32, 32), (32, 256, 16), (256, 256, 32), (16, 64, 32), (128, 128, 128)):
        warps = {"warp_m": min(tile_m, 64), "warp_n": min(tile_n, 32)}
        found[f"{tile_m}x{tile_n}x{tile_k}"] = replace(
            base, tile_m=tile_m, tile_n=tile_n, tile_k=tile_k, wide_b=True, **warps
        )
    return found


SPACE = _tuning_space()


@pytest.mark.parametrize("rows", [(True, True), (True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("tile", SPACE)
def test_every_tile_is_free_of_conflicts_for_every_layout(tile, rows):
    config = SPACE[tile]
    a_rows, b_rows = rows
    if config.check(a_k_contiguous=a_rows, b_k_contiguous=not b_rows):
        pytest.skip("the tile does not take this layout")
    problem = problem_of(config, config.tile_m, config.tile_n, config.tile_k, a_rows=a_rows, b_rows=b_rows)
    outcome = run(config, problem)
    assert outcome.fine, (outcome.error, *map(str, outcome.emulation.findings))
    shared = outcome.emulation.traffic.shared
    assert {name: w.conflicts for name, w in shared.items()} == dict.fromkeys(shared, 0)


LAYOUTS = [(True, True), (True, False), (False, True), (False, False)]


def accesses(config: GemmConfig, rows: tuple[bool, bool]) -> set[Hashable]:
    """What the addresses of a tile's accesses depend on, beyond displacements by constants.

    For A and B the width of the stored rows, how many threads copy and, where warps lie side by side in a row, their
    widths; for C the same of its own tile.
    """
    a_rows, b_rows = rows
    warps = (config.warps_m, config.warps_n)
    a = ("A", config.tile_k, warps) if a_rows else ("A", "columns", config.tile_m, config.warp_m, warps)
    b = ("B", config.tile_n, config.warp_n, warps) if b_rows else ("B", "columns", config.tile_k, config.wide_b, warps)
    return {a, b, ("C", config.tile_n, config.warp_n, warps)}


def covering() -> Iterator[tuple[GemmConfig, tuple[bool, bool]]]:
    """Tiles and layouts of the tuner's whole space such that each has accesses that none before had."""
    problem = contiguous_problem(4096, 4096, 4096, f16)
    goal = target("sm_90a")
    space = next(s for s in GemmFamily().spaces(problem, goal) if isinstance(s, GemmSpace))
    tiles = dict.fromkeys(replace(c, split_k=1, stages=2, block_stride=0) for c in space.tiles())
    seen: set[Hashable] = set()
    for rows in LAYOUTS:
        for tile in sorted(tiles, key=lambda c: c.tile_m * c.tile_n * c.tile_k):  # the small ones are emulated faster
            new = accesses(tile, rows) - seen
            if new and not tile.check(goal, a_k_contiguous=rows[0], b_k_contiguous=not rows[1]):
                seen |= new
                yield tile, rows


def test_every_access_of_the_tuning_space_is_free_of_conflicts():
    cases = list(covering())
    assert len(cases) > 50
    for config, (a_rows, b_rows) in cases:
        problem = problem_of(config, config.tile_m, config.tile_n, config.tile_k, a_rows=a_rows, b_rows=b_rows)
        outcome = run(config, problem)
        assert outcome.fine, (str(config), a_rows, b_rows, *map(str, outcome.emulation.findings))
        shared = outcome.emulation.traffic.shared
        assert {name: w.conflicts for name, w in shared.items()} == dict.fromkeys(shared, 0), str(config)


VARIANTS = {
    "best": SMALL,
    "one stage": replace(SMALL, stages=1, pipelined=False),
    "element-wise": replace(SMALL, ldmatrix=False, swizzle=False, stages=2, pipelined=False, wide_b=False),
    "recomputed, narrow": replace(SMALL, strided=False, wide_b=False, block_stride=0),
    "static strides": replace(SMALL, static_strides=True),
    "fragments that roll": replace(SMALL, lead=4),
    "fragments that roll, recomputed, narrow": replace(SMALL, lead=6, strided=False, wide_b=False),
    "bf16": replace(SMALL, dtype=bf16),
    "f16 sums": replace(SMALL, accumulate=f16),
    "wmma": replace(WMMA, accumulate=f16, stages=2),
    "wmma, padded, f32 sums": replace(WMMA, padding=8),
    "padded": replace(SMALL, swizzle=False, strided=False, padding=8),
}


@pytest.mark.parametrize("extents", [(64, 64, 64), (72, 88, 104), (70, 66, 98), (33, 51, 37), (5, 3, 7), (1, 130, 1)])
@pytest.mark.parametrize("rows", [(True, True), (True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_any_extents_and_layouts(variant, rows, extents):
    """Multiples of the tile; of 8, 4 and 2 elements; odd ones; less than a tile."""
    config = VARIANTS[variant]
    out = f32 if extents[0] == 33 else None
    problem = problem_of(config, *extents, a_rows=rows[0], b_rows=rows[1], out=out)
    outcome = run(config, problem)
    assert outcome.fine, (outcome.error, *map(str, outcome.emulation.findings))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_adversarial_orders_of_the_warps(seed):
    assert run(SMALL, problem_of(SMALL, 64, 64, 32 * 8), seed=seed).fine


def test_block_swizzle_visits_every_tile_once():
    """Groups of 8 rows of tiles, the last one lower: any tile left out would stay NaN."""
    config = replace(SMALL, tile_m=16, tile_n=32, warp_m=16, warp_n=32, stages=2)
    assert run(config, problem_of(config, 16 * 11, 32 * 3, 32)).fine
