# pyright: reportInvalidTypeForm=false
"""The options of :mod:`warploom.kernels.attention.scores` at work in kernels, and the gradients of their arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, reduce
from operator import mul
from typing import Any

from warploom.core.dtypes import f32, u32, u64
from warploom.kernels.attention.backward_rows import SINK_THREADS
from warploom.kernels.attention.device.backward_rows import slot_of
from warploom.kernels.attention.scores import HEAD_ARRAYS, ScoreOption, ScoreOptions
from warploom.lang import Compound, Global, Kernel, Mutable, Traced, kernel
from warploom.lang.values import Number
from warploom.tile.softmax import LOG2_E


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


# -- gradients
ROWS_AT_ONCE = 4
"""Rows that a thread of the sinks' kernel has loads of under way."""


@kernel(threads=SINK_THREADS)
def attention_backward_sinks(
    k: Kernel,
    sinks: Global[f32],
    shift: Global[f32],
    delta: Global[f32],
    dsinks: Global[f32],
    q_len: u32,
    plane: u32,
    batches: u32,
    *,
    tile: tuple[int, int],
) -> None:
    """dsinks = -Σ 2^(log2(e)·sink + shift)·delta over the rows of a head; grid (heads).

    The rows come as :func:`attention_backward_rows` stores them, ``plane`` elements of a head. Sums are always taken in
    the same order.
    """
    head = k.cta_x
    sink = sinks.load(head)
    total = k.register(f32, 0.0, "total")
    with k.loop(batches) as batch:
        first = k.mul_wide(batch * k.grid_x + head, plane)
        with k.loop(q_len, step=ROWS_AT_ONCE * SINK_THREADS) as begin:
            found: list[tuple[Mutable, Mutable]] = []
            for i in range(ROWS_AT_ONCE):
                row = begin + (i * SINK_THREADS + k.thread)
                found.append((k.register(f32, 0.0, "exponent"), k.register(f32, 0.0, "change")))
                with k.when(row < q_len):
                    at = first + k.convert(slot_of(row, tile), u64)
                    for register, source in zip(found[-1], (shift, delta), strict=True):
                        register.set(source.load(at))
            for exponent, change in found:
                # at most 1: where a row has nothing but the sink, and where both are infinite, it is that
                weight = k.exp2(k.minimum(k.fma(sink, LOG2_E, exponent.get()), 0.0))
                total.set(k.fma(weight, change, total))
    sums = k.shared(f32, SINK_THREADS // 32)
    own = total.get()
    for bit in range(5):
        own = own + k.shfl_xor(own, 1 << bit)
    with k.when(k.lane == 0):
        sums.store(own, 0, k.warp)
    k.syncthreads()
    with k.when(k.thread == 0):
        whole = k.reduce_values("add", [sums.load(0, i) for i in range(SINK_THREADS // 32)])
        dsinks.store(whole * -1.0, head)
