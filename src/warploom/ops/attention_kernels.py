"""The kernels of attention by what they are traced from. The generators are imported when one is traced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from warploom.core.once import once
from warploom.interop.arrays import ArrayView
from warploom.kernels.attention.config import AttentionConfig
from warploom.kernels.attention.features import PLAIN, AttentionFeatures
from warploom.kernels.attention.hopper_config import HopperConfig
from warploom.kernels.attention.problem import AnyConfig, AttentionProblem, TensorStrides
from warploom.kernels.mapped import PANEL_COLS, MappedArray
from warploom.kernels.specialised import WARPGROUP_ROWS
from warploom.ops.recipes import Recipe

if TYPE_CHECKING:
    from warploom.ir.program import Program


@once(maxsize=256)
def trace(
    config: AttentionConfig,
    features: AttentionFeatures = PLAIN,
    same_strides: bool = True,
    row_strides: tuple[int, ...] | None = None,
) -> Program:
    """The Program of a configuration, traced once per process; ``row_strides`` for one with static strides."""
    from warploom.kernels.attention.forward import attention_forward

    name = f"attention_{config.tile_m}x{config.tile_n}x{config.head_dim}"
    program = attention_forward.trace(
        config=config, features=features, same_strides=same_strides, row_strides=row_strides, name=name
    )
    return replace(program, min_ctas=config.min_ctas, opt_level=config.opt_level)


@once(maxsize=256)
def trace_hopper(config: HopperConfig, features: AttentionFeatures = PLAIN, heads_inside: bool = True) -> Program:
    """The Program of a ``wgmma`` configuration, traced once per process."""
    from warploom.kernels.attention.hopper import attention_hopper

    name = f"attention_wgmma_{config.tile_m}x{config.tile_n}x{config.head_dim}"
    program = attention_hopper.trace(config=config, features=features, heads_inside=heads_inside, name=name)
    return replace(program, opt_level=config.opt_level)


def recipe_for(problem: AttentionProblem, config: AnyConfig, strides: Sequence[TensorStrides], layout: str) -> Recipe:
    """The kernel for a problem whose Q, K, V and O have these strides."""
    if isinstance(config, HopperConfig):
        return Recipe(trace_hopper, (config, problem.features(config), layout == "bshd"))
    row_strides = tuple(s[2] for s in strides) if config.static_strides else None
    return Recipe(trace, (config, problem.features(config), len(set(strides)) == 1, row_strides))


def trace_for(problem: AttentionProblem, config: AnyConfig, strides: Sequence[TensorStrides], layout: str) -> Program:
    """The Program for a problem whose Q, K, V and O have these strides."""
    return recipe_for(problem, config, strides, layout).program


def mapped(config: AnyConfig, layout: str, arrays: Sequence[ArrayView]) -> tuple[MappedArray, ...]:
    """How the TMA sees Q, K, V and O, the first of ``arrays``; nothing for ``mma.sync``."""
    if not isinstance(config, HopperConfig):
        return ()
    rows = WARPGROUP_ROWS, config.tile_n, config.tile_n, WARPGROUP_ROWS
    boxes = [(1, n, 1, PANEL_COLS) if layout == "bshd" else (1, 1, n, PANEL_COLS) for n in rows]
    return tuple(
        MappedArray(x.dtype, tuple(x.shape), tuple(x.strides), box) for x, box in zip(arrays, boxes, strict=False)
    )
