"""The options of :mod:`warploom.kernels.attention.scores` at work in a kernel, on scores of rows of known heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, reduce
from operator import mul
from typing import TYPE_CHECKING, Any

from warploom.core.dtypes import f32
from warploom.kernels.attention.scores import HEAD_ARRAYS, ScoreOption, ScoreOptions
from warploom.lang import Compound, Global

if TYPE_CHECKING:
    from warploom.lang import Kernel, Traced
    from warploom.lang.values import Number


class HeadArrays(Compound):
    """A parameter: the arrays with a number for each query head, by the names of the options."""

    prefixed = False

    @classmethod
    @cache
    def fields(cls) -> dict[str, Any]:
        """The annotations, by name."""
        return dict.fromkeys(HEAD_ARRAYS, Global[f32])

    def scores(self, options: ScoreOptions, head: Number | None = None) -> HeadScores:
        """The options of a kernel at work on its scores; ``head`` is their query head, if it is the same for all."""
        return HeadScores(self.k, options, self, head)

    def number(self, name: str, head: Number) -> Traced:
        """The number of a head."""
        return getattr(self, name).load(head)

    def sink(self, options: ScoreOptions, head: Number) -> Traced | None:
        """The logit that joins the sums of a head's rows, if there is one."""
        return self.number(options.sink, head) if options.sink else None


class HeadScores:
    """A :class:`warploom.tile.softmax.ScoreChange`: what the options of a kernel make of the scores of some rows.

    :meth:`turn_to` says whose rows those are that come next in the text of the kernel.
    """

    def __init__(self, k: Kernel, options: ScoreOptions, arrays: HeadArrays, head: Number | None) -> None:
        self._k, self._changes, self._arrays = k, options.changes, arrays
        self._head: Number | Callable[[int], Number] | None = head

    def turn_to(self, head: Number | Callable[[int], Number]) -> None:
        """Take the numbers of a query head from here on; or for each element of the scores those of its own."""
        self._head = head

    @property
    def change(self) -> HeadScores | None:
        """Itself, if an option changes scores."""
        return self if self._changes else None

    def scores(self, scaled: Iterable[Traced]) -> Iterator[Traced]:
        """Scaled scores after all options."""
        changes = [(x, self._numbers(name, x)) for name, x in self._changes.items()]
        for element, score in enumerate(scaled):
            for option, number in changes:
                score = option.score(self._k, score, number(element))
            yield score

    def slopes(self, exponents: Iterable[Traced]) -> Iterator[Traced]:
        """The derivatives of :meth:`scores`; ``exponents`` are log2(e) times what it gave."""
        changes = [(x, self._numbers(name, x)) for name, x in self._changes.items()]
        for element, exponent in enumerate(exponents):
            slopes = [option.slope(self._k, exponent, number(element)) for option, number in changes]
            yield reduce(mul, slopes)

    def _numbers(self, name: str, option: ScoreOption) -> Callable[[int], Traced | None]:
        """An option's number for each element of the scores; one of all is loaded now."""
        arrays, head = self._arrays, self._head
        if not option.array:
            return lambda _: None
        if callable(head):
            return lambda element: arrays.number(name, head(element))
        assert head is not None, "turn_to has not been called"
        number = arrays.number(name, head)
        return lambda _: number
