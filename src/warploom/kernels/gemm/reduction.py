# pyright: reportInvalidTypeForm=false
"""The second kernel of a split K: adds the parts in order, so that the result does not depend on who was first."""

from __future__ import annotations

from dataclasses import replace

from warploom.core.dtypes import DType, f32, u16, u32
from warploom.kernels.gemm.epilogue import Elements, Output
from warploom.kernels.gemm.features import GemmFeatures
from warploom.kernels.gemm.problem import FINISH_COLUMNS, FINISH_THREADS
from warploom.lang import Global, Kernel, kernel


@kernel(threads=FINISH_THREADS, drop_unused=True)
def add_parts(
    k: Kernel,
    parts: Global[f32],
    out: Global[u16],
    out_f32: Global[f32],
    bias: Global[u16],
    extra0: Global[u16],
    extra1: Global[u16],
    m: u32, n: u32, c_stride: u32, extra_stride: u32, c_batch: u32, extra_batch: u32, alpha: u32,
    *,
    splits: int,
    half: DType,
    features: GemmFeatures,
) -> None:  # fmt: skip
    """C = epilogue(parts[0] + parts[1] + …) in f32; grid (columns / 256, rows, batches).

    ``parts`` is (batch, splits, m, n), row-major. ``half`` is the type of the bias and the extra matrices.
    """
    features = replace(features, ragged_m=False, ragged_n=True)
    row, col = k.cta_y, k.cta_x * FINISH_COLUMNS + k.thread * 2
    batch = k.cta_z
    extras = tuple(x + k.mul_wide(batch, extra_batch) for x in (extra0, extra1)[: features.epilogue.extras])
    target = (out_f32 if features.out_dtype is f32 else out) + k.mul_wide(batch, c_batch)
    output = Output(target, c_stride, m, n, alpha, bias, extras, extra_stride)
    elements = Elements(k, half, features, output)
    with k.when(col < n):
        part_bytes = k.mul_wide(m, n) * 4
        source = parts + (k.mul_wide(row, n) + k.mul_wide(col, 1))
        source = source.bytes(part_bytes * k.mul_wide(batch, splits))
        sums = k.registers(f32, 2, 0.0)
        for split in range(splits):
            part = source.bytes(part_bytes * split)
            if features.pairs:
                low, high = part.load(count=2)
                sums[0] += low
                sums[1] += high
                continue
            sums[0] += part.load()[0]
            with k.when(col + 1 < n):
                sums[1] += part.load(1)[0]
        values = elements.finished((sums[0].get(), sums[1].get()), row, col)
        elements.store(target + (k.mul_wide(row, c_stride) + k.mul_wide(col, 1)), row, col, values)
