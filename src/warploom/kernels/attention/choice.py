"""Which configuration runs an attention problem when nobody has tuned for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from warploom.core.dtypes import bf16
from warploom.core.errors import ProblemError
from warploom.core.targets import Target
from warploom.kernels.attention.decode import Decode, decode_configuration
from warploom.kernels.attention.forward_sm80 import ForwardSm80
from warploom.kernels.attention.forward_sm90 import ROWS, ForwardSm90, as_packed, unlisted
from warploom.kernels.attention.problem import ArrayStrides, AttentionConfig, AttentionProblem
from warploom.kernels.settings import first_fitting, fitting, violations_of

PackedConfig = ForwardSm90 | ForwardSm80
Tiles = TypeVar("Tiles", bound=PackedConfig)
PACKED_KINDS = (ForwardSm90, ForwardSm80)
"""What a caller may ask for of packed sequences."""
KINDS = (*PACKED_KINDS, Decode, "attention")
"""The same of sequences of one length, and what other packages add to attention."""
CachedConfig = Decode | ForwardSm90
CACHED_KINDS = (Decode, ForwardSm90)
"""The same of sequences on a cache."""
_WIDE_HEAD = 128
"""Above this head_dim a warp's registers hold the output of 16 query rows, not 32."""
ANY = 1 << 31
MULTIPROCESSORS = 132
"""Of an H200: what a configuration is chosen for where nobody says which GPU."""
SHARED_ELEMENTS = {"sm_90a": 2560, "sm_80": 5900}
"""Query elements that an SM multiplies by keys which all SMs share, while a tile of the kernels for this architecture
passes as many keys by itself (benchmarks/few_queries_cells.py)."""
JOINING_KEYS = {"sm_90a": 640, "sm_80": 480}
"""What a tile of the kernels for this architecture passes while parts are put together."""
_NARROW_HEAD = 64
"""Below this head_dim a row takes as long: its scores are as many."""
_SHORT = 256
"""Below so many keys the smallest tiles of ``mma.sync``, several on an SM, beat those of one ``wgmma`` consumer."""

_BY_LENGTH: dict[tuple[int, bool], tuple[tuple[int, dict[str, Any]], ...]] = {
    (64, False): (
        (1024, {"stages": 3, "turns": False}),
        (4096, {"consumers": 3, "stages": 3, "q_in_registers": False}),
        (ANY, {"consumers": 3, "turns": False, "q_in_registers": False}),
    ),
    (64, True): (
        (512, {"tile_n": 64, "stages": 3, "skip_masked": True}),
        (1024, {"stages": 3}),
        (8192, {"consumers": 3, "stages": 3, "q_in_registers": False, "skip_masked": True}),
        (ANY, {"consumers": 3, "turns": False, "q_in_registers": False, "skip_masked": True}),
    ),
    (128, False): ((ANY, {}),),
    (128, True): (
        (512, {"q_in_registers": False, "skip_masked": True}),
        (8192, {}),
        (
            ANY,
            {
                "consumers": 3,
                "tile_n": 64,
                "persistent": False,
                "q_in_registers": False,
                "skip_masked": True,
                "sum_column": False,
            },
        ),
    ),
    (192, False): ((ANY, {"tile_n": 96, "persistent": False, "q_in_registers": False}),),
    (192, True): ((ANY, {"tile_n": 96, "persistent": False, "q_in_registers": False}),),
    (256, False): (
        (512, {"tile_n": 48, "turns": False, "q_in_registers": False}),
        (8192, {"tile_n": 64, "turns": False, "persistent": False, "q_in_registers": False}),
        (ANY, {"tile_n": 80, "persistent": False, "q_in_registers": False}),
    ),
    (256, True): (
        (1024, {"tile_n": 48, "q_in_registers": False, "skip_masked": True}),
        (8192, {"tile_n": 64, "turns": False, "persistent": False, "q_in_registers": False, "skip_masked": True}),
        (ANY, {"tile_n": 64, "turns": False, "persistent": False, "q_in_registers": False}),
    ),
}
"""By (the width that head_dim fits, whether rows see different ends): up to so many queries, what differs from the
default. The fastest of some forty on an H200 at 16384 tokens (benchmarks/sweep_h200.py)."""

