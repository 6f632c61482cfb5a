"""Which configuration runs a product that nobody tuned for: the least by a model of an architecture's candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from warploom.core.dtypes import f16, f32
from warploom.core.targets import Target
from warploom.kernels.matmul.cost import REGISTERS, USUAL_REGISTERS, seconds
from warploom.kernels.matmul.problem import MatmulProblem
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.kernels.matmul.sm90 import MatmulSm90
from warploom.kernels.settings import first_fitting, fitting, violations_of

Tile = TypeVar("Tile", bound="MatmulSm80 | MatmulSm90")
Production = MatmulSm80 | MatmulSm90
"""The configurations that calls choose from."""
KINDS = (MatmulSm90, MatmulSm80, "matmul")
"""What a caller may ask for, and what other packages add to matrix products."""

BEST16 = MatmulSm80(tile_m=256, warp_m=128, accumulate=f16)
"""The fastest ``mma.sync`` configuration with f16 accumulation for large products."""
BEST32 = MatmulSm80(block_stride=16)
"""The fastest with f32 accumulation."""

LEAST_ROWS = 33
"""Of M and N: below, ``mma.sync`` has smaller tiles."""
SHORT_K = 768
"""Up to this K the reduction of a tile's rows is no small part of its products' time."""
MANY_ELEMENTS = 1 << 26
"""Of a product: tiles of 192 columns for some twenty turns of all SMs, where one more hardly counts."""
SPLITS = (1, 2, 3, 4, 6, 8)


# -- candidates
def candidates_sm90(problem: MatmulProblem) -> tuple[MatmulSm90, ...]:
    """``wgmma``'s tiles, the largest first; none for products that leave most of every tile empty."""
    if min(problem.m, problem.n) < LEAST_ROWS or problem.accumulate is not f32:
        return ()
    together = MatmulSm90(dtype=problem.dtype)
    turns = replace(together, pingpong=True)
    alone = replace(together, tile_m=64, consumers=1)
    whole = problem.b.k_contiguous  # else half a panel of B is loaded in vain, which small tiles cannot afford
    tiles = (
        together,
        replace(together, tile_m=256, tile_n=128),
        replace(together, tile_m=128, tile_n=192, stages=5),
        replace(turns, tile_m=128, tile_n=192, stages=5),
        replace(together, tile_m=128, tile_n=160, stages=5),
        replace(turns, tile_m=128, tile_n=160, stages=5),
        replace(together, tile_m=128, tile_n=128, stages=6),
        replace(turns, tile_m=128, tile_n=128, stages=6),
        replace(alone, tile_n=256, stages=5),
        replace(alone, tile_n=192, stages=6),
        *((replace(alone, tile_n=160, stages=6), replace(together, tile_n=96, stages=6)) if whole else ()),
        replace(turns, tile_m=64, tile_n=128, stages=8),
        replace(turns, tile_m=64, tile_n=64, stages=8),
    )
    return tuple(replace(t, split_k=s) for t in tiles for s in SPLITS)


def candidates_sm80(problem: MatmulProblem) -> tuple[MatmulSm80, ...]:
    """``mma.sync``'s tiles, the largest first: whole, with K split, and with its tiles shared by stream-K."""
    best = replace(BEST16 if problem.accumulate is f16 else BEST32, dtype=problem.dtype)
    base = replace(best, block_stride=8)
    shapes = (
        *(((128, 256, 32, 64, 64, 4),) if problem.accumulate is f16 else ()),
        (256, 128, 32, 64, 64, 4),
        (128, 128, 32, 64, 64, 4),
        (128, 64, 64, 32, 64, 4),
        (64, 128, 64, 64, 32, 4),
        (64, 64, 64, 32, 32, 4),
        (32, 256, 128, 32, 64, 3) if problem.b.k_contiguous else (32, 256, 32, 32, 64, 6),
        (32, 128, 64, 32, 32, 5),
        (32, 64, 128, 32, 16, 4),
        (16, 128, 64, 16, 32, 6),
        (16, 64, 128, 16, 16, 6),
        (16, 64, 128, 16, 16, 5),
        (16, 32, 128, 16, 8, 6),
    )
    names = ("tile_m", "tile_n", "tile_k", "warp_m", "warp_n", "stages")
    tiles = [best, *(replace(base, **dict(zip(names, shape, strict=True))) for shape in shapes)]
    split = (replace(t, split_k=s) for t in tiles for s in SPLITS)
    return *split, *(stream for t in tiles for stream in streamed(t))


