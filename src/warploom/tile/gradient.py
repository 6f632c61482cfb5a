"""The softmax of a backward pass: P from scores and log-sum-exps, dS from P and dP. No maxima, no sums.

With c = scale · log2(e) and for each row its log-sum-exp L and delta = sum of dO∘O::

    P = 2^(c·S - log2(e)·L)        dS = P∘(dP - delta)

Scores that do not count get P = 0. Where scaled scores were changed, by a soft cap say, dS is times the slope of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from warploom.tile.softmax import LOG2_E, ScoreChange, nothing

if TYPE_CHECKING:
    from warploom.lang import Fragment, Kernel, Traced


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
