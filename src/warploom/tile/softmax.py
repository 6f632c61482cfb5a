"""The online softmax on accumulators: S becomes P in place, row maxima and sums are carried from block to block.

With c = scale · log2(e), for each row, over blocks of scores S::

    m' = max(m, max S)    P = 2^(c·S - c·m')    l' = l · 2^(c·m - c·m') + sum P    O' = O · 2^(c·m - c·m') + P·V

and O / l at the end. Two changes keep the result exact and save work. *Lazy rescaling*: O keeps m until a row outgrows
it by 2^8 (P and O share whatever factor is left). *Stale max*: a block's P is formed by the maxima of the blocks
before, without looking for its own; P itself shows where one grew too far, and there the scores are recomputed.

A *sink* is one more score of each row, with no value: it joins l alone. It is one step at the end, as if the maximum
were raised to it where it is the largest: no row's sum of exponentials overflows.

A row that sees no key, or only scores of -inf, gives zeros; its log-sum-exp is -inf, or the sink. Such rows cost the
loop over the blocks nothing: maxima start at a number instead of -inf. Rows with a score that is infinite or too large
(:data:`FAR`) are recognised at the end, by their maxima.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_, or_
from typing import TYPE_CHECKING, Protocol

from warploom.core.dtypes import F32_MAX, DType, f32, u32
from warploom.lang.functions import LOG2_E
from warploom.lang.values import Mutable
from warploom.layout.reduction import reduction_plan

if TYPE_CHECKING:
    from warploom.lang import Fragment, Kernel, SharedTile, Traced
    from warploom.lang.values import Number


LAZY_GROWTH = 8.0
"""Powers of two that a row's maximum may grow before O is rescaled."""
STALE_SUM = 4096.0
"""The most that a lane's part of a block's row sum may be for stale maxima to serve: P then fits f16, and O and l stay
as far from float32's end as they are with the block's own maxima. Times 2^-headroom."""
HEADROOM = {"bf16": 24.0, "f16": 0.0}
"""Powers of two that P stays below 1 in bf16, so that O, which is divided by the sum of P only in the end, holds any v:
2^LAZY_GROWTH times 65536 keys. And so that the top bit of P's exponent, which 2 has, shows that a maximum grew. f16 has
no exponents left for it, nor values that need it."""
FAR = {"bf16": 2.0**30, "f16": 2.0**27}
"""Powers of two, of either sign, from which on scores count as infinite: rounded to float32 they are off by so much
that P leaves its type."""
TOP_EXPONENT_BIT = 1 << 30
"""Set in float32's from 2 on, infinities and NaN."""
WARY_BLOCKS = 16
"""Blocks for which a warp looks for maxima again after one grew: where they keep growing, few attempts fail."""
NEAR_ZERO = 0.03
"""|x / cap| below which three terms of tanh's series are exact to float32."""
SUM_COLS = 8
"""Columns beside V that hold ones: the narrowest step of ``wgmma``'s N."""

Action = Callable[[], None]


def nothing() -> None:
    """An action that does nothing."""


class ScoreChange(Protocol):
    """A change of scaled scores before the softmax, one by one and in their order: a soft cap, say."""

    def scores(self, scaled: Iterable[Traced]) -> Iterable[Traced]:
        """The scores that the softmax gets."""
        ...

    def slopes(self, exponents: Iterable[Traced]) -> Iterable[Traced]:
        """The derivatives of those by the scaled ones; ``exponents`` are log2(e) times the scores that it got."""
        ...


def capped(k: Kernel, x: Traced, cap: float) -> Traced:
    """cap · tanh(x / cap) to float32's accuracy (tanh.approx is good to 2^-11, and the cap multiplies its error).

    tanh(t) = 1 - 2 / (1 + e^2t) cancels near 0, where the first terms of the series are exact enough.
    """
    away = k.fma(k.reciprocal(k.exp2(x * (2.0 * LOG2_E / cap)) + 1.0), -2.0 * cap, cap)
    square = (x * (1.0 / cap)) * (x * (1.0 / cap))
    near = x * k.fma(square, k.fma(square, 2.0 / 15.0, -1.0 / 3.0), 1.0)
    return k.select(square < NEAR_ZERO**2, near, away)


