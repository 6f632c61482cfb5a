"""The matrix product on sm_80 and newer: the configuration of its kernel, what it takes, and the ones to choose from."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.core.dtypes import DType, bf16, f16, f32
from warploom.kernels.settings import flag

DEPTH = 16
"""Of one ``mma``."""


@dataclass(frozen=True)
class MatmulSm80:
    """A kernel of :mod:`.sm80_kernel`: warps that own ``warp_m`` × ``warp_n`` of a tile each."""

    tile_m: int = flag(128, "rows of C per CTA (BM)", (16, 32, 64, 128, 256))
    tile_n: int = flag(256, "columns of C per CTA (BN)", (32, 64, 128, 256))
    tile_k: int = flag(32, "depth of a shared tile (BK)", (32, 64, 128))
    warp_m: int = flag(64, "rows of C per warp (WM)", (16, 32, 64, 128))
    warp_n: int = flag(64, "columns of C per warp (WN)", (8, 16, 32, 64, 128))
    stages: int = flag(4, "shared tiles in flight (STAGES)", (2, 3, 4, 5, 6))
    dtype: DType = flag(f16, "element type of A and B", (f16, bf16))
    accumulate: DType = flag(f32, "type of the accumulators", (f32, f16))
    block_stride: int = flag(8, "rows of CTAs that walk along N together, for the L2; 0: row by row", (0, 4, 8, 16))
    split_k: int = flag(1, "parts that K is cut into; their sums are added in order by a second kernel", (1, 2, 4, 8))
    stream_k: bool = flag(False, "as many CTAs as run at once, with equal shares of the k-tiles; a tile's parts are "
                           "added in order by the CTA that arrives last")  # fmt: skip
    min_ctas: int = flag(1, "CTAs per SM asked of ptxas", (1, 2, 3, 4))

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
