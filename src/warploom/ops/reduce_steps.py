"""What a row reduction of a product runs: its plan, and the kernels of a call in order.

The rows of a large problem are taken in blocks, so that the states of a block's tiles fit :data:`WORKSPACE_BYTES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from warploom.core.dtypes import DType, f32, s32, u32
from warploom.interop.arrays import ArrayView, as_numpy, describe, describe_new, empty
from warploom.interop.copies import compact, settled
from warploom.kernels.gemm.hopper_config import HopperGemmConfig
from warploom.kernels.gemm.problem import AnyGemmConfig, GemmProblem
from warploom.kernels.mapped import MappedArray
from warploom.kernels.reduce.states import DOT_WARPS, MERGE_THREADS, ReduceOp, Reduction
from warploom.ops.backends import GpuCall, Grid
from warploom.ops.gemm_kernels import trace_hopper_tiles, trace_logits, trace_merge, trace_tiles
from warploom.ops.matmul_arrays import Inputs, read_inputs
from warploom.ops.matmul_plan import bits_of
from warploom.ops.places import EMULATED_MULTIPROCESSORS
from warploom.ops.recipes import Recipe

if TYPE_CHECKING:
    from warploom.ir.program import Program

WORKSPACE_BYTES = 1 << 25
"""Memory for the states of one block of rows; a block has at least :data:`LEAST_ROWS` rows, whatever that takes."""
LEAST_ROWS = 256


@dataclass(frozen=True)
class ReducePlan:
    """What a call of :func:`matmul_reduce` runs: two kernels, and a workspace of one state per row and tile column."""

    problem: GemmProblem
    config: AnyGemmConfig
    op: ReduceOp
    reason: str
    target: str
    device: str
    subtract: bool = False
    multiprocessors: int = EMULATED_MULTIPROCESSORS

    @property
    def grid(self) -> Grid:
        """CTAs of :attr:`program`."""
        return self.problem.grid(self.config, self.multiprocessors)

    @property
    def mapped(self) -> tuple[MappedArray, ...]:
        """How the TMA sees a and b; empty for ``mma.sync``."""
        return self.problem.mapped(self.config)

    @property
    def tiles(self) -> int:
        """Tiles along N."""
        return self.problem.tiles(self.config)[1]

    @property
    def row_bytes(self) -> int:
        """Memory for the states of one row."""
        return 4 * len(Reduction(self.op).types) * self.tiles

    @property
    def block_rows(self) -> int:
        """Rows that are taken at a time: all of them, or as many as :data:`WORKSPACE_BYTES` are enough for."""
        fitting = WORKSPACE_BYTES // self.row_bytes // LEAST_ROWS * LEAST_ROWS
        return min(self.problem.m, max(LEAST_ROWS, fitting))

    @property
    def workspace_bytes(self) -> int:
        """Memory beyond inputs and results."""
        return self.row_bytes * self.block_rows

    @property
    def recipe(self) -> Recipe:
        """The kernel of the product and the reductions of its tiles, by what it is traced from."""
        features = self.problem.features(self.config)
        if isinstance(self.config, HopperGemmConfig):
            return Recipe(trace_hopper_tiles, (self.config, features, self.op))
        return Recipe(trace_tiles, (self.config, features, self.op))

    @property
    def merge_recipe(self) -> Recipe:
        """The kernel that merges the tiles, by what it is traced from."""
        return Recipe(trace_merge, (self.op, self.subtract))

    @cached_property
    def program(self) -> Program:
        """The kernel of the product and the reductions of its tiles."""
        return self.recipe.program

    @cached_property
    def merge(self) -> Program:
        """The kernel that merges the tiles."""
        return self.merge_recipe.program

    @cached_property
    def cuda(self) -> str:
        """The CUDA C++ of both kernels."""
        from warploom.cuda.printer import print_cuda

        return "\n".join(print_cuda(p) for p in (self.program, self.merge))

    def __str__(self) -> str:
        return f"{self.op}: {self.config}\n  on {self.device} ({self.target}), grid {self.grid}: {self.reason}"

    @property
    def merge_grid(self) -> Grid:
        """CTAs of :attr:`merge`."""
        return -(-self.problem.m // MERGE_THREADS), 1, 1


def _as_words(target: ArrayView) -> ArrayView:
    """Contiguous integers as the 32-bit words that the kernel reads."""
    if target.dtype is s32:
        return target
    if target.device[0] == "cpu":
        return describe(as_numpy(target).view(np.int32))
    return target._replace(dtype=s32, shape=(2 * target.shape[0],), strides=(1,))


def transposed(view: ArrayView) -> ArrayView:
    """The transpose of a matrix, without a copy."""
    if view.kind in ("numpy", "torch", "cupy") and not isinstance(view.owner, tuple):
        return settled(describe(view.owner.T))
    return view._replace(shape=tuple(view.shape)[::-1], strides=tuple(view.strides)[::-1])


@dataclass(frozen=True)
class Step:
    """One kernel of a call: what it runs on, by the names of its parameters."""

    recipe: Recipe
    grid: Grid
    arrays: dict[str, ArrayView]
    scalars: dict[str, int]
    flops: int
    mapped: tuple[MappedArray, ...] = ()

    def taken(self, call: GpuCall) -> list[ArrayView]:
        """The arrays in the order in which the kernel takes them."""
        return [self.arrays[name] for name in call.arrays]


def steps_of(
    plan: ReducePlan, inputs: Inputs, results: list[ArrayView], target: ArrayView | None, parts: Sequence[ArrayView]
) -> list[Step]:
    """The kernels of a call whose rows fit the workspace ``parts``."""
    problem = plan.problem
    alpha = bits_of(inputs.alpha)
    names = ("a_map", "b_map", "bias") if plan.mapped else ("a", "b", "bias")
    arrays: dict[str, ArrayView] = dict(zip(names, inputs.views, strict=False))
    arrays |= dict(zip(("first", "second"), parts, strict=False))
    steps: list[Step] = []
    merged: dict[str, ArrayView] = dict(zip(("first", "second"), parts, strict=False))
    merged |= dict(zip(("out", "index"), results, strict=False))
    if target is not None:
        logits = workspace(inputs, f32, (problem.m,))
        steps.append(_logits_step(problem, inputs.views, target, logits))
        merged["subtracted"] = logits
    scalars = problem.scalars(plan.config, alpha)
    steps.append(Step(plan.recipe, plan.grid, arrays, scalars, problem.flops, plan.mapped))
    scalars = {"m": problem.m, "tiles": plan.tiles}
    steps.append(Step(plan.merge_recipe, plan.merge_grid, merged, scalars, 100 * problem.m * plan.tiles))
    return steps


def _stored(register: DType) -> DType:
    return s32 if register is u32 else register


def _logits_step(problem: GemmProblem, views: tuple[ArrayView, ...], target: ArrayView, logits: ArrayView) -> Step:
    x = views[0] if views[0].strides[1] == 1 else compact(views[0])
    w = transposed(views[1])
    w = w if w.strides[1] == 1 else compact(w)
    target = target if target.contiguous else compact(target)
    recipe = Recipe(trace_logits, (x.dtype, target.dtype.bits // 32))
    target = _as_words(target)
    scalars = {"m": problem.m, "n": problem.n, "depth": problem.k, "x_stride": x.strides[0], "w_stride": w.strides[0]}
    arrays = {"x": x, "w": w, "target": target, "out": logits}
    return Step(recipe, (-(-problem.m // DOT_WARPS), 1, 1), arrays, scalars, 2 * problem.m * problem.k)


def blocks_of(
    plan: ReducePlan, inputs: Inputs, results: list[ArrayView], target: ArrayView | None
) -> Iterator[list[Step]]:
    """The kernels of a call, block after block of rows; all blocks use one workspace."""
    m, size = plan.problem.m, plan.block_rows
    parts = [workspace(inputs, _stored(t), (plan.tiles, size)) for t in Reduction(plan.op).types]
    if size == m:
        yield steps_of(plan, inputs, results, target, parts)
        return
    a, *others = inputs.views
    for start in range(0, m, size):
        stop = min(m, start + size)
        views = [_rows(a, start, stop), *others]
        some = read_inputs(views, None, len(views) > 2, None, f32, "f32", inputs.alpha)
        block = replace(plan, problem=some.problem)
        chosen = None if target is None else _rows(target, start, stop)
        yield steps_of(block, some, [_rows(x, start, stop) for x in results], chosen, parts)


def workspace(inputs: Inputs, dtype: DType, shape: tuple[int, ...]) -> ArrayView:
    """A new array of the kind and on the device of the inputs."""
    first = inputs.views[0]
    return describe_new(empty(first.kind, shape, dtype, first.device))


def _rows(view: ArrayView, start: int, stop: int) -> ArrayView:
    """Some rows of an array, without a copy."""
    if view.kind in ("numpy", "torch", "cupy") and not isinstance(view.owner, tuple):
        return describe(view.owner[start:stop])
    first = view.pointer + start * view.strides[0] * view.dtype.bytes
    return view._replace(pointer=first, shape=(stop - start, *view.shape[1:]))
