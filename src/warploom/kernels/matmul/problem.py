"""A matrix product as a problem: extents, types, how the operands lie; and what its launches have in common."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from warploom.core.arguments import fields, strides
from warploom.core.dtypes import DType, f32
from warploom.kernels.classes import size_class
from warploom.kernels.matmul.features import Epilogue, MatmulFeatures, OperandFeatures
from warploom.kernels.settings import AnyConfiguration, broken_flags, violated
from warploom.kernels.source import Grid, KernelCall, KernelSource, MappedArray

FINISH_THREADS = 128
FINISH_COLUMNS = 2 * FINISH_THREADS
"""Columns of C per CTA of the kernel that adds the parts of a split K: each thread adds two."""

MOST_GRID_ROWS = 65535  # CTAs along y and z
MOST_EXTENT = 2**31  # positions are u32 in the kernels, and a tile may reach beyond the last


class MatmulConfig(AnyConfiguration, Protocol):
    """A configuration of one of the matmul kernels: what it takes, and what it makes of a problem."""

    reducing: ClassVar[str]
    """The kernel that reduces the rows of the same product, as ``module:name``; "" if there is none."""

    @property
    def tile_m(self) -> int:
        """Rows of C per tile."""
        ...

    @property
    def tile_n(self) -> int:
        """Columns of C per tile."""
        ...

    @property
    def tile_k(self) -> int:
        """Depth of a shared tile."""
        ...

    @property
    def accumulate(self) -> DType:
        """The element type of the sums."""
        ...

    @property
    def split_k(self) -> int:
        """Parts that K is cut into."""
        ...

    @property
    def cut(self) -> bool:
        """Whether several CTAs may share a tile's sum."""
        ...

    def violations(self, problem: MatmulProblem) -> list[str]:
        """The constraints that a problem violates; empty if the kernel takes it."""
        ...

    def calls(self, problem: MatmulProblem, multiprocessors: int) -> tuple[KernelCall, ...]:
        """The kernels and their launches, in order; their arrays are a, b, out, bias, extra0, extra1, row_values."""
        ...


@dataclass(frozen=True)
class Matrix:
    """The layout of A, B or C: strides in elements; ``chunk``: elements its lines are aligned to (8, 4, 2, 1).

    ``k_contiguous`` tells for A and B which axis has stride 1. ``batch``: the distance of matrices, 0 for one shared.
    """

    k_contiguous: bool
    stride: int
    batch: int = 0
    chunk: int = 8

    @property
    def strides(self) -> tuple[int, int]:
        """The strides of matrices and of lines."""
        return self.batch, self.stride


