"""Words of ``k`` for memory: addresses, the shared-memory plan, loads, stores, atomics, cp.async, ldmatrix, fences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Literal, NoReturn, overload

from warploom.core.dtypes import DType, f32, u32, u64
from warploom.core.errors import TraceError, VerifyError, shown
from warploom.core.targets import TARGETS
from warploom.ir.statements import SharedRegion, TileRegion
from warploom.isa import memory as isa
from warploom.isa.async_copy import Eviction, cp_async
from warploom.isa.conversion import special
from warploom.isa.effects import MemoryOrder, Scope, Space
from warploom.isa.instruction import named
from warploom.isa.matrix import matrix_access
from warploom.isa.memory import register_type
from warploom.lang.arithmetic import Arithmetic
from warploom.lang.builder import word
from warploom.lang.fold import least, split_sum
from warploom.lang.source import name_at
from warploom.lang.values import Element, Mutable, Number, TileAddress, Traced, Vector, is_a
from warploom.layout.shared import SharedLayout
from warploom.layout.swizzle import NO_SWIZZLE, Swizzle


@dataclass(frozen=True, eq=False, repr=False)
class GlobalPointer:
    """A typed pointer into global memory; offsets and indices count elements."""

    words: MemoryWords
    address: Traced
    dtype: DType

    def __add__(self, elements: Number) -> GlobalPointer:
        """The pointer ``elements`` further on (u32, s32, u64 or a Python int)."""
        return replace(self, address=self.words.advance(self.address, elements, self.dtype.bytes))

    def __repr__(self) -> str:
        return f"a pointer to {self.dtype}"

    def __getitem__(self, *_: object) -> NoReturn:
        raise TraceError("a pointer is not indexed: write x.load(i) and x.store(value, i)")

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

    words: MemoryWords
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
        raise TraceError("a shared tile is one tile, no sequence: `wait_all` returns several")

    def __getitem__(self, *_: object) -> NoReturn:
        raise TraceError("a shared tile is not indexed: write tile.load(row, col) and tile.store(x, row, col)")

    __setitem__ = __getitem__

    def stage(self, index: Number) -> SharedTile:
        """The tile of one pipeline stage; ``index`` is an int or a u32 below ``stages``."""
        known = index.constant if isinstance(index, Traced) and index.constant is not None else index
        if isinstance(known, Integral):
            stage = int(known)
            if not 0 <= stage < self.stages:
                raise TraceError(f"{self.name} has {self.stages} stages; there is no stage {stage}")
            return replace(self, offset=self.offset + stage * self.stage_bytes, chosen=True)
        return replace(self, shift=self.words.operand(index, u32) * self.stage_bytes, chosen=True)

    def seen_as(self, dtype: DType, layout: SharedLayout) -> SharedTile:
        """A tile of another type and layout, no larger, in this one's memory; the author orders accesses to both."""
        if layout.bytes > self.layout.bytes or layout.alignment > max(16, self.layout.alignment):
            raise TraceError(f"{self.name} has {self.layout.bytes} bytes a stage, too few for {layout.bytes}")
        return replace(self, dtype=dtype, layout=layout)

    @property
    def base(self) -> Traced:
        """The tile's address in shared memory (u32, bytes)."""
        start = self.words.shared_base
        if self.shift is not None:
            start = start + self.shift
        return start + self.offset

    @property
    def extent(self) -> TileRegion:
        """The range that an access must stay in (one stage, or all where it is not known which), and its layout."""
        one, layout = self.chosen and self.shift is None, self.layout
        size = layout.bytes if one else layout.bytes + (self.stages - 1) * self.stage_bytes
        return TileRegion(self.name, self.offset, size, layout, self.stage_bytes if self.chosen and not one else 0)

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
                    f"{'' if known else ' or beyond'}"
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
        access = isa.load("shared", kind, count or 1, volatile=volatile)
        values = self.words.issue(access, self._address(row, col, self._elements(kind, count or 1)))
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
        access = isa.atomic("shared", op, self.dtype, order, "cta")
        return self.words.issue(access, self.address(row, col), value)[0]

    def _elements(self, kind: DType, count: int) -> int:
        """The number of the tile's elements that ``count`` elements of ``kind`` cover."""
        return max(1, count * kind.bytes // self.layout.element_bytes)


class MemoryWords(Arithmetic):
    """Shared tiles, accesses by address, atomics, copies of threads, matrices of shared memory."""

    def __init__(self, *, share: bool = True) -> None:
        super().__init__(share=share)
        self.regions: list[SharedRegion] = []
        self.shared_bytes = 0

    def shared(
        self,
        dtype: DType,
        shape: int | tuple[int, int],
        *,
        name: str = "",
        swizzle: Swizzle | Literal["auto"] | None = None,
        stages: int = 1,
        panel_cols: int | None = None,
        padding: int = 0,
        alias: SharedTile | None = None,
    ) -> SharedTile:
        """Allocate a tile of ``shape`` (rows, cols) elements, ``stages`` times.

        Messages call it ``name``, by default the variable it is assigned to. ``swizzle="auto"`` is the one of the row's
        width with which rows are written, and eight rows read, 16 bytes at a time without bank conflicts: what
        ``ldmatrix``, ``cp.async``, the TMA and ``wgmma`` do. Other accesses may want another: a 32 × 32 tile of f32
        that is read by columns, ``Swizzle(5, 2, 5)`` of :mod:`warploom.layout.swizzle`. ``padding`` elements behind
        each row do the same for instructions that take no swizzle. ``alias`` places the tile over another one: the
        author then orders the accesses to both.
        """
        if not is_a(dtype, DType):
            what = shown(dtype)
            raise TraceError(f"a shared tile holds a type of warploom.lang (f32, bf16 …), not {what}")
        given: Any = shape
        extents: tuple[Any, ...] = (
            (1, given) if is_a(given, Integral) else tuple(given) if is_a(given, tuple | list) else ()
        )
        if len(extents) != 2 or not all(is_a(n, Integral) for n in extents):
            raise TraceError(f"the shape of a shared tile is a number or (rows, cols), not {shown(shape)}")
        rows, cols = map(int, extents)
        if not (is_a(stages, Integral) and stages >= 1):
            raise TraceError(f"a shared tile has a number of stages, 1 or more, not {shown(stages)}")
        if not (swizzle in (None, "auto") or is_a(swizzle, Swizzle)):
            raise TraceError(
                f'swizzle is "auto", None or a Swizzle of warploom.layout.swizzle, as Swizzle(3, 4, 3) for <3,4,3>, '
                f"not {shown(swizzle)}"
            )
        if swizzle == "auto":
            first = SharedLayout(rows, cols, dtype.bytes, NO_SWIZZLE, panel_cols)
            swizzle = Swizzle.for_row_bytes(first.row_bytes)
        layout = SharedLayout(rows, cols, dtype.bytes, swizzle or NO_SWIZZLE, panel_cols, padding)
        alignment = max(16, layout.alignment, 128 if layout.bytes >= 128 else 16)
        stage_bytes = -(-layout.bytes // alignment) * alignment
        total = stage_bytes * (stages - 1) + layout.bytes
        offset = alias.offset if alias is not None else -(-self.shared_bytes // alignment) * alignment
        where = self.here()
        name = name or name_at(where.file, where.line) or f"tile{len(self.regions)}"
        most = max(TARGETS.values(), key=lambda t: t.shared_per_block)
        if offset + total > most.shared_per_block:
            raise VerifyError(
                f"with {name} the kernel needs {offset + total} bytes of shared memory, the largest target "
                f"({most.name}) has {most.shared_per_block} per CTA: use smaller tiles or fewer stages"
            )
        self.regions.append(SharedRegion(name, offset, total))
        self.shared_bytes = max(self.shared_bytes, offset + total)
        return SharedTile(self, name, dtype, layout, offset, stages, stage_bytes)

    # -- accesses by address
    @property
    def shared_base(self) -> Traced:
        """The address of the CTA's dynamic shared memory (u32)."""
        return self.emit(special("shared_base"), ())[0]

    def advance(self, address: Traced, elements: Number, size: int) -> Traced:
        """``address`` + elements · size, widened to 64 bits."""
        if not isinstance(elements, Traced):
            if not isinstance(elements, Integral):
                raise TraceError(f"an index is an integer, not {shown(elements)}")
            return address + elements * size
        if isinstance(elements, Mutable):
            elements = elements.get()
        if not elements.dtype.is_integer:
            raise TraceError(f"an index is an integer, not {elements!r}: convert it (k.convert(x, u32))")
        if elements.dtype is u32:
            return address + self._wide_bytes(elements, size)
        return address + self.convert(elements, u64) * size

    def _wide_bytes(self, elements: Traced, size: int) -> Traced:
        base, constant = split_sum(elements)
        if constant >= 0:  # element counts do not wrap, so a constant may leave the widening
            return self.mul_wide(base, size) + constant * size
        return self.mul_wide(elements, size)

    def load(
        self, space: Space, address: Traced, dtype: DType, count: int, cache: str, order: MemoryOrder
    ) -> list[Traced]:
        """Loads by address; see :meth:`GlobalPointer.load` and :meth:`SharedTile.load`."""
        return list(self.issue(isa.load(space, dtype, count, cache, order), address))

    def store(
        self, space: Space, address: Traced, dtype: DType, values: Sequence[Number], cache: str, order: MemoryOrder
    ) -> None:
        """Stores by address; see :meth:`GlobalPointer.store` and :meth:`SharedTile.store`."""
        kind = register_type(dtype)
        for x in values:
            if kind is not dtype and is_a(x, Traced | float) and not (isinstance(x, Traced) and x.dtype.is_integer):
                raise TraceError(
                    f"an element of {dtype} is stored as its bits, not as {x!r}: store k.convert(x, {dtype})"
                )
        self.issue(isa.store(space, dtype, len(values), cache, order), address, *values)

    # -- atomics and hints
    def atomic(
        self,
        op: str,
        pointer: GlobalPointer,
        value: Number,
        index: Number = 0,
        *,
        order: MemoryOrder = "relaxed",
        scope: Scope = "gpu",
    ) -> Traced:
        """``atom.global.{add,min,max,and,or,xor,exch}`` on one element; returns the old value."""
        return self.issue(isa.atomic("global", op, pointer.dtype, order, scope), (pointer + index).address, value)[0]

    def atomic_cas(self, pointer: GlobalPointer, compare: Number, value: Number, index: Number = 0) -> Traced:
        """``atom.global.cas``: stores ``value`` where the element equals ``compare``; returns the old value."""
        return self.issue(isa.atomic("global", "cas", pointer.dtype), (pointer + index).address, compare, value)[0]

    def reduce_add(self, pointer: GlobalPointer, values: Number | Sequence[Number], index: Number = 0) -> None:
        """``red.global.add`` of an f32, or of 2 or 4 consecutive ones (sm_90): nothing comes back."""
        listed = list(values) if isinstance(values, Sequence) else [values]
        if pointer.dtype is not f32 or len(listed) not in (1, 2, 4):
            raise TraceError(f"reduce_add adds 1, 2 or 4 f32, not {len(listed)} of {pointer.dtype}")
        self.issue(isa.reduce_add(len(listed)), (pointer + index).address, *listed)

    def wait_at_least(self, pointer: GlobalPointer, value: Number, index: Number = 0) -> None:
        """Block until a u32 counter in global memory is at least ``value``; acquires what its last arrival released.

        Who raises it must not wait for this CTA, nor be behind it in the grid: CTAs start in the order of their
        numbers, and one that has not started cannot be waited for.
        """
        self.issue(named("ld.acquire.gpu.global.u32", ptx=False), (pointer + index).address, value)

    def prefetch(self, pointer: GlobalPointer, index: Number = 0) -> None:
        """``prefetch.global.L2``: the L2 fetches the line of an element, whoever may be writing it. A hint."""
        self.issue(named("prefetch.global.L2"), (pointer + index).address)

    @word("fence.acq_rel.{scope}")
    def fence(self, scope: Scope = "gpu") -> None:
        """``fence.acq_rel``: orders this thread's accesses for the CTA, the GPU or the system."""

    # -- matrices
    def ldmatrix(self, address: Traced, count: int = 4, *, transposed: bool = False) -> list[Traced]:
        """``ldmatrix``: lanes 8·i … 8·i+7 address the rows of matrix i; returns one u32 per matrix."""
        return list(self.issue(matrix_access("ldmatrix", count, transposed), address))

    def stmatrix(self, address: Traced, values: Sequence[Traced], *, transposed: bool = False) -> None:
        """``stmatrix`` (sm_90) of 1, 2 or 4 matrices."""
        self.issue(matrix_access("stmatrix", len(values), transposed), address, *values)

    # -- asynchronous copies
    def cp_async(
        self,
        shared: Traced,
        source: GlobalPointer,
        size: Literal[4, 8, 16] = 16,
        *,
        cache: Literal["ca", "cg"] | None = None,
        valid_bytes: Number | None = None,
        prefetch: int = 0,
        eviction: Eviction = "",
    ) -> None:
        """``cp.async`` of ``size`` bytes per thread; the data may be read after commit, wait and a barrier.

        ``cache`` defaults to ``cg`` (past L1) for 16 bytes and ``ca`` otherwise. ``valid_bytes`` reads only so many
        bytes and fills the rest with zeros. ``eviction``: what the L2 drops first, or last (sm_90).
        """
        valid = () if valid_bytes is None else (valid_bytes,)
        copy = cp_async(size, cache or ("cg" if size == 16 else "ca"), bool(valid), prefetch, eviction)
        self.issue(copy, shared, source.address, *valid)

    @word("cp.async.commit_group")
    def commit_group(self) -> None:
        """``cp.async.commit_group``: closes the group of copies this thread issued since the last commit."""

    @word("cp.async.wait_group")
    def wait_group(self, pending: int = 0) -> None:
        """``cp.async.wait_group``: this thread's groups but the newest ``pending`` have arrived, for this thread."""
