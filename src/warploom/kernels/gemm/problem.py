"""A matrix product as a problem: extents, types, how the operands lie; and how a configuration is launched on it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from warploom.core.dtypes import DType, f32
from warploom.core.errors import ConfigError
from warploom.kernels.gemm.config import GemmConfig
from warploom.kernels.gemm.features import Epilogue, GemmFeatures, OperandFeatures
from warploom.kernels.gemm.hopper_config import HopperGemmConfig, operand_box
from warploom.kernels.gemm.shares import Shares
from warploom.kernels.mapped import MappedArray
from warploom.kernels.settings import broken_flags

AnyGemmConfig = GemmConfig | HopperGemmConfig
"""A configuration of either generator: ``mma.sync`` or ``wgmma``."""

FINISH_THREADS = 128
FINISH_COLUMNS = 2 * FINISH_THREADS
"""Columns of C per CTA of the kernel that adds the parts of a split K: each thread adds two."""

MOST_GRID_ROWS = 65535  # CTAs along y and z
ALIGNED = 8  # elements of 16 bytes: what the TMA's lines are aligned to
MOST_EXTENT = 2**31  # positions are u32 in the kernel, and a tile may reach beyond the last


@dataclass(frozen=True)
class Matrix:
    """How A, B or C lies in memory: strides in elements; ``chunk``: elements its lines are aligned to (8, 4, 2, 1).

    ``k_contiguous`` tells for A and B which axis has stride 1. ``batch``: the distance of matrices, 0 for one shared.
    """

    k_contiguous: bool
    stride: int
    batch: int = 0
    chunk: int = 8


@dataclass(frozen=True)
class GemmProblem:
    """C (batch, m, n) = epilogue(A (batch, m, k) · B (batch, k, n)); A and B of type ``dtype``."""

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

    def _operand(self, matrix: Matrix, outer: int, tile: int, config: AnyGemmConfig) -> OperandFeatures:
        if isinstance(config, HopperGemmConfig):  # the TMA sees to edges and strides
            return OperandFeatures(matrix.k_contiguous, batched=matrix.batch != 0)
        line = self.k if matrix.k_contiguous else outer
        return OperandFeatures(
            matrix.k_contiguous,
            matrix.chunk,
            ragged_outer=outer % tile != 0,
            ragged_k=self.k % config.tile_k != 0,
            partial=line % matrix.chunk != 0,
            stride=matrix.stride if config.static_strides else None,
        )

    def features(self, config: AnyGemmConfig) -> GemmFeatures:
        """What a kernel of this configuration must be able to do, and nothing more; a split K writes f32 parts."""
        height = config.tile_m * (config.cluster if isinstance(config, HopperGemmConfig) else 1)
        whole = GemmFeatures(
            self._operand(self.a, self.m, config.tile_m, config),
            self._operand(self.b, self.n, config.tile_n, config),
            self.out_dtype,
            self.out.chunk,
            self.pairs,
            self.m % height != 0,
            self.n % config.tile_n != 0,
            self.batch > 1,
            self.epilogue,
        )
        if config.split_k == 1:
            if isinstance(config, HopperGemmConfig) and self.epilogue.plain and whole.bulk_out:
                return replace(whole, ragged_m=False, ragged_n=False, pairs=True)  # the TMA clips what it stores
            return whole
        return replace(whole, out_dtype=f32, out_chunk=8, pairs=self.n % 2 == 0, epilogue=Epilogue())

    def finish_features(self) -> GemmFeatures:
        """What the kernel that adds the parts of a split K must do."""
        return GemmFeatures(out_dtype=self.out_dtype, pairs=self.pairs and self.n % 2 == 0, epilogue=self.epilogue)

    def misfits(self, config: AnyGemmConfig) -> list[str]:
        """Every reason why ``config`` cannot run this problem; empty if it can."""
        found = broken_flags(config)
        if found:
            return found
        found = [
            x for x in config.check(a_k_contiguous=self.a.k_contiguous, b_k_contiguous=self.b.k_contiguous)
            if x.startswith(("A:", "B:", "A's", "B's"))
        ]  # fmt: skip
        if config.dtype is not self.dtype:
            found.append(f"the arrays are {self.dtype}, the configuration {config.dtype}")
        if config.accumulate is not self.accumulate:
            found.append(f"sums are wanted in {self.accumulate}, the configuration has {config.accumulate}")
        if max(self.m, self.n, self.k) >= MOST_EXTENT:
            found.append(f"{self.m}×{self.n}×{self.k} reaches {MOST_EXTENT}")
        found += self._bulk_misfits(config) if isinstance(config, HopperGemmConfig) else self._grid_misfits(config)
        if config.split_k > 1 and self.m > MOST_GRID_ROWS:
            found.append(f"split_k takes at most {MOST_GRID_ROWS} rows, not {self.m}")
        if config.split_k > 1 and self.parts(config) < config.split_k:
            found.append(f"K = {self.k} has fewer than {config.split_k} parts of whole tiles")
        streams = isinstance(config, GemmConfig) and config.stream_k
        if self.k == 0 and (config.split_k > 1 or config.pipelined or streams):
            found.append("K = 0: a pipelined or split loop needs at least one tile")
        return found

    def _grid_misfits(self, config: GemmConfig) -> list[str]:
        found: list[str] = []
        if config.stream_k:
            items = self.all_tiles(config) * self.tiles(config)[2]
            return [f"{items} k-tiles of all tiles reach {MOST_EXTENT}"] if items >= MOST_EXTENT else []
        rows = -(-self.m // config.tile_m)
        if rows > MOST_GRID_ROWS and config.block_stride == 0:
            found.append(f"{rows} rows of tiles are more than {MOST_GRID_ROWS}: set block_stride")
        if self.batch * config.split_k > MOST_GRID_ROWS:
            found.append(f"{self.batch} batches in {config.split_k} parts are more than {MOST_GRID_ROWS}")
        return found

    def _bulk_misfits(self, config: HopperGemmConfig) -> list[str]:
        """Why the TMA does not take A or B, or the tiles are too many for one launch."""
        found: list[str] = []
        for name, matrix, outer in (("A", self.a, self.m), ("B", self.b, self.n)):
            lines, length = (outer, self.k) if matrix.k_contiguous else (self.k, outer)
            if matrix.chunk != ALIGNED:
                found.append(f"{name}'s lines do not start at multiples of 16 bytes, which the TMA needs")
            if matrix.stride < length and lines > 1:
                found.append(f"{name}'s lines overlap, which the TMA does not take")
        if self.all_tiles(config) >= MOST_EXTENT:
            found.append(f"{self.all_tiles(config)} tiles reach {MOST_EXTENT}")
        return found

    def tiles(self, config: AnyGemmConfig) -> tuple[int, int, int]:
        """Tiles along M, N and K."""
        return -(-self.m // config.tile_m), -(-self.n // config.tile_n), -(-self.k // config.tile_k)

    def all_tiles(self, config: AnyGemmConfig) -> int:
        """Tiles of C, of all parts of a split K and all batches."""
        rows, cols, _ = self.tiles(config)
        if isinstance(config, HopperGemmConfig):
            rows = -(-rows // config.cluster) * config.cluster
        return rows * cols * self.batch * config.split_k

    def tiles_per_split(self, config: AnyGemmConfig) -> int:
        """k-tiles of each part of a split K."""
        return -(-self.tiles(config)[2] // config.split_k)

    def parts(self, config: AnyGemmConfig) -> int:
        """Parts of K that have a tile."""
        return -(-self.tiles(config)[2] // max(1, self.tiles_per_split(config)))

    def grid(self, config: AnyGemmConfig, multiprocessors: int = 1) -> tuple[int, int, int]:
        """CTAs along x, y, z; of a persistent kernel one per multiprocessor, or as many as were asked of ptxas.

        Raises ConfigError with every reason of :meth:`misfits`.
        """
        misfits = self.misfits(config)
        if misfits:
            raise ConfigError(f"{config} does not fit: " + "; ".join(misfits))
        if isinstance(config, HopperGemmConfig):
            tiles = self.all_tiles(config)
            most = max(config.cluster, multiprocessors // config.cluster * config.cluster)
            return (min(tiles, most) if config.persistent else tiles), 1, 1
        if config.stream_k:
            return self.shares(config, multiprocessors).ctas, 1, 1
        rows, cols, _ = self.tiles(config)
        z = self.batch * config.split_k
        return (rows * cols, 1, z) if config.block_stride else (cols, rows, z)

    def shares(self, config: GemmConfig, multiprocessors: int) -> Shares:
        """What each CTA of a stream-K launch does on so many multiprocessors."""
        return Shares.of(self.all_tiles(config), self.tiles(config)[2], multiprocessors * config.min_ctas)

    def finish_grid(self) -> tuple[int, int, int]:
        """CTAs of the kernel that adds the parts."""
        return -(-self.n // FINISH_COLUMNS), self.m, self.batch

    def scalars(self, config: AnyGemmConfig, alpha_bits: int = 0, multiprocessors: int = 1) -> dict[str, int]:
        """The kernel's scalar arguments by name; a Program takes those among its parameters."""
        split = config.split_k > 1
        shared: dict[str, int] = {}
        if isinstance(config, GemmConfig) and config.stream_k:
            shares = self.shares(config, multiprocessors)
            shared = {"cut": shares.cut, "waves": shares.waves, "share": shares.share, "longer": shares.longer}
        return {
            "m": self.m, "n": self.n, "depth": self.k,
            "a_stride": self.a.stride, "b_stride": self.b.stride,
            "c_stride": self.n if split else self.out.stride,
            "extra_stride": self.n,
            "a_batch": self.a.batch, "b_batch": self.b.batch,
            "c_batch": self.m * self.n if split else self.out.batch,
            "extra_batch": self.m * self.n,
            "k_tiles": self.tiles(config)[2], "tiles_per_split": self.tiles_per_split(config),
            "tiles": self.all_tiles(config), "alpha": alpha_bits, **shared,
        }  # fmt: skip

    def mapped(self, config: AnyGemmConfig) -> tuple[MappedArray, ...]:
        """A, B and C as the tensor maps of a ``wgmma`` kernel see them, in the order of its parameters."""
        if not isinstance(config, HopperGemmConfig):
            return ()
        features = self.features(config)
        a_box = operand_box(config.tile_m, config.tile_k, self.a.k_contiguous)
        b_box = operand_box(config.tile_n // config.cluster, config.tile_k, self.b.k_contiguous)
        a_size = (self.m, self.k) if self.a.k_contiguous else (self.k, self.m)
        b_size = (self.n, self.k) if self.b.k_contiguous else (self.k, self.n)
        found = [self._mapped(self.a, self.dtype, a_size, a_box), self._mapped(self.b, self.dtype, b_size, b_box)]
        if features.bulk_out:
            found.append(self._mapped(self.out, self.out_dtype, (self.m, self.n), config.store_box))
        return tuple(found)

    def _mapped(self, matrix: Matrix, dtype: DType, size: tuple[int, int], box: tuple[int, int]) -> MappedArray:
        line = matrix.stride if size[0] > 1 else -(-size[1] // ALIGNED) * ALIGNED  # of one line the stride is unused
        if self.batch == 1:
            return MappedArray(dtype, size, (line, 1), box)
        count = self.batch if matrix.batch else 1
        return MappedArray(dtype, (count, *size), (matrix.batch or line, line, 1), (1, *box))

    def finish_scalars(self, alpha_bits: int = 0) -> dict[str, int]:
        """The scalar arguments of the kernel that adds the parts."""
        return {
            "m": self.m, "n": self.n, "c_stride": self.out.stride, "extra_stride": self.n,
            "c_batch": self.out.batch, "extra_batch": self.m * self.n, "alpha": alpha_bits,
        }  # fmt: skip


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
) -> GemmProblem:
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
    return GemmProblem(m, n, k, dtype, accumulate, out, a, b, c, batch, pairs=pairs)


def aligned_elements(*strides: int) -> int:
    """Elements (8, 4, 2, 1) that lines at these strides from an aligned address are aligned to."""
    bits = 8
    for stride in strides:
        bits |= stride
    return bits & -bits
