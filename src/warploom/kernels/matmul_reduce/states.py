"""The row reductions of a product: what each is called, what its states are in memory, and the reducer behind it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from warploom.core.dtypes import DType, f32, u32

if TYPE_CHECKING:
    from warploom.lang import Kernel, Traced
    from warploom.lang.reducers import Reducer, State

ReduceOp = Literal["max", "argmax", "sum", "logsumexp"]
OPS: tuple[ReduceOp, ...] = ("max", "argmax", "sum", "logsumexp")
NO_INDEX = 0xFFFFFFFF

STATES = "first", "second"
"""The arrays of the parts of states, 32 bits each, (tiles along N, rows)."""

MERGE_ROWS, MERGE_WARPS = 32, 8
"""Rows per CTA of the kernel that merges the states of tiles, and the warps that share these."""
ROW_THREADS = 64
"""Rows per CTA of the kernel that tells the gradients what they take of a row."""
DOT_WARPS = 4
"""Rows per CTA of the kernel that computes one logit per row."""
COLUMN_WARPS, COLUMNS = 16, 64
"""Warps and columns per CTA of the kernel that sums columns."""
LOGIT_THREADS, LOGIT_CHUNKS = 256, 4
"""Threads per CTA of the kernel that makes derivatives of exponentials, and the 16 bytes that each has under way."""
SCALE_THREADS = 256
"""Threads per CTA of the kernel that scales gradients."""
TOTAL_THREADS = 512
"""Threads of the one CTA that sums the losses of all rows."""


@dataclass(frozen=True)
class Reduction:
    """A reduction of rows: max and sum (value), argmax (value, column), logsumexp (maximum, Σ exp).

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

    def reducer(self, k: Kernel) -> Reducer:
        """The reducer for fragments."""
        from warploom.lang.reducers import ARG_MAX, LOG_SUM_EXP, single

        if self.op == "max":
            return single(k.maximum)
        if self.op == "sum":
            return single(lambda a, b: a + b)
        return ARG_MAX if self.op == "argmax" else LOG_SUM_EXP

    def of_values(self, k: Kernel, values: Sequence[Traced], cols: Sequence[Traced]) -> State:
        """The state of what one thread holds of a row; ``cols`` ascend."""
        return self.reducer(k).of_values(k, values, cols)

    def merge(self, k: Kernel, left: State, right: State) -> State:
        """One state of two; for equal maxima the smaller column counts, whichever side it is on."""
        return self.reducer(k).combine(k, left, right)

    def result(self, k: Kernel, state: State) -> Traced:
        """The f32 that the state stands for."""
        from warploom.lang.reducers import log_sum_exp

        return log_sum_exp(state) if self.op == "logsumexp" else state[0]
