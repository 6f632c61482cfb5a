"""The table of matrices in registers: ``ldmatrix``, ``stmatrix`` and ``mma.sync``.

Source: PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions". The fragment maps come from the catalogue of
layouts.
"""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from warploom.core.dtypes import DTYPES, DType, bf16, f16, f32, tf32, u32
from warploom.core.errors import VerifyError
from warploom.isa.base import Array
from warploom.isa.effects import Access, Effect, WarpSync
from warploom.isa.form import FORMS, Formed, RefusedError, form, named
from warploom.isa.narrow import half_to_f32
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
    """A function from rows as u32 words, shape (warps, 8 · matrices, 4), to the registers of each matrix."""

    def registers(rows: Array) -> tuple[Array, ...]:
        halves = np.ascontiguousarray(rows).view(np.uint16).reshape(rows.shape[0], -1, 8, 8)
        words = _arranged(i, halves).view(np.uint32).reshape(*halves.shape[:2], 32)
        return tuple(words[:, n] for n in range(words.shape[1]))

    return registers


def _stored(i: Formed) -> Callable[..., Array]:
    """A function from the registers of each matrix to the rows that are written."""

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


# Products: D = A·B + C for one warp. Operands: A's registers, B's, C's; results: D's, laid out as C. Products are exact
# and summed in f32, integers and f64 in their own type. In which order and with which rounding the hardware sums is not
# documented (f32: it truncates more than f32 does); allow a relative error of k · 2^-22 (f64: k · 2^-53) of Σ|a·b|.


def fragment_register(dtype: DType) -> DType:
    """The register type that holds elements of ``dtype``: packed and tf32 elements are u32."""
    return u32 if dtype.bits < 32 or dtype is tf32 else dtype


@lru_cache(maxsize=64)
def _slots(shape: str, *types: DType) -> tuple[FragmentSlot, ...]:
    """A, B and C as fragments."""
    found, first = list[FragmentSlot](), 0
    for which, dtype in zip("ABC", types, strict=True):
        layout = mma_fragment(shape, which, dtype.bits)
        count = layout.registers if dtype.bits <= 32 else layout.elements_per_thread
        found.append(FragmentSlot(layout, dtype, first, count))
        first += count
    return tuple(found)


def _fragments(i: Formed) -> dict[str, Any]:
    inputs, accumulator = DTYPES[i.a], DTYPES[i.c]
    a, b, c = slots = _slots(i.shape, inputs, DTYPES[i.fields.get("b", i.a)], accumulator)
    counts = {"na": a.count, "nb": b.count, "nc": c.count}
    types = {"of_ab": fragment_register(inputs), "of_c": fragment_register(accumulator)}
    return {"slots": slots, "inputs": inputs, "accumulator": accumulator, **counts, **types}


def multiplied(slots: Sequence[FragmentSlot], registers: Sequence[Array]) -> tuple[Array, ...]:
    """D from the matrices that the registers hold, dealt out to the lanes as C is laid out."""
    a, b, c = (slot.matrix(registers[slot.first : slot.first + slot.count]) for slot in slots)
    return slots[2].registers(np.matmul(a.astype(c.dtype, copy=False), b.astype(c.dtype, copy=False)) + c)


PRODUCT: dict[str, Any] = {
    "let": _fragments,
    "choose": lambda i: lambda *registers: multiplied(i.slots, registers),
    "effects": (WarpSync(aligned=True),),
    "asm": "plain",  # ptxas orders mma by its registers alone, and may move it between memory instructions
}
PLACES = "d*nc:of_c, a*na:of_ab, b*nb:of_ab, c*nc:of_c"
for a, c, shape in (
    ("f16 bf16", "f32", "m16n8k16 m16n8k8"),
    ("f16", "f16", "m16n8k16 m16n8k8"),
    ("tf32", "f32", "m16n8k8 m16n8k4"),
):
    said: dict[str, Any] = {"a": a, "c": c, "shape": shape, "tied": "c", **PRODUCT}
    form(f"mma.sync.aligned.{{shape}}.row.col.{{c}}.{{a}}.{{a}}.{{c}} {PLACES}", **said)
form(
    f"mma.sync.aligned.{{shape}}.row.col.{{c}}.{{a}}.{{b}}.{{c}} {PLACES}",
    a="s8 u8",
    b="s8 u8",
    c="s32",
    shape="m8n8k16 m16n8k16 m16n8k32",
    **PRODUCT,
)
form(
    f"mma.sync.aligned.{{shape}}.row.col.{{c}}.{{a}}.{{a}}.{{c}} {PLACES}",
    a="f64",
    c="f64",
    shape="m8n8k4 m16n8k4@sm_90 m16n8k8@sm_90 m16n8k16@sm_90",
    **PRODUCT,
)


def mma(shape: str, inputs: DType, accumulator: DType = f32, b: DType | None = None) -> Formed:
    """``mma.sync``; ``b`` is the type of B where it is another than A's. Raises VerifyError for what does not exist."""
    try:
        return named(f"mma.sync.aligned.{shape}.row.col.{accumulator}.{inputs}.{b or inputs}.{accumulator}")
    except RefusedError:
        known: dict[str, list[str]] = {}
        for line in FORMS["mma"]:
            named_slots = {slot.name: slot.words for slot in line.slots}
            for one in named_slots["shape"] if accumulator.name in named_slots["c"] else ():
                known.setdefault(one, []).extend(named_slots["a"])
        listed = "; ".join(f"{one} takes {', '.join(types)}" for one, types in known.items())
        what = f"mma.sync has no {shape} of {inputs} with sums in {accumulator}"
        raise VerifyError(f"{what}: {listed}") from None