_LONG_BLOCKS = {"tile_n": 128, "persistent": False, "q_in_registers": False, "sum_column": False}
_APART: dict[tuple[int, int, bool], tuple[tuple[int, dict[str, Any]], ...]] = {
    (192, 128, False): ((ANY, _LONG_BLOCKS),),
    (192, 128, True): ((ANY, _LONG_BLOCKS),),
    (128, 64, False): ((ANY, {"consumers": 3, "q_in_registers": False, "sum_column": False}),),
}
"""The same by (head_dim, V's head_dim, whether rows see different ends) where the two differ and leave room for longer
blocks, or for more consumers, than the wider one does (benchmarks/head_cells.py)."""


def candidates(problem: AttentionProblem, target: Target) -> tuple[PackedConfig, ...]:
    """Configurations for a problem, the fastest per multiply first."""
    base = ForwardSm80(head_dim=problem.head_dim, dtype=problem.dtype, v_dim=problem.v_dim)
    if max(problem.head_dim, problem.value_dim) > _WIDE_HEAD:
        wide = replace(base, tile_m=128)
        narrow = replace(wide, tile_m=64, num_warps=4)
        general = (wide, replace(wide, tile_n=32), narrow, replace(narrow, tile_n=32))
    else:
        small = replace(base, tile_m=64, num_warps=4)
        general = (base, replace(base, tile_m=128, num_warps=4), small, replace(small, tile_n=32))
    return (*candidates_sm90(problem), *general) if target.has_wgmma else general


def candidates_sm90(problem: AttentionProblem) -> tuple[ForwardSm90, ...]:
    """``wgmma`` configurations: what won for the length, and one that has room for what changes scores.

    At head_dim 64, 192 rows share a block of keys between three consumers: a third less to read from the L2 and from
    shared memory, which is what counts at the power limit. Their registers hold no Q, and short sequences have too few
    such tiles. From 256 on, short blocks leave fewer masked scores, and two Q tiles have room beside them.
    """
    widths = [w for w in (64, 128, 192, 256) if max(problem.head_dim, problem.value_dim) <= w]
    if not widths:
        return ()
    columns = problem.dtype is bf16 and problem.value_dim in (64, 128) and not problem.lse
    base = ForwardSm90(head_dim=problem.head_dim, dtype=problem.dtype, v_dim=problem.v_dim, sum_column=columns)
    ends = problem.right is not None
    rows = _APART.get((problem.head_dim, problem.value_dim, ends)) or _BY_LENGTH[widths[0], ends]
    left, right = problem.left, problem.right
    length = problem.q_len
    chunk = ends and widths[0] == 64 and length > _SHORT and length * problem.planes > ROWS * MULTIPROCESSORS
    if chunk or widths[0] == 256:  # of a prompt, with tiles for every SM; where blocks are short, for few masked scores
        length = max(length, problem.kv_len)
    seen = length if left is None or right is None else min(length, left + right + 1)
    tuned = next(replace(base, **flags) for most, flags in rows if seen <= most)
    if ends and widths[0] == problem.value_dim == 128 and not columns:  # the row sums take the registers that Q would
        tuned = replace(tuned, q_in_registers=False)
    if tuned.consumers == 3 and problem.changes:
        tuned = replace(base, stages=3 if widths[0] == 64 else 2)
    return (tuned,) if problem.kv_len < _SHORT else (tuned, replace(tuned, consumers=1))


