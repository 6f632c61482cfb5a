"""What a call of ``attention`` would run: configuration, kernel and the numbers it takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from warploom.interop.arrays import ArrayView, Device
from warploom.kernels.attention.choice import choose, parse_config
from warploom.kernels.attention.decode import Decode, DecodeOperands, DecodeProblem
from warploom.kernels.attention.problem import AttentionConfig, AttentionProblem, Operands
from warploom.kernels.settings import refuse, unsuitable
from warploom.kernels.source import KernelCall
from warploom.ops.attention_arrays import strides_of
from warploom.ops.options import configuration
from warploom.ops.places import Place, decided
from warploom.ops.steps import CallsPlan
from warploom.ops.tuned import tuned

if TYPE_CHECKING:
    from collections.abc import Mapping


ARRAYS = "q", "k", "v", "out"
"""What every kernel is given first; then come the :attr:`~AttentionProblem.vectors`."""


@dataclass(frozen=True)
class AttentionPlan(CallsPlan):
    """What a call of :func:`attention` would run: nothing has been compiled or launched yet."""

    problem: AttentionProblem
    config: AttentionConfig | Decode


def plan_for(problem: AttentionProblem, arrays: Mapping[str, ArrayView], layout: str, config: Any) -> AttentionPlan:
    """The plan for a problem on Q, K, V and an output that lie so. Raises ConfigError for a ``config`` that misfits."""
    config, reason, place = configured(problem, arrays["q"].device, config)
    q, k, v, out = (strides_of(arrays[name], layout) for name in ARRAYS)
    calls = calls_of(config, problem, Operands((q, k, v, out), layout), place.multiprocessors)
    return AttentionPlan(problem, config, reason, place.goal.name, str(place), calls)


def calls_of(
    config: AttentionConfig | Decode, problem: AttentionProblem, operands: Operands, multiprocessors: int
) -> tuple[KernelCall, ...]:
    """The launches of a configuration on arrays that lie so."""
    if isinstance(config, Decode):
        return config.calls(DecodeProblem.of(problem), DecodeOperands.of(problem, operands), multiprocessors)
    call = config.call(problem, operands, multiprocessors)
    return (replace(call, arrays=(*ARRAYS, *problem.vectors)),)


def configured(problem: AttentionProblem, device: Device, config: Any) -> tuple[AttentionConfig | Decode, str, Place]:
    """The configuration, why it runs, and where. Raises ConfigError for one asked for that does not fit."""

    def choice(at: Place) -> tuple[AttentionConfig | Decode, str]:
        return tuned(problem, at.goal, at.gpu, parse_config) or choose(problem, at.goal)

    return decided(problem, device, None if config is None else configuration(config, parse_config), choice)


def refuse_config(config: Any, problem: AttentionProblem) -> None:
    """Raises ConfigError for a configuration, or its notation, that does not fit the problem."""
    found = configuration(config, parse_config)
    refuse(f"{found} does not fit", unsuitable(found, problem, None))
