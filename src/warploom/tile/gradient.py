"""The softmax of a backward pass: P from scores and log-sum-exps, dS from P and dP. No maxima, no sums.

With c = scale · log2(e) and for each row its log-sum-exp L and delta = sum of dO∘O::

    P = 2^(c·S - log2(e)·L)        dS = P∘(dP - delta)

Scores that do not count get P = 0. A soft cap c makes c·tanh(x / c) of a scaled score x, and dS times 1 - tanh².
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from warploom.tile.softmax import LOG2_E, capped, nothing

if TYPE_CHECKING:
    from warploom.lang import Fragment, Kernel, Traced


class SoftmaxGradient:
    """P in place of the scores ``s`` of a block, then dS. ``shift`` is -log2(e)·L and ``delta`` for each element."""

    def __init__(self, k: Kernel, s: Fragment, scale: float, *, cap: float | None = None) -> None:
        self._k, self._cap = k, cap
        self._scores = s.mutable
        self._scale = scale

    def probabilities(self, shift: Sequence[Traced], mask: Callable[[], None] = nothing) -> None:
        """P in place of S; ``mask`` puts 0 where scores do not count."""
        k, cap = self._k, self._cap
        factor = self._scale * LOG2_E if cap is None else LOG2_E
        for x, y in zip(self._scores, shift, strict=True):
            score = x.get() if cap is None else capped(k, x * self._scale, cap)
            x.set(k.exp2(k.fma(score, factor, y)))
        mask()

    def uncap(self, shift: Sequence[Traced]) -> None:
        """After P has been used: P·(1 - tanh²) in its place, where there is a soft cap.

        P says what its score was, so that no register keeps it.
        """
        k, cap = self._k, self._cap
        if cap is None:
            return
        for x, y in zip(self._scores, shift, strict=True):
            tanh = (k.log2(x) - y) * (math.log(2.0) / cap)
            slope = k.fma(tanh * -1.0, tanh, 1.0)
            x.set(k.select(x == 0.0, k.value(0.0, x.dtype), x * slope))

    def scores(self, dp: Fragment, delta: Sequence[Traced]) -> Fragment:
        """dS / scale, as values."""
        return score_gradients([x.get() for x in self._scores], dp, delta)


def score_gradients(p: Sequence[Traced], dp: Fragment, delta: Sequence[Traced]) -> Fragment:
    """dS / scale, as values, of P (with the slope of the soft cap) and dP."""
    return replace(dp, registers=tuple(x * (y - d) for x, y, d in zip(p, dp.registers, delta, strict=True)))
