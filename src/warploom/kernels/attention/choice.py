"""Which configuration runs an attention problem when nobody has tuned for it."""

from __future__ import annotations

from dataclasses import replace

from warploom.core.dtypes import bf16
from warploom.core.errors import ConfigError, ProblemError
from warploom.core.targets import Target
from warploom.kernels.attention.problem import AttentionConfig, AttentionProblem
from warploom.kernels.attention.sm80 import ForwardSm80
from warploom.kernels.attention.sm90 import ForwardSm90
from warploom.tile.panels import PANEL_COLS

_WIDE_HEAD = 128
"""Above this head_dim a warp's registers hold the output of 16 query rows, not 32."""
_LONG = 2048
"""Queries from which on three consumers won at head_dim 64 on an H200 (benchmarks/sweep_h200.py)."""
_SHORT = 1024
"""Queries up to which, under a causal mask, narrow blocks won at head_dim 256: fewer masked scores."""


def candidates(problem: AttentionProblem, target: Target) -> tuple[AttentionConfig, ...]:
    """Configurations for a problem, the fastest per multiply first."""
    base = ForwardSm80(head_dim=problem.head_dim, dtype=problem.dtype)
    if problem.head_dim > _WIDE_HEAD:
        wide = replace(base, tile_m=128)
        narrow = replace(wide, tile_m=64, num_warps=4)
        general = (wide, replace(wide, tile_n=32), narrow, replace(narrow, tile_n=32))
    else:
        small = replace(base, tile_m=64, num_warps=4)
        general = (base, replace(base, tile_m=128, num_warps=4), small, replace(small, tile_n=32))
    return (*_sm90_candidates(problem), *general) if target.has_wgmma else general


def _sm90_candidates(problem: AttentionProblem) -> tuple[ForwardSm90, ...]:
    """``wgmma`` configurations: more query rows per CTA where sequences are long, one Q tile where two do not fit.

    At head_dim 64, 192 rows share a block of keys between three consumers: a third less to read from the L2 and from
    shared memory, which is what counts at the power limit. Their registers hold no Q, and short sequences have too few
    such tiles.
    """
    base = ForwardSm90(head_dim=problem.head_dim, dtype=problem.dtype)
    causal, length = problem.window[1] is not None, problem.q_len
    if problem.head_dim > 192:
        single = replace(base, tile_n=80, persistent=False, q_in_registers=False)
        narrow = replace(single, tile_n=48, persistent=True, skip_hidden=True)
        return (narrow, single) if causal and length <= _SHORT else (single,)
    if problem.head_dim > 128:
        return (replace(base, tile_n=96, persistent=False, q_in_registers=False),)
    columns = problem.dtype is bf16 and problem.head_dim % PANEL_COLS == 0 and not problem.lse
    summed = replace(base, sum_column=columns)
    if problem.head_dim > 64:
        return (summed,)
    ring = replace(summed, stages=3)
    wide = replace(ring, consumers=3, q_in_registers=False, skip_hidden=causal)
    roomy = problem.softcap is None  # whose tanh needs registers that three consumers do not have
    return (wide, ring) if length >= _LONG and roomy else (ring,)


def choose(problem: AttentionProblem, target: Target) -> tuple[AttentionConfig, str]:
    """The configuration for a problem on a target, and why. Raises ProblemError when none fits.

    Of the tiles that fit it takes the first whose query tile is not mostly beyond the last row.
    """
    fitting: list[AttentionConfig] = []
    reasons: list[str] = []
    for config in candidates(problem, target):
        problems = config.check(target) + config.misfits(problem)
        if problems:
            reasons.append(problems[0])
        else:
            fitting.append(config)
    if not fitting:
        raise ProblemError("no attention kernel takes this problem: " + "; ".join(dict.fromkeys(reasons)))
    small = [c for c in fitting if c.tile_m < 2 * problem.q_len] or [min(fitting, key=lambda c: c.tile_m)]
    skipped = f"; larger ones do not fit ({reasons[0]})" if reasons and fitting[0] is small[0] else ""
    return small[0], f"the first of the default tiles that suits {problem.q_len} queries, untuned{skipped}"


def parse_config(text: str) -> AttentionConfig:
    """A configuration of any attention kernel from its notation. Raises ConfigError for what it does not know."""
    from warploom.kernels.attention.ladder_config import RungSm80
    from warploom.kernels.attention.ladder_sm90 import RungSm90

    word = text.partition("(")[0].strip()
    for kind in (ForwardSm90, ForwardSm80, RungSm90):
        if word == kind.word:
            return kind.parse(text)
    if word:
        known = ", ".join(kind.word for kind in (ForwardSm90, ForwardSm80, RungSm90))
        raise ConfigError(f"{text!r} is no configuration; write {known} or the seeds' notation, as {RungSm80()}")
    return RungSm80.parse(text)
