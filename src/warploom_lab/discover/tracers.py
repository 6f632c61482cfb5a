"""Tracers for every fragment: what to put into registers and memory, and how to read the coordinates back.

A tracer is exact in every type, since it shows one bit of a coordinate per pass. Where memory defines the coordinates
(``wmma.load``, ``wmma.store``, ``ldmatrix``) the bits lie in a matrix in memory. ``mma.sync`` never touches memory, so
that its fragments have a meaning only with respect to each other: each of A, B and D is traced against the catalogue's
other two. So is D of ``wmma.mma``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.core.dtypes import DTYPES, DType, bf16, f16, f64, s8, s32, tf32, u8, u16
from warploom.core.errors import LayoutError
from warploom.ir.program import Program
from warploom.isa.instruction import Instruction, named
from warploom.isa.matrix import FragmentSlot, matrix_access, mma, product_slots, wmma_load, wmma_mma, wmma_store
from warploom.layout.catalogue import movmatrix_fragment, wgmma_accumulator
from warploom.layout.fit import Observation
from warploom.layout.fragments import WARP_SIZE, FragmentLayout
from warploom.layout.wmma import (
    WMMA_ACCUMULATORS,
    WMMA_SHAPES,
    StorageOrder,
    operand_shape,
    wmma_elements,
    wmma_name,
)
from warploom_lab.discover.kernels import (
    trace_ldmatrix,
    trace_registers,
    trace_stmatrix,
    trace_wgmma,
    trace_wmma_load,
    trace_wmma_store,
    words_of,
)

Array = NDArray[Any]

ORDERS: tuple[StorageOrder, StorageOrder] = ("row", "col")

Run = Callable[[Program, Array, Array], None]
"""Runs a tracer: one CTA per pass (the first axis of both arrays), from the source array into the other."""


@dataclass(frozen=True)
class FragmentTracer:
    """One fragment to trace: its name, the first compute capability that has it, and how."""

    name: str
    bits: int
    how: Callable[[Run, str], Observation]
    capability: tuple[int, int] = (8, 0)

    def observe(self, run: Run) -> Observation:
        """What a run of its kernels shows."""
        return self.how(run, self.name)


# -------------------------------------------------------------------- bits and words


def _passes(size: int) -> int:
    return max(0, (size - 1).bit_length())


def _traced(run: Run, program: Program, source: Array, shape: tuple[int, ...], dtype: DType) -> Array:
    """The elements that a tracer writes, of so many words for each pass."""
    out = np.zeros((len(source), *shape), np.uint32)
    run(program, source, out)
    return _unpacked(out, dtype)


def _packed(values: Array, dtype: DType) -> Array:
    """Elements [..., 32, elements] as the u32 words of each lane's registers."""
    typed = np.ascontiguousarray(values.astype(dtype.numpy))
    return typed.view(np.uint32).reshape(*values.shape[:-1], -1)


def _unpacked(words: Array, dtype: DType) -> Array:
    return np.ascontiguousarray(words).view(dtype.numpy).astype(np.float64)


def _filled(layout: FragmentLayout, matrix: Array, dtype: DType) -> Array:
    """The words of each lane that hold ``matrix``, by the catalogue."""
    return _packed(matrix.reshape(-1)[layout.gather_index()], dtype)


def _identifiers(elements: int) -> Array:
    """A number for each (lane, element), int64 [32, elements]."""
    return np.arange(WARP_SIZE * elements, dtype=np.int64).reshape(WARP_SIZE, elements)


def _identifier_passes(elements: int, dtype: DType) -> Array:
    """The words of each lane in a pass for each bit of its numbers."""
    numbers = _identifiers(elements)
    return np.stack([_packed(numbers >> b & 1, dtype) for b in range(_passes(numbers.size))])


def _located(name: str, shape: tuple[int, int], elements: int, identifiers: Array) -> Observation:
    """From the identifier that each (row, col) shows: where each identifier's element is.

    Raises LayoutError that names the first lane and register that show up nowhere.
    """
    threads = identifiers.size // elements
    rows = np.full(threads * elements, -1, dtype=np.int64)
    cols = rows.copy()
    row, col = np.indices(shape)
    flat = identifiers.reshape(-1)
    if flat.max() >= threads * elements:
        raise LayoutError(f"{name}: the result shows the number {int(flat.max())}, which no register has")
    rows[flat], cols[flat] = row.reshape(-1), col.reshape(-1)
    if (rows < 0).any():
        thread, element = divmod(int(np.nonzero(rows < 0)[0][0]), elements)
        raise LayoutError(f"{name}: what lane {thread} has in register {element} shows up nowhere in the result")
    return Observation(name, shape, rows.reshape(threads, elements), cols.reshape(threads, elements))


