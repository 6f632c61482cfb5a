"""What a call of ``attention`` would run: configuration, kernel and the numbers it takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from warploom.interop.arrays import ArrayView
from warploom.kernels.attention.choice import choose, parse_config
from warploom.kernels.attention.problem import AttentionConfig, AttentionProblem, Operands
from warploom.kernels.settings import refuse, unsuitable
from warploom.kernels.source import KernelCall
from warploom.ops.attention_arrays import Inputs, strides_of
from warploom.ops.options import configuration
from warploom.ops.places import Place
from warploom.ops.tuned import tuned

if TYPE_CHECKING:
    from warploom.core.targets import Target
    from warploom.ir.program import Program


@dataclass(frozen=True)
class AttentionPlan:
    """What a call of :func:`attention` would run: nothing has been compiled or launched yet."""

    problem: AttentionProblem
    config: AttentionConfig
    reason: str
    target: str
    device: str
    call: KernelCall
    multiprocessors: int

    @property
    def grid(self) -> tuple[int, int, int]:
        """CTAs along x, y and z."""
        return self.call.grid

    @property
    def program(self) -> Program:
        """The traced kernel."""
        return self.call.source.program

    @cached_property
    def cuda(self) -> str:
        """The CUDA C++ that would be compiled."""
        from warploom.cuda.printer import print_cuda

        return print_cuda(self.program)

    def __str__(self) -> str:
        return f"{self.config}\n  on {self.device} ({self.target}), grid {self.grid}: {self.reason}"


def operands_of(inputs: Inputs, out: ArrayView, layout: str) -> Operands:
    """How checked inputs and an output lie."""
    q, k, v = (strides_of(view, layout) for view in inputs.all)
    return Operands((q, k, v, strides_of(out, layout)), layout)


def plan_for(inputs: Inputs, out: ArrayView, layout: str, config: Any) -> AttentionPlan:
    """The plan for checked inputs and an output in a layout. Raises ConfigError for a ``config`` that does not fit."""
    problem = inputs.problem
    config, place = configured(inputs, config)
    target = place.goal
    if config is None:
        config, reason = tuned(problem, target, place.gpu, parse_config) or choose(problem, target)
    else:
        reason = "asked for by the caller"
    call = config.call(problem, operands_of(inputs, out, layout), place.multiprocessors)
    return AttentionPlan(problem, config, reason, target.name, str(place), call, place.multiprocessors)


def configured(inputs: Inputs, config: Any) -> tuple[AttentionConfig | None, Place]:
    """The configuration asked for, read, and where it runs. Raises ConfigError for one that does not fit."""
    if config is not None:
        config = configuration(config, parse_config)
    place = Place.of(inputs.q.device, requires=None if config is None else config.requires)
    return None if config is None else read_config(config, inputs.problem, place.goal), place


def read_config(config: Any, problem: AttentionProblem, target: Target | None = None) -> AttentionConfig:
    """A configuration, or its notation. Raises ConfigError for one that does not fit the problem (and the target)."""
    found = configuration(config, parse_config)
    refuse(f"{found} does not fit", unsuitable(found, problem, target))
    return found
