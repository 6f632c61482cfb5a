"""Which configuration runs a backward pass of attention when nobody asks for one."""

from __future__ import annotations

from dataclasses import replace

from warploom.core.targets import Target
from warploom.kernels.attention.backward_sm80 import BackwardSm80
from warploom.kernels.attention.backward_sm90 import KEYS, BackwardSm90
from warploom.kernels.attention.backward_wide import BackwardWideSm90
from warploom.kernels.attention.problem import AttentionProblem, BackwardProblem
from warploom.kernels.settings import first_fitting, violations_of

BackwardConfig = BackwardSm90 | BackwardWideSm90 | BackwardSm80
KINDS = (BackwardSm90, BackwardWideSm90, BackwardSm80)
"""What a caller may ask for."""
PACKED_KINDS = (BackwardSm90, BackwardSm80)
"""The same of packed sequences."""
_ROWS = ((64, 128, 4096), (96, 96, 1280))
"""On sm_90a up to this head_dim registers hold the scores of so many query rows beside dK and dV; and up to how many
query rows that see a key, in the mean, CTAs take one tile after another."""
_LONG = 2048
"""From so many queries on it matters which heads run at a time: what they read does not stay in the L2 by itself."""
MANY_TILES = 2048
"""Of keys, from which on they do: some 16 for each multiprocessor."""
_ROOMY_HEAD = 192
"""Up to this head_dim blocks of 64 keys have room beside 128 rows of Q and dO, and registers for parts of K and V."""
_ROOMY_WIDTH = 384
"""Up to so many columns of Q and dO shared memory has three stages of both."""
_WIDE_HEAD = 128
"""Above this head_dim warpgroups share keys on sm_90a, and a tile has too few of them for two CTAs elsewhere."""


def candidates(problem: BackwardProblem, target: Target) -> tuple[BackwardConfig, ...]:
    """Configurations for a problem, the fastest first; of packed sequences by a typical length."""
    if problem.forward.listed:
        return tiles_of_keys(problem.typical, target, listed=True)
    wide = target.has_wgmma and _widest(problem) > _WIDE_HEAD
    return (*([_wide(problem.forward)] if wide else ()), *tiles_of_keys(problem, target))


