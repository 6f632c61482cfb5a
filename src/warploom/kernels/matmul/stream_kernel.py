# pyright: reportInvalidTypeForm=false
"""The stream-K schedule of :mod:`.sm80_kernel`: every CTA sums equally many k-tiles, whatever the count of tiles.

A tile's parts meet through memory, and no CTA waits for another: each leaves its part and counts itself, and the one
that finds all others counted adds the parts in the order of k. Which CTA that is changes nothing about the sum.
"""

from __future__ import annotations

from collections.abc import Iterator

from warploom.core.dtypes import f16, u16, u32
from warploom.kernels.matmul.features import PLAIN, MatmulFeatures
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.kernels.matmul.sm80_kernel import Sm80Product
from warploom.kernels.matmul.values import Output, Result, ResultTile
from warploom.lang import Compound, Fragment, Global, GlobalPointer, Kernel, Mutable, Strided, Traced, kernel
from warploom.lang.values import Number
from warploom.tile.accumulation import WORDS
from warploom.tile.product import read


@kernel(threads=lambda config, **_: config.threads, drop_unused=True)
def matmul_stream_k(
    k: Kernel,
    a: Strided[u16, 2],
    b: Strided[u16, 2],
    result: Result,
    parts: Global[u32],
    arrived: Global[u32],
    depth: u32,
    shares: KtileShares,
    *,
    config: MatmulSm80,
    features: MatmulFeatures = PLAIN,
) -> None:
    """C = epilogue(A·B): a grid of as many CTAs as run at once, each with its share of the k-tiles.

    Arguments as of :func:`~warploom.kernels.matmul.sm80_kernel.matmul_sm80`. ``parts``: for each CTA two parts, as its
    threads hold them. ``arrived``: for each tile that is cut a count, 0 at the start.
    """
    output = Output(k, features, config.dtype, result)
    order = Segments(k, shares)
    work = Sm80Product(k, config, features, (a, b), (result.m, result.n, depth))
    staging = work.staging(beside=True)  # the stages are being filled when C leaves
    joining = Joining(k, config, order, parts, arrived)
    taken = Taken(k, work, order)

    taken.begin(0)
    with k.loop(order.turns) as turn:
        work.multiply(taken.tile)
        with k.when(turn + 1 < order.turns, uniform=True):
            taken.begin(turn + 1)  # its first k-tiles are on their way while this one's parts meet and C leaves
        number, first, count = order.segment(turn)
        complete = joining.join(work.sums, number, first, count)
        with k.when(complete.get() != 0, uniform=True):
            row, col, batch = work.place(number)
            tile = ResultTile(row, col, batch if features.batched else None, batch, first, count)
            work.store(tile, output, staging)


class Taken:
    """The segment that is being summed, in registers: the loop over k is written once for all of them."""

    def __init__(self, k: Kernel, work: Sm80Product, order: Segments) -> None:
        self._work, self._order = work, order
        self._row, self._col = k.register(u32, 0, "row"), k.register(u32, 0, "col")
        self._first, self._count = k.register(u32, 0, "first_tile"), k.register(u32, 0, "count")

    def begin(self, turn: Number) -> None:
        """Start the copies of segment number ``turn``: it is next."""
        number, first, count = self._order.segment(turn)
        row, col, batch = self._work.place(number)
        self._row.set(row)
        self._col.set(col)
        self._first.set(first)
        self._count.set(count)
        self.tile = ResultTile(self._row, self._col, None, batch, self._first, self._count)
        self._work.begin(self.tile)


class KtileShares(Compound):
    """A parameter: what :class:`~warploom.kernels.matmul.shares.StreamShares` says of a launch."""

    k_tiles: u32
    cut: u32
    waves: u32
    share: u32
    longer: u32


