# pyright: reportInvalidTypeForm=false
"""The next tile of a CTA: an order of tiles as an object, with numbers that the host computes (:mod:`.planning`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from warploom.core.dtypes import pred, u32
from warploom.lang.parameters import Compound
from warploom.tile.pipeline import Pipeline

if TYPE_CHECKING:
    from warploom.lang import GlobalPointer, Kernel, Traced
    from warploom.lang.values import Number


class _Counted:
    """A CTA's turns where it knows ``count``, how many items it works on."""

    is_claimed: ClassVar = False
    """Whether :meth:`claim` has something to do."""

    def __init__(self, k: Kernel, count: Traced) -> None:
        self._k, self.count = k, count

    def any(self) -> AbstractContextManager[None]:
        """A block that runs where this CTA works on some item."""
        return self._k.when(self.count != 0, uniform=True)

    def turns(self, *, claims: bool = False, asks: bool = False) -> AbstractContextManager[Traced]:
        """A loop over this CTA's turns; nobody ``claims`` them or ``asks`` for them, as those of :class:`Claimed`."""
        return self._k.loop(self.count)

    def claim(self, turn: Number) -> None:
        """Do nothing: this CTA has its items."""

    def has(self, turn: Number) -> Traced:
        """Whether this CTA works on an item ``turn``."""
        return turn < self.count


class Persistent(_Counted):
    """Work items 0 … ``total`` - 1 for the CTAs of a grid along x: item ``cta + turn · CTAs`` is a CTA's turn.

    With ``alternating``, every other round of items goes the other way: where they shrink from the first to the last,
    no CTA gets the longer one of every round.
    """

    def __init__(self, k: Kernel, total: Traced, *, alternating: bool = False) -> None:
        self._k, self._alternating = k, alternating
        rounds, rest = total // k.grid_x, total % k.grid_x
        super().__init__(k, rounds + k.select(self._place(rounds) < rest, 1, 0))

    def item(self, turn: Number) -> Traced:
        """The number of this CTA's item ``turn``."""
        return self._place(turn) + self._k.value(turn, u32) * self._k.grid_x

    def _place(self, turn: Number) -> Traced:
        """This CTA's place within a round."""
        k = self._k
        if not self._alternating:
            return k.cta_x
        return k.select((k.value(turn, u32) & 1) == 0, k.cta_x, k.grid_x - 1 - k.cta_x)


class Single(_Counted):
    """One work item for each CTA of a grid along x: what :class:`Persistent` is for kernels whose CTAs come and go.

    ``total``: where the grid may have more CTAs than there are items; the last ones have none.
    """

    def __init__(self, k: Kernel, total: Traced | None = None) -> None:
        one = k.value(1, u32)
        super().__init__(k, one if total is None else k.select(k.cta_x < total, one, 0))
        self._always = total is None

    def any(self) -> AbstractContextManager[None]:
        """A block that runs where this CTA works on some item."""
        return nullcontext() if self._always else super().any()

    def item(self, _turn: Number) -> Traced:
        """The number of this CTA's item."""
        return self._k.cta_x