def capped_slope(k: Kernel, exponent: Traced, cap: float) -> Traced:
    """The derivative of :func:`capped`, 1 - tanh²; ``exponent`` is log2(e) times what that gave."""
    tanh = exponent * (math.log(2.0) / cap)
    return k.fma(tanh * -1.0, tanh, 1.0)


def inverse_or_zero(k: Kernel, total: Traced) -> Traced:
    """The factor of O, or of weighted outputs, in the end: 1 / ``total``, and 0 for a row without a score."""
    return k.select(total == 0.0, k.value(0.0, f32), k.reciprocal(total))


@dataclass(frozen=True)
class Exponents:
    """The formula P = 2^(``c``·s - ``c``·m - headroom) of a score s and its row's maximum m, P of type ``dtype``."""

    c: float
    dtype: DType

    @property
    def headroom(self) -> float:
        """Powers of two that P stays below 1."""
        return HEADROOM[self.dtype.name]

    @property
    def lowest(self) -> float:
        """The maximum of a row that has no larger score yet: lower ones count as -inf."""
        return -min(F32_MAX, FAR[self.dtype.name] / self.c)

    def shift(self, k: Kernel, m: Traced) -> Traced:
        """The term -c·m - headroom, rounded once, so that every use of a maximum is off by the same."""
        return k.fma(m, -self.c, -self.headroom) if self.headroom else m * -self.c

    def factor(self, k: Kernel, before: Traced, after: Traced) -> Traced:
        """The factor of l and O when a row's maximum changes, by the difference of its rounded shifts."""
        return k.exp2(self.shift(k, after) - self.shift(k, before))

    def judged(self, k: Kernel, m: Traced, total: Traced) -> Traced:
        """A row's sum, or a part of it: NaN for a row with a score of +inf."""
        return k.select(self._is_far(m), k.value(math.nan, f32), total)

    def log_sum(self, k: Kernel, m: Traced, total: Traced) -> Traced:
        """The natural log-sum-exp of a row's scores."""
        to_scores = self.c / LOG2_E
        log = (k.log2(total) + self.headroom) * math.log(2.0)
        return k.select(self._is_far(m), m * to_scores, k.fma(m, to_scores, log))

    def join(self, k: Kernel, m: Traced, total: Traced, sink: Traced) -> Sunk:
        """A row's sum with a sink; one of +inf takes all the weight, one of -inf none."""
        above = k.fma(sink, LOG2_E, self.shift(k, m))
        raised = above > 0.0
        factor = k.exp2(k.minimum(above * -1.0, 0.0))
        return Sunk(k, sink, raised, factor, k.fma(total, factor, k.select(raised, k.value(1.0, f32), k.exp2(above))))

    def _is_far(self, m: Traced) -> Traced:
        return m * self.c > FAR[self.dtype.name]


@dataclass(frozen=True)
class Sunk:
    """A row's sum after its sink has joined. ``raised``: the sink is its maximum now, and ``factor`` what O lost."""

    k: Kernel
    sink: Traced
    raised: Traced
    factor: Traced
    total: Traced

    def log_sum(self, of_scores: Traced) -> Traced:
        """The natural log-sum-exp; ``of_scores`` is the one by the maximum of the scores."""
        k = self.k
        return k.select(self.raised, k.fma(k.log2(self.total), math.log(2.0), self.sink), of_scores)


