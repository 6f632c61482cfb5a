"""Which configuration runs a problem when nobody has tuned for it."""

from __future__ import annotations

from dataclasses import replace

from warploom.core.errors import ProblemError
from warploom.core.targets import Target
from warploom.kernels.attention.config import AttentionConfig
from warploom.kernels.attention.ladder import BEST
from warploom.kernels.attention.problem import AttentionProblem

_WIDE_HEAD = 128
"""Above this head_dim a warp's registers hold the output of 16 query rows, not 32."""


def candidates(problem: AttentionProblem) -> tuple[AttentionConfig, ...]:
    """Configurations for a problem, the fastest per multiply first."""
    base = replace(BEST, head_dim=problem.head_dim, dtype=problem.dtype)
    if problem.head_dim > _WIDE_HEAD:
        wide = replace(base, tile_m=128, tile_n=64, num_warps=8)
        narrow = replace(wide, tile_m=64, num_warps=4)
        sizes = (wide, replace(wide, tile_n=32), narrow, replace(narrow, tile_n=32))
    else:
        small = replace(base, tile_m=64, num_warps=4)
        sizes = (base, replace(base, tile_m=128, num_warps=4), small, replace(small, tile_n=32))
    return (*sizes, *(replace(c, stages=1) for c in sizes[1:]))


def choose(problem: AttentionProblem, goal: Target) -> tuple[AttentionConfig, str]:
    """The configuration for a problem on a target, and why. Raises ProblemError when none fits.

    Of the tiles that fit it takes the first whose query tile is not mostly beyond the last row.
    """
    fitting: list[AttentionConfig] = []
    reasons: list[str] = []
    for config in candidates(problem):
        problems = config.check(goal) + problem.misfits(config)
        if problems:
            reasons.append(problems[0])
        else:
            fitting.append(config)
    if not fitting:
        raise ProblemError("no attention kernel takes this problem: " + "; ".join(dict.fromkeys(reasons)))
    small = [c for c in fitting if c.tile_m < 2 * problem.q_len] or [min(fitting, key=lambda c: c.tile_m)]
    skipped = f"; larger ones do not fit ({reasons[0]})" if reasons and fitting[0] is small[0] else ""
    return small[0], f"the first of the default tiles that suits {problem.q_len} queries, untuned{skipped}"
