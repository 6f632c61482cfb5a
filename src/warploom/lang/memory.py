"""Words of ``k`` for memory: addresses, the shared-memory plan, loads, stores, atomics, cp.async, ldmatrix, fences."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, Literal

from warploom.core.dtypes import DType, f32, u32
from warploom.core.errors import TraceError, VerifyError, shown
from warploom.core.targets import TARGETS
from warploom.ir.statements import SharedRegion
from warploom.isa.async_copy import Eviction, cp_async, wait_copies
from warploom.isa.effects import MemoryOrder, Scope
from warploom.isa.form import named
from warploom.isa.matrix import matrix_access
from warploom.isa.memory import atomic, reduce_add, wait_at_least
from warploom.lang.accesses import Accesses, is_kind
from warploom.lang.declared import word
from warploom.lang.fold import split_sum
from warploom.lang.naming import name_at
from warploom.lang.pointers import GlobalPointer, SharedTile
from warploom.lang.values import Number, Traced
from warploom.layout.shared import SharedLayout
from warploom.layout.swizzle import NO_SWIZZLE, Swizzle


class MemoryWords(Accesses):
    """Atomics, copies and the shared-memory plan."""

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
        if not is_kind(dtype, DType):
            what = shown(dtype)
            raise TraceError(f"a shared tile holds a type of warploom.lang (f32, bf16 …), not {what} ({self.here()})")
        given: Any = shape
        extents: tuple[Any, ...] = (
            (1, given) if is_kind(given, Integral) else tuple(given) if is_kind(given, tuple | list) else ()
        )
        if len(extents) != 2 or not all(is_kind(n, Integral) for n in extents):
            raise TraceError(
                f"the shape of a shared tile is a number or (rows, cols), not {shown(shape)} ({self.here()})"
            )
        rows, cols = map(int, extents)
        if not (is_kind(stages, Integral) and stages >= 1):
            raise TraceError(f"a shared tile has a number of stages, 1 or more, not {shown(stages)} ({self.here()})")
        if not (swizzle in (None, "auto") or is_kind(swizzle, Swizzle)):
            raise TraceError(
                f'swizzle is "auto", None or a Swizzle of warploom.layout.swizzle, as Swizzle(3, 4, 3) for <3,4,3>, '
                f"not {shown(swizzle)} ({self.here()})"
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
        base, offset = split_sum((pointer + index).address)
        operands = (base, self.operand(value, pointer.dtype))
        return self.emit(atomic("global", op, pointer.dtype, order, scope).at(offset=offset), operands)[0]

    def atomic_cas(self, pointer: GlobalPointer, compare: Number, value: Number, index: Number = 0) -> Traced:
        """``atom.global.cas``: stores ``value`` where the element equals ``compare``; returns the old value."""
        base, offset = split_sum((pointer + index).address)
        operands = (base, *(self.operand(v, pointer.dtype) for v in (compare, value)))
        return self.emit(atomic("global", "cas", pointer.dtype).at(offset=offset), operands)[0]

    def reduce_add(self, pointer: GlobalPointer, values: Number | Sequence[Number], index: Number = 0) -> None:
        """``red.global.add`` of an f32, or of 2 or 4 consecutive ones (sm_90): nothing comes back."""
        listed = list(values) if isinstance(values, Sequence) else [values]
        base, offset = split_sum((pointer + index).address)
        if pointer.dtype is not f32 or len(listed) not in (1, 2, 4):
            raise TraceError(f"reduce_add adds 1, 2 or 4 f32, not {len(listed)} of {pointer.dtype} ({self.here()})")
        self.emit(reduce_add(len(listed)).at(offset=offset), (base, *(self.operand(v, f32) for v in listed)))

    def wait_at_least(self, pointer: GlobalPointer, value: Number, index: Number = 0) -> None:
        """Block until a u32 counter in global memory is at least ``value``; acquires what its last arrival released.

        Who raises it must not wait for this CTA, nor be behind it in the grid: CTAs start in the order of their
        numbers, and one that has not started cannot be waited for.
        """
        base, offset = split_sum((pointer + index).address)
        self.emit(wait_at_least().at(offset=offset), (base, self.operand(value, u32)))

    def prefetch(self, pointer: GlobalPointer, index: Number = 0) -> None:
        """``prefetch.global.L2``: the L2 fetches the line of an element, whoever may be writing it. A hint."""
        base, offset = split_sum((pointer + index).address)
        self.emit(named("prefetch.global.L2").at(offset=offset), (base,))

    def fence(self, scope: Scope = "gpu") -> None:
        """``fence.acq_rel``: orders this thread's accesses for the CTA, the GPU or the system."""
        self.emit(named(f"fence.acq_rel.{scope}"), ())

    # -- matrices
    def ldmatrix(self, address: Traced, count: int = 4, *, transposed: bool = False) -> list[Traced]:
        """``ldmatrix``: lanes 8·i … 8·i+7 address the rows of matrix i; returns one u32 per matrix."""
        base, offset = split_sum(address)
        return list(self.emit(matrix_access("ldmatrix", count, transposed).at(offset=offset), (base,)))

    def stmatrix(self, address: Traced, values: Sequence[Traced], *, transposed: bool = False) -> None:
        """``stmatrix`` (sm_90) of 1, 2 or 4 matrices."""
        base, offset = split_sum(address)
        self.emit(
            matrix_access("stmatrix", len(values), transposed).at(offset=offset),
            (base, *(self.operand(v, u32) for v in values)),
        )

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
        to, shared_offset = split_sum(shared)
        origin, global_offset = split_sum(source.address)
        how = cache or ("cg" if size == 16 else "ca")
        operands = [to, origin]
        if valid_bytes is not None:
            operands.append(self.operand(valid_bytes, u32))
        copy = cp_async(size, how, valid_bytes is not None, prefetch, eviction)
        self.emit(copy.at(shared_offset=shared_offset, global_offset=global_offset), operands)

    @word("cp.async.commit_group")
    def commit_group(self) -> None:
        """``cp.async.commit_group``: closes the group of copies this thread issued since the last commit."""

    def wait_group(self, pending: int = 0) -> None:
        """``cp.async.wait_group``: this thread's groups but the newest ``pending`` have arrived, for this thread."""
        self.emit(wait_copies(pending), ())
