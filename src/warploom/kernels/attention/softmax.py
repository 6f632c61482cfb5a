"""The online softmax on accumulator fragments: running maxima, sums and the rescaling of the output.

What is out of the way costs the loop over the key blocks nothing. Maxima start at a number instead of -inf, so that
rows without a score need no case of their own; and rows with a score that is infinite or too large (:data:`FAR`) are
told at the end, by their maxima.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np

from warploom.core.dtypes import F32_MAX, DType, bf16, f32, u32
from warploom.kernels.attention.features import AttentionFeatures
from warploom.lang import Fragment, Kernel, Mutable, Traced
from warploom.layout.fragments import FragmentLayout
from warploom.layout.reduction import reduction_plan

LOG2_E = math.log2(math.e)
LAZY_GROWTH = 8.0
"""Powers of two that a row's maximum may grow before O is rescaled; exact, since P and O keep one common factor."""

CARRIED_SUM = 4096.0
"""Up to which a lane's part of a block's row sum shows that the maxima of earlier blocks still serve: P then fits f16,
and O and l stay as far from float32's end as they are with the block's own maxima. Times 2^-headroom."""
HEADROOM = 24.0
"""Powers of two that P stays below 1 in bf16, so that O, which is divided by the sum of P only in the end, holds any v:
2^LAZY_GROWTH times 65536 keys. And so that the top bit of P's exponent, which 2 has, shows that a maximum grew. f16 has
no exponents left for it, nor values that need it."""
FAR = {"bf16": 2.0**30, "f16": 2.0**27}
"""Powers of two, of either sign, from which on scores count as infinite: rounded to float32 they are off by so much
that P leaves its type."""
TOP_EXPONENT_BIT = 1 << 30
"""Set in float32's from 2 on, infinities and NaN."""
NEAR_ZERO = 0.03
"""|x / cap| below which three terms of tanh's series are exact to float32."""


class SoftmaxConfig(Protocol):
    """What the softmax needs to know of a kernel's configuration."""

    @property
    def head_dim(self) -> int:
        """Elements per head."""
        ...

    @property
    def dtype(self) -> DType:
        """The type of P and V."""
        ...

    @property
    def lazy_rescale(self) -> bool:
        """Whether O keeps an older maximum until a row outgrows it."""
        ...

    @property
    def folded_scale(self) -> bool:
        """Whether the scale is part of the exponential."""
        ...

    @property
    def peel(self) -> bool:
        """Whether the first block is a case of its own."""
        ...


