"""What a call of ``attention`` would run: configuration, kernel and the numbers it takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from warploom.core.errors import ConfigError
from warploom.core.targets import Target
from warploom.interop.arrays import ArrayView
from warploom.kernels.attention.choice import adapted, choose, parse_config
from warploom.kernels.attention.config import AttentionConfig
from warploom.kernels.attention.hopper_config import HopperConfig
from warploom.kernels.attention.problem import AnyConfig, AttentionProblem, TensorStrides
from warploom.ops.attention_arrays import Inputs, strides_of
from warploom.ops.attention_kernels import recipe_for
from warploom.ops.backends import Grid, gpu_name
from warploom.ops.options import configuration
from warploom.ops.places import Place
from warploom.ops.recipes import Recipe
from warploom.winners.classes import attention_class
from warploom.winners.store import find_winner

if TYPE_CHECKING:
    from warploom.ir.program import Program


@dataclass(frozen=True)
class AttentionPlan:
    """What a call of :func:`attention` would run: nothing has been compiled or launched yet."""

    problem: AttentionProblem
    config: AnyConfig
    reason: str
    target: str
    device: str
    strides: tuple[TensorStrides, ...]
    scalars: dict[str, int]
    layout: str
    multiprocessors: int

    @property
    def grid(self) -> Grid:
        """CTAs along x, y and z."""
        return self.problem.grid(self.config, self.multiprocessors)

    @property
    def recipe(self) -> Recipe:
        """The kernel by what it is traced from."""
        return recipe_for(self.problem, self.config, self.strides, self.layout)

    @cached_property
    def program(self) -> Program:
        """The traced kernel."""
        return self.recipe.program

    @cached_property
    def cuda(self) -> str:
        """The CUDA C++ that would be compiled."""
        from warploom.cuda.printer import print_cuda

        return print_cuda(self.program)

    def __str__(self) -> str:
        return f"{self.config}\n  on {self.device} ({self.target}), grid {self.grid}: {self.reason}"


def plan_for(inputs: Inputs, out: ArrayView, layout: str, config: Any) -> AttentionPlan:
    """The plan for checked inputs and an output in a layout. Raises ConfigError for a ``config`` that does not fit."""
    problem = inputs.problem
    config, place = configured(inputs, config)
    goal = place.goal
    q_strides, k_strides, v_strides = (strides_of(view, layout) for view in inputs.all)
    strides = q_strides, k_strides, v_strides, strides_of(out, layout)
    if config is None:
        won = None if place.gpu is None else tuned(problem, goal, place.gpu)
        config, reason = won or choose(problem, goal)
    else:
        reason = "asked for by the caller"
    scalars = problem.scalars(config, *strides, multiprocessors=place.multiprocessors)
    return AttentionPlan(
        problem, config, reason, goal.name, str(place), strides, scalars, layout, place.multiprocessors
    )


def configured(inputs: Inputs, config: Any) -> tuple[AnyConfig | None, Place]:
    """The configuration asked for, read, and where it runs. Raises ConfigError for one that does not fit."""
    if config is not None:
        config = configuration(config, (AttentionConfig, HopperConfig), parse_config)
    place = Place.of(inputs.q.device, wgmma=isinstance(config, HopperConfig))
    return None if config is None else read_config(config, inputs.problem, place.goal), place


def read_config(config: Any, problem: AttentionProblem, goal: Target | None = None) -> AnyConfig:
    """A configuration, or its notation. Raises ConfigError for one that does not fit the problem (and the target)."""
    found = configuration(config, (AttentionConfig, HopperConfig), parse_config)
    problems = list(dict.fromkeys(found.check(goal) + problem.misfits(found)))
    if problems:
        raise ConfigError(f"{found} does not fit: " + "; ".join(problems))
    return found


def tuned(problem: AttentionProblem, goal: Target, device: int) -> tuple[AnyConfig, str] | None:
    """The configuration that won on this GPU for such problems, and why; None where nobody has tuned for them."""
    found = find_winner(gpu_name(device), attention_class(problem))
    if found is None:
        return None
    try:
        config = parse_config(found.winner.config)
    except ConfigError:  # flags that this version does not know
        return None
    config = adapted(config, problem)
    return None if config.check(goal) or problem.misfits(config) else (config, found.reason)
