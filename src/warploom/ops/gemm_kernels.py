"""The kernels of products and of their row reductions by what they are traced from.

The generators are imported when one is traced.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from warploom.core.dtypes import DType
from warploom.core.once import once
from warploom.kernels.gemm.config import GemmConfig
from warploom.kernels.gemm.features import GemmFeatures
from warploom.kernels.gemm.hopper_config import HopperGemmConfig
from warploom.kernels.gemm.problem import AnyGemmConfig
from warploom.kernels.reduce.states import ReduceOp

if TYPE_CHECKING:
    from warploom.ir.program import Program


@once(maxsize=256)
def trace(config: GemmConfig, features: GemmFeatures) -> Program:
    """The Program of a configuration and its features, traced once per process."""
    if config.stream_k:
        from warploom.kernels.gemm.stream import gemm_stream_k as generator
    else:
        from warploom.kernels.gemm.forward import gemm as generator

    name = f"{generator.name}_{config.tile_m}x{config.tile_n}x{config.tile_k}"
    program = generator.trace(config=config, features=features, name=name)
    return replace(program, min_ctas=config.min_ctas, opt_level=config.opt_level)


@once(maxsize=256)
def trace_hopper(config: HopperGemmConfig, features: GemmFeatures) -> Program:
    """The Program of a configuration fed by the TMA and its features, traced once per process."""
    from warploom.kernels.gemm.hopper import gemm_hopper

    name = f"gemm_{'mma_tma' if config.mma_sync else 'wgmma'}_{config.tile_m}x{config.tile_n}x{config.tile_k}"
    program = gemm_hopper.trace(config=config, features=features, name=name)
    return replace(program, opt_level=config.opt_level)


def trace_for(config: AnyGemmConfig, features: GemmFeatures) -> Program:
    """The Program of a configuration of either generator and its features."""
    return trace_hopper(config, features) if isinstance(config, HopperGemmConfig) else trace(config, features)


@once(maxsize=256)
def trace_finish(splits: int, half: DType, features: GemmFeatures) -> Program:
    """The Program that adds the parts of a split K."""
    from warploom.kernels.gemm.reduction import add_parts

    return add_parts.trace(splits=splits, half=half, features=features, name=f"gemm_add_{splits}_parts")


@once(maxsize=128)
def trace_tiles(config: GemmConfig, features: GemmFeatures, op: ReduceOp) -> Program:
    """The Program of a product whose tiles are reduced, by ``mma.sync``."""
    from warploom.kernels.reduce.matmul import reduce_tiles

    name = f"matmul_{op}_{config.tile_m}x{config.tile_n}x{config.tile_k}"
    program = reduce_tiles.trace(config=config, features=features, op=op, name=name)
    return replace(program, min_ctas=config.min_ctas, opt_level=config.opt_level)


@once(maxsize=128)
def trace_hopper_tiles(config: HopperGemmConfig, features: GemmFeatures, op: ReduceOp) -> Program:
    """The Program of a product whose tiles are reduced, by ``wgmma``."""
    from warploom.kernels.reduce.hopper import reduce_tiles_hopper

    name = f"matmul_{op}_wgmma_{config.tile_m}x{config.tile_n}x{config.tile_k}"
    program = reduce_tiles_hopper.trace(config=config, features=features, op=op, name=name)
    return replace(program, opt_level=config.opt_level)


@once(maxsize=16)
def trace_merge(op: ReduceOp, subtract: bool) -> Program:
    """The Program that merges the states of tiles."""
    from warploom.kernels.reduce.matmul import merge_tiles

    return merge_tiles.trace(op=op, with_index=op == "argmax", subtract=subtract)


@once(maxsize=8)
def trace_logits(dtype: DType, target_words: int) -> Program:
    """The Program of the targets' logits."""
    from warploom.kernels.reduce.matmul import target_logits

    return target_logits.trace(dtype=dtype, target_words=target_words)
