"""What a kernel holds of memory: typed global pointers and shared tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import NoReturn, overload

from warploom.core.dtypes import DType, u32
from warploom.core.errors import TraceError
from warploom.ir.statements import Tile
from warploom.isa.effects import MemoryOrder
from warploom.isa.memory import atomic, load
from warploom.lang.accesses import Accesses
from warploom.lang.fold import least, split_sum
from warploom.lang.loaded import Element, Vector
from warploom.lang.values import Number, TileAddress, Traced
from warploom.layout.shared import SharedLayout


@dataclass(frozen=True, eq=False, repr=False)
class GlobalPointer:
    """A typed pointer into global memory; offsets and indices count elements."""

    words: Accesses
    address: Traced
    dtype: DType

    def __add__(self, elements: Number) -> GlobalPointer:
        """The pointer ``elements`` further on (u32, s32, u64 or a Python int)."""
        return replace(self, address=self.words.advance(self.address, elements, self.dtype.bytes))

    def __repr__(self) -> str:
        return f"a pointer to {self.dtype}"

    def __getitem__(self, *_: object) -> NoReturn:
        raise TraceError(f"a pointer is not indexed ({self.words.here()}): write x.load(i) and x.store(value, i)")

    __setitem__ = __getitem__

    def bytes(self, offset: Number) -> GlobalPointer:
        """The pointer ``offset`` bytes further on."""
        return replace(self, address=self.words.advance(self.address, offset, 1))

    @overload
    def load(
        self, index: Number = 0, *, cache: str = "", order: MemoryOrder = "weak", dtype: DType | None = None
    ) -> Element: ...
    @overload
    def load(
        self, index: Number, count: int, *, cache: str = "", order: MemoryOrder = "weak", dtype: DType | None = None
    ) -> Vector: ...
    @overload
    def load(
        self, index: Number = 0, *, count: int, cache: str = "", order: MemoryOrder = "weak", dtype: DType | None = None
    ) -> Vector: ...
    def load(
        self,
        index: Number = 0,
        count: int | None = None,
        *,
        cache: str = "",
        order: MemoryOrder = "weak",
        dtype: DType | None = None,
    ) -> Element | Vector:
        """The element at ``index``, or with ``count`` that many from there on, in one access.

        ``dtype`` reads the memory as another type: ``index`` still counts elements of the pointer's own type, ``count``
        those of ``dtype``. Elements narrower than 32 bits arrive one at a time, as bits in u32
        (``k.convert(x, f32)`` gives their value); read pairs of 16-bit elements with ``dtype=u32``.
        """
        kind = dtype or self.dtype
        values = self.words.load("global", (self + index).address, kind, 1 if count is None else count, cache, order)
        return Element(values[0], kind) if count is None else Vector(values)

    def store(
        self,
        values: Number | Sequence[Number],
        index: Number = 0,
        *,
        cache: str = "",
        order: MemoryOrder = "weak",
        dtype: DType | None = None,
    ) -> None:
        """Store one value, or several consecutive ones in one access, from ``index`` on."""
        listed = list(values) if isinstance(values, Sequence) else [values]
        self.words.store("global", (self + index).address, dtype or self.dtype, listed, cache, order)


@dataclass(frozen=True, eq=False, repr=False)
class SharedTile:
    """A tile in shared memory: where it lies, and where its elements lie in it (its :class:`SharedLayout`).

    ``offset`` is its byte offset from the start of shared memory; ``shift`` a run-time part of it (a pipeline stage);
    ``chosen`` whether it is one stage of several.
    """

    words: Accesses
    name: str
    dtype: DType
    layout: SharedLayout
    offset: int
    stages: int = 1
    stage_bytes: int = 0
    shift: Traced | None = None
    chosen: bool = False

    def __repr__(self) -> str:
        return f"tile {self.name} of {self.dtype}"

    def __iter__(self) -> NoReturn:
        raise TraceError(f"a shared tile is one tile, no sequence ({self.words.here()}): `wait_all` returns several")

    def __getitem__(self, *_: object) -> NoReturn:
        raise TraceError(
            f"a shared tile is not indexed ({self.words.here()}): write tile.load(row, col) and tile.store(x, row, col)"
        )

    __setitem__ = __getitem__

    def stage(self, index: Number) -> SharedTile:
        """The tile of one pipeline stage; ``index`` is an int or a u32 below ``stages``."""
        known = index.constant if isinstance(index, Traced) and index.constant is not None else index
        if isinstance(known, Integral):
            stage = int(known)
            if not 0 <= stage < self.stages:
                raise TraceError(
                    f"{self.name} has {self.stages} stages; there is no stage {stage} ({self.words.here()})"
                )
            return replace(self, offset=self.offset + stage * self.stage_bytes, chosen=True)
        return replace(self, shift=self.words.operand(index, u32) * self.stage_bytes, chosen=True)

    def seen_as(self, dtype: DType, layout: SharedLayout) -> SharedTile:
        """The same memory as a tile of another type and layout, no larger; the author orders the accesses to both."""
        if layout.bytes > self.layout.bytes or layout.alignment > max(16, self.layout.alignment):
            raise TraceError(
                f"{self.name} has {self.layout.bytes} bytes a stage, too few for {layout.bytes} ({self.words.here()})"
            )
        return replace(self, dtype=dtype, layout=layout)

    @property
    def base(self) -> Traced:
        """The tile's address in shared memory (u32, bytes)."""
        start = self.words.shared_base
        if self.shift is not None:
            start = start + self.shift
        return start + self.offset

    @property
    def extent(self) -> Tile:
        """What an access may reach: the stage, or all stages where it is not known which; and how it is laid out."""
        one, layout = self.chosen and self.shift is None, self.layout
        size = layout.bytes if one else layout.bytes + (self.stages - 1) * self.stage_bytes
        return Tile(self.name, self.offset, size, layout, self.stage_bytes if self.chosen and not one else 0)

    def address(self, row: Number, col: Number = 0) -> Traced:
        """The shared address of element (row, col), swizzled as the tile is."""
        return self._address(row, col, 1)

    def _address(self, row: Number, col: Number, count: int) -> Traced:
        """Refuses ``count`` elements from (row, col) on that lie outside whatever the run does."""
        layout = self.layout
        for what, index, extent, width in (("row", row, layout.rows, 1), ("column", col, layout.cols, count)):
            first = least(index)
            if first is not None and not 0 <= first <= extent - width:
                which = f"{what} {first}" if width == 1 else f"columns {first} to {first + width - 1}"
                known = not isinstance(index, Traced) or index.constant is not None
                raise TraceError(
                    f"{self.name} has {layout.rows} rows and {layout.cols} columns: there is no {which}"
                    f"{'' if known else ' or beyond'} ({self.words.here()})"
                )
        return self.at(layout.offset(row, col))

    def at(self, offset: Number) -> Traced:
        """The shared address ``offset`` bytes into the tile."""
        return TileAddress(self.base + offset, self.extent)

    @overload
    def load(self, row: Number, col: Number = 0, *, dtype: DType | None = None, volatile: bool = False) -> Element: ...
    @overload
    def load(
        self, row: Number, col: Number, count: int, *, dtype: DType | None = None, volatile: bool = False
    ) -> Vector: ...
    @overload
    def load(
        self, row: Number, col: Number = 0, *, count: int, dtype: DType | None = None, volatile: bool = False
    ) -> Vector: ...
    def load(
        self,
        row: Number,
        col: Number = 0,
        count: int | None = None,
        *,
        dtype: DType | None = None,
        volatile: bool = False,
    ) -> Element | Vector:
        """The element (row, col), or with ``count`` that many of the row, in one access (within a swizzle's 16 bytes).

        Types are as in :meth:`GlobalPointer.load`. ``volatile`` keeps the access as written where the compiler would
        join it with its neighbours.
        """
        kind = dtype or self.dtype
        base, offset = split_sum(self._address(row, col, self._elements(kind, count or 1)))
        values = self.words.emit(load("shared", kind, count or 1, volatile=volatile).at(offset=offset), (base,))
        return Element(values[0], kind) if count is None else Vector(values)

    def store(
        self, values: Number | Sequence[Number], row: Number, col: Number = 0, *, dtype: DType | None = None
    ) -> None:
        """Store one value, or several consecutive ones of a row in one access."""
        listed = list(values) if isinstance(values, Sequence) else [values]
        kind = dtype or self.dtype
        address = self._address(row, col, self._elements(kind, len(listed)))
        self.words.store("shared", address, kind, listed, "", "weak")

    def atomic(self, op: str, value: Number, row: Number, col: Number = 0, *, order: MemoryOrder = "relaxed") -> Traced:
        """``atom.shared.{add,min,max,and,or,xor,exch}`` on element (row, col), of the CTA; returns the old value."""
        base, offset = split_sum(self._address(row, col, 1))
        operands = (base, self.words.operand(value, self.dtype))
        return self.words.emit(atomic("shared", op, self.dtype, order, "cta").at(offset=offset), operands)[0]

    def _elements(self, kind: DType, count: int) -> int:
        """How many of the tile's elements ``count`` of ``kind`` cover."""
        return max(1, count * kind.bytes // self.layout.element_bytes)
