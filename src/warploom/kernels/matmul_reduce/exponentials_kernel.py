# pyright: reportInvalidTypeForm=false
"""Products of which the exponentials leave: exp(x - top) for each part of a row, with the part's largest element.

A part is what one warp holds of a row. With the parts' states, (top, Σ exp(x - top)), the log-sum-exp of a row is known
once all of its tiles are done, and one factor for each part makes the softmax of what was stored.
"""

from __future__ import annotations

from dataclasses import replace

from warploom.core.dtypes import f32, u16, u32
from warploom.kernels.matmul.features import Epilogue, MatmulFeatures
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.kernels.matmul.sm80_kernel import Sm80Product
from warploom.kernels.matmul.sm90 import MatmulSm90
from warploom.kernels.matmul.sm90_kernel import Extents, Sm90Product, multiply
from warploom.kernels.matmul.values import Output, Result
from warploom.kernels.matmul_reduce.rows import RowValues
from warploom.kernels.matmul_reduce.states import Reduction
from warploom.lang import Global, GlobalPointer, Kernel, Strided, TensorMap, Traced, kernel
from warploom.lang.values import Number
from warploom.tile.epilogue import Sums


def _leave(values: RowValues, sums: Sums, cols: int, to: tuple[GlobalPointer, GlobalPointer], rows: Traced) -> None:
    """Make exponentials of sums, and store the states of their rows, (parts of ``cols`` columns, rows)."""
    k, part = values.k, sums.part
    found = values.exponentials(sums.fragment, sums.col, part)
    at_part = k.mul_wide(sums.col // cols, rows)
    for row, state in found.rows(part):
        with k.when(found.first_lane & (sums.row + row < rows)):
            at = at_part + k.mul_wide(sums.row + row, 1)
            for target, x in zip(to, state, strict=True):
                (target + at).store(x)


def _short(k_tiles: Traced) -> Traced:
    """Whether both consumers' exponentials would fall into one time, as in the kernel that reduces rows."""
    return (k_tiles > 1) & (k_tiles <= 4)


@kernel(threads=lambda config, **_: config.threads, requires="sm_90a", drop_unused=True)
def matmul_exponentials_sm90(
    k: Kernel,
    a_map: TensorMap,
    b_map: TensorMap,
    c_map: TensorMap,
    result: Result,
    first: Global[f32],
    second: Global[f32],
    k_tiles: u32,
    tiles_per_split: u32,
    tiles: u32,
    *,
    config: MatmulSm90,
    features: MatmulFeatures,
) -> None:
    """C = exp(x - top) for x = epilogue(alpha · A·B + bias), and (top, Σ C) of each row of each tile.

    ``first`` and ``second`` are (tiles along N, m). Operands and grid as for
    :func:`~warploom.kernels.matmul.sm90_kernel.matmul_sm90`, without batches and split K.
    """
    work = Sm90Product(
        k, config, features, (a_map, b_map), Extents(result.m, result.n, k_tiles, tiles_per_split, tiles)
    )
    values = RowValues.of(k, Reduction("logsumexp"), config.dtype, features, result)

    def exponentials(sums: Sums) -> None:
        _leave(values, sums, config.tile_n, (first, second), result.m)

    multiply(k, work, Output(k, features, config.dtype, result), c_map, exponentials, _short(k_tiles))


@kernel(threads=lambda config, **_: config.threads, drop_unused=True)
def matmul_exponentials_sm80(
    k: Kernel,
    a: Strided[u16, 2],
    b: Strided[u16, 2],
    result: Result,
    first: Global[f32],
    second: Global[f32],
    depth: u32,
    k_tiles: u32,
    tiles_per_split: u32,
    *,
    config: MatmulSm80,
    features: MatmulFeatures,
) -> None:
    """C = exp(x - top) for x = epilogue(alpha · A·B + bias), and (top, Σ C) of each row of each warp's columns.

    ``first`` and ``second`` are (warps' tiles along N, m). Operands and grid as for
    :func:`~warploom.kernels.matmul.sm80_kernel.matmul_sm80`, without batches and split K.
    """
    work = Sm80Product(k, config, features, (a, b), (result.m, result.n, depth))
    tile = work.own_tile(k_tiles, tiles_per_split)
    values = RowValues.of(k, Reduction("logsumexp"), config.dtype, features, result)
    work.begin(tile)
    work.multiply(tile)
    along_m, along_n = work.warp
    row, col = along_m * config.warp_m + tile.row, along_n * config.warp_n + tile.col
    own: Number = 0
    _leave(values, Sums(k, work.sums, row, col, own), config.warp_n, (first, second), result.m)
    work.store(tile, Output(k, replace(features, epilogue=Epilogue()), config.dtype, result))
