"""Operators that reduce fragments, on states of one or several registers.

A reduction is two functions of traced values: what one element becomes, and what two states become. Arg-max,
log-sum-exp and mean with variance are instances, and a kernel writes its own in the same way.

Source of the merged variance: T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating Formulae and a Pairwise Algorithm for
Computing Sample Variances" (1979).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import TYPE_CHECKING, TypeAlias

from warploom.core.dtypes import f32, u32
from warploom.core.errors import TraceError, shown
from warploom.lang.functions import LOG2_E, absolute, exp2, fma, log, maximum, select
from warploom.lang.values import Number, Traced
from warploom.layout.reduction import ReductionPlan

if TYPE_CHECKING:
    from warploom.lang.warp import WarpWords

State: TypeAlias = tuple[Traced, ...]
"""32-bit values that stand for some elements of a row (or column)."""

Start: TypeAlias = Callable[[Traced, Traced], tuple[Number, ...]]
Merge: TypeAlias = Callable[[State, State], tuple[Number, ...]]
Own: TypeAlias = Callable[[Sequence[Traced], Sequence[Traced]], tuple[Number, ...]]


@dataclass(frozen=True)
class Reducer:
    """An associative and commutative operator on states.

    ``start(x, at)`` is the state of one element: its value, and where it is along the axis (a column, if columns are
    combined). ``merge(a, b)`` is the state of both. ``own(values, positions)``, if given, is the state of what one
    thread holds, in ascending positions, where that takes fewer instructions than merging elements one by one.
    Python numbers in a state are f32 if they are floats, u32 if they are integers. ``placed=False`` says that positions
    do not matter: they are all 0 then, and no instruction computes them.
    """

    start: Start
    merge: Merge
    own: Own | None = None
    placed: bool = True

    def of_values(self, k: WarpWords, values: Sequence[Traced], positions: Sequence[Traced]) -> State:
        """The state of what one thread holds; ``positions`` ascend."""
        if self.own is not None:
            return _traced(k, self.own(values, positions), "own")
        states = [_traced(k, self.start(x, at), "start") for x, at in zip(values, positions, strict=True)]
        return reduce(partial(self.combine, k), states)

    def combine(self, k: WarpWords, left: State, right: State) -> State:
        """One state of two. Raises TraceError where ``merge`` makes no state of two like them."""
        found = _traced(k, self.merge(left, right), "merge")
        kinds = [tuple(x.dtype for x in state) for state in (left, right, found)]
        if kinds[0] != kinds[1] or kinds[0] != kinds[2]:
            of_each = " and ".join(f"({', '.join(map(str, kind))})" for kind in kinds[:2])
            raise TraceError(
                f"a reducer's states must have one form: of {of_each} its merge makes ({', '.join(map(str, kinds[2]))})"
            )
        return found

    def across(self, k: WarpWords, states: Sequence[State], plan: ReductionPlan, member_mask: Number) -> list[State]:
        """The states of all lanes that ``plan`` exchanges, of one state for each of its groups."""
        left = list(states)
        for mask in plan.lane_masks:
            other: list[State] = left
            if mask in plan.halved:  # of each pair of lanes, the upper keeps the second half of the states
                half = len(left) // 2
                upper = (k.lane & mask) != 0
                pairs = list(zip(left[:half], left[half:], strict=True))
                left = [_chosen(k, upper, high, low) for low, high in pairs]
                other = [_chosen(k, upper, low, high) for low, high in pairs]
            sent = [tuple(k.shfl_xor(x, mask, member_mask) for x in state) for state in other]
            left = [self.combine(k, mine, theirs) for mine, theirs in zip(left, sent, strict=True)]
        return left


def _traced(k: WarpWords, state: Sequence[Number], made_by: str) -> State:
    if not isinstance(state, tuple | list) or not state:
        raise TraceError(
            f"a reducer's {made_by} returns a tuple of one or more values, not {shown(state)}: for one "
            "value write (value,)"
        )
    kinds = [x.dtype if isinstance(x, Traced) else (f32 if isinstance(x, float) else u32) for x in state]
    return tuple(k.value(x, kind) for x, kind in zip(state, kinds, strict=True))


def _chosen(k: WarpWords, condition: Traced, first: State, second: State) -> State:
    return tuple(k.select(condition, a, b) for a, b in zip(first, second, strict=True))


def single(combine: Callable[[Traced, Traced], Traced]) -> Reducer:
    """The reducer of a function of two values: states of one register, positions ignored."""
    return Reducer(lambda x, _: (x,), lambda a, b: (combine(a[0], b[0]),), placed=False)


# -- the maximum and where it is


def _larger(a: State, b: State) -> State:
    """The larger of two states; equal values count as the one whose position is first, whichever side it is on."""
    better = (b[0] > a[0]) | ((b[0] == a[0]) & (b[1] < a[1]))
    return select(better, b[0], a[0]), select(better, b[1], a[1])


def _number(x: Traced) -> Traced:
    """``x``, or -inf for a NaN, which is no maximum."""
    return maximum(x, -math.inf) if x.dtype is f32 else x


def _first_largest(values: Sequence[Traced], positions: Sequence[Traced]) -> State:
    best, at = _number(values[0]), positions[0]
    for x, position in zip(values[1:], positions[1:], strict=True):
        larger = x > best  # never true of a NaN
        best, at = select(larger, x, best), select(larger, position, at)
    return best, at


ARG_MAX = Reducer(lambda x, at: (_number(x), at), _larger, _first_largest)
"""(maximum, its first position). A NaN is no maximum."""


# -- log-sum-exp


_LARGE = 2.0**29
"""From here on floats are 64 apart: the maximum alone is the result, whatever finite and positive the sum is."""


def _added(a: State, b: State) -> State:
    top = maximum(a[0], b[0])
    base = select(absolute(top) == math.inf, 0.0, top)  # an infinity minus itself would be NaN
    parts = [total * exp2((high - base) * LOG2_E) for high, total in (a, b)]
    return top, parts[0] + parts[1]


def _own_sum(values: Sequence[Traced], _: Sequence[Traced]) -> State:
    top = reduce(maximum, values)
    # One fma an element, exact enough as long as top · log2(e) is: beyond, its rounding would overflow the exponential.
    near = absolute(top) < _LARGE  # never true of infinities and NaN
    shift = select(near, top * -LOG2_E, 0.0)
    terms = [exp2(fma(x, LOG2_E, shift)) for x in values]
    total = reduce(add, terms)
    return top, select(near | (total != total), total, 1.0)


LOG_SUM_EXP = Reducer(lambda x, _: (x, 1.0), _added, _own_sum, placed=False)
"""(maximum, Σ exp(x - maximum)); :func:`log_sum_exp` is the number it stands for.

