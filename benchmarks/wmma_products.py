# pyright: reportInvalidTypeForm=false
"""Whole products by ``wmma`` alone, loaded, multiplied and stored as fragments, against float64 element by element."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.core.dtypes import DType, bf16, f16, f64, tf32, u32
from warploom.isa.instruction import Instruction
from warploom.lang import Global, Kernel, kernel
from warploom.layout.wmma import StorageOrder, operand_shape
from warploom_lab.discover.tracers import Run, wmma_products

LEADING = 32
"""Elements from line to line of every matrix: the longest line, and 16 bytes or more in every type."""
PRODUCTS = 8
"""Random products of each instruction."""
Array = NDArray[Any]


@kernel(threads=32)
def multiply(k: Kernel, source: Global[u32], out: Global[u32], *, instruction: Instruction) -> None:
    """D = A·B + C for product ``cta_x``: A, B and C one after the other in ``source``, D in ``out``, by rows."""
    i = instruction
    b, c, size = words(i, "A"), words(i, "A") + words(i, "B"), sum(words(i, operand) for operand in "ABC")
    at = source + k.cta_x * size
    left = k.wmma_load("A", at, LEADING, shape=i.shape, dtype=i.inputs, order=i.a_order)
    right = k.wmma_load("B", at + b, LEADING, shape=i.shape, dtype=i.inputs, order=i.b_order)
    sums = k.wmma_load("C", at + c, LEADING, shape=i.shape, dtype=i.accumulator)
    orders = i.a_order, i.b_order
    d = k.wmma_mma(left, right, sums, shape=i.shape, inputs=i.inputs, accumulate=i.accumulator, orders=orders)
    k.wmma_store(out + k.cta_x * words(i, "D"), LEADING, d, shape=i.shape, dtype=i.accumulator)


def words(instruction: Instruction, operand: str) -> int:
    """32-bit words of a matrix in memory."""
    lines = operand_shape(instruction.shape, operand)[0 if _order(instruction, operand) == "row" else 1]
    return lines * LEADING * _dtype(instruction, operand).bits // 32


def _order(instruction: Instruction, operand: str) -> StorageOrder:
    orders: dict[str, StorageOrder] = {"A": instruction.a_order, "B": instruction.b_order}
    return orders.get(operand, "row")


def _dtype(instruction: Instruction, operand: str) -> DType:
    return instruction.inputs if operand in "AB" else instruction.accumulator


def _drawn(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> Array:
    """Values that ``dtype`` holds exactly: normal, or small integers."""
    if dtype.is_integer:
        return rng.integers(0 if dtype.name == "u8" else -100, 100, shape).astype(dtype.numpy)
    values = rng.standard_normal(shape)
    return (values.astype(bf16.numpy) if dtype is tf32 else values).astype(dtype.numpy)


def _packed(matrices: Array, order: StorageOrder) -> Array:
    """Matrices (products, rows, columns) as the 32-bit words of each, lines padded to :data:`LEADING` elements."""
    lines = matrices if order == "row" else matrices.transpose(0, 2, 1)
    padded = np.pad(lines, ((0, 0), (0, 0), (0, LEADING - lines.shape[2])))
    return padded.reshape(len(padded), -1).view(np.uint32)


def error(run: Run, instruction: Instruction, seed: int = 0) -> float:
    """The largest error of :data:`PRODUCTS` random products over its bound: at most 1 is right; NaN is infinite.

    The bound is 0 for integers, k roundings of the sum of absolute values for f64, that of ``mma.sync`` for sums in
    f32, and two roundings of the sum of absolute values for sums in f16.
    """
    rng = np.random.default_rng(seed)
    shapes = {operand: operand_shape(instruction.shape, operand) for operand in "ABC"}
    drawn = {o: _drawn(rng, (PRODUCTS, *shape), _dtype(instruction, o)) for o, shape in shapes.items()}
    source = np.concatenate([_packed(x, _order(instruction, o)) for o, x in drawn.items()], axis=1)
    out = np.zeros((PRODUCTS, words(instruction, "D")), np.uint32)
    run(multiply.trace(instruction=instruction), source, out)
    lines = out.view(instruction.accumulator.numpy).reshape(PRODUCTS, -1, LEADING)
    a, b, c = (drawn[o].astype(np.float64) for o in "ABC")
    off = np.abs(lines[..., : c.shape[2]].astype(np.float64) - (a @ b + c))
    if instruction.inputs.is_integer:
        return 0.0 if (off == 0).all() else np.inf
    depth = a.shape[2]
    unit = {f16: 2 * 2.0**-11, f64: depth * 2.0**-52}.get(instruction.accumulator, depth * 2.0**-22)
    return float(np.nan_to_num(off / (unit * (np.abs(a) @ np.abs(b) + np.abs(c))), nan=np.inf).max())


def errors(run: Run) -> dict[str, float]:
    """Mnemonic → :func:`error` of every ``wmma.mma``."""
    return {instruction.mnemonic: error(run, instruction) for instruction in wmma_products()}