class OnlineSoftmax:
    """Row maxima m and sums l (each lane's part) of the rows that a thread has of S.

    ``s`` holds a block's scores, and P after it, which products take as ``dtype`` (f16 or bf16); ``o`` is the output's
    accumulator. ``change``: what becomes of scaled scores. ``column``: the last columns of ``o`` are the row sums,
    since :func:`put_ones` stand beside V. ``lse``: :meth:`finish` returns log-sum-exps; ``sink``: it takes a sink.
    """

    def __init__(
        self,
        k: Kernel,
        s: Fragment,
        o: Fragment,
        scale: float,
        dtype: DType,
        *,
        change: ScoreChange | None = None,
        column: bool = False,
        lse: bool = False,
        sink: bool = False,
    ) -> None:
        self._k, self._s, self._o = k, s, o
        self._scores = s.mutable
        self._scale, self._change, self._column, self._lse = scale, change, column, lse
        self._folded = change is None and scale > 0
        self._exponents = Exponents(scale * LOG2_E if self._folded else LOG2_E, dtype)
        self._plan = reduction_plan(s.layout, "col")
        self._rows = self._plan.groups
        self._out_rows = reduction_plan(o.layout, "col").groups
        count = len(self._rows)
        self._m = k.registers(f32, count, None, "row_max")
        self._l = k.registers(f32, count, None, "row_sum")
        self._last_m = k.registers(f32, count, None, "last_max") if lse or column or sink else []
        self._last_l = [] if column else k.registers(f32, count, None, "last_sum")

    @property
    def rows(self) -> int:
        """Rows that a thread has scores of."""
        return len(self._rows)

    # -- one block after another
    def begin(self) -> None:
        """Rows that have seen nothing yet, for :meth:`step` alone; O is 0."""
        for m, total in zip(self._m, self._l, strict=True):
            m.set(self._exponents.lowest)
            total.set(0.0)

    def first(self, mask: Action = nothing) -> None:
        """A first block: P by its own maxima; the rows begin anew. ``mask`` masks scores, here and below."""
        self._form_scores()
        mask()
        for m, top in zip(self._m, self._s.reduce("max", "col"), strict=True):
            m.set(self._k.maximum(top, self._exponents.lowest))
        self._exponentials()
        for kept, total in zip(self._l, self._totals(), strict=False):
            kept.set(total)

    def step(self, mask: Action = nothing) -> None:
        """The next block, where no product writes O meanwhile: P, and O rescaled where a row outgrew its maximum."""
        k = self._k
        self._form_scores()
        mask()
        tops = self._s.reduce("max", "col")
        outgrown = [(top - m) * self._exponents.c > LAZY_GROWTH for m, top in zip(self._m, tops, strict=True)]
        with k.when(k.vote_any(reduce(or_, outgrown)), uniform=True):
            factors = [self._raise(m, k.maximum(m, top)) for m, top in zip(self._m, tops, strict=True)]
            for kept, factor in zip(self._l, factors, strict=True):
                kept *= factor
            self.scale_output(factors)
        self._exponentials()
        for kept, total in zip(self._l, self._totals(), strict=False):
            kept += total

    def deferred(self, mask: Action = nothing, *, lazy: bool = True) -> list[Traced]:
        """The next block, while a product still writes O: P now; returns the rows' factors for :meth:`rescale`."""
        k = self._k
        self._form_scores()
        mask()
        factors: list[Traced] = []
        for m, top in zip(self._m, self._s.reduce("max", "col"), strict=True):
            grew = (top - m) * self._exponents.c > LAZY_GROWTH if lazy else top > m
            factors.append(self._raise(m, k.select(grew, top, m.get())))
        self._exponentials()
        for kept, factor, total in zip(self._l, factors, self._totals(), strict=False):
            kept.set(k.fma(kept, factor, total))
        return factors

    def rescale(self, factors: Sequence[Traced], also: Action = nothing) -> None:
        """Multiply O by the rows' factors, if a row of the warp has one other than 1; then do ``also`` as well."""
        with self._k.when(self._k.vote_any(reduce(or_, [factor != 1.0 for factor in factors])), uniform=True):
            self.scale_output(factors)
            also()

    def stale(self) -> tuple[Traced, list[Traced]]:
        """P by the maxima so far; whether they serve the whole warp, and the sums for :meth:`accept`.

        NaN never passes, and no score of a row without a maximum yet: the sum is no number, or too large.
        """
        k = self._k
        self._form_scores()
        self._exponentials()
        if self._column:
            bits = reduce(or_, [k.bitcast(x, u32) for x in self._scores])
            return k.vote_all((bits & TOP_EXPONENT_BIT) == 0), []
        totals, most = self._totals(), STALE_SUM * 2.0**-self._exponents.headroom
        return k.vote_all(reduce(and_, [total <= most for total in totals])), totals

    def accept(self, totals: Sequence[Traced]) -> None:
        """Take up a block's sums by unchanged maxima."""
        for kept, total in zip(self._l, totals, strict=False):
            kept += total

    # -- the end of a tile
    def keep(self) -> None:
        """The rows end here: :meth:`finish` takes what they have now, even after the next tile's first block."""
        for kept, m, total in zip(self._last_l, self._m, self._l, strict=False):
            kept.set(self._exponents.judged(self._k, m.get(), total.get()))
        for kept, m in zip(self._last_m, self._m, strict=False):
            kept.set(m)

    def finish(self, sink: Traced | None = None) -> list[Traced]:
        """O / l of the rows that were kept; with ``lse`` each row's log-sum-exp (natural). ``sink`` joins every l."""
        inverse, logs = self.ends(sink)
        self.scale_output(inverse)
        return logs

    def ends(self, sink: Traced | None = None) -> tuple[list[Traced], list[Traced]]:
        """The factors that :meth:`finish` would multiply O by, and the log-sum-exps; O stays as it is."""
        k = self._k
        factors: list[Traced] = []
        logs: list[Traced] = []
        for row, elements in enumerate(self._out_rows):
            if self._column:
                total = self._exponents.judged(k, self._last_m[row].get(), self._o.registers[elements[-1]])
            else:
                total = self._last_l[row].get()
                for mask in self._plan.lane_masks:
                    total = total + k.shfl_xor(total, mask)
            sunk = None if sink is None else self._exponents.join(k, self._last_m[row].get(), total, sink)
            total = total if sunk is None else sunk.total
            scaled = inverse_or_zero(k, total)
            factors.append(scaled if sunk is None else scaled * sunk.factor)
            if self._lse:
                log = self._exponents.log_sum(k, self._last_m[row].get(), total)
                logs.append(log if sunk is None else sunk.log_sum(log))
        return factors, logs

    def ends_to(self, index: Number, logs: SharedTile, inverse: SharedTile) -> None:
        """Store the results of :meth:`ends` to (``index``, row) of shared tiles, for :func:`.merge.merged` to join.

        The lanes of the warp meet before: what they have read may be overwritten.
        """
        k, found = self._k, self.ends()
        k.syncwarp()
        with k.when((k.lane & self._plan.replicated) == 0):
            for group, (factor, log) in enumerate(zip(*found, strict=True)):
                row = self._plan.result_coordinate(group, k.lane, 0)
                logs.store(log, index, row)
                inverse.store(factor, index, row)

    # -- formulas
    def _form_scores(self) -> None:
        """Scores scaled, where the scale is not part of the exponent, and changed."""
        if self._folded:
            return
        scaled = (x * self._scale for x in self._scores)
        changed = scaled if self._change is None else self._change.scores(scaled)
        for x, score in zip(self._scores, changed, strict=True):
            x.set(score)

    def _raise(self, m: Mutable, top: Traced) -> Traced:
        """Set a row's maximum; returns the factor of its l and O."""
        factor = self._exponents.factor(self._k, m.get(), top)
        m.set(top)
        return factor

    def _exponentials(self) -> None:
        """P, in place of the scores."""
        k = self._k
        for row, m in zip(self._rows, self._m, strict=True):
            shift = self._exponents.shift(k, m.get())
            for element in row:
                x = self._scores[element]
                x.set(k.exp2(k.fma(x, self._exponents.c, shift)))

    def _totals(self) -> list[Traced]:
        """This lane's part of each row's sum of P; none where P·V forms them."""
        rows = () if self._column else self._rows
        return [self._k.reduce_values("add", [self._scores[e].get() for e in row]) for row in rows]

    def scale_output(self, factors: Sequence[Traced]) -> None:
        """Multiply O by the rows' factors."""
        for row, factor in zip(self._out_rows, factors, strict=True):
            for element in row:
                self._o.scale(element, factor)


