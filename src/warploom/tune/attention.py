"""Attention as the tuner sees it: its kernels' tiles."""

from __future__ import annotations

from collections.abc import Iterator

from warploom.core.errors import ProblemError
from warploom.core.targets import Target
from warploom.kernels.attention.choice import choose
from warploom.kernels.attention.forward_sm80 import ForwardSm80
from warploom.kernels.attention.forward_sm90 import ForwardSm90
from warploom.kernels.attention.problem import ArrayStrides, AttentionConfig, AttentionProblem
from warploom.kernels.settings import violations_of
from warploom.kernels.source import KernelSource
from warploom.measure.attention import AttentionOnGpu
from warploom.tune.operation import TunableOperation, combinations


def _choose(problem: AttentionProblem, target: Target) -> tuple[AttentionConfig, str]:
    config, reason = choose(problem, target)
    if config.shares_keys is True:
        raise ProblemError(f"nothing to tune: {reason}, by two kernels that are the same for all lengths")
    return config, reason


def space(problem: AttentionProblem, target: Target) -> Iterator[AttentionConfig]:
    """Every tile of the kernels for the architecture, the fastest kernel first."""
    default, _ = _choose(problem, target)
    general = ForwardSm80(head_dim=problem.head_dim, dtype=problem.dtype)
    if target.has_wgmma:
        base = ForwardSm90(head_dim=problem.head_dim, dtype=problem.dtype)
        base = default if default.requires == base.requires else base
        yield from combinations(base, dict.fromkeys(("consumers", "tile_n", "stages", "turns", "persistent")))
    yield from combinations(general, dict.fromkeys(("tile_m", "tile_n", "num_warps", "stages")))


def _source(problem: AttentionProblem, config: AttentionConfig) -> KernelSource:
    return config.calls(problem, ArrayStrides.contiguous(problem), 1)[0].source


ATTENTION = TunableOperation(
    frozenset({"dtype", "head_dim"}), _choose, space, violations_of, _source, (ForwardSm90, ForwardSm80), AttentionOnGpu
)
"""Attention forward."""
