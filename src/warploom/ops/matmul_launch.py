"""The launches of a planned product on a GPU, again and again on other addresses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from warploom.core.dtypes import DType, f32
from warploom.interop.arrays import ArrayView, describe_new, empty, empty_like, memory_span
from warploom.ops.backends import GpuCall, zero_words
from warploom.ops.matmul_arrays import Inputs, refuse_overlap
from warploom.ops.matmul_plan import MatmulPlan


@dataclass(frozen=True)
class Launches:
    """A plan's kernels on one GPU. ``workspace`` and ``counts`` are the plan's; ``divided``: by stream-K."""

    call: GpuCall
    finish: GpuCall | None
    workspace: tuple[int, ...]
    counts: int
    divided: bool

    @classmethod
    def prepare(cls, made: MatmulPlan, device: int, kernel: GpuCall | None = None) -> Launches:
        """Compile (or take from the cache) and load what the plan needs; ``kernel``: the product's, if it is loaded."""
        call = kernel or GpuCall.prepare(made.recipe, made.grid, made.scalars, device, mapped=made.mapped)
        finish = None
        if made.finish_recipe is not None:
            finish = GpuCall.prepare(made.finish_recipe, made.problem.finish_grid(), made.finish_scalars, device)
        return cls(call, finish, made.workspace, made.counts, made.shares is not None)

    @property
    def alone(self) -> bool:
        """Whether one launch on the caller's arrays is all."""
        return self.finish is None and not self.divided

    @property
    def words(self) -> int:
        """32-bit words of memory that :meth:`queue` needs."""
        return math.prod(self.workspace) + self.counts if self.workspace else 0

    def queue(self, operands: tuple[int, int], result: int, combined: tuple[int, ...], memory: int, kind: str) -> None:
        """Queue one product on the current stream of framework ``kind``; all are addresses, ``memory``: of the words.

        ``combined``: the bias (if any) and the extra matrices.
        """
        if self.finish is not None:
            self.call.launch_again((*operands, memory), kind)
            self.finish.launch_again((memory, result, *combined), kind)
        elif self.divided:
            counts = memory + 4 * math.prod(self.workspace)
            if self.counts:
                zero_words(counts, self.counts, kind, self.call.device)
            self.call.launch_again((*operands, result, *combined, memory, counts), kind)
        else:
            self.call.launch_again((*operands, result, *combined), kind)


@dataclass(frozen=True)
class Prepared:
    """Everything that a repeated call needs.

    ``offsets``: for each group of batches, byte offsets of (a, b, out, extras); one group of zeros as a rule.
    ``near``: between which distances in bytes from the caller's ``out`` each input reaches into its memory.
    """

    launches: Launches
    shape: tuple[int, ...]
    out_dtype: DType
    offsets: tuple[tuple[int, int, int, int], ...]
    near: tuple[tuple[int, int], ...]
    apart: set[tuple[int, ...]] = field(default_factory=set[tuple[int, ...]])
    """Distances of inputs from ``out`` at which they interleave, or are one, without harm."""

    @classmethod
    def of(cls, made: MatmulPlan, inputs: Inputs, result: ArrayView, device: int) -> Prepared:
        """What calls like the planned one, with such a ``result``, need on a GPU."""
        near = tuple([_near(view, result) for view in inputs.views])
        return cls(Launches.prepare(made, device), inputs.shape, made.problem.out_dtype, inputs.offsets, near)

    def check_out(self, views: Sequence[ArrayView], out: ArrayView, has_bias: bool) -> None:
        """Raises ProblemError where ``out`` shares memory with an input: mostly one comparison for each tells."""
        at = out[0]
        for view, (least, most) in zip(views, self.near, strict=False):
            if least < view[0] - at < most:
                break
        else:
            return
        distances = tuple([view.pointer - at for view in views])
        if distances not in self.apart:
            refuse_overlap(views, out, has_bias)
            self.apart.add(distances)

    def new_result(self, like: ArrayView) -> Any:
        """An array for the result, of the kind and on the device of ``like``."""
        if like.kind == "torch" and like.dtype is self.out_dtype:
            return like.owner.new_empty(self.shape)  # the shortest way that torch has
        return empty_like(like, self.shape, self.out_dtype)

    def run(self, views: Sequence[ArrayView], result: int) -> None:
        """Queue the launches that write to address ``result``. ``views``: a, b, the bias (if any), the extras."""
        if len(views) == 2 and self.launches.alone and len(self.offsets) == 1:
            self.launches.call.launch_again((views[0].pointer, views[1].pointer, result), views[0].kind)
            return
        a, b, *others = views
        words = self.launches.words
        memory = describe_new(empty(a.kind, (words,), f32, a.device)) if words else None
        for of_a, of_b, of_out, of_extra in self.offsets:
            combined = tuple(x.pointer + (of_extra if len(x.shape) > 1 else 0) for x in others)
            operands = (a.pointer + of_a, b.pointer + of_b)
            self.launches.queue(operands, result + of_out, combined, memory.pointer if memory else 0, a.kind)


def _near(view: ArrayView, out: ArrayView) -> tuple[int, int]:
    """Between which distances from ``out`` an array like ``view`` reaches into the memory of ``out``, gaps included."""
    (first, size), (first_out, size_out) = memory_span(view), memory_span(out)
    below, below_out = first - view.pointer, first_out - out.pointer
    return below_out - below - size, below_out + size_out - below
