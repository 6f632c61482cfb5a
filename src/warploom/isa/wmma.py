"""``wmma``: load, multiply and store matrices as opaque fragments.

Source: PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions", ``wmma.load``, ``wmma.mma``, ``wmma.store``. The
ISA does not say which lane holds which element; :mod:`warploom.layout.wmma` has what GPUs were seen to do, and the
emulator needs it. Printing a kernel does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from warploom.core.dtypes import DTYPES, DType, f16, u32, u64
from warploom.core.errors import VerifyError
from warploom.isa.base import Array, Instruction, address, braces
from warploom.isa.effects import Effect, MatrixAccess, Space, WarpSync
from warploom.isa.matrix import FragmentSlot
from warploom.layout.fragments import FragmentLayout
from warploom.layout.wmma import WMMA_ACCUMULATORS, WMMA_SHAPES, StorageOrder, wmma_elements, wmma_fragment

Operand = Literal["A", "B", "C", "D"]


def fragment_register(dtype: DType) -> DType:
    """The register type that holds elements of ``dtype``: packed and tf32 elements are u32."""
    return u32 if dtype.bits < 32 or dtype.name == "tf32" else dtype


def fragment_registers(shape: str, operand: str, dtype: DType) -> int:
    """Registers of a fragment per thread (of :func:`fragment_register`)."""
    return -(-wmma_elements(shape, operand, dtype) * dtype.bits // max(32, dtype.bits))


def _check(shape: str, operand: str, dtype: DType) -> None:
    inputs = WMMA_SHAPES.get(shape, ())
    allowed = inputs if operand in "AB" else {c for t in inputs for c in WMMA_ACCUMULATORS[t]}
    if dtype.name not in allowed:
        raise VerifyError(f"wmma {shape} has no operand {operand} of {dtype}; it takes {', '.join(sorted(allowed))}")


def _slot(shape: str, operand: Operand, dtype: DType, order: StorageOrder, first: int) -> FragmentSlot:
    count = fragment_registers(shape, operand, dtype)
    return FragmentSlot(wmma_fragment(shape, operand, dtype, order), dtype, first, count)


@dataclass(frozen=True, slots=True)
class WmmaLoad(Instruction):
    """``wmma.load.{a,b,c}.sync.aligned.{row,col}.{shape}.{space}.{type}``: a fragment from memory.

    Operands: the matrix's address and its leading dimension in elements (u32), the same in all lanes; results: the
    fragment's registers. The matrix is 16-byte aligned (32 for f64), and so is each line of it.
    """

    operand: Literal["A", "B", "C"]
    shape: str
    dtype: DType
    order: StorageOrder
    space: Space
    offset: int = 0
    moves_bits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check(self.shape, self.operand, self.dtype)

    @property
    def mnemonic(self) -> str:
        """Matrix, order, shape, space, type: ``wmma.load.a.sync.aligned.row.m16n16k16.shared.f16``."""
        which = self.operand.lower()
        return f"wmma.load.{which}.sync.aligned.{self.order}.{self.shape}.{self.space}.{self.dtype.ptx}"

    @property
    def layout(self) -> FragmentLayout:
        """Which lane holds what. Raises LayoutError if that was never traced."""
        return wmma_fragment(self.shape, self.operand, self.dtype, self.order)

    @property
    def operand_types(self) -> tuple[DType, ...]:
        """The address (u32 shared, u64 global) and the leading dimension in elements."""
        return (u32 if self.space == "shared" else u64, u32)

    @property
    def result_types(self) -> tuple[DType, ...]:
        """The fragment's registers: :func:`fragment_registers` of :func:`fragment_register`."""
        count = fragment_registers(self.shape, self.operand, self.dtype)
        return (fragment_register(self.dtype),) * count

    def effects(self) -> tuple[Effect, ...]:
        """The warp reads the whole matrix together."""
        size = self.dtype.bytes
        matrix = MatrixAccess(self.space, "load", 0, size, self.offset, collective=True, stride=1, major=self.order)
        return (WarpSync(aligned=True), matrix)

    @property
    def template(self) -> str:
        """The fragment is one vector."""
        n = len(self.result_types)
        return f"{self.mnemonic} {braces(0, n)}, {address(n, self.offset)}, %{n + 1};"

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """``operands[0]``: the elements of each lane as words of the element's width, (warps, lanes, elements)."""
        words = np.ascontiguousarray(operands[0]).view(self.result_types[0].numpy)
        return tuple(np.ascontiguousarray(words[..., i]) for i in range(words.shape[-1]))


