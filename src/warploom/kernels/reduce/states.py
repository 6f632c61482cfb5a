"""The states a row reduction carries, and how two of them become one: maximum, arg-max, sum, log-sum-exp."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from warploom.core.dtypes import DType, f32, u32

if TYPE_CHECKING:
    from warploom.lang import Kernel, Traced

ReduceOp = Literal["max", "argmax", "sum", "logsumexp"]
OPS: tuple[ReduceOp, ...] = ("max", "argmax", "sum", "logsumexp")
LOG2_E = math.log2(math.e)
NO_INDEX = 0xFFFFFFFF

State: TypeAlias = "tuple[Traced, ...]"

MERGE_THREADS = 64
"""Rows per CTA of the kernel that merges the states of tiles."""
DOT_WARPS = 4
"""Rows per CTA of the kernel that computes one logit per row."""


@dataclass(frozen=True)
class Reduction:
    """A reduction as values of a state: max and sum (value), argmax (value, column), logsumexp (maximum, Σ exp).

    Merging is associative up to float32 rounding and always done in the order of the columns, so that a result depends
    on nothing but the inputs and the tile sizes. Of equal maxima the first column is taken; a NaN is no maximum.
    """

    op: ReduceOp

    @property
    def types(self) -> tuple[DType, ...]:
        """The register types of a state."""
        return {"max": (f32,), "sum": (f32,), "argmax": (f32, u32), "logsumexp": (f32, f32)}[self.op]

    @property
    def neutral(self) -> tuple[float, ...]:
        """The state of no columns; the first entry is also what a column beyond the edge counts as."""
        return {"max": (-math.inf,), "sum": (0.0,), "argmax": (-math.inf, NO_INDEX), "logsumexp": (-math.inf, 0.0)}[
            self.op
        ]

    def of_values(self, k: Kernel, values: Sequence[Traced], cols: Sequence[Traced]) -> State:
        """The state of what one thread holds of a row; ``cols`` ascend."""
        if self.op in ("max", "sum"):
            return (k.reduce_values("max" if self.op == "max" else "add", values),)
        if self.op == "argmax":
            best, index = values[0], cols[0]
            for value, col in zip(values[1:], cols[1:], strict=True):
                larger = value > best
                best, index = k.select(larger, value, best), k.select(larger, col, index)
            return best, index
        top = k.reduce_values("max", values)
        shift = self._finite(k, top) * -LOG2_E
        return top, k.reduce_values("add", [k.exp2(k.fma(x, LOG2_E, shift)) for x in values])

    def merge(self, k: Kernel, left: State, right: State) -> State:
        """One state of two; for equal maxima the smaller column counts, whichever side it is on."""
        if self.op == "max":
            return (k.maximum(left[0], right[0]),)
        if self.op == "sum":
            return (left[0] + right[0],)
        if self.op == "argmax":
            better = (right[0] > left[0]) | ((right[0] == left[0]) & (right[1] < left[1]))
            return k.select(better, right[0], left[0]), k.select(better, right[1], left[1])
        top = k.maximum(left[0], right[0])
        base = self._finite(k, top)
        parts = [total * k.exp2((high - base) * LOG2_E) for high, total in (left, right)]
        return top, parts[0] + parts[1]

    def across(self, k: Kernel, state: State, lane_masks: Sequence[int]) -> State:
        """The state of all lanes of a row, in each of them."""
        for mask in lane_masks:
            state = self.merge(k, state, tuple(k.shfl_xor(x, mask) for x in state))
        return state

    def result(self, k: Kernel, state: State) -> Traced:
        """The f32 that the state stands for."""
        if self.op != "logsumexp":
            return state[0]
        return k.fma(k.log2(state[1]), 1.0 / LOG2_E, state[0])

    @staticmethod
    def _finite(k: Kernel, top: Traced) -> Traced:
        """What to subtract: 0 where there is no column yet, so that -inf minus -inf does not become NaN."""
        return k.select(top == -math.inf, k.value(0.0, f32), top)
