# pyright: reportInvalidTypeForm=false
"""What the matmul kernels share: tiles, matrices as they are copied, and what becomes of sums on their way to C."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from warploom.core.dtypes import DType, f32, u16, u32
from warploom.kernels.matmul.features import ROW_VALUES, Epilogue, Extra, MatmulFeatures, OperandFeatures
from warploom.lang import Compound, Global, GlobalPointer, Kernel, Strided, StridedPointer, Traced
from warploom.lang.values import Number
from warploom.tile.copies import Rows
from warploom.tile.epilogue import OutputMatrix, Pair

At = TypeVar("At", int, Number)


@dataclass(frozen=True)
class ResultTile:
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
    matrix: StridedPointer, own: OperandFeatures, extents: tuple[Traced, Traced], *, batched: bool = False
) -> Rows:
    """A or B, strides of matrices and lines, as it is copied: ``extents`` are M or N, and K."""
    by_outer, by_k = extents[0] if own.ragged_outer else None, extents[1] if own.ragged_k else None
    rows, cols = (by_outer, by_k) if own.k_contiguous else (by_k, by_outer)
    plane, stride = matrix.strides
    return Rows(matrix, stride, rows, cols, own.chunk, own.partial, plane if batched else None)


def along(own: OperandFeatures, outer: At, depth: At) -> tuple[At, At]:
    """(row, column) of A or B as it is stored."""
    return (outer, depth) if own.k_contiguous else (depth, outer)


class Result(Compound):
    """A parameter: C of ``m`` × ``n``, and what is combined with it. Strides of matrices and rows.

    C has 16-bit elements in ``out`` or f32 ones in ``out_f32``. ``alpha`` is the bits of an f32; ``row_values`` is the
    table of those (of one batch).
    """

    out: Strided[u16, 2]
    out_f32: Strided[f32, 2]
    bias: Global[u16]
    extra0: Strided[u16, 2]
    """Both extra matrices have its strides."""
    extra1: Global[u16]
    row_values: Global[f32]
    m: u32
    n: u32
    alpha: u32


@dataclass(frozen=True)
class Output:
    """The way from sums to the result; ``half`` is the type of the bias and the extra matrices."""

    k: Kernel
    features: MatmulFeatures
    half: DType
    result: Result

    def of(self, matrix: Traced | None, batch: Traced) -> tuple[OutputMatrix, EpilogueValue | None]:
        """Where the sums of a matrix go, and what of them; None for the sums themselves."""
        k, f, to = self.k, self.features, self.result
        out = to.out_f32 if f.out_dtype is f32 else to.out
        pointer = out if matrix is None else out.at(matrix)
        rows, cols = to.m if f.ragged_m else None, to.n if f.ragged_n else None
        target = OutputMatrix(k, pointer, out.strides[1], f.out_dtype, rows, cols, f.out_chunk, f.pairs)
        if f.epilogue.plain:
            return target, None
        extras = (to.extra0, to.extra1)[: len(f.epilogue.extras)]
        if f.batched:
            step = to.extra0.offset(batch)
            extras = tuple(at + step * own.size for at, own in zip(extras, f.epilogue.extras, strict=True))
        return target, EpilogueValue(k, f.epilogue, target, self.half, to, extras)


@dataclass(frozen=True)
class EpilogueValue:
    """``function(alpha · sum + bias[col], extra[0][row, col], …, *row_values[row], col)`` for two neighbouring sums.

    ``half`` is the type of the bias and the extra matrices; ``extras`` point to this batch's first elements.
    """

    k: Kernel
    epilogue: Epilogue
    target: OutputMatrix
    half: DType
    given: Result
    extras: tuple[GlobalPointer, ...]

    def __call__(self, sums: Pair, row: Traced, col: Traced) -> Pair:
        """The values to store at (row, col) and (row, col + 1)."""
        k, e, others = self.k, self.epilogue, list[Pair]()
        first, second = sums
        if e.scaled:
            alpha = k.bitcast(self.given.alpha, f32)
            first, second = first * alpha, second * alpha
        if e.bias:
            added = self._load_pair(self.given.bias + col, row, col, self.half)
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
            at = k.mul_wide(row, self.given.extra0.strides[1]) * own.size + at
        return self._load_pair(pointer + at, row, col, kind)

    def _inside(self, row: Traced) -> Traced:
        """The row; of rows beyond the target's edge the last."""
        return row if self.target.rows is None else self.k.minimum(row, self.target.rows - 1)

    def _of_row(self, row: Traced) -> list[Traced]:
        """The row's numbers in the table; of rows beyond the target's edge those of the last."""
        return (self.given.row_values + self.k.mul_wide(self._inside(row), ROW_VALUES)).load(count=ROW_VALUES)

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