class StaleSoftmax:
    """An :class:`OnlineSoftmax` that looks for a block's maxima only where P shows that it must."""

    def __init__(self, k: Kernel, softmax: OnlineSoftmax) -> None:
        self._k, self._softmax = k, softmax
        self._wary = k.register(u32, 0, "wary")
        """The number of further blocks that compute their maxima in any case."""
        self._exact = k.register(u32, None, "exact")
        self._factors = k.registers(f32, softmax.rows, None, "factor")

    def step(self, cuts: Traced | None, mask: Action, recompute: Action, release: Action) -> Action:
        """The next block's scores into P; returns what brings O to the new maxima once no product writes it.

        ``cuts``: whether ``mask`` has scores to mask, which would pass for grown ones; None if it never has.
        ``recompute`` forms the scores once more, by each warp for itself; ``release`` gives back their operands.
        """
        k, softmax, exact = self._k, self._softmax, self._exact
        exact.set(0)
        looks = self._wary != 0
        with k.when(looks if cuts is None else looks | cuts, uniform=True):
            exact.set(1)
        with k.otherwise():
            served, totals = softmax.stale()
            with k.when(served, uniform=True):
                softmax.accept(totals)
            with k.otherwise():
                recompute()
                exact.set(1)
        release()
        with k.when(exact != 0, uniform=True):
            for kept, factor in zip(self._factors, softmax.deferred(mask), strict=True):
                kept.set(factor)
            self._wary.set(k.select(self._wary == 0, 0, self._wary - 1))

        def rescale() -> None:
            with k.when(exact != 0, uniform=True):
                softmax.rescale([factor.get() for factor in self._factors], lambda: self._wary.set(WARY_BLOCKS))

        return rescale