@dataclass(frozen=True)
class Tiling:
    """A problem in the tiles of a configuration: along M, N and K, in ``parts`` of K, for ``batch`` matrices."""

    rows: int
    cols: int
    k_tiles: int
    parts: int
    batch: int

    @property
    def count(self) -> int:
        """Tiles of all parts of all batches."""
        return self.rows * self.cols * self.parts * self.batch

    @property
    def per_part(self) -> int:
        """k-tiles of each part, but perhaps the last."""
        return -(-self.k_tiles // self.parts)

    @property
    def whole(self) -> bool:
        """Whether every part has a k-tile."""
        return self.parts == 1 or (self.parts - 1) * self.per_part < self.k_tiles


@dataclass(frozen=True)
class MatmulProblem:
    """C (batch, m, n) = epilogue(alpha · A (batch, m, k) · B (batch, k, n)); A and B of type ``dtype``."""

    m: int
    n: int
    k: int
    dtype: DType
    accumulate: DType
    out_dtype: DType
    a: Matrix
    b: Matrix
    out: Matrix
    batch: int = 1
    epilogue: Epilogue = Epilogue()
    pairs: bool = True
    alpha: float = 1.0

    @property
    def flops(self) -> int:
        """Floating-point operations of the product: 2 · batch · m · n · k."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """The least that must move: A, B and C once."""
        batches_a, batches_b = (self.batch if x.batch else 1 for x in (self.a, self.b))
        read = (batches_a * self.m + batches_b * self.n) * self.k * self.dtype.bytes
        return read + self.batch * self.m * self.n * self.out_dtype.bytes

    @property
    def size_class(self) -> str:
        """Which problems share a tuned configuration: of one layout (as BLAS names it), types and alignment."""
        layout = ("n" if self.a.k_contiguous else "t") + ("t" if self.b.k_contiguous else "n")
        fixed = {
            "dtype": self.dtype,
            "layout": layout,
            "accumulate": self.accumulate,
            "out_bits": self.out_dtype.bits,
            "aligned": min(self.a.chunk, self.b.chunk),
        }
        sizes = {"m": (self.m, 4, 15), "n": (self.n, 4, 17), "k": (self.k, 5, 16), "batch": (self.batch, 0, 10)}
        return size_class("matmul", fixed, sizes)

    def tiling(self, config: MatmulConfig) -> Tiling:
        """The problem in a configuration's tiles."""
        rows, cols, k_tiles = (
            -(-extent // tile)
            for extent, tile in ((self.m, config.tile_m), (self.n, config.tile_n), (self.k, config.tile_k))
        )
        return Tiling(rows, cols, k_tiles, config.split_k, self.batch)

    def differences(self, config: MatmulConfig) -> list[str]:
        """The reasons why a configuration, or any, does not take the problem; empty if there is none."""
        found = broken_flags(config)
        if found:
            return found
        split = config.split_k
        return violated(
            [
                (config.dtype is self.dtype, f"the arrays are {self.dtype}, the configuration {config.dtype}"),
                (
                    config.accumulate is self.accumulate,
                    f"sums are wanted in {self.accumulate}, the configuration has {config.accumulate}",
                ),
                (max(self.m, self.n, self.k) < MOST_EXTENT, f"{self.m}×{self.n}×{self.k} reaches {MOST_EXTENT}"),
                (split == 1 or self.m <= MOST_GRID_ROWS, f"split_k takes at most {MOST_GRID_ROWS} rows, not {self.m}"),
                (self.tiling(config).whole, f"K = {self.k} has fewer than {split} parts of whole tiles"),
            ]
        )

    def result_features(self, config: MatmulConfig) -> MatmulFeatures:
        """The features of C that a kernel with such tiles needs; a split K writes f32 parts."""
        ragged_m, ragged_n = self.m % config.tile_m != 0, self.n % config.tile_n != 0
        if config.split_k > 1:
            return MatmulFeatures(
                out_dtype=f32, pairs=self.n % 2 == 0, ragged_m=ragged_m, ragged_n=ragged_n, batched=self.batch > 1
            )
        return MatmulFeatures(
            out_dtype=self.out_dtype,
            out_chunk=self.out.chunk,
            pairs=self.pairs,
            batched=self.batch > 1,
            epilogue=self.epilogue,
            empty=self.k == 0,
            ragged_m=ragged_m,
            ragged_n=ragged_n,
        )

    def copied_features(self, config: MatmulConfig) -> MatmulFeatures:
        """The features of A and B for a kernel whose threads copy them: alignment of lines, and edges of tiles."""

        def of(matrix: Matrix, outer: int, tile: int) -> OperandFeatures:
            line = self.k if matrix.k_contiguous else outer
            return OperandFeatures(
                matrix.k_contiguous,
                matrix.chunk,
                ragged_outer=outer % tile != 0,
                ragged_k=self.k % config.tile_k != 0,
                partial=line % matrix.chunk != 0,
            )

        a, b = of(self.a, self.m, config.tile_m), of(self.b, self.n, config.tile_n)
        return replace(self.result_features(config), a=a, b=b)

    # -- launches
    @property
    def combined(self) -> tuple[str, ...]:
        """The arrays that are combined with the product."""
        e = self.epilogue
        extras = (f"extra{i}" for i in range(len(e.extras)))
        return (*(["bias"] if e.bias else []), *extras, *(["row_values"] if e.row_values else []))

    def calls(
        self, config: MatmulConfig, source: KernelSource, grid: Grid, maps: tuple[MappedArray, ...] = ()
    ) -> tuple[KernelCall, ...]:
        """A kernel of the product with a tile or a part of one for each CTA at a time; of a split K, their sum."""
        tiling, split = self.tiling(config), config.split_k
        scalars = self.scalars | {
            "k_tiles": tiling.k_tiles,
            "tiles_per_split": tiling.per_part,
            "tiles": tiling.count,
        }
        if split == 1:
            return (KernelCall(source, grid, scalars, maps, ("a", "b", "out", *self.combined)),)
        scalars |= strides(result_out_f32=(self.m * self.n, self.n))
        parts = {"parts": self.batch * split * self.m * self.n}
        return KernelCall(source, grid, scalars, maps, ("a", "b", "parts"), parts), self._finish(config)

    def _finish(self, config: MatmulConfig) -> KernelCall:
        """The kernel that adds the parts of a split K."""
        features = MatmulFeatures(
            out_dtype=self.out_dtype,
            pairs=self.pairs and self.n % 2 == 0,
            epilogue=self.epilogue,
            ragged_n=True,
            batched=self.batch > 1,
        )
        source = KernelSource.of(
            "warploom.kernels.matmul.reduction:add_parts",
            f"matmul_add_{config.split_k}_parts",
            splits=config.split_k,
            half=self.dtype,
            features=features,
        )
        grid = -(-self.n // FINISH_COLUMNS), self.m, self.batch
        return KernelCall(source, grid, self.scalars, (), ("parts", "out", *self.combined))

    @property
    def scalars(self) -> dict[str, int]:
        """The numbers of a launch that do not depend on tiles, by the kernels' names."""
        alpha = int.from_bytes(struct.pack("<f", self.alpha), "little")
        return {
            **fields("result", m=self.m, n=self.n, alpha=alpha),
            "depth": self.k,
            **strides(
                a=self.a.strides,
                b=self.b.strides,
                result_out=self.out.strides,
                result_out_f32=self.out.strides,
                result_extra0=(self.m * self.n, self.n),
            ),
        }


def contiguous_problem(
    m: int,
    n: int,
    k: int,
    dtype: DType,
    accumulate: DType = f32,
    *,
    out_dtype: DType | None = None,
    b_rows: bool = True,
    batch: int = 1,
) -> MatmulProblem:
    """The problem of contiguous matrices at aligned addresses: A (batch, m, k) and C row-major.

    B is stored as (k, n) with ``b_rows``, else as (n, k): a layer's weights, passed transposed.
    """
    out = out_dtype or dtype
    b_rows = b_rows and n > 1  # one column lies along K either way
    b_line = n if b_rows else k
    sizes = (m * k, k * n, m * n) if batch > 1 else (0, 0, 0)
    a = Matrix(True, k if m > 1 else 0, sizes[0], aligned_elements(k if m > 1 else 0, sizes[0]))
    b_stride = b_line if (k if b_rows else n) > 1 else 0
    b = Matrix(not b_rows, b_stride, sizes[1], aligned_elements(b_stride, sizes[1]))
    c_stride = n if m > 1 else 0
    c = Matrix(True, c_stride, sizes[2], aligned_elements(c_stride, sizes[2], n % 8))
    pairs = n % 2 == 0 and not (c_stride | sizes[2]) & 1
    return MatmulProblem(m, n, k, dtype, accumulate, out, a, b, c, batch, pairs=pairs)


def aligned_elements(*strides: int) -> int:
    """Elements (8, 4, 2, 1) that lines at these strides from an aligned address are aligned to."""
    bits = 8
    for stride in strides:
        bits |= stride
    return bits & -bits