@dataclass(frozen=True, slots=True)
class WmmaStore(Instruction):
    """``wmma.store.d.sync.aligned.{row,col}.{shape}.{space}.{type}``: an accumulator to memory.

    Operands: the matrix's address, its leading dimension in elements (u32), then the fragment's registers.
    """

    shape: str
    dtype: DType
    order: StorageOrder
    space: Space
    offset: int = 0
    moves_bits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check(self.shape, "D", self.dtype)

    @property
    def mnemonic(self) -> str:
        """Order, shape, space, type: ``wmma.store.d.sync.aligned.row.m16n16k16.global.f32``."""
        return f"wmma.store.d.sync.aligned.{self.order}.{self.shape}.{self.space}.{self.dtype.ptx}"

    @property
    def layout(self) -> FragmentLayout:
        """Which lane holds what. Raises LayoutError if that was never traced."""
        return wmma_fragment(self.shape, "D", self.dtype)

    @property
    def operand_types(self) -> tuple[DType, ...]:
        """The address, the leading dimension in elements, then the fragment's registers."""
        count = fragment_registers(self.shape, "D", self.dtype)
        return (u32 if self.space == "shared" else u64, u32, *(fragment_register(self.dtype),) * count)

    def effects(self) -> tuple[Effect, ...]:
        """The warp writes the whole matrix together."""
        size = self.dtype.bytes
        matrix = MatrixAccess(self.space, "store", 0, size, self.offset, collective=True, stride=1, major=self.order)
        return (WarpSync(aligned=True), matrix)

    @property
    def template(self) -> str:
        """The fragment is one vector, before the leading dimension."""
        count = len(self.operand_types) - 2
        return f"{self.mnemonic} {address(0, self.offset)}, {braces(2, count)}, %1;"

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """The elements to write as words of the element's width, (warps, 32, elements); operands: the registers."""
        stacked = np.ascontiguousarray(np.stack(operands, axis=-1))
        return (stacked.view(f"u{self.dtype.bytes}"),)


@dataclass(frozen=True, slots=True)
class WmmaMma(Instruction):
    """``wmma.mma.sync.aligned.{row,col}.{row,col}.{shape}``: D = A·B + C of fragments loaded in those orders.

    Operands: A's registers, B's, C's; results: D's. Rounding as for ``mma.sync``.
    """

    shape: str
    inputs: DType
    accumulator: DType
    a_order: StorageOrder = "row"
    b_order: StorageOrder = "col"
    does = (WarpSync(aligned=True),)
    volatile_ptx = False
    clobbers_memory = False

    def __post_init__(self) -> None:
        _check(self.shape, "A", self.inputs)
        if self.accumulator.name not in WMMA_ACCUMULATORS[self.inputs.name]:
            known = ", ".join(WMMA_ACCUMULATORS[self.inputs.name])
            raise VerifyError(f"wmma of {self.inputs} accumulates in {known}, not {self.accumulator}")

    @property
    def mnemonic(self) -> str:
        """Orders, shape, types: ``wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32`` (f16 names D and C alone)."""
        ab, c = self.inputs.ptx, self.accumulator.ptx
        types = f"{c}.{c}" if self.inputs is f16 else f"{c}.{ab}.{ab}.{c}"
        return f"wmma.mma.sync.aligned.{self.a_order}.{self.b_order}.{self.shape}.{types}"

    @property
    def counts(self) -> tuple[int, int, int]:
        """Registers of A, B and C."""
        a, b = (fragment_registers(self.shape, which, self.inputs) for which in "AB")
        return a, b, fragment_registers(self.shape, "C", self.accumulator)

    @property
    def slots(self) -> tuple[FragmentSlot, FragmentSlot, FragmentSlot]:
        """A, B and C as fragments. Raises LayoutError if they were never traced."""
        a, b, _ = self.counts
        return (
            _slot(self.shape, "A", self.inputs, self.a_order, 0),
            _slot(self.shape, "B", self.inputs, self.b_order, a),
            _slot(self.shape, "C", self.accumulator, "row", a + b),
        )

    @property
    def operand_types(self) -> tuple[DType, ...]:
        """The registers of A, B and C, as :attr:`counts` says."""
        a, b, c = self.counts
        return (fragment_register(self.inputs),) * (a + b) + (fragment_register(self.accumulator),) * c

    @property
    def result_types(self) -> tuple[DType, ...]:
        """D's registers, as C's."""
        return (fragment_register(self.accumulator),) * self.counts[2]

    @property
    def template(self) -> str:
        """Each fragment is one vector."""
        a, b, c = self.counts
        groups = braces(0, c), braces(c, a), braces(c + a, b), braces(c + a + b, c)
        return f"{self.mnemonic} {', '.join(groups)};"

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """D from the matrices that the traced maps find in the registers. Raises LayoutError without maps."""
        a, b, c = (slot.matrix(operands[slot.first : slot.first + slot.count]) for slot in self.slots)
        if self.inputs.is_integer:
            a, b = a.astype(np.int32), b.astype(np.int32)
        return self.slots[2].registers(np.matmul(a, b) + c)


ALL_SHAPES: tuple[tuple[str, DType], ...] = tuple((s, DTYPES[t]) for s, types in WMMA_SHAPES.items() for t in types)
"""Every shape with every type of A and B."""
