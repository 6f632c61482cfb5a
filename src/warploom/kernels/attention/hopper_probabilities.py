"""One block's scores into probabilities: by its own maxima, or by those of the blocks before."""

from __future__ import annotations

from collections.abc import Callable

from warploom.core.dtypes import f32, u32
from warploom.core.errors import ConfigError
from warploom.kernels.attention.features import AttentionFeatures
from warploom.kernels.attention.hopper_parts import TilePlace
from warploom.kernels.attention.softmax import DeferredSoftmax
from warploom.lang import Fragment, Kernel, Mutable, Traced
from warploom.lang.values import Number

WARY_BLOCKS = 16
"""Blocks for which a warp looks for maxima again after one grew: where they keep growing, few attempts fail."""
Rescale = Callable[[], None]
"""Brings O, once no product writes it, from the old maxima to the new ones."""


class BlockProbabilities:
    """P of a block in place of its scores, still f32; masked, limited and summed."""

    def __init__(
        self, k: Kernel, features: AttentionFeatures, softmax: DeferredSoftmax, scores: Fragment, *, carries: bool
    ) -> None:
        self._k, self._features, self._softmax, self._scores = k, features, softmax, scores
        self._registers = [r for r in scores.registers if isinstance(r, Mutable)]
        self._wary = k.register(u32, 0, "wary") if carries else None

    def first(self, place: TilePlace, index: Number) -> Rescale:
        """Of a tile: by its own maxima, and nothing to rescale."""
        self._limit()
        self._exact(place, index, first=True)
        return lambda: None

    def following(self, place: TilePlace, index: Number) -> Rescale:
        """By the maxima with this block's own."""
        self._limit()
        factors = self._exact(place, index, first=False)
        return lambda: self._softmax.rescale_output(factors)

    def carried(
        self, place: TilePlace, index: Number, again: Callable[[], None], release: Callable[[], None]
    ) -> Rescale:
        """By the maxima of the blocks before: no maximum is looked for.

        Unless some score is masked, or P itself shows that a maximum grew: then ``again`` forms the scores once more,
        and the maxima of this block and of the next :data:`WARY_BLOCKS` count. ``release`` gives K back, which
        ``again`` reads.
        """
        k, wary = self._k, self._wary
        if wary is None:
            raise ConfigError("maxima are carried only with carry_max")
        exact = k.register(u32, 0, "exact")
        factors = k.registers(f32, self._softmax.rows, None, "factor")
        looks = wary != 0
        if self._features.masked:
            looks = looks | place.mask.cuts(self._block(place, index))
        with k.when(looks, uniform=True):
            exact.set(1)
        with k.otherwise():
            self._limit()
            served, sums = self._softmax.carried(self._scores)
            with k.when(served, uniform=True):
                self._softmax.accept(sums)
            with k.otherwise():
                again()
                exact.set(1)
        release()
        with k.when(exact != 0, uniform=True):
            self._limit()
            for kept, factor in zip(factors, self._exact(place, index, first=False), strict=True):
                kept.set(factor)
            wary.set(k.select(wary == 0, k.value(0, u32), wary - 1))

        def rescale() -> None:
            with k.when(exact != 0, uniform=True):
                self._softmax.rescale_output([f.get() for f in factors], lambda: wary.set(WARY_BLOCKS))

        return rescale

    def _limit(self) -> None:
        """Scores as the softmax takes them: scaled and capped here, unless the exponential folds the scale."""
        if not self._softmax.folds_scale:
            scores = self._k.fragment(self._scores.layout, f32, [r.get() for r in self._registers])
            for register, value in zip(self._registers, self._softmax.scaled(scores).registers, strict=True):
                register.set(value)

    def _exact(self, place: TilePlace, index: Number, first: bool) -> list[Traced]:
        """P by the maxima with this block's own; returns the factors for O."""
        if self._features.masked:
            place.mask.cut(self._scores.layout, self._registers, self._block(place, index))
        factors = self._softmax.advance(self._scores, first)
        self._softmax.exponentiate(self._scores, factors)
        return factors

    def _block(self, place: TilePlace, index: Number) -> Traced:
        """The number of a tile's key block ``index``: the last comes first."""
        return self._k.value(place.first + place.count - 1 - index, u32)
