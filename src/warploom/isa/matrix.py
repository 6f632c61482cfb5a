"""``mma.sync``: the warp-wide matrix multiply-accumulate of sm_80.

Sources: PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions" (``mma.sync.aligned.m16n8k*``). The fragment maps
come from the catalogue of layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from warploom.core.dtypes import DType, bf16, f16, f32, tf32, u32
from warploom.core.errors import VerifyError
from warploom.isa.base import Array, Instruction, braces, inline_ptx
from warploom.isa.conversion import half_to_f32
from warploom.isa.effects import Access, Effect, WarpSync
from warploom.isa.form import Formed, form, named
from warploom.layout.catalogue import mma_fragment
from warploom.layout.fragments import FragmentLayout


@dataclass(frozen=True)
class FragmentSlot:
    """A matrix operand in registers: its layout, element type, and which registers of the operand list hold it."""

    layout: FragmentLayout
    dtype: DType
    first: int
    count: int

    def elements(self, registers: Sequence[Array]) -> Array:
        """Exact element values per lane, shape (warps, 32, elements); ``registers`` have the shape (warps, 32)."""
        stacked = np.ascontiguousarray(np.stack(registers, axis=-1))
        if self.dtype in (f16, bf16):
            return half_to_f32(stacked.view(np.uint16), self.dtype)
        if self.dtype is tf32:  # the hardware ignores the 13 low bits of the fraction
            return (stacked & np.uint32(0xFFFFE000)).view(np.float32)
        return stacked.view(self.dtype.numpy)

    def matrix(self, registers: Sequence[Array]) -> Array:
        """The matrix per warp, shape (warps, rows, columns): float32 for floats of up to 32 bits, else the own type."""
        elements = self.elements(registers)
        flat = elements.reshape(elements.shape[0], -1).take(self.layout.owner_index(), axis=1)
        return flat.reshape(elements.shape[0], *self.layout.shape)

    def registers(self, matrix: Array) -> tuple[Array, ...]:
        """The registers of each lane, shape (warps, 32) each, that hold ``matrix`` (warps, rows, columns)."""
        index = self.layout.gather_index()
        values = matrix.reshape(matrix.shape[0], -1).take(index.reshape(-1), axis=1)
        values = values.reshape(matrix.shape[0], *index.shape)
        words = values.astype(self.dtype.numpy, copy=False)
        if self.dtype.bits < 32:
            words = np.ascontiguousarray(words).view(np.uint32)
        return tuple(np.ascontiguousarray(words[..., i]) for i in range(self.count))


# Matrices of 8×8 elements of 16 bits between shared memory and registers. Lane 8·i + r gives the address of row r of
# matrix i (16 bytes); register i holds, in lane l, elements 2·(l mod 4) and 2·(l mod 4) + 1 of row l/4 of matrix i,
# with ``.trans`` of column l/4.


def _arranged(i: Formed, halves: Array) -> Array:
    """(warps, matrices, 8 rows, 8 halves), rows and columns exchanged for ``.trans``."""
    return np.ascontiguousarray(halves.transpose(0, 1, 3, 2)) if i.trans else halves


def _loaded(i: Formed) -> Callable[[Array], tuple[Array, ...]]:
    """The registers of each matrix, of rows as u32 words, shape (warps, 8 · matrices, 4)."""

    def registers(rows: Array) -> tuple[Array, ...]:
        halves = np.ascontiguousarray(rows).view(np.uint16).reshape(rows.shape[0], -1, 8, 8)
        words = _arranged(i, halves).view(np.uint32).reshape(*halves.shape[:2], 32)
        return tuple(words[:, n] for n in range(words.shape[1]))

    return registers


def _stored(i: Formed) -> Callable[..., Array]:
    """The rows to write, of the registers of each matrix."""

    def rows(*registers: Array) -> Array:
        words = np.ascontiguousarray(np.stack(registers, axis=1))
        halves = _arranged(i, words.view(np.uint16).reshape(*words.shape[:2], 8, 8))
        return halves.view(np.uint32).reshape(words.shape[0], -1, 4)

    return rows


def _rows(i: Formed) -> tuple[Effect, ...]:
    mode, lanes = "load" if i.op == "ldmatrix" else "store", 8 * int(i.num[1:])
    access = Access("shared", mode, 0, 16, i.offset, lanes=lanes, collective=True, words=4)
    return WarpSync(aligned=True), access


ROWS: dict[str, Any] = {"num": "x1 x2 x4", "space": "shared shared::cta", "effects": _rows, "moves_bits": True}
ROWS["asm"] = "volatile memory"
form("ldmatrix.sync.aligned.m8n8.{num}{.trans}.{space}.b16 d*num:b32, [at]", choose=_loaded, **ROWS)
form("stmatrix.sync.aligned.m8n8.{num}{.trans}.{space}.b16 [at], a*num:b32", choose=_stored, since="sm_90", **ROWS)


def matrix_access(opcode: Literal["ldmatrix", "stmatrix"], count: int, transposed: bool = False) -> Formed:
    """``ldmatrix`` or ``stmatrix`` of 1, 2 or 4 matrices. Operands: the address, and the registers that are stored."""
    if count not in (1, 2, 4):
        raise VerifyError(f"ldmatrix and stmatrix move 1, 2 or 4 matrices, not {count}")
    return named(f"{opcode}.sync.aligned.m8n8.x{count}{'.trans' if transposed else ''}.shared.b16")


_SHAPES: dict[str, tuple[str, ...]] = {
    "m16n8k16": ("f16", "bf16"),
    "m16n8k8": ("f16", "bf16", "tf32"),
    "m16n8k4": ("tf32",),
}


@lru_cache(maxsize=64)
def _slots(shape: str, inputs: DType, accumulator: DType) -> tuple[FragmentSlot, FragmentSlot, FragmentSlot]:
    a, b = (mma_fragment(shape, which, inputs.bits) for which in "AB")
    c = mma_fragment(shape, "C", accumulator.bits)
    return (
        FragmentSlot(a, inputs, 0, a.registers),
        FragmentSlot(b, inputs, a.registers, b.registers),
        FragmentSlot(c, accumulator, a.registers + b.registers, c.registers),
    )


@dataclass(frozen=True, slots=True)
class MmaSync(Instruction):
    """``mma.sync.aligned.{shape}.row.col``: D = A·B + C for one warp.

    Operands: A's registers, B's, C's; results: D's, laid out as C. Products are exact and summed in float32 by the
    emulator and then rounded to the accumulator's type. The hardware's internal order and rounding of the sum are not
    documented (it truncates more than float32 does); allow a relative error of k · 2^-22 of Σ|a·b| between the two.
    """

    shape: str
    inputs: DType
    accumulator: DType = f32
    ptx = "mma.sync.aligned.{self.shape}.row.col.{self.accumulator}.{self.inputs}.{self.inputs}.{self.accumulator}"
    does = (WarpSync(aligned=True),)

    def __post_init__(self) -> None:
        if self.inputs.name not in _SHAPES.get(self.shape, ()):
            known = "; ".join(f"{s} takes {', '.join(t)}" for s, t in _SHAPES.items())
            raise VerifyError(f"mma.sync has no {self.shape} for {self.inputs.name} here: {known}")
        if self.accumulator is not f32 and not (self.accumulator is f16 and self.inputs is f16):
            raise VerifyError(f"mma.sync of {self.inputs.name} accumulates in f32 (f16 also in f16)")

    @property
    def slots(self) -> tuple[FragmentSlot, FragmentSlot, FragmentSlot]:
        """A, B and C as fragments."""
        return _slots(self.shape, self.inputs, self.accumulator)

    @property
    def _c_register(self) -> DType:
        return f32 if self.accumulator is f32 else u32

    @property
    def operand_types(self) -> tuple[DType, ...]:
        """A's and B's packed registers (u32), then C's: f32, or u32 that packs two f16 sums."""
        a, b, c = self.slots
        return (u32,) * (a.count + b.count) + (self._c_register,) * c.count

    @property
    def result_types(self) -> tuple[DType, ...]:
        """D's registers, as C's."""
        return (self._c_register,) * self.slots[2].count

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        """Inline PTX; where D's registers are C's they are one read-write operand, so that no move is left."""
        a, b, c = self.slots
        letter, n = self._c_register.constraint, c.count
        ab_in = [("r", x) for x in operands[: a.count + b.count]]
        c_names = list(operands[c.first :])
        in_place = c_names == list(results)
        ab = f"{braces(n, a.count)}, {braces(n + a.count, b.count)}"
        c_text = braces(0, n) if in_place else braces(n + a.count + b.count, n)
        outs = [(f"{'+' if in_place else '='}{letter}", r) for r in results]
        ins = ab_in if in_place else ab_in + [(letter, x) for x in c_names]
        # Not volatile: ptxas orders mma by its registers alone, and may move it between memory instructions.
        return inline_ptx(f"{self.mnemonic} {braces(0, n)}, {ab}, {c_text};", outs, ins, volatile=False)

    def multiply(self, a: Array, b: Array, c: Array) -> Array:
        """D of matrices A (warps, m, k), B (warps, k, n), C (warps, m, n), all float32."""
        return np.matmul(a, b) + c

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """D from the matrices that the registers hold, dealt out to the lanes as C is laid out."""
        a, b, c = (slot.matrix(operands[slot.first : slot.first + slot.count]) for slot in self.slots)
        return self.slots[2].registers(self.multiply(a, b, c))
