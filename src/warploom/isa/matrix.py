"""The table of matrices: ``ldmatrix``, ``stmatrix``, ``mma.sync``, ``wmma`` and ``wgmma``.

Source: PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions", "Asynchronous Warpgroup Level Matrix
Multiply-Accumulate Instructions". The fragment maps come from the catalogue of
layouts.
"""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np

from warploom.core.dtypes import DTYPES, DType, bf16, e4m3, e5m2, f16, f32, tf32, u32
from warploom.core.errors import VerifyError
from warploom.isa.cpp import braces
from warploom.isa.effects import (
    Access,
    AsyncMatrix,
    CommitGroup,
    Effect,
    MatrixAccess,
    WaitGroup,
    WarpgroupFence,
    WarpSync,
)
from warploom.isa.form import FORMS, Array, RefusedError, common, form, viewed, waits_for_groups
from warploom.isa.instruction import Instruction, named
from warploom.isa.meanings import half_to_f32
from warploom.layout.catalogue import mma_fragment
from warploom.layout.fragments import FragmentLayout
from warploom.layout.wgmma import element_addresses
from warploom.layout.wmma import StorageOrder, wmma_elements, wmma_fragment

_ELEMENTS = DTYPES | {"e4m3": e4m3, "e5m2": e5m2}
"""The types of a matrix's elements by PTX's names."""


def element_values(bits: Array, dtype: DType) -> Array:
    """The values of elements, of unsigned integers of their width: float32 for floats of up to 32 bits."""
    if dtype in (f16, bf16):
        return half_to_f32(bits, dtype)
    if dtype is tf32:  # the hardware ignores the 13 low bits of the fraction
        return (bits & np.uint32(0xFFFFE000)).view(np.float32)
    numbers = bits.view(dtype.numpy)
    return numbers.astype(np.float32) if dtype in (e4m3, e5m2) else numbers


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
        return element_values(stacked.view(f"u{self.dtype.bits // 8}"), self.dtype)

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
            words = viewed(words, np.uint32)
        return tuple(np.ascontiguousarray(words[..., i]) for i in range(self.count))


# Matrices of 8×8 elements of 16 bits between shared memory and registers. Lane 8·i + r gives the address of row r of
# matrix i (16 bytes); register i holds, in lane l, elements 2·(l mod 4) and 2·(l mod 4) + 1 of row l/4 of matrix i,
# with ``.trans`` of column l/4.


def _arranged(i: Instruction, halves: Array) -> Array:
    """(warps, matrices, 8 rows, 8 halves), rows and columns exchanged for ``.trans``."""
    return np.ascontiguousarray(halves.transpose(0, 1, 3, 2)) if i.trans else halves


def _loaded(i: Instruction) -> Callable[[Array], tuple[Array, ...]]:
    """A function from rows as u32 words, shape (warps, 8 · matrices, 4), to the registers of each matrix."""

    def registers(rows: Array) -> tuple[Array, ...]:
        halves = viewed(rows, np.uint16).reshape(rows.shape[0], -1, 8, 8)
        words = _arranged(i, halves).view(np.uint32).reshape(*halves.shape[:2], 32)
        return tuple(words[:, n] for n in range(words.shape[1]))

    return registers


def _stored(i: Instruction) -> Callable[..., Array]:
    """A function from the registers of each matrix to the rows that are written."""

    def rows(*registers: Array) -> Array:
        words = np.ascontiguousarray(np.stack(registers, axis=1))
        halves = _arranged(i, words.view(np.uint16).reshape(*words.shape[:2], 8, 8))
        return halves.view(np.uint32).reshape(words.shape[0], -1, 4)

    return rows


def _rows(i: Instruction) -> tuple[Effect, ...]:
    mode, lanes = "load" if i.op == "ldmatrix" else "store", 8 * int(i.num[1:])
    access = Access("shared", mode, 0, 16, i.offset, lanes=lanes, collective=True, words=4)
    return WarpSync(aligned=True), access


