"""Which configuration runs a problem when nobody has tuned for it."""

from __future__ import annotations

from dataclasses import replace

from warploom.core.dtypes import bf16
from warploom.core.errors import ProblemError
from warploom.core.targets import Target
from warploom.kernels.attention.config import AttentionConfig
from warploom.kernels.attention.hopper_config import HopperConfig
from warploom.kernels.attention.ladder import BEST
from warploom.kernels.attention.problem import AnyConfig, AttentionProblem
from warploom.kernels.mapped import PANEL_COLS

_WIDE_HEAD = 128
"""Above this head_dim a warp's registers hold the output of 16 query rows, not 32."""


_LONG = 2048
"""Queries from which on three consumers won at head_dim 64 on an H200 (benchmarks/sweep_h200.py)."""

_SHORT = 1024
"""Queries up to which, under a causal mask, narrow blocks won at head_dim 256: fewer hidden scores."""


def candidates(problem: AttentionProblem, goal: Target) -> tuple[AnyConfig, ...]:
    """Configurations for a problem, the fastest per multiply first."""
    base = replace(BEST, head_dim=problem.head_dim, dtype=problem.dtype)
    if problem.head_dim > _WIDE_HEAD:
        wide = replace(base, tile_m=128, tile_n=64, num_warps=8)
        narrow = replace(wide, tile_m=64, num_warps=4)
        sizes = (wide, replace(wide, tile_n=32), narrow, replace(narrow, tile_n=32))
    else:
        small = replace(base, tile_m=64, num_warps=4)
        sizes = (base, replace(base, tile_m=128, num_warps=4), small, replace(small, tile_n=32))
    general = (*sizes, *(replace(c, stages=1) for c in sizes[1:]))
    return (*_hopper_candidates(problem), *general) if goal.has_wgmma else general


def _hopper_candidates(problem: AttentionProblem) -> tuple[HopperConfig, ...]:
    """``wgmma`` configurations: more query rows per CTA where sequences are long, one Q buffer where two do not fit.

    Maxima are always carried. At head_dim 64, 192 rows share a block of keys between three consumers: a third less to
    read from the L2 and from shared memory, which is what counts at the power limit. Their registers hold no Q, and
    short sequences have too few such tiles.
    """
    base = HopperConfig(head_dim=problem.head_dim, dtype=problem.dtype, carry_max=True, hold=False)
    causal, length = problem.window[1] is not None, problem.q_len
    if problem.head_dim > 192:
        single = replace(base, tile_n=80, flat=False, q_in_registers=False)
        narrow = replace(single, tile_n=48, flat=True, skip_hidden=True)
        return (narrow, single) if causal and length <= _SHORT else (single,)
    if problem.head_dim > 128:
        return (replace(base, tile_n=96, flat=False, q_in_registers=False),)
    summed = replace(base, sum_column=problem.dtype is bf16 and problem.head_dim % PANEL_COLS == 0)
    if problem.head_dim > 64:
        return (summed,)
    ring = replace(summed, stages=3)
    wide = replace(ring, consumers=3, q_in_registers=False, skip_hidden=causal)
    roomy = problem.softcap is None  # whose tanh needs registers that three consumers do not have
    return (wide, ring) if length >= _LONG and roomy else (ring,)


def choose(problem: AttentionProblem, goal: Target) -> tuple[AnyConfig, str]:
    """The configuration for a problem on a target, and why. Raises ProblemError when none fits.

    Of the tiles that fit it takes the first whose query tile is not mostly beyond the last row.
    """
    fitting: list[AnyConfig] = []
    reasons: list[str] = []
    for config in candidates(problem, goal):
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


def adapted(config: AnyConfig, problem: AttentionProblem) -> AnyConfig:
    """A configuration that won for a similar problem, for this one's head_dim and element type."""
    found = replace(config, head_dim=problem.head_dim, dtype=problem.dtype)
    if isinstance(found, HopperConfig) and found.sum_column and found.check():
        return replace(found, sum_column=False)  # f16 and widths between the panels' have no room for it
    return found


def parse_config(text: str) -> AnyConfig:
    """A configuration of either generator from its notation. Raises ConfigError for what it does not know."""
    return HopperConfig.parse(text) if text.startswith("wgmma") else AttentionConfig.parse(text)