def rounds(config: AttentionConfig, planes: int, q_len: int, multiprocessors: int) -> int:
    """The number of tiles that the busiest SM takes."""
    return -(-(-(-q_len // config.tile_m) * planes) // multiprocessors)


def narrowed(config: Tiles, planes: int, q_len: int, multiprocessors: int) -> Tiles:
    """The narrow one where it takes no more rounds: its steps are shorter (benchmarks/few_queries_cells.py)."""
    few = rounds(config.narrow, planes, q_len, multiprocessors) <= rounds(config, planes, q_len, multiprocessors)
    return config.narrow if few else config


def spared_keys(config: AttentionConfig, rows: float, keys: int, passed: float) -> float:
    """Keys that the busiest SM has less to pass where all SMs share those of a head, than with tiles of ``config``.

    ``rows``: queries of heads that an SM multiplies by ``keys`` then; ``passed``: keys of its tiles otherwise.
    """
    return passed - keys * rows * max(_NARROW_HEAD, config.head_dim) / SHARED_ELEMENTS[config.requires]


def choose(
    problem: AttentionProblem, target: Target, multiprocessors: int = MULTIPROCESSORS
) -> tuple[PackedConfig | Decode, str]:
    """The configuration for a problem on a target, and why. Raises ProblemError when none fits.

    Of the tiles that fit it takes the first whose query tile is not mostly beyond the last row. CTAs that have one each
    need not be ready for another. Where tiles would leave most SMs idle, all SMs share the keys.
    """
    takes, reasons = fitting(problem, candidates(problem, target), target)
    if not takes:
        raise ProblemError("no attention kernel takes this problem: " + "; ".join(reasons))
    small = [c for c in takes if c.tile_m < 2 * problem.q_len] or [min(takes, key=lambda c: c.tile_m)]
    config = narrowed(small[0], problem.planes, problem.q_len, multiprocessors)
    if rounds(config, problem.planes, problem.q_len, multiprocessors) <= 1:
        config = config.once
    if _shared(problem, config, multiprocessors):
        decode = decode_configuration(problem.on_cache, target)
        if not violations_of(decode, problem, target):
            return decode, f"{problem.q_len} queries on {problem.kv_len} keys: all SMs share the keys"
    skipped = f"; larger ones do not fit ({reasons[0]})" if reasons and takes[0] is small[0] else ""
    return config, f"the first of the default tiles that suits {problem.q_len} queries, untuned{skipped}"


def choose_packed(problem: AttentionProblem, target: Target) -> PackedConfig:
    """The configuration for packed sequences on a target. Raises ProblemError when none fits."""
    none = "no attention kernel takes this problem"
    return first_fitting(candidates(problem.typical, target), lambda c: violations_of(c, problem, target), none)


def choose_cached(
    problem: AttentionProblem, operands: ArrayStrides, target: Target, multiprocessors: int
) -> tuple[CachedConfig, str]:
    """The configuration for a problem on a cache when nobody asks for another, and why: never by what lengths say.

    Few queries take those of :mod:`.decode`; many of a sequence are cut into tiles, each with all of its keys.
    """
    p, batch = problem, max(1, problem.batch)
    queries = max(1, p.q_len // batch if p.cache.packed else p.q_len)
    if target.has_wgmma and not unlisted(p, operands):
        packed, planes = as_packed(p, operands), batch * p.heads
        takes = [c for c in candidates_sm90(packed.typical) if not violations_of(c, packed, target)]
        for wide in takes[:1]:
            tiled = narrowed(wide, planes, queries, multiprocessors)
            turns = rounds(tiled, planes, queries, multiprocessors)
            rows = planes * queries / multiprocessors
            if spared_keys(tiled, rows, p.kv_len, turns * p.kv_len) < 0:  # both have two launches
                return tiled, f"{queries} queries of each sequence: tiles of {tiled.tile_m}"
    return decode_configuration(problem, target), "by head_dim and rows"


def violations_on_cache(config: CachedConfig, problem: AttentionProblem, operands: ArrayStrides) -> list[str]:
    """The constraints that a problem on a cache with such arrays violates; empty if the kernels take it."""
    if config.shares_keys is True:
        return config.violations(problem)
    return config.violations_on_cache(problem, operands)


def _shared(problem: AttentionProblem, config: AttentionConfig, multiprocessors: int) -> bool:
    """Whether all SMs should share the keys of a head, rather than that a tile has all of them."""
    p, left = problem, problem.left
    turns = rounds(config, p.planes, p.q_len, multiprocessors)
    blocks = p.visited_blocks(config.tile_m, config.tile_n)
    passed = config.tile_n * (max(blocks, default=0) if turns <= 1 else turns * sum(blocks) / len(blocks))
    keys = p.kv_len if left is None else min(p.kv_len, p.q_len + left)
    spared = spared_keys(config, p.planes * p.q_len / multiprocessors, keys, passed)
    return 0 < turns * JOINING_KEYS[config.requires] <= spared