ROWS = common(num="x1 x2 x4", space="shared shared::cta", effects=_rows, moves_bits=True)
ROWS["asm"] = "volatile memory"
form("ldmatrix.sync.aligned.m8n8.{num}{.trans}.{space}.b16 d*num:b32, [at]", ROWS, choose=_loaded)
form("stmatrix.sync.aligned.m8n8.{num}{.trans}.{space}.b16 [at], a*num:b32", ROWS, choose=_stored, since="sm_90")


def matrix_access(opcode: Literal["ldmatrix", "stmatrix"], count: int, transposed: bool = False) -> Instruction:
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


def _fragments(i: Instruction) -> dict[str, Any]:
    inputs, accumulator = _ELEMENTS[i.a], _ELEMENTS[i.c]
    a, b, c = slots = _slots(i.shape, inputs, _ELEMENTS[i.fields.get("b", i.a)], accumulator)
    counts = {"na": a.count, "nb": b.count, "nc": c.count}
    types = {"of_ab": fragment_register(inputs), "of_c": fragment_register(accumulator)}
    return {"slots": slots, "inputs": inputs, "accumulator": accumulator, **counts, **types}


def product_and_sum(a: Array, b: Array, c: Array, saturates: bool) -> Array:
    """A·B + C in the type of C; ``saturates``: sums of integers beyond the range of s32 become its nearest end."""
    wide = np.int64 if saturates else c.dtype
    total = np.matmul(a.astype(wide, copy=False), b.astype(wide, copy=False)) + c
    return np.clip(total, -(2**31), 2**31 - 1).astype(c.dtype) if saturates else total


def multiplied(slots: Sequence[FragmentSlot], registers: Sequence[Array], saturates: bool = False) -> tuple[Array, ...]:
    """D from the matrices that the registers hold, dealt out to the lanes as C is laid out."""
    a, b, c = (slot.matrix(registers[slot.first : slot.first + slot.count]) for slot in slots)
    return slots[2].registers(product_and_sum(a, b, c, saturates))


PRODUCT = common(
    let=_fragments,
    choose=lambda i: lambda *registers: multiplied(i.slots, registers, bool(i.fields.get("satfinite"))),
    effects=(WarpSync(aligned=True),),
    asm="plain",  # ptxas orders mma by its registers alone, and may move it between memory instructions
)
PLACES = "d*nc:of_c, a*na:of_ab, b*nb:of_ab, c*nc:of_c"
for a, c, shape in (
    ("f16 bf16", "f32", "m16n8k16 m16n8k8"),
    ("f16", "f16", "m16n8k16 m16n8k8"),
    ("tf32", "f32", "m16n8k8 m16n8k4"),
):
    said = common(a=a, c=c, shape=shape, tied="c", **PRODUCT)
    form(f"mma.sync.aligned.{{shape}}.row.col.{{c}}.{{a}}.{{a}}.{{c}} {PLACES}", said)
for flag, ab, c, shape, since in (
    ("{.satfinite}", "s8 u8", "s32", "m8n8k16 m16n8k16 m16n8k32", "sm_80"),
    ("", "e4m3 e5m2", "f32 f16", "m16n8k16 m16n8k32", "sm_89"),
):
    said = common(a=ab, b=ab, c=c, shape=shape, since=since, **PRODUCT)
    form(f"mma.sync.aligned.{{shape}}.row.col{flag}.{{c}}.{{a}}.{{b}}.{{c}} {PLACES}", said)
form(
    f"mma.sync.aligned.{{shape}}.row.col.{{c}}.{{a}}.{{a}}.{{c}} {PLACES}",
    PRODUCT,
    a="f64",
    c="f64",
    shape="m8n8k4 m16n8k4@sm_90 m16n8k8@sm_90 m16n8k16@sm_90",
)


