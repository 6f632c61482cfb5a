# pyright: reportInvalidTypeForm=false
"""The ladder's ``wgmma`` matmul kernels: the production kernel with consumers that wait for each k-tile's products."""

from __future__ import annotations

from warploom.core.dtypes import f32, u16, u32
from warploom.kernels.matmul.features import PLAIN, MatmulFeatures
from warploom.kernels.matmul.ladder_sm90 import RungWgmma
from warploom.kernels.matmul.sm90_kernel import Extents, Product, multiply
from warploom.kernels.matmul.values import Output, Tile
from warploom.lang import Global, Kernel, TensorMap, kernel


@kernel(threads=lambda config, **_: config.threads, requires="sm_90a", drop_unused=True)
def matmul_wgmma(
    k: Kernel,
    a_map: TensorMap,
    b_map: TensorMap,
    c_map: TensorMap,
    out: Global[u16],
    out_f32: Global[f32],
    bias: Global[u16],
    extra0: Global[u16],
    extra1: Global[u16],
    row_values: Global[f32],
    m: u32, n: u32,
    c_stride: u32, extra_stride: u32, c_batch: u32, extra_batch: u32,
    k_tiles: u32, tiles_per_split: u32, tiles: u32, alpha: u32,
    *,
    config: RungWgmma,
    features: MatmulFeatures = PLAIN,
) -> None:  # fmt: skip
    """As :func:`~warploom.kernels.matmul.sm90_kernel.matmul_sm90`; not persistent, the grid has a CTA for each tile."""
    output = Output(
        k, features, config.dtype, (out, out_f32), bias, (extra0, extra1), (m, n), (c_stride, extra_stride),
        (c_batch, extra_batch), alpha, row_values,
    )  # fmt: skip
    extents = Extents(m, n, k_tiles, tiles_per_split, tiles)
    multiply(k, RungProduct(k, config, features, (a_map, b_map), extents), output, c_map)


class RungProduct(Product):
    """A product whose consumers may wait for each k-tile before they start the next."""

    config: RungWgmma

    def _multiply(self, tile: Tile) -> None:
        if self.config.in_flight:
            super()._multiply(tile)
            return
        with self._turns:
            self._start(zero=True)
            self._cores.wait(0)
            self._read.release()
            with self._k.loop(tile.count, 1):
                self._start(zero=False)
                self._cores.wait(0)
                self._read.release()
        self._cores.wait(0, *self._blocks)
