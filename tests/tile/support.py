"""Kernels of one tile word on the emulator, and every mutant of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from tests.hopper.mutants import edits, index_edits, rewritten
from warploom.core.dtypes import DType, bf16, f16
from warploom.core.errors import EmulationError, WarploomError
from warploom.emulate import TensorMapArgument, emulate
from warploom.ir.program import Program
from warploom.ir.statements import Register
from warploom.layout.tensor_map import TensorMapSpec
from warploom.tile.planning import panel_cols

NUMPY = {bf16: np.dtype(ml_dtypes.bfloat16), f16: np.dtype(np.float16)}
SEEDS: tuple[int | None, ...] = (None, 0, 1, 2)
Array = np.ndarray[Any, Any]
Check = Callable[[Program, int | None], bool]
"""Runs a program in an order of warps; whether the result is right and nothing was found."""


def normal(*shape: int, dtype: DType = bf16, seed: int = 0) -> Array:
    """Random numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(NUMPY[dtype])


def whole(*shape: int, dtype: DType = bf16, seed: int = 0) -> Array:
    """Random whole numbers from -4 to 4, whose products add up exactly."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(NUMPY[dtype])


def as_boxes(x: Array, rows: int, cols: int, dtype: DType = bf16) -> TensorMapArgument:
    """A matrix as the TMA sees it: boxes for the panels of tiles of so many rows and columns."""
    width = panel_cols(cols)
    shape, strides = x.shape[::-1], tuple(x.strides[-2::-1])
    return TensorMapArgument(x, TensorMapSpec(dtype, shape, strides, (width, rows), 2 * width))


def clean(program: Program, grid: Any, arguments: Any, seed: int | None = None) -> bool:
    """Emulate up to the first finding; whether there was none."""
    try:
        emulate(program, grid, arguments, seed=seed, stop=True)
    except EmulationError:
        return False
    return True


def mutants(program: Program) -> Iterator[tuple[str, Program | None]]:
    """Every instruction that synchronises deleted or miscounted, every stage and parity shifted, with its register.

    None where the language itself refuses the program.
    """
    for number, op in enumerate(program.ops()):
        registers = [x.name for x in (*op.operands, *op.results) if isinstance(x, Register) and x.name]
        for label, rewrite in (*edits(op), *index_edits(op)):
            try:
                yield " ".join([label, *registers]), rewritten(program, number, rewrite)
            except WarploomError:
                yield " ".join([label, *registers]), None


def escapes(program: Program, check: Check) -> Counter[str]:
    """The mutants that nothing objects to, in any of several orders; the program itself is right in all of them."""
    for seed in SEEDS:
        assert check(program, seed), f"the kernel itself, seed {seed}"
    found: Counter[str] = Counter()
    tried = 0
    for label, mutant in mutants(program):
        tried += 1
        found[label] += mutant is not None and all(check(mutant, seed) for seed in SEEDS)
    assert tried > 0
    return +found
