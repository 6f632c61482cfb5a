"""The configuration of the GEMM generator: each flag is one idea of the ladder, or one beyond it."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from warploom.core.dtypes import DType, bf16, f16, f32
from warploom.core.errors import ConfigError
from warploom.core.targets import Target
from warploom.kernels.copy_plan import CopyPlan
from warploom.kernels.settings import broken_flags, flag, override, refuse, shared_excess

if TYPE_CHECKING:
    from warploom.lang.fragments import Addressing

MMA_K = 16
"""The depth of one ``mma.m16n8k16``."""


@dataclass(frozen=True)
class GemmConfig:
    """One GEMM kernel. The seeds' names: tile_m BM, tile_n BN, tile_k BK, warp_m WM, warp_n WN, stages STAGES."""

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
    lead: int = flag(0, "pipelined: mma between a fragment's load and its first use; 0: a k-step's fragments together",
                      (0, 4, 8, 16))  # fmt: skip
    block_stride: int = flag(0, "rows of CTAs that walk along N together, for the L2; 0: plain 2-D grid (05)",
                              (0, 4, 8, 16))  # fmt: skip
    strided: bool = flag(False, "swizzled addresses of fragments as base + signed strides instead of recomputed")
    wide_b: bool = flag(False, "two B operands per ldmatrix.x4 instead of one per ldmatrix.x2")
    static_strides: bool = flag(False, "leading dimensions known while tracing: global offsets are immediates")
    split_k: int = flag(1, "parts that K is cut into; their sums are added in order by a second kernel", (1, 2, 4, 8))
    stream_k: bool = flag(False, "as many CTAs as run at once, with equal shares of the k-tiles; a tile's parts are "
                           "added in order by the CTA that arrives last")  # fmt: skip
    min_ctas: int = flag(1, "CTAs per SM asked of ptxas", (1, 2, 3, 4))
    opt_level: int = flag(3, "ptxas's optimisation level", (1, 3))

    # -- derived
    @property
    def instruction(self) -> str:
        """What multiplies."""
        return "mma.sync"

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
    def k_steps(self) -> int:
        """``mma`` steps per shared tile."""
        return self.tile_k // MMA_K

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
        """How a fragment's shared addresses are formed; those of padded rows are sums of products."""
        return "strided" if self.strided or not (self.swizzle or self.padding) else "recomputed"

    @property
    def copy_addressing(self) -> Addressing:
        """The same of copies: a thread's lie whole periods of the swizzle apart, so one address has immediates."""
        return "recomputed" if self.padding else "strided"

    def stored_shape(self, operand: str, k_contiguous: bool) -> tuple[int, int]:
        """(rows, cols) of a shared tile of A or B: its contiguous axis is the matrix's."""
        outer = self.tile_m if operand == "A" else self.tile_n
        return (outer, self.tile_k) if k_contiguous else (self.tile_k, outer)

    def copy_plan(self, operand: str, k_contiguous: bool, chunk: int = 8) -> CopyPlan:
        """How a tile of A or B is copied, ``chunk`` elements per thread and step."""
        rows, cols = self.stored_shape(operand, k_contiguous)
        return CopyPlan(rows, cols, self.num_warps, True, chunk)

    @property
    def pipeline_bytes(self) -> int:
        """Shared memory of the stages of A and B; with padding, of the layouts with the most rows."""
        rows = max(self.tile_m, self.tile_k) + max(self.tile_n, self.tile_k)
        elements = (self.tile_m + self.tile_n) * self.tile_k + rows * self.padding
        return self.stages * elements * self.dtype.bytes

    @property
    def staging_bytes(self) -> int:
        """Shared memory that C passes through: over the stages, of stream-K beside them."""
        return self.tile_m * (self.tile_n + self.padding) * self.staged_in.bytes

    @property
    def staged_in(self) -> DType:
        """The type of the tile that C passes through: a 16-bit one; of wmma that of the sums, which it stores."""
        return self.accumulate if self.wmma else f16

    def shared_bytes(self, out_dtype: DType | None = None) -> int:
        """Dynamic shared memory for an output type (by default a 16-bit one); f32 leaves from the registers."""
        staging = 0 if out_dtype is f32 and not self.wmma else self.staging_bytes
        if self.stream_k:
            return self.pipeline_bytes + staging + 16  # the count of arrivals
        return max(self.pipeline_bytes, staging)

    @property
    def part_words(self) -> int:
        """32-bit words of a part of a tile, as the accumulators hold it."""
        return self.tile_m * self.tile_n * self.accumulate.bytes // 4

    # -- whether it fits
    def check(
        self, target: Target | None = None, *, a_k_contiguous: bool = True, b_k_contiguous: bool = False
    ) -> list[str]:
        """Every reason why this is no kernel (for ``target`` and these operands); empty if it is one."""
        found = broken_flags(self)
        if found:
            return found
        found = self._sizes() or self._copies(a_k_contiguous, b_k_contiguous)
        if self.dtype not in (bf16, f16):
            found.append(f"dtype {self.dtype} is not f16 or bf16")
        if self.accumulate not in (f32, f16) or (self.accumulate is f16 and self.dtype is not f16):
            found.append(f"{self.dtype} does not accumulate in {self.accumulate}: f32 always, f16 for f16 inputs")
        if self.wmma and (self.ldmatrix or self.swizzle or self.warp_n % 16):
            found.append("wmma loads its own fragments, 16 wide: warp_n is a multiple of 16, no ldmatrix, no swizzle")
        if self.padding % 8 or (self.padding and (self.swizzle or self.strided)):
            found.append(f"padding {self.padding}: a multiple of 8 elements (16 bytes), without swizzle and strided")
        if self.pipelined and (self.stages < 2 or not self.ldmatrix):
            found.append("pipelined needs stages >= 2 and ldmatrix: the next tile's fragments load early")
        if self.pipelined and self.k_steps % 2:
            found.append(
                f"tile_k {self.tile_k} makes {self.k_steps} k-steps: the two fragment buffers alternate, so pipelined "
                "needs an even number (tile_k a multiple of 32)"
            )
        if self.lead and not (self.pipelined and 0 < self.lead < self.mma_rows * self.mma_cols):
            found.append(
                f"lead {self.lead} needs pipelined, and to be less than the {self.mma_rows * self.mma_cols} mma of a "
                "k-step"
            )
        if self.wide_b and (self.warp_n % 16 or not self.ldmatrix):
            found.append("wide_b loads two B operands of 8 columns: warp_n must be a multiple of 16, with ldmatrix")
        if self.stream_k and self.split_k > 1:
            found.append("stream_k cuts K where it must: it takes no split_k")
        return found + shared_excess(self.shared_bytes(), target)

    def _sizes(self) -> list[str]:
        found: list[str] = []
        if self.warp_m < 16 or self.warp_m % 16 or self.tile_m % self.warp_m:
            found.append(f"warp_m {self.warp_m} is no multiple of 16 that divides tile_m {self.tile_m}")
        if self.warp_n < 8 or self.warp_n % 8 or self.tile_n % self.warp_n:
            found.append(f"warp_n {self.warp_n} is no multiple of 8 that divides tile_n {self.tile_n}")
        if self.tile_k < MMA_K or self.tile_k % MMA_K:
            found.append(f"tile_k {self.tile_k} is no multiple of {MMA_K}")
        for name in ("tile_n", "tile_k", "warp_n"):
            value = getattr(self, name)
            if value & (value - 1):
                found.append(f"{name} {value} is no power of two")
        if not found and self.num_warps & (self.num_warps - 1):
            found.append(f"{self.num_warps} warps are no power of two, which the copies' thread map needs")
        if not found and self.threads > 1024:
            found.append(f"{self.threads} threads are more than the 1024 of a CTA")
        return found

    def _copies(self, a_k_contiguous: bool, b_k_contiguous: bool) -> list[str]:
        found: list[str] = []
        for name, contiguous in (("A", a_k_contiguous), ("B", b_k_contiguous)):
            rows, cols = self.stored_shape(name, contiguous)
            if cols & (cols - 1) or cols < 8:
                found.append(f"{name}'s tile of {rows}×{cols} has no power-of-two rows of at least 8 elements")
            elif not contiguous and name == "A" and self.warp_m & (self.warp_m - 1):
                found.append(f"warp_m {self.warp_m} is no power of two, which a column-major A needs")
            else:
                found += [f"{name}: {problem}" for problem in self.copy_plan(name, contiguous).problems()]
        return found

    def require(self, target: Target | None = None, **operands: bool) -> None:
        """Raise ConfigError with every reason of :meth:`check`."""
        refuse(f"{self} is no GEMM kernel", self.check(target, **operands))

    # -- notation
    def __str__(self) -> str:
        """The seeds' notation, then flags: ``BM=128,BN=128,BK=64,WM=64,WN=64,STAGES=3,BLOCK_STRIDE=8,ldmatrix,…``."""
        words = [f"{word}={getattr(self, name)}" for word, name in _SEED_WORDS.items()]
        for f in fields(self):
            value = getattr(self, f.name)
            # accumulate always: the seeds' words alone would be read as the seeds' kernel
            if f.name not in _SEED_WORDS.values() and (value != f.default or f.name == "accumulate"):
                text = value.name if isinstance(value, DType) else value  # torch.compile traces names, not str(DType)
                words.append(f.name if value is True else f"{f.name}={text}")
        return ",".join(words)

    @classmethod
    def parse(cls, text: str, **types: DType) -> GemmConfig:
        """A config from the seeds' notation (what :meth:`__str__` prints); words left out keep their defaults.

        The seeds' words alone (``BM=128,…,STAGES=3``) mean the seeds' kernels: ldmatrix, swizzled, and pipelined where
        STAGES is above 1, with f16 accumulation. ``types`` (dtype, accumulate) hold where the text leaves them out.
        Raises ConfigError for words it does not know.
        """
        settings: dict[str, str] = {}
        for word in filter(None, (w.strip() for w in text.split(","))):
            match = re.fullmatch(r"(\w+)(?:\s*=\s*(\w+))?", word)
            if match is None:
                raise ConfigError(f"{word!r} is no setting; write BM=128,BN=128,BK=64,WM=64,WN=64,STAGES=3")
            settings[match[1]] = match[2] or "true"
        if not settings:
            raise ConfigError(f"{text!r} is no configuration; write BM=128,BN=128,BK=64,WM=64,WN=64,STAGES=3")
        config = cls().with_settings(settings)
        if {_SEED_WORDS.get(word, word) for word in settings} <= set(_SEED_WORDS.values()):
            config = replace(config, ldmatrix=True, swizzle=True, accumulate=f16, pipelined=config.stages > 1)
        return replace(config, **{name: dtype for name, dtype in types.items() if name not in settings})

    def with_settings(self, settings: dict[str, str]) -> GemmConfig:
        """This config with flags overridden by text, as ``--set FLAG=VALUE`` gives it; the seeds' words work too."""
        return override(self, settings, "gemm", _SEED_WORDS)


_SEED_WORDS = {
    "BM": "tile_m",
    "BN": "tile_n",
    "BK": "tile_k",
    "WM": "warp_m",
    "WN": "warp_n",
    "STAGES": "stages",
    "BLOCK_STRIDE": "block_stride",
}
