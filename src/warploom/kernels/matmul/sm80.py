"""The matrix product on sm_80 and newer: the configuration of its kernels, and their calls."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from warploom.core.arguments import fields
from warploom.core.dtypes import DType, bf16, f16, f32
from warploom.core.targets import Target
from warploom.kernels.matmul.problem import MOST_EXTENT, MOST_GRID_ROWS, MatmulProblem
from warploom.kernels.matmul.shares import StreamShares
from warploom.kernels.settings import Configuration, broken_flags, flag, shared_excess, violated
from warploom.kernels.source import KernelCall, KernelSource
from warploom.tile.planning import CopyPlan

DEPTH = 16
"""Of one ``mma``."""
SEED_WORDS = {
    "BM": "tile_m",
    "BN": "tile_n",
    "BK": "tile_k",
    "WM": "warp_m",
    "WN": "warp_n",
    "STAGES": "stages",
    "BLOCK_STRIDE": "block_stride",
}
"""The seeds' names of flags."""


class WarpTiles(Configuration):
    """A base of configurations where each warp owns ``warp_m`` × ``warp_n`` of a tile."""

    also: ClassVar[Mapping[str, str]] = SEED_WORDS
    requires: ClassVar[str] = "sm_80"

    tile_m: int
    tile_n: int
    tile_k: int
    warp_m: int
    warp_n: int
    dtype: DType
    accumulate: DType

    @property
    def warps_m(self) -> int:
        """Warps along the tile's rows."""
        return self.tile_m // self.warp_m

    @property
    def warps_n(self) -> int:
        """Warps along the tile's columns."""
        return self.tile_n // self.warp_n

    @property
    def num_warps(self) -> int:
        """Warps per CTA."""
        return self.warps_m * self.warps_n

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 32 * self.num_warps

    @property
    @abstractmethod
    def shared_bytes(self) -> int:
        """Dynamic shared memory, at most: of an f32 C, which leaves from the registers, less may do."""

    @property
    @abstractmethod
    def _constraints(self) -> Sequence[tuple[bool, str]]:
        """(whether it holds, what is wrong if not) of flags whose tiles and warps fit."""

    def check(self, target: Target | None = None) -> list[str]:
        """The violated constraints (of ``target``, if given); empty if the configuration is valid."""
        return (
            broken_flags(self)
            or violated(
                [
                    (
                        self.warp_m % 16 == 0 and self.tile_m % self.warp_m == 0,
                        f"warp_m {self.warp_m} is no multiple of 16 that divides tile_m {self.tile_m}",
                    ),
                    (
                        self.warp_n % 8 == 0 and self.tile_n % self.warp_n == 0,
                        f"warp_n {self.warp_n} is no multiple of 8 that divides tile_n {self.tile_n}",
                    ),
                    (self.tile_k % DEPTH == 0, f"tile_k {self.tile_k} is no multiple of {DEPTH}"),
                    *(
                        (not value & (value - 1), f"{name} {value} is no power of two")
                        for name, value in (("tile_n", self.tile_n), ("tile_k", self.tile_k), ("warp_n", self.warp_n))
                    ),
                ]
            )
            or violated(
                [
                    (
                        not self.num_warps & (self.num_warps - 1),
                        f"{self.num_warps} warps are no power of two, which the copies' thread map needs",
                    ),
                    (self.threads <= 1024, f"{self.threads} threads are more than the 1024 of a CTA"),
                    (self.dtype in (bf16, f16), f"dtype {self.dtype} is not f16 or bf16"),
                    (
                        self.accumulate is f32 or (self.accumulate is f16 and self.dtype is f16),
                        f"{self.dtype} does not accumulate in {self.accumulate}: f32 always, f16 for f16 inputs",
                    ),
                    *self._constraints,
                ]
            )
            or shared_excess(self.shared_bytes, target)
        )


