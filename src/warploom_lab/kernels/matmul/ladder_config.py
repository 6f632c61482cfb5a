"""The configuration of the matmul ladder's ``mma.sync`` kernels: each flag is one idea of a rung."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar, Self

from warploom.core.dtypes import DType, bf16, f16, f32
from warploom.core.errors import ConfigError
from warploom.kernels.matmul.problem import MOST_GRID_ROWS, MatmulProblem
from warploom.kernels.matmul.sm80 import DEPTH, SEED_WORDS, WarpTiles, copy_problems
from warploom.kernels.settings import flag, type_name, violated
from warploom.kernels.source import KernelCall, KernelSource

if TYPE_CHECKING:
    from warploom.lang.fragments import Addressing

_EXAMPLE = "BM=128,BN=128,BK=64,WM=64,WN=64,STAGES=3"


@dataclass(frozen=True)
class RungGemm(WarpTiles):
    """A kernel of :mod:`.ladder_kernel`. The seeds' names: tile_m BM, tile_n BN, tile_k BK, warp_m WM, warp_n WN."""

    word: ClassVar[str] = "gemm"
    reducing: ClassVar[str] = ""

    tile_m: int = flag(128, "rows of C per CTA (BM)", (16, 32, 64, 128, 256))
    tile_n: int = flag(128, "columns of C per CTA (BN)", (32, 64, 128, 256))
    tile_k: int = flag(64, "depth of a shared tile (BK)", (32, 64, 128))
    warp_m: int = flag(64, "rows of C per warp (WM)", (16, 32, 64, 128))
    warp_n: int = flag(64, "columns of C per warp (WN)", (8, 16, 32, 64, 128))
    dtype: DType = flag(f16, "element type of A and B", (f16, bf16))
    accumulate: DType = flag(f32, "type of the accumulators", (f32, f16))
    wmma: bool = flag(False, "opaque fragments by wmma.load, wmma.mma and wmma.store: the WMMA API (00a)")
    padding: int = flag(0, "elements behind each row of the shared tiles, which move rows to other banks (00b)", (0, 8))
    ldmatrix: bool = flag(False, "fragments by ldmatrix instead of element-wise loads (01b)")
    swizzle: bool = flag(False, "XOR-swizzled shared tiles, the epilogue's too (02)")
    stages: int = flag(1, "shared tiles in flight; from 2 on copies overlap the mma (03)", (1, 2, 3, 4, 5, 6))
    pipelined: bool = flag(False, "fragments double-buffered, copies issued at the k-loop's midpoint (04)")
    lead: int = flag(
        0, "pipelined: mma between a fragment's load and its first use; 0: a k-step's fragments together", (0, 4, 8, 16)
    )
    block_stride: int = flag(
        0, "rows of CTAs that walk along N together, for the L2; 0: plain 2-D grid (05)", (0, 4, 8, 16)
    )
    opt_level: int = flag(3, "ptxas's optimisation level", (1, 3))

    @property
    def split_k(self) -> int:
        """One part: K is whole."""
        return 1

    @property
    def cut(self) -> bool:
        """No: one CTA sums each tile."""
        return False

    @property
    def k_steps(self) -> int:
        """``mma`` steps per shared tile."""
        return self.tile_k // DEPTH

    @property
    def mma_rows(self) -> int:
        """``mma`` of a warp along its rows."""
        return self.warp_m // 16

    @property
    def mma_cols(self) -> int:
        """``mma`` of a warp along its columns."""
        return self.warp_n // (16 if self.wmma else 8)

    @property
    def addressing(self) -> Addressing:
        """The way of forming shared addresses: those of swizzled and padded rows are computed for each access."""
        return "recomputed" if self.swizzle or self.padding else "strided"

    @property
    def fragment_registers(self) -> int:
        """Registers of a thread for the accumulators, and for A's and B's fragments of a k-step, or of two.

        Two if pipelined, unless fragments roll: those of a step then come and go one by one.
        """
        accumulators = self.warp_m * self.warp_n // 32 // (2 if self.accumulate is f16 else 1)
        return accumulators + (self.warp_m + self.warp_n) // 4 * (2 if self.pipelined and not self.lead else 1)

    @property
    def staged_in(self) -> DType:
        """The type of the tile that C passes through: a 16-bit one; of wmma that of the sums, which it stores."""
        return self.accumulate if self.wmma else f16

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory, with padding of the longest rows, over which C lies on its way out."""
        rows = max(self.tile_m, self.tile_k) + max(self.tile_n, self.tile_k)
        stage = ((self.tile_m + self.tile_n) * self.tile_k + rows * self.padding) * self.dtype.bytes
        staging = self.tile_m * (self.tile_n + self.padding) * self.staged_in.bytes
        return max(self.stages * stage, staging)

    # -- what it takes
    @property
    def _constraints(self) -> Sequence[tuple[bool, str]]:
        step = self.mma_rows * self.mma_cols
        return (
            (
                not self.wmma or not (self.ldmatrix or self.swizzle or self.warp_n % 16),
                "wmma loads its own fragments, 16 wide: warp_n is a multiple of 16, no ldmatrix, no swizzle",
            ),
            (
                self.padding % 8 == 0 and not (self.padding and self.swizzle),
                f"padding {self.padding}: a multiple of 8 elements (16 bytes), without swizzle",
            ),
            (
                not self.pipelined or (self.stages >= 2 and self.ldmatrix),
                "pipelined needs stages >= 2 and ldmatrix: the next tile's fragments load early",
            ),
            (
                not self.pipelined or self.k_steps % 2 == 0,
                f"tile_k {self.tile_k} makes {self.k_steps} k-steps: two fragment buffers alternate: pipelined needs "
                "an even number (tile_k a multiple of 32)",
            ),
            (
                not self.lead or (self.pipelined and self.lead < step),
                f"lead {self.lead} needs pipelined, and to be less than the {step} mma of a k-step",
            ),
        )

    def violations(self, problem: MatmulProblem) -> list[str]:
        """The constraints of the kernel that a problem violates; empty if it takes it."""
        tile, rows = (self.tile_m, self.tile_n, self.tile_k), -(-problem.m // self.tile_m)
        return (
            problem.differences(self)
            or copy_problems(problem, tile, self.num_warps, self.warp_m)
            or violated(
                [
                    (
                        problem.batch == 1,
                        f"a rung of the ladder multiplies two matrices, not {problem.batch} times two",
                    ),
                    (problem.epilogue.plain and problem.alpha == 1.0, "a rung of the ladder has no epilogue"),
                    (problem.k > 0, "K = 0: a rung of the ladder sums at least one tile"),
                    (
                        self.block_stride > 0 or rows <= MOST_GRID_ROWS,
                        f"{rows} rows of tiles are more than {MOST_GRID_ROWS}: set block_stride",
                    ),
                ]
            )
        )

    # -- what it makes of a problem
    def calls(self, problem: MatmulProblem, multiprocessors: int) -> tuple[KernelCall, ...]:
        """The kernel for a problem: a CTA for each tile."""
        source = KernelSource.of(
            "warploom_lab.kernels.matmul.ladder_kernel:gemm",
            f"gemm_{self.tile_m}x{self.tile_n}x{self.tile_k}",
            opt_level=self.opt_level,
            config=self,
            features=problem.copied_features(self),
        )
        tiling = problem.tiling(self)
        grid = (tiling.rows * tiling.cols, 1, 1) if self.block_stride else (tiling.cols, tiling.rows, 1)
        return problem.calls(self, source, grid)

    # -- notation
    def __str__(self) -> str:
        """The seeds' notation, then flags: ``BM=128,BN=128,BK=64,WM=64,WN=64,STAGES=3,BLOCK_STRIDE=8,ldmatrix,…``."""
        words = [f"{word}={getattr(self, name)}" for word, name in SEED_WORDS.items()]
        for f in fields(self):
            value = getattr(self, f.name)
            # accumulate always: the seeds' words alone would be read as the seeds' kernel
            if f.name not in SEED_WORDS.values() and (value != f.default or f.name == "accumulate"):
                words.append(f.name if value is True else f"{f.name}={type_name(value)}")
        return ",".join(words)

    @classmethod
    def reads(cls, text: str) -> bool:
        """Whether a text is in the seeds' notation, by how it begins."""
        return "(" not in text and text.partition(",")[0].partition("=")[0].strip() in SEED_WORDS

    @classmethod
    def settings_of(cls, text: str) -> dict[str, str]:
        """The words of a text in the seeds' notation. Raises ConfigError for another text."""
        settings: dict[str, str] = {}
        for word in filter(None, (w.strip() for w in text.split(","))):
            match = re.fullmatch(r"(\w+)(?:\s*=\s*(\w+))?", word)
            if match is None:
                raise ConfigError(f"{word!r} is no setting; write {_EXAMPLE}")
            settings[match[1]] = match[2] or "true"
        if not settings:
            raise ConfigError(f"{text!r} is no configuration; write {_EXAMPLE}")
        return settings

    @classmethod
    def parse(cls, text: str) -> Self:
        """A config from the seeds' notation (what :meth:`__str__` prints); words left out keep their defaults.

        The seeds' words alone (``BM=128,…,STAGES=3``) mean the seeds' kernels: ldmatrix, swizzled, and pipelined where
        STAGES is above 1, with f16 accumulation. Raises ConfigError for words it does not know.
        """
        settings = cls.settings_of(text)
        config = cls().with_settings(settings)
        if {SEED_WORDS.get(word, word) for word in settings} <= set(SEED_WORDS.values()):
            config = replace(config, ldmatrix=True, swizzle=True, accumulate=f16, pipelined=config.stages > 1)
        return config
