# pyright: reportInvalidTypeForm=false
"""Tracer kernels: one instruction applied to registers or memory that the host prepared, and what came out.

The host puts one bit of every element's coordinate into a pass and reads the same bit back from wherever the
instruction brought the element; :mod:`warploom_lab.discover.fragments` prepares the passes and puts the bits together.
"""

from __future__ import annotations

from warploom.core.dtypes import DType, bf16, f32, u16, u32
from warploom.isa.instruction import Instruction
from warploom.lang import Global, Kernel, Mutable, Traced, kernel
from warploom.lang.values import Number
from warploom.layout.wgmma import MatrixDescriptor


def words_of(types: tuple[object, ...]) -> int:
    """32-bit words of one thread's registers of these types."""
    return sum(t.bits // 32 for t in types)  # type: ignore[attr-defined]


def _load_registers(k: Kernel, source: Global[u32], slot: Number, types: tuple[object, ...]) -> list[Traced]:
    """A thread's registers from ``source[slot][lane][word]``."""
    count = words_of(types)
    at = source + (k.value(slot, u32) * 32 + k.lane) * count
    found: list[Traced] = []
    word = 0
    for t in types:
        found.append(at.load(word, dtype=t))  # type: ignore[arg-type]
        word += t.bits // 32  # type: ignore[attr-defined]
    return found


def _store_registers(k: Kernel, out: Global[u32], slot: Number, values: list[Traced]) -> None:
    count = words_of(tuple(v.dtype for v in values))
    at = out + (k.value(slot, u32) * 32 + k.lane) * count
    word = 0
    for value in values:
        at.store(value, word, dtype=value.dtype)
        word += value.dtype.bits // 32


@kernel(threads=32)
def trace_registers(k: Kernel, source: Global[u32], out: Global[u32], *, instruction: Instruction) -> None:
    """``mma``, ``movmatrix``: pass ``cta_x`` reads its operands' registers from ``source`` and dumps the results.

    ``source``: u32 (passes, 32, words of the operands); ``out``: u32 (passes, 32, words of the results).
    """
    operands = _load_registers(k, source, k.cta_x, instruction.operand_types)
    _store_registers(k, out, k.cta_x, list(k.emit(instruction, operands)))


@kernel(threads=32)
def trace_wmma_load(
    k: Kernel, source: Global[u32], out: Global[u32], *, instruction: Instruction, matrix_words: int, leading: int
) -> None:
    """``wmma.load`` of matrix number ``cta_x`` (``matrix_words`` 32-bit words each), and its registers dumped."""
    matrix = source + k.cta_x * matrix_words
    registers = k.emit(instruction, (matrix.address, k.value(leading, u32)))
    _store_registers(k, out, k.cta_x, list(registers))


@kernel(threads=32)
def trace_wmma_store(
    k: Kernel, source: Global[u32], out: Global[u32], *, instruction: Instruction, matrix_words: int, leading: int
) -> None:
    """Registers from ``source``, and the matrix that ``wmma.store`` makes of them."""
    registers = _load_registers(k, source, k.cta_x, instruction.operand_types[2:])
    matrix = out + k.cta_x * matrix_words
    k.emit(instruction, (matrix.address, k.value(leading, u32), *registers))


@kernel(threads=32)
def trace_ldmatrix(k: Kernel, source: Global[u32], out: Global[u32], *, instruction: Instruction) -> None:
    """8·count rows of 16 bytes to shared memory, lane *r* pointing to row *r*; the registers dumped."""
    rows = 8 * len(instruction.result_types)
    tile = k.shared(u16, (rows, 8), name="rows")
    row = k.lane & (rows - 1)
    with k.when(k.lane < rows):
        tile.store((source + (k.cta_x * rows + row) * 4).load(0, 4), row, dtype=u32)
    k.syncwarp()
    registers = k.emit(instruction, (tile.address(row),))
    _store_registers(k, out, k.cta_x, list(registers))


@kernel(threads=32, requires="sm_90")
def trace_stmatrix(k: Kernel, source: Global[u32], out: Global[u32], *, instruction: Instruction) -> None:
    """Registers from ``source`` through ``stmatrix``; out are the 8·count rows of 16 bytes that it wrote."""
    count = len(instruction.operand_types) - 1
    rows = 8 * count
    tile = k.shared(u16, (rows, 8), name="rows")
    row = k.lane & (rows - 1)
    registers = _load_registers(k, source, k.cta_x, (u32,) * count)
    k.emit(instruction, (tile.address(row), *registers))
    k.syncwarp()
    with k.when(k.lane < rows):
        (out + (k.cta_x * rows + row) * 4).store(tile.load(row, 0, 4, dtype=u32), 0)


@kernel(threads=128, requires="sm_90a")
def trace_wgmma(
    k: Kernel, source: Global[u32], out: Global[f32], *, a_in_registers: bool, inputs: DType = bf16
) -> None:
    """One ``wgmma`` m64n8k16 on pass ``cta_x``, its four results per thread dumped.

    ``source``: u32 (passes, 512 + 64): A as 64 rows of 8 words (or as 4 registers for each of 128 threads), then B as
    8 rows (of n) of 8 words; ``out``: f32 (passes, 128, 4).
    """
    a_tile = k.shared(inputs, (64, 16), name="a_tile", swizzle="auto")
    b_tile = k.shared(inputs, (8, 16), name="b_tile", swizzle="auto")
    words = source + k.cta_x * 576
    row, chunk = k.thread >> 1, k.thread & 1
    if not a_in_registers:
        a_tile.store((words + k.thread * 4).load(0, 4), row, chunk * 8, dtype=u32)
    with k.when(k.thread < 16):
        b_tile.store((words + k.thread * 4).load(512, 4), row, chunk * 8, dtype=u32)
    k.fence_async()
    k.syncthreads()
    rows = MatrixDescriptor(row_bytes=32, stride=256)
    accumulator = k.warpgroup_accumulator(8)
    a = (words + k.thread * 4).load(0, 4) if a_in_registers else k.descriptor(a_tile.base, rows)
    k.wgmma_fence()
    k.wgmma(accumulator, a, k.descriptor(b_tile.base, rows), inputs=inputs, accumulate=False)
    k.wgmma_commit()
    k.wgmma_wait(0, accumulator)
    (out + (k.cta_x * 128 + k.thread) * 4).store([x.get() for x in accumulator.registers if isinstance(x, Mutable)])
