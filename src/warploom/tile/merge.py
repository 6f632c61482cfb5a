"""Attention over parts of the keys, put together: O and the log-sum-exp of all keys from those of each part."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from itertools import groupby
from operator import add, itemgetter
from typing import TYPE_CHECKING

from warploom.core.dtypes import f32
from warploom.core.errors import TraceError
from warploom.lang.fragments import TileAddresses
from warploom.layout.shared import SharedLayout
from warploom.tile.eight_bits import LANES, columns
from warploom.tile.softmax import LOG2_E, inverse_or_zero

if TYPE_CHECKING:
    from warploom.lang import Fragment, Kernel, Traced
    from warploom.lang.values import Number
    from warploom.tile.cache import WarpRing
    from warploom.tile.softmax import OnlineSoftmax

QUAD = 4
"""Columns that a thread puts together at once."""


def anchor(k: Kernel, top: Traced) -> Traced:
    """The number that exponents are relative to: the largest log-sum-exp, but 0 where no part has a key."""
    return k.select(top == -math.inf, k.value(0.0, f32), top)


def weight(k: Kernel, log: Traced, at: Traced) -> Traced:
    """A part's share of the sum, relative to its anchor; 0 for a part without a key."""
    return k.exp2((log - at) * LOG2_E)


def logarithm(k: Kernel, top: Traced, total: Traced) -> Traced:
    """The log-sum-exp of all parts: -inf without a key, +inf where a part has it."""
    return k.select(top == math.inf, top, k.fma(k.log2(total), 1 / LOG2_E, anchor(k, top)))


def with_sink(k: Kernel, log: Traced, sink: Traced) -> tuple[Traced, Traced]:
    """The factor of O and the log-sum-exp where a logit without a value joins the sum: 0 beside a sink of +inf."""
    top = k.maximum(log, sink)
    at = anchor(k, top)
    both = k.select(top == math.inf, top, k.fma(k.log2(weight(k, log, at) + weight(k, sink, at)), 1 / LOG2_E, at))
    return k.select(log == -math.inf, k.value(0.0, f32), weight(k, log, both)), both


def merged(k: Kernel, logs: Sequence[Traced]) -> tuple[list[Traced], Traced, Traced]:
    """Weights for the outputs of parts with these log-sum-exps, the factor of their sum, and its log-sum-exp."""
    top = _in_pairs(k.maximum, logs)
    at = anchor(k, top)
    weights = [weight(k, log, at) for log in logs]
    total = _in_pairs(add, weights)
    return weights, inverse_or_zero(k, total), logarithm(k, top, total)


def _in_pairs(join: Callable[[Traced, Traced], Traced], values: Sequence[Traced]) -> Traced:
    """Join all values into one, in as few dependent steps as there can be."""
    while len(values) > 1:
        values = [reduce(join, values[i : i + 2]) for i in range(0, len(values), 2)]
    return values[0]