class Claimed:
    """Work items 0 … ``total`` - 1 for the CTAs of a grid along x, each taken by the next CTA that becomes free.

    What :class:`Persistent` is where nobody knows how long an item takes. ``counter``: a u32 in global memory, 0 at
    first. One thread of each CTA ``claims``: in each of its turns it takes an item for the next one (:meth:`claim`), as
    late as it can, and says so to the others through ``told``, a pipeline made by :meth:`telling`. They go through the
    turns in order, at most two ahead of those that exist, and ask :meth:`has` before :meth:`item`. The kernel's other
    pipelines keep the one that claims fewer than ``TOLD`` - 2 turns ahead of them.
    """

    is_claimed: ClassVar = True
    TOLD, NONE = 8, (1 << 32) - 1

    def __init__(self, k: Kernel, total: Traced, counter: GlobalPointer, told: Pipeline) -> None:
        self._k, self._total, self._counter, self._told = k, total, counter, told
        self._most = (total // k.grid_x) * 2 + 4
        """Turns of a CTA: enough for all items if all CTAs take as many, and no other one has to come for that."""
        self._claimed = k.register(u32, k.cta_x, "claimed")

    @classmethod
    def telling(cls, k: Kernel) -> Pipeline:
        """The items of the last turns."""
        return Pipeline(k, k.shared(u32, 1, name="claims", stages=cls.TOLD), readers=0)

    def any(self) -> AbstractContextManager[None]:
        """A block that runs where this CTA works on some item."""
        return self._k.when(self.has(0), uniform=True)

    @contextmanager
    def turns(self, *, claims: bool = False, asks: bool = False) -> Iterator[Traced]:
        """A loop over this CTA's turns; one thread ``claims`` them.

        ``asks``: this one asks :meth:`has` by itself, for turn 0 before the loop, and in each turn for the next.
        """
        k, has = self._k, self._is_item if asks else self.has
        if claims:
            self._say(0)
            with k.loop(self._most) as turn, k.when(self._claimed.get() < self._total):
                yield turn
            return
        going = k.register(pred, has(0), "going")
        with k.loop(self._most) as turn, k.when(going.get(), uniform=True):
            yield turn
            going.set(has(turn + 1))

    def claim(self, turn: Number) -> None:
        """The one that claims: an item for the next turn, which is number ``turn``."""
        k = self._k
        self._claimed.set(k.value(self.NONE, u32))
        with k.when(turn < self._most):
            self._claimed.set(k.grid_x + k.atomic("add", self._counter, 1))
        self._say(turn)

    def has(self, turn: Number) -> Traced:
        """Whether this CTA works on an item ``turn``: waits until that is known."""
        self._told.at(turn).wait()
        return self._is_item(turn)

    def item(self, turn: Number) -> Traced:
        """The number of this CTA's item ``turn``."""
        return self._told.at(turn).tile.load(0)

    def _is_item(self, turn: Number) -> Traced:
        return self.item(turn) < self._total

    def _say(self, turn: Number) -> None:
        """Tell the item of a turn to the others; after the last one also that the turn behind has none."""
        number = self._claimed.get()
        self._put(turn, number)
        with self._k.when(number >= self._total):
            self._put(turn + 1, number)

    def _put(self, turn: Number, number: Traced) -> None:
        place = self._told.at(turn)
        place.tile.store(number, 0)
        self._told.full.arrive(place.stage)


TileScheduler = Persistent | Single | Claimed


class Divisor(Compound):
    """A parameter to divide by, and its inverse from the host (:func:`.planning.divisors`): a multiplication does it.

    A division takes some twenty instructions, which nothing hides where a tile begins.
    """

    value: u32
    inverse: u32

    @classmethod
    def of(cls, k: Kernel, value: Traced) -> Divisor:
        """A number that only the kernel knows: one division, wherever this is traced."""
        return cls(k, value, k.value((1 << 32) - 1, u32) // value)

    def divide(self, number: Traced) -> tuple[Traced, Traced]:
        """(quotient, remainder) of a number below 2^31."""
        k, value = self.k, self.value
        least = k.convert(k.mul_wide(number, self.inverse) >> 32, u32)  # the quotient, or one less
        rest = number - least * value
        less = rest >= value
        return least + k.select(less, 1, 0), k.select(less, rest - value, rest)

    def or_else(self, condition: Traced, other: Divisor) -> Divisor:
        """Select this divisor where ``condition`` holds, else the other."""
        k = self.k
        value, inverse = k.select(condition, self.value, other.value), k.select(condition, self.inverse, other.inverse)
        return Divisor(k, value, inverse)


class RowTiles(Compound):
    """A parameter: tiles of row blocks × planes (one head of one batch) by number.

    The host gives the numbers (:func:`.planning.row_tiles`); :meth:`of` takes what only the kernel knows.

    ``grouped``: where work grows with the row block, ``together`` planes form a group of ``group`` tiles, which come
    from the longest to the shortest (:func:`.planning.planes_together`); the last group has ``last`` planes. Else plane
    by plane, from the first rows on.
    """

    rows: Divisor
    planes: u32
    group: Divisor
    together: Divisor
    last: Divisor

    def __init__(self, k: Kernel, *values: Any, grouped: bool = True) -> None:
        super().__init__(k, *values)
        self.grouped = grouped

    def ordered(self, *, grouped: bool) -> RowTiles:
        """A copy that orders the tiles in groups, or plane by plane."""
        return RowTiles(self.k, *self.values, grouped=grouped)

    @classmethod
    def of(cls, k: Kernel, rows: Traced, planes: Traced, together: Traced | None = None) -> RowTiles:
        """Tiles of numbers that only the kernel knows: it divides once, where this is traced, not for each tile."""
        size = planes if together is None else together
        rest = planes % size
        last = k.select(rest == 0, size, rest)
        divisors = (Divisor.of(k, n) for n in (size * rows, size, last))
        return cls(k, Divisor.of(k, rows), planes, *divisors, grouped=together is not None)

    @property
    def count(self) -> Traced:
        """Tiles of all planes."""
        return self.rows.value * self.planes

    def tile(self, number: Traced) -> tuple[Traced, Traced]:
        """The (row block, plane) of a tile by its number."""
        if not self.grouped:
            plane, row = self.rows.divide(number)
            return row, plane
        group, within = self.group.divide(number)
        first = group * self.together.value
        whole = first + self.together.value <= self.planes
        steps, member = self.together.or_else(whole, self.last).divide(within)
        return self.rows.value - 1 - steps, first + member


@dataclass(frozen=True)
class GroupedTiles:
    """Tiles of a matrix of ``rows`` × ``cols`` tiles by number; ``height`` rows of them walk along N together.

    They share their columns of B in the L2. 0: row by row.
    """

    k: Kernel
    rows: Traced
    cols: Traced
    height: int

    def tile(self, number: Traced) -> tuple[Traced, Traced]:
        """The (row, column) of a tile by its number."""
        if self.height == 0:
            return number // self.cols, number % self.cols
        group, within = number // (self.cols * self.height), number % (self.cols * self.height)
        members = self.k.minimum(self.rows - group * self.height, self.height)  # the last group may be lower
        return group * self.height + within % members, within // members