+inf among the elements gives +inf, -inf alone -inf, NaN among them NaN. Where the maximum is 2^29 or more in magnitude
the sum is any positive number, as it does not change what the state stands for.
"""


def log_sum_exp(state: State) -> Traced:
    """log Σ exp(x) from a state of :data:`LOG_SUM_EXP`."""
    return state[0] + log(state[1])


# -- mean and variance


def _pooled(a: State, b: State) -> State:
    count = a[0] + b[0]
    apart = b[1] - a[1]
    share = b[0] / count
    return count, fma(apart, share, a[1]), fma(apart * apart, a[0] * share, a[2] + b[2])


def _own_moments(values: Sequence[Traced], _: Sequence[Traced]) -> tuple[Number, ...]:
    mean = reduce(add, values) * (1.0 / len(values))
    squares = (values[0] - mean) * (values[0] - mean)
    for x in values[1:]:
        squares = fma(x - mean, x - mean, squares)
    return float(len(values)), mean, squares


MOMENTS = Reducer(lambda x, _: (1.0, x, 0.0), _pooled, _own_moments, placed=False)
"""(count, mean, Σ (x - mean)²), without the cancellation of Σ x² - (Σ x)²."""

NAMED = {"argmax": ARG_MAX, "logsumexp": LOG_SUM_EXP, "moments": MOMENTS}