class WarpSums:
    """O of warps that have parts of the keys, put together: each leaves its own through its place of the ring.

    ``o``: the ``cols`` columns of a warp's rows, scaled as ``softmax`` says; ``fp8``: in the order of
    :func:`.eight_bits.columns`. Rows are those of the first of the ring's heads, and then of the next. So many columns
    go at a time as a warp's keys and values of a block have room for, half a row of each in turn.
    """

    def __init__(
        self, k: Kernel, ring: WarpRing, o: Fragment, softmax: OnlineSoftmax, cols: int, *, fp8: bool = False
    ) -> None:
        self._k, self._ring, self._o, self._softmax, self._cols, self._fp8 = k, ring, o, softmax, cols, fp8
        self._warps, self._rows, whole = ring.parts * ring.heads, o.layout.shape[0], ring.tiles[0].layout
        if whole.rows < self._rows:
            raise TraceError(f"the place of {whole.rows} keys takes no sums of {self._rows} rows")
        self._logs, self._inverses = (k.shared(f32, (self._warps, self._rows), name=x) for x in ("logs", "inverses"))
        self._half, self._together = whole.cols // 2, whole.rows // self._rows * 2
        self._layout = SharedLayout(whole.rows, self._half, 4, whole.swizzle, whole.panels[0].cols // 2)
        self._lanes = LANES if fp8 else o.layout.atom.restrict("lane")
        halves = [x.seen_as(f32, self._layout) for x in ring.tiles]
        self._places = [TileAddresses(k, x, self._lanes, k.lane, 0, "strided") for x in halves]

    def finish(self) -> None:
        """A warp's sums end here: what they are multiplied by to shared memory."""
        self._softmax.keep()
        self._softmax.ends_to(self._k.warp, self._logs, self._inverses)

    def each(
        self,
        stage: Number,
        exists: Callable[[Traced], Traced],
        leave: Callable[[Traced, Traced, Callable[..., None]], None],
    ) -> None:
        """``leave(row, log, store)`` in a thread for some columns of each row that ``exists``; ``stage`` is given up.

        ``log``: of all parts. ``store(sums, end)`` calls ``sums(column, four of O)``, and ``end()`` once for each row.
        """
        k, quads, count = self._k, self._half // QUAD, -(-self._cols // self._half)
        rows = self._rows * self._ring.heads
        for first in range(0, count, self._together):
            places = range(first, min(first + self._together, count))
            if first:
                k.syncthreads()  # all have read the columns before
            self._put(stage, places, exists)
            k.syncthreads()  # every warp's sums are there
            for item in range(0, rows * quads, 32 * self._warps):
                row, col = (k.thread + item) // quads, (k.thread + item) % quads * QUAD
                with k.when(exists(row) & (row < rows)):
                    log, sums = self._merged(stage, row, col, places)
                    leads = (col == 0) if first == 0 else None
                    leave(row, log, partial(self._store, col, dict(zip(places, sums, strict=True)), leads))

    def _put(self, stage: Number, places: range, exists: Callable[[Traced], Traced]) -> None:
        """Some columns of each warp's O to shared memory, in the place of the block that was read last."""
        k, half = self._k, self._half
        own, o, layout = self._ring.at(stage, k.warp), self._o.mutable, self._o.layout
        tiles = [to.on(x.seen_as(f32, self._layout)) for to, x in zip(self._places, own, strict=True)]
        firsts = range(0, layout.elements_per_thread, 2)
        pairs = [(*layout.coordinates(0, first), [*o[first : first + 2]]) for first in firsts]
        found = sorted(columns(self._o) if self._fp8 else pairs, key=itemgetter(0, 1))
        stores = [
            (row, tiles[col // half % 2], row + (col // half - places.start) // 2 * self._rows, col % half, values)
            for row, col, values in found
            if col // half in places
        ]
        for _, to, row, col, _ in stores:
            to.prepare([(row, col)])
        for first, together in groupby(stores, key=itemgetter(0)):
            with k.when(exists(self._lanes.apply(lane=k.lane)["row"] + first)):
                for _, to, row, col, values in together:
                    k.store("shared", to.address(row, col), f32, [x.get() for x in values], "", "weak")

    def _merged(self, stage: Number, row: Traced, col: Traced, places: range) -> tuple[Traced, list[list[Traced]]]:
        """The log-sum-exp of a row, and its sums in four columns of each place."""
        k, ring, half, own = self._k, self._ring, self._half, row % self._rows
        warps = [row // self._rows + part * ring.heads for part in range(ring.parts)]
        weights, factor, log = merged(k, [self._logs.load(warp, own) for warp in warps])
        weights = [x * self._inverses.load(warp, own) for warp, x in zip(warps, weights, strict=True)]
        found: list[list[Traced]] = []
        for place in places:
            below, last = (place - places.start) // 2 * self._rows, self._cols - place * half - QUAD
            at = k.minimum(col, last) if last < half - QUAD else col
            sums: list[Traced] = []
            for warp, share in zip(warps, weights, strict=True):
                source = ring.at(stage, warp)[place % 2].seen_as(f32, self._layout)
                loaded = source.load(own + below, at, QUAD)
                sums = [
                    x * share if not sums else k.fma(x, share, y) for x, y in zip(loaded, sums or loaded, strict=True)
                ]
            found.append([x * factor for x in sums])
        return log, found

    def _store(
        self,
        col: Traced,
        found: dict[int, list[Traced]],
        leads: Traced | None,
        sums: Callable[[Traced, list[Traced]], None],
        end: Callable[[], None],
    ) -> None:
        for place, values in found.items():
            at = col + place * self._half
            with nullcontext() if (place + 1) * self._half <= self._cols else self._k.when(at < self._cols):
                sums(at, values)
        if leads is not None:
            with self._k.when(leads):
                end()
