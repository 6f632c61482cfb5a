# pyright: reportInvalidTypeForm=false
"""The second kernel of a split K: adds the parts in order, so that the result does not depend on who was first."""

from __future__ import annotations

from warploom.core.dtypes import DType, f32
from warploom.kernels.matmul.features import MatmulFeatures
from warploom.kernels.matmul.problem import FINISH_COLUMNS, FINISH_THREADS
from warploom.kernels.matmul.values import Output, Result
from warploom.lang import Global, Kernel, kernel


@kernel(threads=FINISH_THREADS, drop_unused=True)
def add_parts(
    k: Kernel,
    parts: Global[f32],
    result: Result,
    *,
    splits: int,
    half: DType,
    features: MatmulFeatures,
) -> None:
    """C = epilogue(parts[0] + parts[1] + …) in f32; grid (columns / 256, rows, batches).

    ``parts`` is (batch, splits, m, n), row-major. ``half`` is the type of the bias and the extra matrices.
    """
    row, col, batch = k.cta_y, k.cta_x * FINISH_COLUMNS + k.thread * 2, k.cta_z
    target, value = Output(k, features, half, result).of(batch if features.batched else None, batch)
    m, n = result.m, result.n
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
            sums[0] += part.load()
            with k.when(col + 1 < n):
                sums[1] += part.load(1)
        found = sums[0].get(), sums[1].get()
        target.store_pair(row, col, found if value is None else value(found, row, col))
