# pyright: reportInvalidTypeForm=false
"""From accumulators to one state per row and warp: scale, bias, the last column, and the reduction in registers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from operator import add

from warploom.core.dtypes import DType, f32, u16, u32
from warploom.kernels.matmul.features import Epilogue, MatmulFeatures
from warploom.kernels.matmul.values import Result
from warploom.kernels.matmul_reduce.states import Reduction
from warploom.lang import Compound, Fragment, Global, GlobalPointer, Kernel, Mutable, Traced
from warploom.lang.functions import absolute, exp, maximum
from warploom.lang.reducers import State, single
from warploom.lang.values import Number
from warploom.layout.reduction import FULL_MASK, ReductionPlan, reduction_plan


class Reduced(Compound):
    """A parameter: where the states of ``m`` rows of ``n`` columns go, and what comes into them.

    ``first`` and ``second`` receive the parts of the states (32 bits each), (tiles along N, m). ``alpha`` is the bits
    of an f32.
    """

    first: Global[u32]
    second: Global[u32]
    bias: Global[u16]
    m: u32
    n: u32
    alpha: u32


@dataclass(frozen=True)
class RowValues:
    """The values that are reduced: epilogue(alpha · product + bias) over the first ``cols`` columns.

    ``half``: the bias's type. ``ragged``: a tile may reach beyond the last column.
    """

    k: Kernel
    reduction: Reduction
    half: DType
    cols: Traced
    scale: Traced | None
    bias: GlobalPointer | None
    ragged: bool
    epilogue: Epilogue

    @classmethod
    def of(
        cls, k: Kernel, reduction: Reduction, half: DType, features: MatmulFeatures, result: Reduced | Result
    ) -> RowValues:
        """The values that a product's epilogue gives."""
        scale = k.bitcast(result.alpha, f32) if features.epilogue.scaled else None
        added = result.bias if features.epilogue.bias else None
        return cls(k, reduction, half, result.n, scale, added, features.ragged_n, features.epilogue)

    def states(self, accumulator: Fragment, first_col: Traced, warp: Number = 0) -> RowStates:
        """The states of the rows of a warp's accumulator whose first column is ``first_col``."""
        k, layout = self.k, accumulator.layout
        plan = reduction_plan(layout, "col")
        added: dict[int, Traced] = {}
        states: list[State] = []
        for elements in plan.groups:
            values: list[Traced] = []
            cols: list[Traced] = []
            for element in elements:
                own: int = layout.coordinates(0, element)[1]  # lane 0's column tells columns apart
                col = layout.coordinates(k.lane, element, warp)[1] + first_col
                if self.bias is not None and own not in added:
                    added[own] = self._bias(self.bias, col)
                values.append(self._value(accumulator.registers[element], col, added.get(own)))
                cols.append(col)
            states.append(self.reduction.of_values(k, values, cols))
        plan = plan.spread()
        return RowStates(k, plan, self.reduction.reducer(k).across(k, states, plan, FULL_MASK))

    def exponentials(self, accumulator: Fragment, first_col: Traced, warp: Number = 0) -> RowStates:
        """Replace the elements x of a row by exp(x - top), ``top`` the largest of them; states are (top, sum).

        These are a log-sum-exp's, and all lanes of a row hold them. Where the largest element is infinite, x itself
        takes the place of x - top.
        """
        k, layout = self.k, accumulator.layout
        plan, values = reduction_plan(layout, "col"), dict[int, Traced]()
        added: dict[int, Traced] = {}
        for element, register in enumerate(accumulator.mutable):
            own: int = layout.coordinates(0, element)[1]
            col = layout.coordinates(k.lane, element, warp)[1] + first_col
            if self.bias is not None and own not in added:
                added[own] = self._bias(self.bias, col)
            values[element] = self._value(register, col, added.get(own))
        largest = [(reduce(maximum, [values[e] for e in elements]),) for elements in plan.groups]
        tops = [top for (top,) in single(k.maximum).across(k, largest, plan, FULL_MASK)]
        totals = list[State]()
        for elements, top in zip(plan.groups, tops, strict=True):
            base = k.select(absolute(top) == math.inf, k.value(0.0, f32), top)  # inf - inf would be NaN
            terms = [exp(values[e] - base) for e in elements]
            for e, term in zip(elements, terms, strict=True):
                accumulator.mutable[e].set(term)
            totals.append((reduce(add, terms),))
        sums = [total for (total,) in single(add).across(k, totals, plan, FULL_MASK)]
        return RowStates(k, plan, list(zip(tops, sums, strict=True)))

    def _value(self, register: Traced, col: Traced, bias: Traced | None) -> Traced:
        """One finished element; those beyond the last column count for nothing."""
        k, scale = self.k, self.scale
        x = register.get() if isinstance(register, Mutable) else register
        if scale is not None and bias is not None:
            x = k.fma(x, scale, bias)
        elif scale is not None:
            x = x * scale
        elif bias is not None:
            x = x + bias
        x = self.epilogue.call(x, ())
        if self.ragged:
            x = k.select(col < self.cols, x, k.value(self.reduction.neutral[0], f32))
        return x

    def _bias(self, bias: GlobalPointer, col: Traced) -> Traced:
        k = self.k
        if not self.ragged:
            return k.unpack((bias + col).load(), self.half)[0]
        bits = k.register(u32, 0)
        with k.when(col < self.cols):
            bits.set((bias + col).load())
        return k.unpack(bits.get(), self.half)[0]


@dataclass(frozen=True)
class RowStates:
    """The states of a warp's rows, spread over its lanes."""

    k: Kernel
    plan: ReductionPlan
    states: list[State]

    @property
    def first_lane(self) -> Traced:
        """Whether this lane is the first of those that hold the same rows."""
        return (self.k.lane & self.plan.replicated) == 0

    def rows(self, warp: Number = 0) -> list[tuple[Traced, State]]:
        """(row of the fragment, state) of what this lane holds."""
        at = (self.plan.result_coordinate(result, self.k.lane, warp) for result in range(len(self.states)))
        return list(zip(at, self.states, strict=True))
