"""Words of ``k`` for the other matrix instructions: ``mma`` of integers and doubles, ``movmatrix``, ``wmma``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from warploom.core.dtypes import DType, bf16, f32, f64, s8, s32, u32
from warploom.core.errors import TraceError
from warploom.isa.base import Instruction
from warploom.isa.matrix import mma
from warploom.isa.wmma import wmma_load, wmma_mma, wmma_store
from warploom.lang.declared import word
from warploom.lang.fold import split_sum
from warploom.lang.fragments import FragmentWords
from warploom.lang.pointers import GlobalPointer, SharedTile
from warploom.lang.values import Mutable, Number, Traced
from warploom.layout.wmma import StorageOrder

Matrix = GlobalPointer | SharedTile | Traced
"""Where a matrix begins: a pointer, a shared tile, or an address in one (``tile.address(row, col)``)."""


class MatrixWords(FragmentWords):
    """Fragments as sequences of registers; see PTX's names of the instructions."""

    @word("movmatrix.sync.aligned.m8n8.trans.b16")
    def movmatrix(self, x: Traced) -> Traced:  # pyright: ignore[reportReturnType]
        """``movmatrix``: transposes an 8×8 matrix of 16-bit elements, a register per lane as ``ldmatrix`` loads it."""

    def mma_integer(
        self,
        a: Sequence[Number],
        b: Sequence[Number],
        c: Sequence[Number],
        shape: str,
        types: tuple[DType, DType] = (s8, s8),
    ) -> tuple[Traced, ...]:
        """``mma.sync`` of s8 or u8 matrices: the s32 registers of D = A·B + C."""
        return self._multiply(mma(shape, types[0], s32, types[1]), (*a, *b, *c))

    def mma_double(
        self, a: Sequence[Number], b: Sequence[Number], c: Sequence[Number], shape: str = "m8n8k4"
    ) -> tuple[Traced, ...]:
        """``mma.sync`` of float64 matrices: the registers of D = A·B + C."""
        return self._multiply(mma(shape, f64, f64), (*a, *b, *c))

    def _multiply(
        self, instruction: Instruction, operands: Sequence[Number], into: Sequence[Mutable] | None = None
    ) -> tuple[Traced, ...]:
        kinds, results = instruction.operand_types, len(instruction.result_types)
        if len(operands) != len(kinds):
            raise TraceError(
                f"{instruction.mnemonic} takes {len(kinds)} registers, got {len(operands)} ({self.here()})"
            )
        typed = [self.operand(x, t) for x, t in zip(operands, kinds, strict=True)]
        if into is None:
            return self.emit(instruction, typed)
        if len(into) != results:
            raise TraceError(f"{instruction.mnemonic} has {results} results, into= has {len(into)} ({self.here()})")
        self.emit_into(instruction, typed, into)
        return tuple(into)

    # -- wmma
    def wmma_load(
        self,
        operand: Literal["A", "B", "C"],
        matrix: Matrix,
        leading: Number,
        *,
        shape: str = "m16n16k16",
        dtype: DType = bf16,
        order: StorageOrder = "row",
    ) -> tuple[Traced, ...]:
        """``wmma.load``: the registers of operand A, B or C from a matrix in ``order``, ``leading`` elements a line."""
        space, address = _where(matrix)
        base, offset = split_sum(address)
        load = wmma_load(operand, shape, dtype, order, space).at(offset=offset)
        return self.emit(load, (base, self.operand(leading, u32)))

    def wmma_store(
        self,
        matrix: Matrix,
        leading: Number,
        registers: Sequence[Traced],
        *,
        shape: str = "m16n16k16",
        dtype: DType = f32,
        order: StorageOrder = "row",
    ) -> None:
        """``wmma.store``: an accumulator to a matrix in ``order``, ``leading`` elements a line."""
        space, address = _where(matrix)
        base, offset = split_sum(address)
        store = wmma_store(shape, dtype, order, space).at(offset=offset)
        kinds = store.operand_types[2:]
        values = [self.operand(x, t) for x, t in zip(registers, kinds, strict=True)]
        self.emit(store, (base, self.operand(leading, u32), *values))

    def wmma_mma(
        self,
        a: Sequence[Traced],
        b: Sequence[Traced],
        c: Sequence[Number],
        *,
        shape: str = "m16n16k16",
        inputs: DType = bf16,
        accumulate: DType = f32,
        orders: tuple[StorageOrder, StorageOrder] = ("row", "col"),
        into: Sequence[Mutable] | None = None,
    ) -> tuple[Traced, ...]:
        """``wmma.mma``: the registers of D = A·B + C; ``orders`` are those that A and B were loaded in.

        ``into`` writes D to mutable registers (in place if it is C).
        """
        return self._multiply(wmma_mma(shape, inputs, accumulate, *orders), (*a, *b, *c), into)


def _where(matrix: Matrix) -> tuple[Literal["shared", "global"], Traced]:
    if isinstance(matrix, GlobalPointer):
        return "global", matrix.address
    return "shared", matrix.base if isinstance(matrix, SharedTile) else matrix
