"""The matrix product on sm_90a: the configuration of its kernel, what it takes, and what it makes of a problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from warploom.core.dtypes import DType, bf16, f16, f32
from warploom.core.targets import TARGETS, Target
from warploom.kernels.matmul.features import MatmulFeatures, OperandFeatures
from warploom.kernels.matmul.problem import MOST_EXTENT, MatmulProblem, Matrix
from warploom.kernels.settings import Configuration, broken_flags, flag, shared_excess, violated
from warploom.kernels.source import KernelCall, KernelSource, MappedArray
from warploom.tile.planning import PANEL_COLS, padded_cols, panel_cols
from warploom.tile.roles import WARPGROUP, WARPGROUP_ROWS, threads_of

BARRIER_BYTES = 1024
"""Shared memory behind the stages for the mbarriers, to where swizzled panels of C may begin."""
COLUMN_STEP = 32
"""What tile_n is a multiple of."""
ALIGNED = 8
"""Elements of 16 bytes: what the TMA's lines are aligned to."""
MOST_PANELS = 5
_MOST_ACCUMULATORS = {1: 192, 2: 192, 3: 96}
_SHARED_LIMIT = TARGETS["sm_90a"].shared_per_block


@dataclass(frozen=True)
class MatmulSm90(Configuration):
    """A kernel of :mod:`.sm90_kernel`: a producer warpgroup, and ``consumers`` that multiply 64 rows or more each."""

    word: ClassVar[str] = "matmul_sm90"
    always: ClassVar[tuple[str, ...]] = ("tile_m", "tile_n", "stages", "consumers", "dtype")
    also: ClassVar[Mapping[str, str]] = {
        "BM": "tile_m",
        "BN": "tile_n",
        "STAGES": "stages",
        "BLOCK_STRIDE": "block_stride",
    }
    requires: ClassVar[str] = "sm_90a"
    function: ClassVar[str] = "warploom.kernels.matmul.sm90_kernel:matmul_sm90"
    product: ClassVar[str] = "warploom.kernels.matmul.sm90_kernel:Sm90Product"
    """What the kernel's consumers do: of a rung, without some ideas."""
    reducing: ClassVar[str] = "warploom.kernels.matmul_reduce.sm90_kernel:matmul_reduce_sm90"

    tile_m: int = flag(128, "rows of C per tile (BM)", (64, 128, 192, 256))
    tile_n: int = flag(256, "columns of C per tile (BN)", (64, 96, 128, 160, 192, 256))
    stages: int = flag(4, "tiles of A and B in flight (STAGES)", (2, 3, 4, 5, 6, 7, 8))
    consumers: int = flag(2, "consumer warpgroups", (1, 2, 3))
    dtype: DType = flag(f16, "element type of A and B", (f16, bf16))
    block_stride: int = flag(
        8, "rows of tiles that walk along N together, for the L2; 0: row by row", (0, 4, 8, 16, 32)
    )
    pingpong: bool = flag(False, "two consumers with a tile each: one multiplies while the other stores")
    split_k: int = flag(
        1, "parts that K is cut into; their sums are added in order by a second kernel", (1, 2, 3, 4, 6, 8)
    )

    @property
    def tile_k(self) -> int:
        """Depth of a shared tile: one swizzled row of 128 bytes."""
        return PANEL_COLS

    @property
    def accumulate(self) -> DType:
        """Type of the accumulators."""
        return f32

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return threads_of(self.consumers)

    @property
    def cut(self) -> bool:
        """Whether several CTAs may share a tile's sum."""
        return self.split_k > 1

    @property
    def consumer_rows(self) -> int:
        """Rows of a tile that one consumer multiplies."""
        return self.tile_m if self.pingpong else self.tile_m // self.consumers

    @property
    def panel_cols(self) -> int:
        """Columns of C that one bulk store takes: 64 where they divide the tile, else 32."""
        return PANEL_COLS if self.tile_n % PANEL_COLS == 0 else COLUMN_STEP

    @property
    def loaded_cols(self) -> int:
        """Columns of B that whole panels of a tile take, where B's rows run along N."""
        return padded_cols(self.tile_n)

    @property
    def stage_bytes(self) -> int:
        """One k-tile of A and B, at most."""
        return (self.tile_m + self.loaded_cols) * self.tile_k * self.dtype.bytes

    @property
    def _panel_bytes(self) -> int:
        """A panel of a 16-bit C for each consumer."""
        return 2 * self.consumers * WARPGROUP_ROWS * self.panel_cols

    @property
    def most_stages(self) -> int:
        """The most stages, of 8, that leave room for a panel of C for each consumer; 2 even where none does."""
        return max(2, min(8, (_SHARED_LIMIT - BARRIER_BYTES - self._panel_bytes) // self.stage_bytes))

    @property
    def panels(self) -> int:
        """Panels of C that a consumer may have on their way out at once: as many as fit beside the stages, to 5."""
        most = (_SHARED_LIMIT - BARRIER_BYTES - self.stages * self.stage_bytes) // self._panel_bytes
        own = self.consumer_rows // WARPGROUP_ROWS * (self.tile_n // self.panel_cols)
        return max((n for n in range(1, MOST_PANELS + 1) if n <= most and own % n == 0), default=1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory, at most: an f32 C leaves from the registers."""
        return self.stages * self.stage_bytes + self.panels * self._panel_bytes + BARRIER_BYTES

    # -- what it takes
    def check(self, target: Target | None = None) -> list[str]:
        """The violated constraints (of ``target``, if given); empty if the configuration is valid."""
        found = broken_flags(self)
        if found:
            return found
        step = WARPGROUP_ROWS * (1 if self.pingpong else self.consumers)
        accumulators = self.consumer_rows * self.tile_n // WARPGROUP
        most = _MOST_ACCUMULATORS.get(self.consumers, 0)
        constraints = [
            (self.dtype in (bf16, f16), f"dtype {self.dtype} is not f16 or bf16"),
            (self.consumers <= 3, f"there are 1 to 3 consumer warpgroups, not {self.consumers}"),
            (self.stages >= 2, "the ring has at least 2 stages"),
            (not self.pingpong or self.consumers == 2, "pingpong is between two consumers"),
            (
                self.tile_n % COLUMN_STEP == 0 and self.tile_n <= 256,
                f"tile_n {self.tile_n} is no multiple of {COLUMN_STEP} from {COLUMN_STEP} to 256",
            ),
            (self.tile_m <= 256 and self.tile_m % step == 0, f"tile_m {self.tile_m}: no multiple of {step} up to 256"),
            (
                accumulators <= most,
                f"{accumulators} accumulators a thread are more than the {most} that leave room to work",
            ),
            (target is None or target.has_wgmma, f"{target and target.name} has no wgmma: this kernel needs sm_90a"),
        ]
        return violated(constraints) or shared_excess(self.shared_bytes, target)

    def violations(self, problem: MatmulProblem) -> list[str]:
        """The constraints of the kernel that a problem violates; empty if it takes it."""
        found = problem.differences(self)
        if found:
            return found
        tiles = problem.tiling(self).count
        lines = [
            constraint
            for name, matrix, outer in (("A", problem.a, problem.m), ("B", problem.b, problem.n))
            for constraint in _lines(name, matrix, outer, problem.k)
        ]
        return violated(
            [
                *lines,
                (problem.k > 0, "K = 0: the ring has at least one tile"),
                (tiles < MOST_EXTENT, f"{tiles} tiles reach {MOST_EXTENT}"),
            ]
        )

    # -- what it makes of a problem
    def features(self, problem: MatmulProblem) -> MatmulFeatures:
        """The features that the kernel needs; the TMA sees to edges and strides of A and B."""
        a, b = (OperandFeatures(x.k_contiguous, batched=x.batch != 0) for x in (problem.a, problem.b))
        features = replace(problem.result_features(self), a=a, b=b)
        if features.epilogue.plain and features.bulk_out:  # the TMA clips what it stores
            return replace(features, ragged_m=False, ragged_n=False, pairs=True)
        return features

    def calls(self, problem: MatmulProblem, multiprocessors: int) -> tuple[KernelCall, ...]:
        """The kernels for a problem: persistent, with one CTA per multiprocessor."""
        features = self.features(problem)
        name = f"matmul_wgmma_{self.tile_m}x{self.tile_n}x{self.tile_k}"
        source = KernelSource.of(self.function, name, config=self, features=features)
        grid = min(problem.tiling(self).count, multiprocessors), 1, 1
        return problem.calls(self, source, grid, self._maps(problem, features))

    def _maps(self, problem: MatmulProblem, features: MatmulFeatures) -> tuple[MappedArray, ...]:
        """A, B and, where it leaves by bulk stores, C as the TMA sees them."""
        p = problem
        found = [
            _mapped(
                p,
                matrix,
                p.dtype,
                (outer, p.k) if matrix.k_contiguous else (p.k, outer),
                (tile, panel_cols(self.tile_k)) if matrix.k_contiguous else (self.tile_k, panel_cols(tile)),
            )
            for matrix, outer, tile in ((p.a, p.m, self.tile_m), (p.b, p.n, self.tile_n))
        ]
        if features.bulk_out:
            found.append(_mapped(p, p.out, p.out_dtype, (p.m, p.n), (WARPGROUP_ROWS, self.panel_cols)))
        return tuple(found)


def _lines(name: str, matrix: Matrix, outer: int, depth: int) -> list[tuple[bool, str]]:
    """The constraints of the TMA on the lines of A or B."""
    lines, length = (outer, depth) if matrix.k_contiguous else (depth, outer)
    return [
        (matrix.chunk == ALIGNED, f"{name}'s lines do not start at multiples of 16 bytes, which the TMA needs"),
        (matrix.stride >= length or lines <= 1, f"{name}'s lines overlap, which the TMA does not take"),
    ]


def _mapped(
    problem: MatmulProblem, matrix: Matrix, dtype: DType, size: tuple[int, int], box: tuple[int, int]
) -> MappedArray:
    line = matrix.stride if size[0] > 1 else -(-size[1] // ALIGNED) * ALIGNED  # of one line the stride is unused
    if problem.batch == 1:
        return MappedArray(dtype, size, (line, 1), box)
    count = problem.batch if matrix.batch else 1
    return MappedArray(dtype, (count, *size), (matrix.batch or line, line, 1), (1, *box))