def _from_bits(name: str, passes: Array) -> Array:
    """Numbers from passes [bits, ...] of 0 and 1."""
    if not np.isin(passes, (0, 1)).all():
        raise LayoutError(f"{name}: a pass shows {passes[~np.isin(passes, (0, 1))][0]}; a tracer shows 0 or 1")
    weights = (1 << np.arange(len(passes))).reshape(-1, *[1] * (passes.ndim - 1))
    return (passes.astype(np.int64) * weights).sum(axis=0)


# -------------------------------------------------------------------- mma.sync


def _slots(instruction: Instruction) -> tuple[FragmentSlot, ...]:
    """A, B and C of ``mma`` or ``wmma.mma``."""
    return instruction.slots or product_slots(instruction)


def _run_mma(run: Run, instruction: Instruction, sources: list[tuple[Array, Array, Array]]) -> Array:
    """Words of A, B and C per pass → D's elements per lane, float64 [passes, 32, elements]."""
    source = np.stack([np.concatenate(parts, axis=-1) for parts in sources])
    needs_hopper = instruction.since != "sm_80"
    kernel = replace(trace_registers, requires="sm_90") if needs_hopper else trace_registers
    words = WARP_SIZE, words_of(instruction.result_types)
    return _traced(run, kernel.trace(instruction=instruction), source, words, _slots(instruction)[2].dtype)


