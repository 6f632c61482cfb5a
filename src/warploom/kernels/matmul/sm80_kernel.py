# pyright: reportInvalidTypeForm=false
"""The matrix product for ``cp.async`` and ``mma.sync`` (sm_80 and newer): all warps copy, each owns a part."""

from __future__ import annotations

from collections.abc import Sequence

from warploom.core.dtypes import f32, u16, u32
from warploom.kernels.matmul.features import PLAIN, MatmulFeatures
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.kernels.matmul.values import Output, Result, ResultTile, along, stored_rows
from warploom.lang import Fragment, Kernel, SharedTile, Strided, StridedPointer, Traced, kernel
from warploom.lang.values import Number
from warploom.tile.copies import CopyRing, Place, accumulate
from warploom.tile.epilogue import Staging, Sums, store_registers
from warploom.tile.pipeline import operand_tile
from warploom.tile.product import MmaSync, zero
from warploom.tile.scheduler import GroupedTiles


@kernel(threads=lambda config, **_: config.threads, drop_unused=True)
def matmul_sm80(
    k: Kernel,
    a: Strided[u16, 2],
    b: Strided[u16, 2],
    result: Result,
    depth: u32,
    k_tiles: u32,
    tiles_per_split: u32,
    *,
    config: MatmulSm80,
    features: MatmulFeatures = PLAIN,
) -> None:
    """C = epilogue(A·B): one CTA per tile of C; grid (tiles, 1, batches · splits).

    A and B with strides of matrices and lines; ``k_tiles`` = ⌈depth / tile_k⌉, ``tiles_per_split`` of them per part of
    a split K, whose f32 sums go out as (batch · splits, m, n). Parameters that a configuration does not use are left
    out.
    """
    work = Sm80Product(k, config, features, (a, b), (result.m, result.n, depth))
    tile = work.own_tile(k_tiles, tiles_per_split)
    work.begin(tile)
    work.multiply(tile)
    work.store(tile, Output(k, features, config.dtype, result))


class Sm80Product:
    """A·B of a CTA, tile by tile: :meth:`begin` starts the copies, :meth:`multiply` sums, :meth:`store` stores."""

    def __init__(
        self,
        k: Kernel,
        config: MatmulSm80,
        features: MatmulFeatures,
        matrices: tuple[StridedPointer, StridedPointer],
        extents: tuple[Traced, Traced, Traced],
    ) -> None:
        self._k, self._config, self._features = k, config, features
        c, (m, n, depth) = config, extents
        self._tiles = GroupedTiles(
            k, (m + (c.tile_m - 1)) // c.tile_m, (n + (c.tile_n - 1)) // c.tile_n, c.block_stride
        )
        self._operands = features.a, features.b
        a, b = (
            operand_tile(k, c.dtype, *along(own, outer, c.tile_k), name=name, stages=c.stages)
            for name, own, outer in zip("AB", self._operands, (c.tile_m, c.tile_n), strict=True)
        )
        sources = [
            stored_rows(matrix, own, (outer, depth), batched=features.batched)
            for matrix, own, outer in zip(matrices, self._operands, (m, n), strict=True)
        ]
        self.ring = CopyRing(k, (a, sources[0]), (b, sources[1]), threads=c.threads)
        cores = MmaSync(k, c.dtype, sums=c.accumulate)
        self.warp = k.warp // c.warps_n, k.warp % c.warps_n
        """This warp's number along the tile's rows and columns."""
        self.sums: Fragment = cores.accumulator(c.warp_m, c.warp_n, "c")
        self._product = cores.product(
            self.sums,
            a,
            b,
            warp=self.warp,
            depth=c.tile_k,
            transposed_a=not features.a.k_contiguous,
            transposed_b=not features.b.k_contiguous,
        )

    # -- which tile
    def own_tile(self, k_tiles: Traced, tiles_per_split: Traced) -> ResultTile:
        """The tile of C that the grid gives this CTA, and of a split K its part."""
        k, c = self._k, self._config
        row, col = self._tiles.tile(k.cta_x)
        first: Number = 0
        count = k_tiles
        if c.split_k > 1:
            first = k.cta_z % c.split_k * tiles_per_split
            count = k.minimum(tiles_per_split, k_tiles - first)
        matrix = k.cta_z if self._features.batched or c.split_k > 1 else None
        return ResultTile(row * c.tile_m, col * c.tile_n, matrix, k.cta_z // c.split_k, first, count)

    def place(self, number: Traced) -> tuple[Traced, Traced, Traced]:
        """First row, first column and batch of tile ``number`` of all batches."""
        batch = self._k.value(0, u32)
        if self._features.batched:
            per_matrix = self._tiles.rows * self._tiles.cols
            batch, number = number // per_matrix, number % per_matrix
        row, col = self._tiles.tile(number)
        return row * self._config.tile_m, col * self._config.tile_n, batch

    # -- the sum
    def _places(self, tile: ResultTile, number: Traced) -> Sequence[Place]:
        depth = self._k.value((number + tile.first) * self._config.tile_k, u32)
        outers = zip((tile.row, tile.col), self._operands, strict=True)
        matrix = (tile.batch,) if self._features.batched else ()
        return [(*along(own, outer, depth), *matrix) for outer, own in outers]

    def begin(self, tile: ResultTile) -> None:
        """Start the copies of a tile's first k-tiles; no warp reads the stages any more."""
        steps = [along(own, 0, self._config.tile_k) for own in self._operands]
        self.ring.begin(tile.count, lambda number: self._places(tile, number), steps)

    def multiply(self, tile: ResultTile) -> None:
        """Finish the product that :meth:`begin` began, in :attr:`sums`; no warp reads the stages any more."""
        if self._features.empty:
            zero(self.sums)
        else:
            accumulate(self._k, self.ring, self._product, tile.count, lambda number: self._places(tile, number))

    # -- its way out
    def staging(self, *, beside: bool = False) -> SharedTile | None:
        """The shared tile that a 16-bit C passes through: over the stages or ``beside`` them; f32 needs none."""
        c, out = self._config, self._features.out_dtype
        over = None if beside else self.ring.tiles[0]
        return None if out is f32 else self._k.shared(out, (c.tile_m, c.tile_n), name="C", swizzle="auto", alias=over)

    def store(self, tile: ResultTile, output: Output, staging: SharedTile | None = None) -> None:
        """The sums through the epilogue to C; ``staging`` by default lies over the stages."""
        k, c = self._k, self._config
        target, value = output.of(tile.matrix, tile.batch)
        along_m, along_n = self.warp
        sums = Sums(k, self.sums, along_m * c.warp_m + tile.row, along_n * c.warp_n + tile.col, 0, value)
        staged = staging or self.staging()
        if staged is None:
            store_registers(sums, target)
        else:
            Staging(k, staged, (c.warps_m, c.warps_n)).store(sums, target, (tile.row, tile.col))
