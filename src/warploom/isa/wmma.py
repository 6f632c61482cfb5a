"""The table of ``wmma``: load, multiply and store matrices as opaque fragments.

Source: PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions", ``wmma.load``, ``wmma.mma``, ``wmma.store``. The
ISA does not say which lane holds which element; :mod:`warploom.layout.wmma` has what GPUs were seen to do, and the
emulator needs it. Printing a kernel does not.
"""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false
from __future__ import annotations

from functools import partial
from typing import Any, Literal

import numpy as np

from warploom.core.dtypes import DTYPES, DType, f16
from warploom.isa.base import Array
from warploom.isa.effects import Effect, MatrixAccess, WarpSync
from warploom.isa.form import Formed, form, named
from warploom.isa.matrix import FragmentSlot, fragment_register, multiplied
from warploom.layout.wmma import WMMA_SHAPES, StorageOrder, wmma_elements, wmma_fragment

Operand = Literal["A", "B", "C", "D"]
ALL_SHAPES: tuple[tuple[str, DType], ...] = tuple((s, DTYPES[t]) for s, types in WMMA_SHAPES.items() for t in types)
"""Every shape with every type of A and B."""


def fragment_registers(shape: str, operand: str, dtype: DType) -> int:
    """Registers of a fragment per thread (of :func:`fragment_register`)."""
    return -(-wmma_elements(shape, operand, dtype) * dtype.bits // max(32, dtype.bits))


# Loads and stores. Operands: the matrix's address and its leading dimension in elements (u32), the same in all lanes,
# then the registers that are stored. The matrix is 16-byte aligned (32 for f64), and so is each line of it.


def _memory(i: Formed) -> dict[str, Any]:
    operand, dtype = i.which.upper(), DTYPES[i.type]
    registers = {"count": fragment_registers(i.shape, operand, dtype), "register": fragment_register(dtype)}
    order = i.order if operand in "AB" else "row"
    fragment = partial(wmma_fragment, i.shape, operand, dtype, order)
    return {"operand": operand, "dtype": dtype, "fragment": fragment, **registers}


def _name(i: Formed) -> str:
    space = i.space or "global"
    return f"wmma.{i.kind}.{i.which}.sync.aligned.{i.order}.{i.shape}.{space}.{i.type}"


def _access(i: Formed) -> tuple[Effect, ...]:
    """The warp reads or writes the whole matrix together."""
    space: Any = (i.space or "global").partition("::")[0]
    major: StorageOrder = i.order
    common: Any = {"collective": True, "stride": 1, "major": major, "is_input": i.operand in "AB"}
    return WarpSync(aligned=True), MatrixAccess(space, i.kind, 0, i.dtype.bytes, i.offset, **common)


def _loaded(i: Formed) -> Any:
    """A function from the elements of each lane, (warps, lanes, elements) of the element's width, to registers."""

    def registers(words: Array) -> tuple[Array, ...]:
        held = np.ascontiguousarray(words).view(i.register.numpy)
        return tuple(np.ascontiguousarray(held[..., n]) for n in range(held.shape[-1]))

    return registers


def _stored(i: Formed) -> Any:
    """A function from registers to the elements that are written, (warps, 32, elements) of the element's width."""
    return lambda *registers: np.ascontiguousarray(np.stack(registers, axis=-1)).view(f"u{i.dtype.bytes}")


MEMORY: dict[str, Any] = {
    "order": "row col",
    "space": "shared shared::cta global",
    "let": _memory,
    "name": _name,
    "effects": _access,
    "moves_bits": True,
    "asm": "volatile memory",
}
WORDS = "{which}.sync.aligned.{order}.{shape}{.space}.{type}"
HALVES = "m16n16k16 m32n8k16 m8n32k16"
for shape, inputs, sums in (
    (HALVES, "f16 bf16 s8 u8", "f16 f32 s32"),
    ("m16n16k8", "tf32", "f32"),
    ("m8n8k4", "f64", "f64"),
):
    for which, kind in (("a b", inputs), ("c", sums)):
        said: dict[str, Any] = {"kind": "load", "which": which, "shape": shape, "type": kind, **MEMORY}
        form(f"wmma.{{kind}}.{WORDS} d*count:register, [at], stride:u32", choose=_loaded, **said)
    said = {"kind": "store", "which": "d", "shape": shape, "type": sums, "operands": "at stride a", **MEMORY}
    form(f"wmma.{{kind}}.{WORDS} [at], a*count:register, stride:u32", choose=_stored, **said)

# Products of fragments that were loaded in these orders: D = A·B + C. Operands and rounding are those of mma.sync.


def _product(i: Formed) -> dict[str, Any]:
    inputs, accumulator = DTYPES[i.a], DTYPES[i.c]
    a, b = (fragment_registers(i.shape, which, inputs) for which in "AB")
    c = fragment_registers(i.shape, "C", accumulator)
    types = {"of_ab": fragment_register(inputs), "of_c": fragment_register(accumulator)}
    return {"inputs": inputs, "accumulator": accumulator, "na": a, "nb": b, "nc": c, **types}


def product_slots(i: Formed) -> tuple[FragmentSlot, FragmentSlot, FragmentSlot]:
    """A, B and C of ``wmma.mma`` as fragments. Raises LayoutError if they were never traced."""
    layouts = (
        wmma_fragment(i.shape, "A", i.inputs, i.a_order),
        wmma_fragment(i.shape, "B", i.inputs, i.b_order),
        wmma_fragment(i.shape, "C", i.accumulator, "row"),
    )
    firsts, types = (0, i.na, i.na + i.nb), (i.inputs, i.inputs, i.accumulator)
    a, b, c = map(FragmentSlot, layouts, types, firsts, (i.na, i.nb, i.nc))
    return a, b, c


PRODUCT: dict[str, Any] = {
    "a_order": "row col",
    "b_order": "row col",
    "let": _product,
    "choose": lambda i: lambda *registers: multiplied(product_slots(i), registers),
    "effects": (WarpSync(aligned=True),),
    "asm": "plain",
}
PLACES = "d*nc:of_c, a*na:of_ab, b*nb:of_ab, c*nc:of_c"
for a, c, shape in (
    ("f16", "f16 f32", HALVES),  # whose names give the types of D and C alone
    ("bf16", "f32", HALVES),
    ("s8 u8", "s32", HALVES),
    ("tf32", "f32", "m16n16k8"),
    ("f64", "f64", "m8n8k4"),
):
    types, default = ("{c}.{c}", {"a": a}) if a == "f16" else ("{c}.{a}.{a}.{c}", {})
    pattern = f"wmma.mma.sync.aligned.{{a_order}}.{{b_order}}.{{shape}}.{types} {PLACES}"
    form(pattern, a=a, c=c, shape=shape, default=default, **PRODUCT)


def wmma_load(
    operand: Literal["A", "B", "C"], shape: str, dtype: DType, order: StorageOrder, space: Literal["shared", "global"]
) -> Formed:
    """``wmma.load``: a fragment from memory."""
    return named(f"wmma.load.{operand.lower()}.sync.aligned.{order}.{shape}.{space}.{dtype.ptx}")


def wmma_store(shape: str, dtype: DType, order: StorageOrder, space: Literal["shared", "global"]) -> Formed:
    """``wmma.store``: an accumulator to memory."""
    return named(f"wmma.store.d.sync.aligned.{order}.{shape}.{space}.{dtype.ptx}")


def wmma_mma(
    shape: str, inputs: DType, accumulator: DType, a_order: StorageOrder = "row", b_order: StorageOrder = "col"
) -> Formed:
    """``wmma.mma`` of fragments that were loaded in these orders."""
    c = accumulator.ptx
    types = f"{c}.{c}" if inputs is f16 else f"{c}.{inputs.ptx}.{inputs.ptx}.{c}"
    return named(f"wmma.mma.sync.aligned.{a_order}.{b_order}.{shape}.{types}")