def _observe_input(instruction: Instruction, which: int, run: Run, name: str) -> Observation:
    """A (0) or B (1): identifiers enter there, multiplied by shifted identities, and show up in D."""
    slots = _slots(instruction)
    traced, other, out = slots[which], slots[1 - which], slots[2]
    m, n = out.layout.shape
    k = slots[0].layout.shape[1]
    span = n if which == 0 else m  # how many of the k one product shows
    elements = traced.layout.elements_per_thread
    bits = _passes(WARP_SIZE * elements)
    numbers = _identifiers(elements)
    shifts = -(-k // span)
    sources: list[tuple[Array, Array, Array]] = []
    nothing = _filled(out.layout, np.zeros((m, n)), out.dtype)
    for shift in range(shifts):
        picked = np.eye(k, span, -shift * span)
        identity = _filled(other.layout, picked if which == 0 else picked.T, other.dtype)
        for bit in range(bits):
            words = _packed(numbers >> bit & 1, traced.dtype)
            sources.append((words, identity, nothing) if which == 0 else (identity, words, nothing))
    seen = _run_mma(run, instruction, sources).reshape(shifts, bits, -1)
    matrices = seen[..., out.layout.owner_index()].reshape(shifts, bits, m, n)
    parts = [_from_bits(name, part) for part in matrices]
    joined = np.concatenate(parts, axis=1)[:, :k] if which == 0 else np.concatenate(parts, axis=0)[:k]
    return _located(name, traced.layout.shape, elements, joined)


def _observe_result(instruction: Instruction, run: Run, name: str) -> Observation:
    """D: bits of the row enter through A's first column, bits of the column through B's first row."""
    a, b, c = _slots(instruction)
    (m, k), n = a.layout.shape, c.layout.shape[1]
    nothing = _filled(c.layout, np.zeros((m, n)), c.dtype)
    sources: list[tuple[Array, Array, Array]] = []
    for size, of_rows in ((m, True), (n, False)):
        for bit in range(_passes(size)):
            left, right = np.zeros((m, k)), np.zeros((k, n))
            left[:, 0] = np.arange(m) >> bit & 1 if of_rows else 1
            right[0] = 1 if of_rows else np.arange(n) >> bit & 1
            sources.append((_filled(a.layout, left, a.dtype), _filled(b.layout, right, b.dtype), nothing))
    return Observation.from_bits(name, (m, n), _run_mma(run, instruction, sources))


def _mma_tracers() -> Iterator[FragmentTracer]:
    instructions: list[Instruction] = [
        *(mma(shape, t) for shape in ("m16n8k16", "m16n8k8") for t in (bf16, f16)),
        *(mma(shape, f16, f16) for shape in ("m16n8k16", "m16n8k8")),
        *(mma(shape, tf32) for shape in ("m16n8k8", "m16n8k4")),
        *(mma(shape, t, s32, t) for shape in ("m8n8k16", "m16n8k16", "m16n8k32") for t in (s8, u8)),
        *(mma(shape, f64, f64) for shape in ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16")),
    ]
    for instruction in instructions:
        slots = _slots(instruction)
        hopper = instruction.since != "sm_80"
        for which, slot in enumerate(slots):
            if which < 2 and slots[2].dtype is f16:
                continue  # the operands of the f32 form
            of = slots[0].dtype.name if which < 2 else f"{slots[0].dtype.name}.{slot.dtype.name}"
            name = f"mma.{instruction.shape}.{'ABD'[which]}.{of}"
            how = partial(_observe_result, instruction) if which == 2 else partial(_observe_input, instruction, which)
            yield FragmentTracer(name, slot.dtype.bits, how, (9, 0) if hopper else (8, 0))


# -------------------------------------------------------------------- ldmatrix, stmatrix, movmatrix


def _coordinate_passes(rows: int, cols: int) -> Array:
    """Matrices [passes, rows, cols] of 0 and 1: the bits of the row, then those of the column."""
    row, col = np.indices((rows, cols))
    return np.stack([row >> b & 1 for b in range(_passes(rows))] + [col >> b & 1 for b in range(_passes(cols))])


def _observe_ldmatrix(instruction: Instruction, run: Run, name: str) -> Observation:
    count = len(instruction.result_types)
    shape, program = (8 * count, 8), trace_ldmatrix.trace(instruction=instruction)
    passes = _traced(run, program, _packed(_coordinate_passes(*shape), u16), (WARP_SIZE, count), u16)
    return Observation.from_bits(name, shape, passes)


def _observe_stmatrix(instruction: Instruction, run: Run, name: str) -> Observation:
    count = len(instruction.operand_types) - 1
    shape, elements = (8 * count, 8), 2 * count
    source = _identifier_passes(elements, u16)
    passes = _traced(run, trace_stmatrix.trace(instruction=instruction), source, (shape[0], 4), u16)
    return _located(name, shape, elements, _from_bits(name, passes))


def _observe_movmatrix(run: Run, name: str) -> Observation:
    source = np.stack([_filled(movmatrix_fragment(), m, u16) for m in _coordinate_passes(8, 8)])
    program = trace_registers.trace(instruction=named("movmatrix.sync.aligned.m8n8.trans.b16"))
    return Observation.from_bits(name, (8, 8), _traced(run, program, source, (WARP_SIZE, 1), u16))


def _matrix_tracers() -> Iterator[FragmentTracer]:
    for count in (1, 2, 4):
        for transposed in (False, True):
            suffix = f"x{count}{'.trans' if transposed else ''}.b16"
            load, store = (matrix_access(kind, count, transposed) for kind in ("ldmatrix", "stmatrix"))
            yield FragmentTracer(f"ldmatrix.{suffix}", 16, partial(_observe_ldmatrix, load))
            yield FragmentTracer(f"stmatrix.{suffix}", 16, partial(_observe_stmatrix, store), (9, 0))
    yield FragmentTracer("movmatrix.trans.b16", 16, _observe_movmatrix)


# -------------------------------------------------------------------- wgmma


def _observe_wgmma_result(inputs: DType, run: Run, name: str) -> Observation:
    sources = [_wgmma_source(np.arange(64) >> bit & 1, np.ones(8), inputs) for bit in range(_passes(64))]
    sources += [_wgmma_source(np.ones(64), np.arange(8) >> bit & 1, inputs) for bit in range(_passes(8))]
    out = np.zeros((len(sources), 128, 4), np.float32)
    run(trace_wgmma.trace(a_in_registers=False, inputs=inputs), np.stack(sources), out)
    return Observation.from_bits(name, (64, 8), out)


def _wgmma_source(first_column: Array, first_row: Array, inputs: DType) -> Array:
    """Words of an A with one column and a B, kept by its columns, with one row."""
    a, b = np.zeros((64, 16)), np.zeros((8, 16))
    a[:, 0], b[:, 0] = first_column, first_row
    return np.concatenate([_packed(a, inputs).reshape(-1), _packed(b, inputs).reshape(-1)])


def _observe_wgmma_operand(inputs: DType, run: Run, name: str) -> Observation:
    result, elements, bits = wgmma_accumulator(8), 8, 10
    numbers = np.arange(128 * elements).reshape(128, elements)
    sources: list[Array] = []
    for shift in (0, 8):
        identity = _packed(np.eye(8, 16, shift), inputs).reshape(-1)  # B[k][n] = 1 for k = n + shift, kept by n
        sources += [np.concatenate([_packed(numbers >> b & 1, inputs).reshape(-1), identity]) for b in range(bits)]
    out = np.zeros((len(sources), 128, 4), np.float32)
    run(trace_wgmma.trace(a_in_registers=True, inputs=inputs), np.stack(sources), out)
    matrices = out.reshape(2, bits, -1)[..., result.owner_index()].reshape(2, bits, 64, 8)
    return _located(name, (64, 16), elements, np.concatenate([_from_bits(name, m) for m in matrices], axis=1))


def _wgmma_tracers() -> Iterator[FragmentTracer]:
    for inputs in (bf16, f16):
        result, operand = partial(_observe_wgmma_result, inputs), partial(_observe_wgmma_operand, inputs)
        yield FragmentTracer(f"wgmma.m64n8k16.D.{inputs.name}.f32", 32, result, (9, 0))
        yield FragmentTracer(f"wgmma.m64n8k16.A.{inputs.name}", 16, operand, (9, 0))


# -------------------------------------------------------------------- wmma


def _leading(shape: tuple[int, int], order: str, dtype: DType) -> int:
    """Elements of a line in memory, rounded up to the 16 bytes the ISA asks for."""
    line = shape[1] if order == "row" else shape[0]
    return -(-line * dtype.bytes // 16) * 16 // dtype.bytes


def _observe_wmma_load(instruction: Instruction, run: Run, name: str) -> Observation:
    shape = operand_shape(instruction.shape, instruction.operand)
    dtype = instruction.dtype
    passes = _coordinate_passes(*shape)
    lines = passes if instruction.order == "row" else passes.transpose(0, 2, 1)
    leading = _leading(shape, instruction.order, dtype)
    padded = np.zeros((*lines.shape[:2], leading))
    padded[..., : lines.shape[2]] = lines
    source = _packed(padded, dtype)
    program = trace_wmma_load.trace(instruction=instruction, matrix_words=source[0].size, leading=leading)
    words = WARP_SIZE, words_of(instruction.result_types)
    return Observation.from_bits(name, shape, _traced(run, program, source, words, dtype))


def _observe_wmma_store(instruction: Instruction, run: Run, name: str) -> Observation:
    shape, dtype = operand_shape(instruction.shape, "D"), instruction.dtype
    elements = wmma_elements(instruction.shape, "D", dtype)
    leading = _leading(shape, instruction.order, dtype)
    lines, line = shape if instruction.order == "row" else shape[::-1]
    words = lines, leading * dtype.bits // 32
    program = trace_wmma_store.trace(instruction=instruction, matrix_words=math.prod(words), leading=leading)
    passes = _traced(run, program, _identifier_passes(elements, dtype), words, dtype)
    numbers = _from_bits(name, passes[..., :line])
    return _located(name, shape, elements, numbers if instruction.order == "row" else numbers.T)


def _wmma_tracers() -> Iterator[FragmentTracer]:
    for shape, types in WMMA_SHAPES.items():
        for dtype in (DTYPES[t] for t in types):
            for operand, order in product(("A", "B"), ORDERS):
                load = wmma_load(operand, shape, dtype, order, "global")
                name = wmma_name(shape, operand, dtype, order)
                yield FragmentTracer(name, dtype.bits, partial(_observe_wmma_load, load))
        for dtype in (DTYPES[c] for c in dict.fromkeys(c for t in types for c in WMMA_ACCUMULATORS[t])):
            name = wmma_name(shape, "C", dtype, "row")
            for order in ORDERS:
                # The plain name is the fragment; the others must show the same map.
                of_load, of_store = (name if order == "row" else f"{name}.load.col"), f"{name}.store.{order}"
                load, store = wmma_load("C", shape, dtype, order, "global"), wmma_store(shape, dtype, order, "global")
                yield FragmentTracer(of_load, dtype.bits, partial(_observe_wmma_load, load))
                yield FragmentTracer(of_store, dtype.bits, partial(_observe_wmma_store, store))
    for i in wmma_products():
        name = f"wmma.{i.shape}.D.{i.inputs.name}.{i.accumulator.name}.{i.a_order}.{i.b_order}"
        yield FragmentTracer(name, i.accumulator.bits, partial(_observe_result, i))


def wmma_products() -> Iterator[Instruction]:
    """``wmma.mma`` in every shape, type and order."""
    for shape, types in WMMA_SHAPES.items():
        for inputs, sums in ((DTYPES[t], DTYPES[c]) for t in types for c in WMMA_ACCUMULATORS[t]):
            for a_order, b_order in product(ORDERS, ORDERS):
                yield wmma_mma(shape, inputs, sums, a_order, b_order)


# -------------------------------------------------------------------- all together


def tracers() -> tuple[FragmentTracer, ...]:
    """Every fragment there is a tracer for."""
    return (*_mma_tracers(), *_matrix_tracers(), *_wmma_tracers(), *_wgmma_tracers())