def put_ones(k: Kernel, tile: SharedTile, col: int, dtype: DType) -> None:
    """Ones in :data:`SUM_COLS` columns of every stage of V's tile, one thread a row; no copy ever reaches them."""
    ones = [k.pack(1.0, 1.0, dtype)] * (SUM_COLS // 2)
    with k.when(k.thread < tile.layout.rows):
        for stage in range(tile.stages):
            tile.stage(stage).store(ones, k.thread, col, dtype=u32)
        k.fence_async()


class SoftmaxGradient:
    """P in place of the scores ``s`` of a block, then dS. ``shift`` is -log2(e)·L and ``delta`` for each element."""

    def __init__(self, k: Kernel, s: Fragment, scale: float, change: ScoreChange | None = None) -> None:
        self._k, self._change = k, change
        self._scores = s.mutable
        self._scale = scale

    def probabilities(self, shift: Sequence[Traced], mask: Callable[[], None] = nothing) -> None:
        """P in place of S; ``mask`` puts 0 where scores do not count."""
        k, factor = self._k, LOG2_E
        if self._change is None:
            scores, factor = (x.get() for x in self._scores), self._scale * LOG2_E
        else:
            scores = self._change.scores(x * self._scale for x in self._scores)
        for x, score, y in zip(self._scores, scores, shift, strict=True):
            x.set(k.exp2(k.fma(score, factor, y)))
        mask()

    def apply_slopes(self, shift: Sequence[Traced]) -> None:
        """After P has been used: P times the slope of what changed its score, if something did.

        P says what the score was, so that no register keeps it.
        """
        k = self._k
        if self._change is None:
            return
        exponents = (k.log2(x) - y for x, y in zip(self._scores, shift, strict=True))
        for x, slope in zip(self._scores, self._change.slopes(exponents), strict=True):
            x.set(k.select(x == 0.0, k.value(0.0, x.dtype), x * slope))

    def scores(self, dp: Fragment, delta: Sequence[Traced]) -> Fragment:
        """dS / scale, as values."""
        return score_gradients([x.get() for x in self._scores], dp, delta)


def score_gradients(p: Sequence[Traced], dp: Fragment, delta: Sequence[Traced]) -> Fragment:
    """dS / scale, as values, of P (with the slope of what changed scores) and dP."""
    return replace(dp, registers=tuple(x * (y - d) for x, y, d in zip(p, dp.registers, delta, strict=True)))