class Segments:
    """The segments of this CTA, one after another: :meth:`warploom.kernels.matmul.shares.StreamShares.segments`."""

    def __init__(self, k: Kernel, shares: KtileShares) -> None:
        self._k, self._cut, cta = k, shares.cut, k.cta_x
        self.k_tiles = k_tiles = shares.k_tiles
        self._share, self._longer = share, longer = shares.share, shares.longer
        self._start = cta * share + k.minimum(cta, longer)
        self._end = self._start + share + k.select(cta < longer, 1, 0)
        self._tile = self._start // k_tiles
        self._parts = (self._end + (k_tiles - 1)) // k_tiles - self._tile
        self.turns = self._parts + shares.waves

    def segment(self, turn: Number) -> tuple[Traced, Traced, Traced]:
        """(tile, first k-tile, count of k-tiles) of segment number ``turn``."""
        k, turn = self._k, self._k.value(turn, u32)
        whole = self._cut + k.cta_x + (turn - self._parts) * k.grid_x
        tile = k.select(turn < self._parts, self._tile + turn, whole)
        begin = k.select(turn == 0, self._start - self._tile * self.k_tiles, 0)
        stop = k.select(turn + 1 == self._parts, self._end - tile * self.k_tiles, self.k_tiles)
        return tile, begin, stop - begin

    def sharers(self, tile: Traced) -> tuple[Traced, Traced]:
        """(the first CTA, how many) that a tile is shared by."""
        first = self._owner(tile * self.k_tiles)
        return first, self._owner(tile * self.k_tiles + (self.k_tiles - 1)) - first + 1

    def _owner(self, item: Traced) -> Traced:
        wide = self._longer * (self._share + 1)
        return self._k.select(item < wide, item // (self._share + 1), self._longer + (item - wide) // self._share)


class Joining:
    """A tile's parts become its sum, in the registers of the CTA that arrives last."""

    def __init__(
        self, k: Kernel, config: MatmulSm80, order: Segments, parts: GlobalPointer, arrived: GlobalPointer
    ) -> None:
        self._k, self._config, self._order = k, config, order
        self._parts, self._arrived = parts, arrived
        self._count = k.shared(u32, WORDS, name="arrivals")
        self._together = min(WORDS, config.part_words // config.threads)

    def join(self, accumulator: Fragment, tile: Traced, begin: Traced, count: Traced) -> Mutable:
        """1 where the accumulators now hold the tile's whole sum, 0 where another CTA will have it.

        Every thread of the CTA gets the same answer.
        """
        k = self._k
        complete = k.register(u32, 1, "complete")
        with k.when(count < self._order.k_tiles, uniform=True):
            first, sharers = self._order.sharers(tile)
            self._meet(accumulator, self._arrived + tile, sharers, begin, complete)
            with k.when(complete.get() != 0, uniform=True):
                self._add(accumulator, first, sharers, begin)
        return complete

    def _meet(
        self, accumulator: Fragment, counter: GlobalPointer, sharers: Traced, begin: Traced, complete: Mutable
    ) -> None:
        """Leave this CTA's part and count it, unless all others are counted; ``complete``: 1 for the last one.

        What the others stored before they were counted can be read then.
        """
        k = self._k
        others = sharers - 1
        with k.when(k.thread == 0):
            self._count.store(counter.load(order="acquire"), 0)
        k.syncthreads()  # the count is here for every thread
        self._compare(others, complete)
        with k.when(complete.get() == 0, uniform=True):
            self._leave(accumulator, begin)
            k.syncthreads()  # every thread has left its part, and has read the count
            with k.when(k.thread == 0):
                self._count.store(k.atomic("add", counter, 1, order="acq_rel"), 0)
            k.syncthreads()  # the count is here for every thread
            self._compare(others, complete)

    def _compare(self, others: Traced, complete: Mutable) -> None:
        k = self._k
        complete.set(k.select(self._count.load(0) == others, 1, 0))

    def _add(self, accumulator: Fragment, first: Traced, sharers: Traced, begin: Traced) -> None:
        """The sum of all parts in the order of k, in the accumulators.

        The first two may be added either way round. So what a CTA holds of them stays where it is, and the others are
        added; a later part is put aside, and the sum begins anew.
        """
        k = self._k
        own, start = k.cta_x - first, k.register(u32, 0, "part")
        with k.when(own > 1, uniform=True):
            self._leave(accumulator, begin)  # again, where it has been left: each thread reads its own words
            for register, word in self._words(accumulator, self._part(first, k.value(1, u32) == 1)):
                register.set(word)
            start.set(1)
        kept = k.select(own > 1, sharers, own)
        with k.loop(sharers, start=start.get()) as number, k.when(number != kept, uniform=True):
            for register, word in self._words(accumulator, self._part(first + number, number == 0)):
                register.set(k.pair("add", f16, register, word) if accumulator.dtype is f16 else register + word)

    # -- parts: each thread's registers, 16 bytes from every thread side by side
    def _part(self, cta: Traced, from_the_first: Traced) -> GlobalPointer:
        """This thread's first words of a CTA's part: of its last segment (from a tile's first k-tile on), or first."""
        k, c = self._k, self._config
        slot = cta * 2 + k.select(from_the_first, 1, 0)
        return self._parts + (k.mul_wide(slot, c.part_words) + k.mul_wide(k.thread, self._together))

    def _leave(self, accumulator: Fragment, begin: Traced) -> None:
        target = self._part(self._k.cta_x, begin == 0)
        for first in range(0, len(accumulator.registers), self._together):
            words = [read(r) for r in accumulator.registers[first : first + self._together]]
            target.store(words, first * self._config.threads, dtype=words[0].dtype)

    def _words(self, accumulator: Fragment, source: GlobalPointer) -> Iterator[tuple[Mutable, Traced]]:
        """Each register of the accumulators, with its word in a part."""
        kind = accumulator.registers[0].dtype
        for first in range(0, len(accumulator.registers), self._together):
            loaded = source.load(first * self._config.threads, self._together, dtype=kind)
            for register, word in zip(accumulator.registers[first : first + self._together], loaded, strict=True):
                assert isinstance(register, Mutable)
                yield register, word