def streamed(tile: MatmulSm80) -> tuple[MatmulSm80, ...]:
    """A tile's stream-K schedule with one CTA per multiprocessor, and with two where their registers have room."""
    room = REGISTERS // (tile.threads * USUAL_REGISTERS)
    return tuple(replace(tile, stream_k=True, min_ctas=ctas) for ctas in (1, 2) if ctas <= max(1, room))


def for_rows_sm90(problem: MatmulProblem, exponentials: bool = False) -> tuple[MatmulSm90, ...]:
    """``wgmma``'s tile for a product whose rows are reduced; none where :func:`candidates_sm90` has none.

    Tiles of 256 columns leave the fewest states to merge. The reduction of a tile takes as long as a few k-tiles'
    products, so consumers take turns where K is short, and share the larger tile where it is not. Where each element
    takes an exponential, turns pay at any K, as long as there are many tiles, here of 192 columns.
    """
    if min(problem.m, problem.n) < LEAST_ROWS:
        return ()
    tile = MatmulSm90(dtype=problem.dtype)
    in_turn = replace(tile, stages=5, block_stride=16, pingpong=True)
    if problem.k <= SHORT_K or problem.m <= tile.tile_m // 2:
        tile = replace(in_turn, tile_m=64)
    elif exponentials and problem.m * problem.n >= MANY_ELEMENTS:
        tile = replace(in_turn, tile_n=192)
    return (tile,)


# -- choices
def least(problem: MatmulProblem, configs: Sequence[Tile], target: Target) -> Tile:
    """The first of them, by the cost model, that can run a problem on a target. Raises ProblemError when none can."""
    ordered = sorted(configs, key=lambda c: seconds(problem, c, target))
    return first_fitting(ordered, lambda c: violations_of(c, problem, target), "no matmul kernel takes this problem")


def choose(problem: MatmulProblem, target: Target, *, whole: bool = False) -> tuple[Production, str]:
    """The configuration for a problem on a target, and why. Raises ProblemError when none fits.

    ``whole``: of those that never cut the sum of a tile, and so need no memory of their own.
    """
    tiles = candidates_sm90(problem) if target.has_wgmma else ()
    configs = [c for c in (*tiles, *candidates_sm80(problem)) if not (whole and c.cut)]
    config = least(problem, configs, target)
    expected = seconds(problem, config, target)
    reason = f"the least of {len(configs)} by the cost model, about {expected * 1e6:.0f} µs; untuned"
    bulk, reasons = (tiles, []) if config in tiles else fitting(problem, tiles, target)
    return config, reason if bulk else reason + _refused(reasons)


def choose_for_rows(problem: MatmulProblem, target: Target, *, exponentials: bool = False) -> tuple[Production, str]:
    """The choice of :func:`choose` for a product whose rows are reduced and which is not stored: K is never cut.

    ``exponentials``: the reduction takes one for each element.
    """
    bulk, reasons = fitting(problem, for_rows_sm90(problem, exponentials) if target.has_wgmma else (), target)
    if bulk:
        return bulk[0], "wgmma's tile for reductions of rows; untuned"
    config, why = general_for_rows(problem, target)
    return config, why + _refused(reasons)


def general_for_rows(problem: MatmulProblem, target: Target) -> tuple[MatmulSm80, str]:
    """The choice of :func:`choose_for_rows` among ``mma.sync`` configurations alone."""
    configs = candidates_sm80(problem)
    config = least(problem, configs, target)
    return replace(config, split_k=1, stream_k=False), f"the least of {len(configs)} by the cost model; untuned"


def _refused(reasons: list[str]) -> str:
    """Why ``wgmma`` does not multiply a problem whose rows and columns would fill its tiles."""
    return f"; mma.sync, as {reasons[0]}" if reasons else ""