class OnlineSoftmax:
    """Row statistics of one warp's query rows: the maximum m (in units of S) and each lane's part of the sum l."""

    def __init__(
        self,
        k: Kernel,
        config: SoftmaxConfig,
        features: AttentionFeatures,
        scores: FragmentLayout,
        output: Fragment,
    ) -> None:
        self._k, self._config, self._features, self._output = k, config, features, output
        self._plan = reduction_plan(scores, "col")
        self._output_rows = reduction_plan(output.layout, "col").groups
        scale = 1.0 / math.sqrt(config.head_dim) if features.scale is None else features.scale
        self._scale = scale if np.float32(scale) else 0.0  # 0 in float32: times a masked score it would be NaN
        self._headroom = HEADROOM if config.dtype is bf16 else 0.0
        start = None if config.peel else self._lowest
        rows = len(self._plan.groups)
        self._max = k.registers(f32, rows, start, "row_max")
        self._sum = k.registers(f32, rows, None if config.peel else 0.0, "row_sum")

    @property
    def _to_log2(self) -> float:
        """What a difference of the kept maxima is multiplied by to be an exponent of 2."""
        return self._scale * LOG2_E if self.folds_scale else LOG2_E

    @property
    def _lowest(self) -> float:
        """The maximum of a row that has no larger score yet: lower ones count as -inf."""
        return -min(F32_MAX, FAR[self._config.dtype.name] / self._to_log2)

    @property
    def folds_scale(self) -> bool:
        """Whether the maxima are those of unscaled scores (a capped score is scaled before its tanh)."""
        return self._config.folded_scale and self._features.softcap is None and self._scale > 0

    def scaled(self, scores: Fragment) -> Fragment:
        """Scores as the softmax takes them: scaled, unless the scale is folded into the exponential, and capped."""
        cap = self._features.softcap
        if cap is not None:
            return scores.map(lambda x: self._capped(x * self._scale, cap))
        return scores if self.folds_scale else scores.map(lambda x: x * self._scale)

    def probabilities(self, scores: Fragment, first: bool) -> Fragment:
        """P = exp(S - m) of one block of scaled scores, with m, l and O updated. ``first``: nothing to rescale."""
        block_max = scores.reduce("max", "col")
        if first:
            self._start(block_max)
        elif self._config.lazy_rescale:
            self._rescale_lazily(block_max)
        else:
            self._rescale([self._k.maximum(kept, top) for kept, top in zip(self._max, block_max, strict=True)])
        return self._exponentials(scores, first)

    def _start(self, block_max: list[Traced]) -> None:
        """The maxima of a first block."""
        for kept, top in zip(self._max, block_max, strict=True):
            kept.set(self._k.maximum(top, self._lowest))

    def _capped(self, x: Traced, cap: float) -> Traced:
        """cap · tanh(x / cap) to float32's accuracy (tanh.approx is good to 2^-11, and the cap multiplies its error).

        tanh(t) = 1 - 2 / (1 + e^2t) cancels near 0, where the first terms of the series are exact enough.
        """
        k = self._k
        away = k.fma(k.reciprocal(k.exp2(x * (2.0 * LOG2_E / cap)) + 1.0), -2.0 * cap, cap)
        square = (x * (1.0 / cap)) * (x * (1.0 / cap))
        near = x * k.fma(square, k.fma(square, 2.0 / 15.0, -1.0 / 3.0), 1.0)
        return k.select(square < NEAR_ZERO**2, near, away)

    def _rescale(self, new_max: list[Traced]) -> None:
        """Bring l and O from the old maxima to the new ones."""
        for row, top in enumerate(new_max):
            factor = self._factor(self._max[row].get(), top)
            self._max[row].set(top)
            self._sum[row] *= factor
            for element in self._output_rows[row]:
                self._output.scale(element, factor)

    def _factor(self, before: Traced, after: Traced) -> Traced:
        """What l and O are multiplied by when a row's maximum changes: as their shifts differ, rounded as they are."""
        if self._config.folded_scale:
            return self._k.exp2(self._shift(after) - self._shift(before))
        return self._k.exp2((before - after) * self._to_log2)

    def _shift(self, kept: Traced) -> Traced:
        """What subtracts the maximum ``kept`` and the headroom: added to a scaled score, or subtracted from a score."""
        headroom = self._headroom
        if self._config.folded_scale:
            return self._k.fma(kept, -self._to_log2, -headroom) if headroom else kept * -self._to_log2
        return kept + headroom / LOG2_E if headroom else kept

    def _exponential(self, score: Traced | Mutable, shift: Traced) -> Traced:
        """exp of a score with its row's shift."""
        k = self._k
        return k.exp2(k.fma(score, self._to_log2, shift) if self._config.folded_scale else (score - shift) * LOG2_E)

    def _rescale_lazily(self, block_max: list[Traced]) -> None:
        """Rescale only when some row of the warp outgrew its kept maximum; else P stays below 2^LAZY_GROWTH."""
        k = self._k
        outgrown: Traced | None = None
        for kept, top in zip(self._max, block_max, strict=True):
            grew = (top - kept) * self._to_log2 > LAZY_GROWTH
            outgrown = grew if outgrown is None else outgrown | grew
        assert outgrown is not None
        with k.when(k.vote_any(outgrown), uniform=True):
            self._rescale([k.maximum(kept, top) for kept, top in zip(self._max, block_max, strict=True)])

    def _exponentials(self, scores: Fragment, first: bool) -> Fragment:
        """P, and each lane's part of its row sums."""
        k = self._k
        values: list[Traced] = list(scores.registers)
        for row, elements in enumerate(self._plan.groups):
            shift = self._shift(self._max[row].get())
            total: Traced | None = None if first else self._sum[row].get()
            for element in elements:
                p = values[element] = self._exponential(values[element], shift)
                total = p if total is None else total + p
            assert total is not None
            self._sum[row].set(total)
        return k.fragment(scores.layout, f32, values)

    def normalise(self, statistics: tuple[list[Traced], list[Traced]] | None = None) -> list[Traced]:
        """Divide O by the row sums, completed over the lanes of each row; returns each row's log-sum-exp (natural).

        ``statistics`` are those of the rows O belongs to, if the running ones have moved on to the next tile.
        """
        k = self._k
        maxima, sums = statistics or self.statistics()
        logs: list[Traced] = []
        for row, elements in enumerate(self._output_rows):
            total, top = self._whole_sum(sums, row), maxima[row]
            far = self._is_far(top)
            inverse = k.select(total == 0.0, k.value(0.0, f32), k.reciprocal(total))  # 0: no score above -inf
            inverse = k.select(far, k.value(math.nan, f32), inverse)
            for element in elements:
                self._output.scale(element, inverse)
            if self._features.lse:
                to_scores = self._scale if self.folds_scale else 1.0
                log = (k.log2(total) + self._headroom) * math.log(2.0)
                logs.append(k.select(far, top * to_scores, k.fma(top, to_scores, log)))
        return logs

    def _is_far(self, maximum: Traced) -> Traced:
        """Whether a row has a score that is infinite or too large."""
        return maximum * self._to_log2 > FAR[self._config.dtype.name]

    def _whole_sum(self, sums: list[Traced], row: int) -> Traced:
        """A row's sum over all lanes that share it."""
        total = sums[row]
        for mask in self._plan.lane_masks:
            total = total + self._k.shfl_xor(total, mask)
        return total

    def statistics(self) -> tuple[list[Traced], list[Traced]]:
        """Snapshots of each row's maximum and of this lane's part of its sum."""
        return [m.get() for m in self._max], [x.get() for x in self._sum]