@dataclass(frozen=True)
class MatmulSm80(WarpTiles):
    """A kernel of :mod:`.sm80_kernel` or :mod:`.stream_kernel`: each warp owns ``warp_m`` × ``warp_n`` of a tile."""

    word: ClassVar[str] = "matmul_sm80"
    always: ClassVar[tuple[str, ...]] = (
        "tile_m",
        "tile_n",
        "tile_k",
        "warp_m",
        "warp_n",
        "stages",
        "dtype",
        "accumulate",
    )
    reducing: ClassVar[str] = "warploom.kernels.matmul_reduce.sm80_kernel:matmul_reduce_sm80"

    tile_m: int = flag(128, "rows of C per CTA (BM)", (16, 32, 64, 128, 256))
    tile_n: int = flag(256, "columns of C per CTA (BN)", (32, 64, 128, 256))
    tile_k: int = flag(32, "depth of a shared tile (BK)", (32, 64, 128))
    warp_m: int = flag(64, "rows of C per warp (WM)", (16, 32, 64, 128))
    warp_n: int = flag(64, "columns of C per warp (WN)", (8, 16, 32, 64, 128))
    stages: int = flag(4, "shared tiles in flight (STAGES)", (2, 3, 4, 5, 6))
    dtype: DType = flag(f16, "element type of A and B", (f16, bf16))
    accumulate: DType = flag(f32, "type of the accumulators", (f32, f16))
    block_stride: int = flag(8, "rows of CTAs that walk along N together, for the L2; 0: row by row", (0, 4, 8, 16))
    split_k: int = flag(
        1, "parts that K is cut into; their sums are added in order by a second kernel", (1, 2, 3, 4, 6, 8)
    )
    stream_k: bool = flag(
        False,
        "as many CTAs as run at once, with equal shares of the k-tiles; a tile's parts are "
        "added in order by the CTA that arrives last",
    )
    min_ctas: int = flag(1, "CTAs per SM asked of ptxas", (1, 2, 3, 4))
    opt_level: int = flag(3, "ptxas's optimisation level", (1, 3))

    @property
    def cut(self) -> bool:
        """Whether several CTAs may share a tile's sum."""
        return self.split_k > 1 or self.stream_k

    @property
    def fragment_registers(self) -> int:
        """Registers of a thread for the accumulators, and for A's and B's fragments of two k-steps."""
        accumulators = self.warp_m * self.warp_n // 32 // (2 if self.accumulate is f16 else 1)
        return accumulators + (self.warp_m + self.warp_n) // 2

    @property
    def part_words(self) -> int:
        """32-bit words of a part of a tile, as the accumulators hold it."""
        return self.tile_m * self.tile_n * self.accumulate.bytes // 4

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: a 16-bit C lies over the stages, but of stream-K, which fills them when it leaves."""
        pipeline = self.stages * (self.tile_m + self.tile_n) * self.tile_k * self.dtype.bytes
        staging = 2 * self.tile_m * self.tile_n
        return pipeline + staging + 16 if self.stream_k else max(pipeline, staging)  # 16: the count of arrivals

    # -- what it takes
    @property
    def _constraints(self) -> Sequence[tuple[bool, str]]:
        return (
            (self.tile_k >= 2 * DEPTH, f"tile_k {self.tile_k} is less than the two k-steps of {DEPTH} that take turns"),
            (self.stages >= 2, "the ring has at least 2 stages"),
            (not (self.stream_k and self.split_k > 1), "stream_k cuts K where it must: it takes no split_k"),
        )

    def violations(self, problem: MatmulProblem) -> list[str]:
        """The constraints of the kernel that a problem violates; empty if it takes it."""
        tile = self.tile_m, self.tile_n, self.tile_k
        found = problem.differences(self) or copy_problems(problem, tile, self.num_warps, self.warp_m)
        if found:
            return found
        tiling = problem.tiling(self)
        if self.stream_k:
            items = tiling.count * tiling.k_tiles
            return violated(
                [
                    (problem.k > 0, "K = 0: stream_k has nothing to share"),
                    (items < MOST_EXTENT, f"{items} k-tiles of all tiles reach {MOST_EXTENT}"),
                ]
            )
        planes = problem.batch * self.split_k
        return violated(
            [
                (tiling.rows * tiling.cols < MOST_EXTENT, f"{tiling.rows}×{tiling.cols} tiles reach {MOST_EXTENT}"),
                (
                    planes <= MOST_GRID_ROWS,
                    f"{problem.batch} batches in {self.split_k} parts are more than {MOST_GRID_ROWS}",
                ),
            ]
        )

    # -- what it makes of a problem
    def shares(self, problem: MatmulProblem, multiprocessors: int) -> StreamShares:
        """The shares of the CTAs of a stream-K launch on so many multiprocessors."""
        tiling = problem.tiling(self)
        return StreamShares.of(tiling.count, tiling.k_tiles, multiprocessors * self.min_ctas)

    def calls(self, problem: MatmulProblem, multiprocessors: int) -> tuple[KernelCall, ...]:
        """The kernels for a problem: a CTA for each tile, or of stream-K as many as run at once."""
        function = "stream_kernel:matmul_stream_k" if self.stream_k else "sm80_kernel:matmul_sm80"
        name = f"matmul_{'stream_k_' * self.stream_k}{self.tile_m}x{self.tile_n}x{self.tile_k}"
        source = KernelSource.of(
            f"warploom.kernels.matmul.{function}",
            name,
            min_ctas=self.min_ctas,
            opt_level=self.opt_level,
            config=self,
            features=problem.copied_features(self),
        )
        if not self.stream_k:
            tiling = problem.tiling(self)
            return problem.calls(self, source, (tiling.rows * tiling.cols, 1, problem.batch * self.split_k))
        shares = self.shares(problem, multiprocessors)
        (call,) = problem.calls(self, source, (shares.ctas, 1, 1))
        own = fields(
            "shares",
            k_tiles=call.scalars["k_tiles"],
            cut=shares.cut,
            waves=shares.waves,
            share=shares.share,
            longer=shares.longer,
        )
        workspace = {"parts": shares.ctas * 2 * self.part_words, "arrived": max(1, shares.cut)}
        call = replace(call, scalars={**call.scalars, **own}, arrays=(*call.arrays, *workspace))
        return (replace(call, workspace=workspace, zeroed="arrived"),)


def copy_problems(problem: MatmulProblem, tile: tuple[int, int, int], num_warps: int, warp_m: int) -> list[str]:
    """Why so many warps cannot copy a problem's tiles of A and B (m, n, k), or not read them; empty if they can."""
    found: list[str] = []
    tile_m, tile_n, tile_k = tile
    for name, matrix, outer in (("A", problem.a, tile_m), ("B", problem.b, tile_n)):
        rows, cols = (outer, tile_k) if matrix.k_contiguous else (tile_k, outer)
        if cols & (cols - 1) or cols < 8:
            found.append(f"{name}'s tile of {rows}×{cols} has no power-of-two rows of at least 8 elements")
        elif not matrix.k_contiguous and name == "A" and warp_m & (warp_m - 1):
            found.append(f"warp_m {warp_m} is no power of two, which a column-major A needs")
        else:
            found += [f"{name}: {text}" for text in CopyPlan(rows, cols, num_warps, True).problems()]
    return found