def mma(shape: str, inputs: DType, accumulator: DType = f32, b: DType | None = None) -> Instruction:
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


# ``wmma``: matrices as opaque fragments. The ISA does not say which lane holds which element;
# :mod:`warploom.layout.wmma` has what GPUs were seen to do, and the emulator needs it. Printing a kernel does not.


Operand = Literal["A", "B", "C", "D"]


def fragment_registers(shape: str, operand: str, dtype: DType) -> int:
    """Registers of a fragment per thread (of :func:`fragment_register`)."""
    return -(-wmma_elements(shape, operand, dtype) * dtype.bits // max(32, dtype.bits))


# Loads and stores. Operands: the matrix's address and its leading dimension in elements (u32), the same in all lanes,
# then the registers that are stored. The matrix is 16-byte aligned (32 for f64), and so is each line of it.


def _fragment_in_memory(i: Instruction) -> dict[str, Any]:
    operand, dtype = i.which.upper(), DTYPES[i.type]
    registers = {"count": fragment_registers(i.shape, operand, dtype), "register": fragment_register(dtype)}
    order = i.order if operand in "AB" else "row"
    fragment = partial(wmma_fragment, i.shape, operand, dtype, order)
    return {"operand": operand, "dtype": dtype, "fragment": fragment, **registers}


def _wmma_name(i: Instruction) -> str:
    space = i.space or "global"
    return f"wmma.{i.kind}.{i.which}.sync.aligned.{i.order}.{i.shape}.{space}.{i.type}"


def _whole_matrix(i: Instruction) -> tuple[Effect, ...]:
    """The warp reads or writes the whole matrix together."""
    space: Any = (i.space or "global").partition("::")[0]
    major: StorageOrder = i.order
    common: Any = {"collective": True, "stride": 1, "major": major, "is_input": i.operand in "AB"}
    return WarpSync(aligned=True), MatrixAccess(space, i.kind, 0, i.dtype.bytes, i.offset, **common)


def _loaded_fragment(i: Instruction) -> Any:
    """A function from the elements of each lane, (warps, lanes, elements) of the element's width, to registers."""

    def registers(words: Array) -> tuple[Array, ...]:
        held = viewed(words, i.register.numpy)
        return tuple(np.ascontiguousarray(held[..., n]) for n in range(held.shape[-1]))

    return registers


def _stored_fragment(i: Instruction) -> Any:
    """A function from registers to the elements that are written, (warps, 32, elements) of the element's width."""
    return lambda *registers: viewed(np.stack(registers, axis=-1), f"u{i.dtype.bytes}")


FRAGMENT = common(
    order="row col",
    space="shared shared::cta global",
    let=_fragment_in_memory,
    name=_wmma_name,
    effects=_whole_matrix,
    moves_bits=True,
    asm="volatile memory",
)
FRAGMENT_WORDS = "{which}.sync.aligned.{order}.{shape}{.space}.{type}"
WMMA_SHAPES_OF_16_BITS = "m16n16k16 m32n8k16 m8n32k16"
for shape, inputs, sums in (
    (WMMA_SHAPES_OF_16_BITS, "f16 bf16 s8 u8", "f16 f32 s32"),
    ("m16n16k8", "tf32", "f32"),
    ("m8n8k4", "f64", "f64"),
):
    for which, kind in (("a b", inputs), ("c", sums)):
        said = common(kind="load", which=which, shape=shape, type=kind, **FRAGMENT)
        form(f"wmma.{{kind}}.{FRAGMENT_WORDS} d*count:register, [at], stride:u32", said, choose=_loaded_fragment)
    said = common(kind="store", which="d", shape=shape, type=sums, operands="at stride a", **FRAGMENT)
    form(f"wmma.{{kind}}.{FRAGMENT_WORDS} [at], a*count:register, stride:u32", said, choose=_stored_fragment)

# Products of fragments that were loaded in these orders: D = A·B + C. Operands and rounding are those of mma.sync.


def _product_of_fragments(i: Instruction) -> dict[str, Any]:
    inputs, accumulator = DTYPES[i.a], DTYPES[i.c]
    a, b = (fragment_registers(i.shape, which, inputs) for which in "AB")
    c = fragment_registers(i.shape, "C", accumulator)
    types = {"of_ab": fragment_register(inputs), "of_c": fragment_register(accumulator)}
    return {"inputs": inputs, "accumulator": accumulator, "na": a, "nb": b, "nc": c, **types}


def product_slots(i: Instruction) -> tuple[FragmentSlot, FragmentSlot, FragmentSlot]:
    """A, B and C of ``wmma.mma`` as fragments. Raises LayoutError if they were never traced."""
    layouts = (
        wmma_fragment(i.shape, "A", i.inputs, i.a_order),
        wmma_fragment(i.shape, "B", i.inputs, i.b_order),
        wmma_fragment(i.shape, "C", i.accumulator, "row"),
    )
    firsts, types = (0, i.na, i.na + i.nb), (i.inputs, i.inputs, i.accumulator)
    a, b, c = map(FragmentSlot, layouts, types, firsts, (i.na, i.nb, i.nc))
    return a, b, c


WMMA = common(
    a_order="row col",
    b_order="row col",
    let=_product_of_fragments,
    choose=lambda i: lambda *registers: multiplied(product_slots(i), registers),
    effects=(WarpSync(aligned=True),),
    asm="plain",
)
for a, c, shape in (
    ("f16", "f16 f32", WMMA_SHAPES_OF_16_BITS),  # whose names give the types of D and C alone
    ("bf16", "f32", WMMA_SHAPES_OF_16_BITS),
    ("s8 u8", "s32", WMMA_SHAPES_OF_16_BITS),
    ("tf32", "f32", "m16n16k8"),
    ("f64", "f64", "m8n8k4"),
):
    types, default = ("{c}.{c}", {"a": a}) if a == "f16" else ("{c}.{a}.{a}.{c}", {})
    pattern = f"wmma.mma.sync.aligned.{{a_order}}.{{b_order}}.{{shape}}.{types} {PLACES}"
    form(pattern, WMMA, a=a, c=c, shape=shape, default=default)


def wmma_load(
    operand: Literal["A", "B", "C"], shape: str, dtype: DType, order: StorageOrder, space: Literal["shared", "global"]
) -> Instruction:
    """``wmma.load``: a fragment from memory."""
    return named(f"wmma.load.{operand.lower()}.sync.aligned.{order}.{shape}.{space}.{dtype.ptx}")


def wmma_store(shape: str, dtype: DType, order: StorageOrder, space: Literal["shared", "global"]) -> Instruction:
    """``wmma.store``: an accumulator to memory."""
    return named(f"wmma.store.d.sync.aligned.{order}.{shape}.{space}.{dtype.ptx}")


def wmma_mma(
    shape: str, inputs: DType, accumulator: DType, a_order: StorageOrder = "row", b_order: StorageOrder = "col"
) -> Instruction:
    """``wmma.mma`` of fragments that were loaded in these orders."""
    c = accumulator.ptx
    types = f"{c}.{c}" if inputs is f16 else f"{c}.{inputs.ptx}.{inputs.ptx}.{c}"
    return named(f"wmma.mma.sync.aligned.{a_order}.{b_order}.{shape}.{types}")


# ``wgmma``: the asynchronous product of a warpgroup (sm_90a)


M = 64


@lru_cache(maxsize=128)
def _of_one_warp(shape: str, operand: str, dtype: DType, first: int, tiles: int) -> FragmentSlot:
    layout = mma_fragment(shape, operand, dtype.bits).tile(1, tiles)
    return FragmentSlot(layout, dtype, first, layout.registers)


@dataclass(frozen=True, slots=True)
class WarpgroupProduct:
    """D = A·B (+ D) of four warps, of m64n{n} and K elements in 32 bytes of a row.

    Operands: A (a descriptor, or four registers), B's descriptor, whether to accumulate, D's registers; results: the
    same registers. ``transposed_b``: B's rows of K are not contiguous in shared memory (N is); ``transposed_a``: nor
    are A's (M is), which only an A in shared memory may be. Reads and writes happen at any time until the warpgroup
    waits for the committed group.
    """

    n: int
    a: DType
    b: DType
    sums: DType
    a_source: Literal["shared", "registers"]
    transposed_b: bool
    transposed_a: bool
    saturates: bool

    @property
    def k(self) -> int:
        """Columns of A, rows of B."""
        return 256 // self.a.bits

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of A or B."""
        return self.a.bits // 8

    @property
    def a_count(self) -> int:
        """Operands that make up A."""
        return 1 if self.a_source == "shared" else 4

    @property
    def a_slot(self) -> FragmentSlot:
        """The 16 rows of A that one warp holds, when it is in registers: the fragment of ``mma.m16n8``."""
        return _of_one_warp(f"m16n8k{self.k}", "A", self.a, 0, 1)

    @property
    def accumulator_slot(self) -> FragmentSlot:
        """The 16 rows of D that one warp holds, among the operands: accumulators of ``mma.m16n8k16`` side by side."""
        return _of_one_warp("m16n8k16", "D", self.sums, self.a_count + 2, self.n // 8)

    def a_addresses(self, descriptor: int) -> Array:
        """Shared byte addresses of A's elements, int64 [64, k]."""
        return self._addresses(descriptor, M, self.transposed_a)

    def b_addresses(self, descriptor: int) -> Array:
        """Shared byte addresses of B's elements, int64 [n, k]."""
        return self._addresses(descriptor, self.n, self.transposed_b)

    def _addresses(self, descriptor: int, rows: int, transposed: bool) -> Array:
        size = self.element_bytes
        return element_addresses(descriptor, rows, self.k, k_contiguous=not transposed, element_bytes=size)

    def multiply(self, a: Array, b: Array, c: Array) -> Array:
        """D from A (groups, 64, k), B (groups, n, k), C (groups, 64, n); see ``mma.sync`` on rounding."""
        return product_and_sum(a, b.transpose(0, 2, 1), c, self.saturates)


def _warpgroup_product(i: Instruction) -> dict[str, Any]:
    said = i.fields.get
    if (said("scale_a", 1), said("scale_b", 1)) != (1, 1):
        raise VerifyError("factors other than 1 are not supported")
    n, a, b, sums = int(i.shape[4:].partition("k")[0]), i.a, said("b", i.a), _ELEMENTS[i.c]
    source = "registers" if any(p.name == "a" and p.count for p in i.form.places) else "shared"
    transposed_b, transposed_a, saturates = (bool(said(x)) for x in ("transposed_b", "transposed_a", "satfinite"))
    product = WarpgroupProduct(n, _ELEMENTS[a], _ELEMENTS[b], sums, source, transposed_b, transposed_a, saturates)
    first, count = product.a_count + 2, product.accumulator_slot.count
    registers = {"nc": count, "of_c": f32 if sums is f32 else u32}
    return {**registers, "warpgroup_product": product, "optional_operands": range(first, first + count)}


def _wgmma_text(i: Instruction) -> str:
    """The line on D's registers, then A, B and the predicate that says whether to accumulate."""
    d, a = i.nc, i.warpgroup_product.a_count
    at, of_a = d + a, f"%{d}" if a == 1 else braces(d, 4)
    line = ", ".join(("p", *(str(i.fields[p.name]) for p in i.present if p.kind == "number")))
    line = f"{i.mnemonic} {braces(0, d)}, {of_a}, %{at}, {line};"
    return f"{{ .reg .pred p; setp.ne.b32 p, %{at + 1}, 0; {line} }}"


WARPGROUP = common(since="sm_90a", asm="volatile memory")
for types, ab, c, k, widths in (
    ("{c}.{a}.{a}", "f16", "f32 f16", 16, range(8, 257, 8)),
    ("{c}.{a}.{a}", "bf16", "f32", 16, range(8, 257, 8)),
    ("{c}.{a}.{a}", "tf32", "f32", 8, range(8, 257, 8)),
    ("{c}.{a}.{b}", "e4m3 e5m2", "f32 f16", 32, range(8, 257, 8)),
    ("{c}.{a}.{b}{.satfinite}", "s8 u8", "s32", 32, (8, 24, *range(16, 257, 16))),
):
    scales = "" if c == "s32" else ", #scale_a, #scale_b"
    for a, of_a in (("a:b64", ", #transposed_a"), ("a*4:b32", "")):
        transposes = f"{of_a}, #transposed_b" if k == 16 else ""
        form(
            f"wgmma.mma_async.sync.aligned.{{shape}}.{types} "
            f"d*nc:of_c, {a}, b:b64, adds:pred{scales}{transposes}, ^sums*nc:of_c",
            WARPGROUP,
            shape=" ".join(f"m64n{n}k{k}" for n in widths),
            a=ab,
            b=ab,
            c=c,
            name=lambda i: i.ptx_name,
            let=_warpgroup_product,
            inline=_wgmma_text,
            tied="sums",
            effects=(WarpSync(aligned=True), AsyncMatrix()),
        )
form("wgmma.fence.sync.aligned", WARPGROUP, effects=(WarpSync(aligned=True), WarpgroupFence()))
form("wgmma.commit_group.sync.aligned", WARPGROUP, effects=(WarpSync(aligned=True), CommitGroup("wgmma")))


def _waits_for_products(i: Instruction) -> tuple[Effect, ...]:
    waits_for_groups(i.pending)
    return WarpSync(aligned=True), WaitGroup("wgmma", i.pending)


# Operands and results are the registers that are complete from here on: naming them keeps the compiler from moving
# their uses above the wait.
form(
    "wgmma.wait_group.sync.aligned ^d*registers, ^done*registers, #pending, #^registers",
    WARPGROUP,
    registers="width",
    name="wgmma.wait_group.sync.aligned",
    default={"registers": 0},
    inline=lambda i: f"{i.mnemonic} {i.pending};",
    tied="done",
    effects=_waits_for_products,
)


def wgmma(
    n: int,
    inputs: DType,
    a_source: Literal["shared", "registers"] = "shared",
    transposed_b: bool = False,
    transposed_a: bool = False,
) -> Instruction:
    """``wgmma.mma_async`` m64n{n}k16; the parameters are fields of :class:`WarpgroupProduct`."""
    if transposed_a and a_source != "shared":
        raise VerifyError("wgmma transposes A only where it reads it from shared memory")
    if n % 8 or not 8 <= n <= 256:
        raise VerifyError(f"wgmma takes n = 8, 16 … 256, not {n}")
    if inputs not in (f16, bf16):
        raise VerifyError(f"wgmma here takes f16 or bf16, not {inputs}")
    name = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{inputs}.{inputs}"
    numbers = {"scale_a": 1, "scale_b": 1, "transposed_a": int(transposed_a), "transposed_b": int(transposed_b)}
    return named(name, numbers=tuple(numbers.items()), operands=(3 if a_source == "shared" else 6) + n // 2)


def wgmma_wait(pending: int, registers: int, dtype: DType = f32) -> Instruction:
    """``wgmma.wait_group``: at most ``pending`` groups stay unfinished. Operands and results: completed registers."""
    numbers = (("pending", pending), ("registers", registers))
    return named("wgmma.wait_group.sync.aligned", dtype, numbers=numbers)
