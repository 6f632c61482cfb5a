"""Instructions on the GPU: kernels that load operands as words, execute instructions, and store results as words."""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from warploom.core.dtypes import DType, f32, f64, pred, s32, s64, u32, u64
from warploom.cuda.compile import compile_source
from warploom.cuda.device import target_of
from warploom.cuda.launch import load
from warploom.cuda.printer import print_cuda
from warploom.interop.arrays import current_stream
from warploom.ir.program import Program
from warploom.isa.instruction import Instruction
from warploom.lang import Global, Kernel, Traced, kernel

THREADS = 128

FLOAT_EDGES = np.array(
    [
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        2.0,
        np.inf,
        -np.inf,
        np.nan,
        1e-45,
        -1e-45,
        1.1754944e-38,
        1.1754942e-38,
        3.4028235e38,
        65504.0,
        65520.0,
        2147483648.0,
        -2147483648.0,
        4294967296.0,
        16777217.0,
        0.49999997,
        1.5,
        2.5,
        126.0,
        -126.5,
    ],
    np.float32,
)


def random_operand(rng: np.random.Generator, dtype: DType, lanes: int) -> np.ndarray:
    """Random values of a register type: bit patterns, ordinary numbers and edges in turn."""
    if dtype is pred:
        return rng.integers(0, 2, lanes).astype(bool)
    values = np.ascontiguousarray(rng.integers(0, 256, (lanes, dtype.bytes), np.uint8)).view(dtype.numpy)[:, 0]
    if dtype.is_float:
        values[::3] = rng.standard_normal(values[::3].size) * 10.0 ** rng.integers(-4, 4, values[::3].size)
        values[1::6] = rng.choice(FLOAT_EDGES, values[1::6].size)
    else:
        values[::3] = rng.integers(0, 70, values[::3].size)
        edges = np.array([0, 1, 2, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 2**64 - 2], np.uint64)
        values[1::6] = rng.choice(edges, values[1::6].size).astype(dtype.numpy)
    return values


def to_words(values: np.ndarray) -> np.ndarray:
    """Values as the u64 words that the kernels load."""
    if values.dtype == bool:
        return values.astype(np.uint64)
    return np.ascontiguousarray(values).view(f"u{values.itemsize}").astype(np.uint64)


def from_words(words: np.ndarray, dtype: DType) -> np.ndarray:
    """The values in the words that the kernels stored."""
    if dtype is pred:
        return words != 0
    return words.astype(f"u{dtype.bytes}").view(dtype.numpy)


def _from_word(k: Kernel, word: Traced, dtype: DType) -> Traced:
    if dtype is pred:
        return k.convert(word, u32) != 0
    return k.bitcast(word if dtype.bits == 64 else k.convert(word, u32), dtype)


def _to_word(k: Kernel, value: Traced) -> Traced:
    if value.dtype is pred:
        return k.convert(k.select(value, k.value(1, u32), k.value(0, u32)), u64)
    if value.dtype in (f64, s64, u64):
        return k.bitcast(value, u64)
    return k.convert(k.bitcast(value, u32) if value.dtype in (f32, s32) else value, u64)


@kernel(threads=THREADS)
def apply_instructions(
    k: Kernel, source: Global[u64], out: Global[u64], *, instructions: tuple[Instruction, ...], lanes: int
) -> None:
    """Every instruction on the same operands: ``source`` is [operand][lane], ``out`` [result of each][lane]."""
    lane = k.cta_x * THREADS + k.thread
    kinds = instructions[0].operand_types
    operands = [_from_word(k, source.load(lane + i * lanes), t) for i, t in enumerate(kinds)]
    row = 0
    for instruction in instructions:
        for result in k.emit(instruction, operands):
            out.store(_to_word(k, result), lane + row * lanes)
            row += 1


def program_of(instructions: Sequence[Instruction], lanes: int) -> Program:
    """:func:`apply_instructions` for the least architecture that has them all."""
    newer = any(i.since != "sm_80" for i in instructions)
    function = replace(apply_instructions, requires="sm_90" if newer else "sm_80")
    return function.trace(instructions=tuple(instructions), lanes=lanes)


def launch(program: Program, grid: Any, arguments: Sequence[Any], device: int = 0) -> None:
    """Compile and run on torch's current stream; tensors go by address, the rest as it is."""
    arch = target_of(device).name
    compiled = compile_source(print_cuda(program), program.name, arch=arch, opt_level=program.opt_level)
    loaded = load(compiled, device)
    made = loaded.configure(grid, program.threads, shared_bytes=program.shared_bytes)
    pointers = [a.data_ptr() if hasattr(a, "data_ptr") else a for a in arguments]
    made.queue(current_stream("torch", device), made.pack(pointers))


def on_gpu(instructions: Sequence[Instruction], operands: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """The results of each instruction on the GPU; operands are flat arrays of one length, a multiple of 128."""
    import torch

    lanes = operands[0].size
    words = np.stack([to_words(x) for x in operands]) if operands else np.zeros((1, lanes), np.uint64)
    source = torch.from_numpy(words.view(np.int64)).cuda()
    counts = [len(i.result_types) for i in instructions]
    out = torch.full((sum(counts), lanes), -1, dtype=torch.int64, device="cuda")
    launch(program_of(instructions, lanes), lanes // THREADS, [source, out])
    stored = out.cpu().numpy().view(np.uint64)
    results: list[list[np.ndarray]] = []
    row = 0
    for instruction in instructions:
        results.append([from_words(stored[row + i], t) for i, t in enumerate(instruction.result_types)])
        row += len(instruction.result_types)
    return results