def tiles_of_keys(
    problem: BackwardProblem, target: Target, *, listed: bool = False
) -> tuple[BackwardSm90 | BackwardSm80, ...]:
    """Configurations of one kernel for all products; ``listed``: for tiles that the GPU lists."""
    general = _general(problem, target)
    if not target.has_wgmma or _widest(problem) > _WIDE_HEAD:
        return general
    p = problem.forward
    plain = in_order(_narrow(problem), p, listed=listed)
    count = MANY_TILES if listed else -(-p.kv_len // KEYS) * p.kv_heads * p.batch  # the host does not know of a list
    return (*_persistent(plain, p, count), plain, *general)


def _widest(problem: BackwardProblem) -> int:
    return max(problem.forward.head_dim, problem.forward.value_dim)


def _general(problem: BackwardProblem, target: Target) -> tuple[BackwardSm80, ...]:
    """For ``mma.sync``: two CTAs on a multiprocessor or one of more warps, then those that need less shared memory."""
    p, widest = problem.forward, _widest(problem)
    base = BackwardSm80(head_dim=p.head_dim, dtype=p.dtype, v_dim=p.v_dim, in_turn=problem.deterministic)
    few, less, low = replace(base, num_warps=4), replace(base, warp_keys=16), replace(base, warp_keys=16, tile_m=32)
    two = widest <= _WIDE_HEAD and 2 * (few.shared_bytes + target.shared_reserved_per_block) <= target.shared_per_sm
    held = 3 if _WIDE_HEAD < widest <= _ROOMY_HEAD else 0
    small = replace(low, num_warps=4)
    return few if two else replace(base, held=held), less, low, small, replace(small, tile_m=16)


def _narrow(problem: BackwardProblem) -> BackwardSm90:
    """Registers have room for as many query rows; else shared memory has room for the sums of two blocks."""
    p, widest = problem.forward, _widest(problem)
    base = BackwardSm90(head_dim=p.head_dim, dtype=p.dtype, v_dim=p.v_dim, in_turn=problem.deterministic)
    for most, rows, _ in _ROWS if not p.changes else ():
        if widest <= most:
            return replace(base, tile_m=rows)
    return replace(base, alternating=widest > _ROWS[0][0])


def _wide(p: AttentionProblem) -> BackwardWideSm90:
    """Loads are what the kernels wait for: stages where shared memory has room, and operands that stay in registers.

    Without a mask, tiles of one plane are as long as each other and read the same blocks at the same time.
    """
    base = BackwardWideSm90(head_dim=p.head_dim, dtype=p.dtype, v_dim=p.v_dim)
    stages = 3 if base.width + base.value_width <= _ROOMY_WIDTH else 2
    planes = 1 if not p.windowed and p.q_len >= _LONG else 16
    base = replace(base, stages=stages, side_by_side=planes)
    if max(p.head_dim, p.value_dim) <= _ROOMY_HEAD:
        return replace(base, tile_n=64, held=6)
    return replace(base, tile_n=48, held_queries=6)


def in_order(config: BackwardSm90, p: AttentionProblem, *, listed: bool = False) -> BackwardSm90:
    """The configuration with the order of tiles and heads in which what tiles share stays in the L2.

    Tiles of a plane that visit a block one soon after the other find it there. Under a causal mask the tiles of later
    keys are shorter, by as many steps as heads share them where all heads of a block are visited, and after the first
    round their distances are those; one head after the other they meet again at each, where the shorter ones wait, the
    less, the fewer run at a time. Tiles of narrow heads are shorter by about a step: in turn they wait for each other,
    the less, the more planes share the multiprocessors; in no order they begin at their own rows, where they meet at no
    block, as all ``listed`` ones do. Without a mask nothing brings tiles together again, so the planes of a group fit.
    """
    left, right = p.left, p.right
    if right is None:
        return replace(config, side_by_side=1) if left is None else config
    if listed and not config.in_turn:
        config = replace(config, rising=True)
    if left is not None:
        return config
    if p.heads > p.kv_heads and p.q_len >= _LONG:
        return replace(config, side_by_side=16, by_heads=True)
    if max(p.head_dim, p.value_dim) > _ROWS[-1][0]:
        return config
    if config.in_turn:
        return replace(config, side_by_side=32 if p.q_len <= 4 * _LONG else 16)
    return replace(config, rising=True)


def _persistent(config: BackwardSm90, p: AttentionProblem, tiles: int) -> list[BackwardSm90]:
    """The configuration that takes one tile after another, where that pays of so many tiles.

    Tiles with few blocks of query rows spend much of their time on their first and last; among few tiles whose work
    differs, those that become free should take the next.
    """
    few = next((few for most, _, few in _ROWS if max(p.head_dim, p.value_dim) <= most), 0)
    long = p.visible_scores * p.heads // p.kv_heads > few * p.kv_len
    if long or tiles < MANY_TILES:
        return []
    if config.tile_m < 128:  # there is room for the keys of two tiles beside fewer query rows
        config = replace(config, tile_m=64, alternating=True)
    return [replace(config, persistent=True)]


def choose(problem: BackwardProblem, target: Target) -> tuple[BackwardConfig, str]:
    """The configuration for a problem on a target, and why. Raises ProblemError when none fits."""
    what = "these packed sequences" if problem.forward.listed else "this problem"
    none = f"no backward kernel of attention for {target.name} takes {what}"
    config = first_fitting(candidates(problem, target), lambda c: violations_of(c, problem, target), none)
    return config, "the first of the default tiles that fits"
