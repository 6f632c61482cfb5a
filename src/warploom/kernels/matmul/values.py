"""What the matmul kernels share: tiles, matrices as they are copied, and what becomes of sums on their way to C."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from warploom.core.dtypes import DType, f32, u16, u32
from warploom.kernels.matmul.features import ROW_VALUES, Epilogue, Extra, MatmulFeatures, OperandFeatures
from warploom.lang import GlobalPointer, Kernel, Traced
from warploom.lang.values import Number
from warploom.tile.copies import Rows
from warploom.tile.epilogue import Pair, Target

At = TypeVar("At", int, Number)


@dataclass(frozen=True)
class Tile:
    """A tile of C, or a part of one: its first row and column, and its ``count`` k-tiles from ``first`` on.

    ``matrix`` is the number of its matrix among the results (batch · parts + part), None where there is one.
    """

    row: Traced
    col: Traced
    matrix: Traced | None
    batch: Traced
    first: Number
    count: Traced


def stored_rows(
    pointer: GlobalPointer, stride: Number, own: OperandFeatures, extents: tuple[Traced, Traced], plane: Traced | None
) -> Rows:
    """A or B as it is copied: ``extents`` are M or N, and K; ``plane`` lies between the matrices of batches."""
    by_outer, by_k = extents[0] if own.ragged_outer else None, extents[1] if own.ragged_k else None
    rows, cols = (by_outer, by_k) if own.k_contiguous else (by_k, by_outer)
    return Rows(pointer, stride, rows, cols, own.chunk, own.partial, plane)


def along(own: OperandFeatures, outer: At, depth: At) -> tuple[At, At]:
    """(row, column) of A or B as it is stored."""
    return (outer, depth) if own.k_contiguous else (depth, outer)


@dataclass(frozen=True)
class Output:
    """C, and what is combined with it: pointers to the first elements of the first batch, strides in elements.

    ``pointers``: C as 16-bit and as f32 elements, of which ``features`` name one. ``half`` is the type of the bias and
    the extra matrices, ``alpha`` the bits of an f32. ``row_values`` is the table of those (of one batch). ``strides``
    and ``batches``: between rows and between matrices, of C and of the extra matrices.
    """

    k: Kernel
    features: MatmulFeatures
    half: DType
    pointers: tuple[GlobalPointer, GlobalPointer]
    bias: GlobalPointer
    extras: tuple[GlobalPointer, GlobalPointer]
    extents: tuple[Traced, Traced]
    strides: tuple[Traced, Traced]
    batches: tuple[Traced, Traced]
    alpha: Traced
    row_values: GlobalPointer

    def of(self, matrix: Traced | None, batch: Traced) -> tuple[Target, EpilogueValue | None]:
        """Where the sums of a matrix go, and what of them; None for the sums themselves."""
        k, f = self.k, self.features
        pointer = self.pointers[f.out_dtype is f32]
        if matrix is not None:
            pointer = pointer + k.mul_wide(matrix, self.batches[0])
        rows, cols = (
            extent if ragged else None for extent, ragged in zip(self.extents, (f.ragged_m, f.ragged_n), strict=True)
        )
        target = Target(k, pointer, self.strides[0], f.out_dtype, rows, cols, f.out_chunk, f.pairs)
        if f.epilogue.plain:
            return target, None
        extras = self.extras[: len(f.epilogue.extras)]
        if f.batched:
            step = k.mul_wide(batch, self.batches[1])
            extras = tuple(at + step * own.size for at, own in zip(extras, f.epilogue.extras, strict=True))
        value = EpilogueValue(
            k, f.epilogue, target, self.half, self.alpha, self.bias, extras, self.strides[1], self.row_values
        )
        return target, value


@dataclass(frozen=True)
class EpilogueValue:
    """``function(alpha · sum + bias[col], extra[0][row, col], …, *row_values[row], col)`` for two neighbouring sums.

    ``alpha`` is the bits of an f32, ``half`` the type of the bias and the extra matrices, which point to this batch's
    first elements; the latter's lines are ``extra_stride`` elements apart.
    """

    k: Kernel
    epilogue: Epilogue
    target: Target
    half: DType
    alpha: Traced
    bias: GlobalPointer
    extras: tuple[GlobalPointer, ...]
    extra_stride: Traced
    row_values: GlobalPointer

    def __call__(self, sums: Pair, row: Traced, col: Traced) -> Pair:
        """The values to store at (row, col) and (row, col + 1)."""
        k, e, others = self.k, self.epilogue, list[Pair]()
        first, second = sums
        if e.scaled:
            alpha = k.bitcast(self.alpha, f32)
            first, second = first * alpha, second * alpha
        if e.bias:
            added = self._load_pair(self.bias + col, row, col, self.half)
            first, second = first + added[0], second + added[1]
        others += [self._extra(x, own, row, col) for x, own in zip(self.extras, e.extras, strict=True)]
        if e.row_values:
            of_row = self._of_row(row)
            others += [(x, x) for x in of_row] + [(col, col + 1)]
        return e.call(first, [pair[0] for pair in others]), e.call(second, [pair[1] for pair in others])

    def _extra(self, pointer: GlobalPointer, own: Extra, row: Traced, col: Traced) -> Pair:
        """The values of an extra matrix for (row, col) and (row, col + 1)."""
        k, kind = self.k, f32 if own.wide else self.half
        if own.along == "rows":
            at = pointer + k.mul_wide(self._inside(row), own.size)
            value = k.convert(at.load(dtype=kind), f32)
            return value, value
        at = k.mul_wide(col, own.size)
        if own.along == "both":
            at = k.mul_wide(row, self.extra_stride) * own.size + at
        return self._load_pair(pointer + at, row, col, kind)

    def _inside(self, row: Traced) -> Traced:
        """The row; of rows beyond the target's edge the last."""
        return row if self.target.rows is None else self.k.minimum(row, self.target.rows - 1)

    def _of_row(self, row: Traced) -> list[Traced]:
        """The row's numbers in the table; of rows beyond the target's edge those of the last."""
        return (self.row_values + self.k.mul_wide(self._inside(row), ROW_VALUES)).load(count=ROW_VALUES)

    def _load_pair(self, source: GlobalPointer, row: Traced, col: Traced, kind: DType) -> Pair:
        """Two neighbouring elements of type ``kind`` as f32; those beyond the target's edge are 0."""
        k, exists = self.k, self.target.exists
        if self.target.pairs:
            words = self._guarded(source, exists(row, col), u32, kind.bits // 16)
            return k.unpack(words[0], kind) if kind is not f32 else (k.bitcast(words[0], f32), k.bitcast(words[1], f32))
        if kind is f32:
            first, second = (self._guarded(source + 2 * i, exists(row, col + i), u32)[0] for i in range(2))
            return k.bitcast(first, f32), k.bitcast(second, f32)
        bits = [self._guarded(source + i, exists(row, col + i), u16)[0] for i in range(2)]
        return k.unpack(bits[0], kind)[0], k.unpack(bits[1], kind)[0]

    def _guarded(self, source: GlobalPointer, exists: Traced | None, dtype: DType, count: int = 1) -> list[Traced]:
        if exists is None:
            return source.load(count=count, dtype=dtype)
        values = self.k.registers(u32, count, 0)
        with self.k.when(exists):
            for value, x in zip(values, source.load(count=count, dtype=dtype), strict=True):
                value.set(x)
        return [x.get() for x in values]