class DeferredSoftmax(OnlineSoftmax):
    """The online softmax of an overlapped pipeline: O is still being written when P is formed, and rescaled later.

    ``sum_column``: the last columns of ``output`` are the row sums, which P·V forms.
    """

    def __init__(
        self,
        k: Kernel,
        config: SoftmaxConfig,
        features: AttentionFeatures,
        scores: FragmentLayout,
        output: Fragment,
        *,
        sum_column: bool = False,
    ) -> None:
        super().__init__(k, config, features, scores, output)
        self._column = sum_column

    @property
    def rows(self) -> int:
        """Query rows that a thread has scores of."""
        return len(self._plan.groups)

    def statistics(self) -> tuple[list[Traced], list[Traced]]:
        """Snapshots of the maxima and sums; no sums where they are in the output."""
        return [m.get() for m in self._max], [] if self._column else [x.get() for x in self._sum]

    def _whole_sum(self, sums: list[Traced], row: int) -> Traced:
        """A row's sum over all lanes that share it."""
        if not self._column:
            return super()._whole_sum(sums, row)
        return self._output.registers[self._output_rows[row][-1]]

    def advance(self, scores: Fragment, first: bool) -> list[Traced]:
        """Update the maxima by one block's scores; returns the factor each row's l and O must be multiplied by."""
        k = self._k
        block_max = scores.reduce("max", "col")
        if first:
            self._start(block_max)
            return []
        factors: list[Traced] = []
        for kept, top in zip(self._max, block_max, strict=True):
            if self._config.lazy_rescale:
                grew = (top - kept) * self._to_log2 > LAZY_GROWTH
                following = k.select(grew, top, kept.get())
            else:
                following = k.maximum(kept, top)
            factors.append(self._factor(kept.get(), following))
            kept.set(following)
        return factors

    def exponentiate(self, scores: Fragment, factors: list[Traced]) -> None:
        """P in place of the scores' registers; the row sums take it up (``factors`` is empty for a first block)."""
        k = self._k
        registers = [r for r in scores.registers if isinstance(r, Mutable)]
        for row, elements in enumerate(self._plan.groups):
            self._raise_to(registers, elements, self._max[row].get())
        for row, elements in enumerate(() if self._column else self._plan.groups):
            total = k.reduce_values("add", [registers[e].get() for e in elements])
            self._sum[row].set(k.fma(self._sum[row], factors[row], total) if factors else total)

    def carried(self, scores: Fragment) -> tuple[Traced, list[Traced]]:
        """P by the maxima so far, in place of the scores' registers; whether they serve the whole warp, and the sums.

        NaN never passes, and no score of a row without a maximum yet: the sum is no number, or too large.
        """
        k = self._k
        registers = [r for r in scores.registers if isinstance(r, Mutable)]
        for row, elements in enumerate(self._plan.groups):
            self._raise_to(registers, elements, self._max[row].get())
        if self._column:
            bits = k.bitcast(registers[0].get(), u32)
            for register in registers[1:]:
                bits = bits | k.bitcast(register.get(), u32)
            return k.vote_all((bits & TOP_EXPONENT_BIT) == 0), []
        totals = [k.reduce_values("add", [registers[e].get() for e in elements]) for elements in self._plan.groups]
        most = CARRIED_SUM * 2.0**-self._headroom
        good = totals[0] <= most
        for total in totals[1:]:
            good = good & (total <= most)
        return k.vote_all(good), totals

    def accept(self, totals: list[Traced]) -> None:
        """Take up a block's sums by unchanged maxima."""
        if not self._column:
            for kept, total in zip(self._sum, totals, strict=True):
                kept += total

    def _raise_to(self, registers: list[Mutable], elements: tuple[int, ...], kept: Traced) -> None:
        """exp of the scores less the maximum ``kept``, in place."""
        shift = self._shift(kept)
        for element in elements:
            registers[element].set(self._exponential(registers[element], shift))

    def rescale_output(self, factors: list[Traced], also: Callable[[], None] = lambda: None) -> None:
        """Multiply O by the factors; with lazy rescaling only where a row of the warp has one other than 1.

        ``also`` is done wherever O is rescaled.
        """
        if not self._config.lazy_rescale:
            self._scale_output(factors)
            also()
            return
        changed = factors[0] != 1.0
        for factor in factors[1:]:
            changed = changed | (factor != 1.0)
        with self._k.when(self._k.vote_any(changed), uniform=True):
            self._scale_output(factors)
            also()

    def _scale_output(self, factors: list[Traced]) -> None:
        for row, factor in enumerate(factors):
            for element in self._output_rows[row]:
                self._output.scale(element, factor)
