"""Attention forward on sm_80 and newer: the configuration of its kernel, what it takes, and the ones to choose from."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.core.dtypes import DType, bf16, f16
from warploom.core.targets import Target
from warploom.kernels.settings import Configuration, broken_flags, flag, shared_excess, violated

PANEL_COLS = 64


@dataclass(frozen=True)
class ForwardSm80(Configuration):
    """A kernel of :mod:`.sm80_kernel`: ``num_warps`` warps that copy, and own ``tile_m / num_warps`` query rows each."""

    tile_m: int = flag(256, "query rows per CTA", (64, 128, 256))
    tile_n: int = flag(64, "keys per step", (32, 64, 128))
    num_warps: int = flag(8, "warps per CTA", (4, 8))
    stages: int = flag(2, "K and V tiles in flight", (2, 3))
    head_dim: int = flag(128, "elements per head", (64, 128, 256))
    dtype: DType = flag(bf16, "element type of Q, K, V and O", (bf16, f16))
    min_ctas: int = flag(1, "CTAs per SM asked of ptxas", (1, 2, 3, 4))

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 32 * self.num_warps

    @property
    def warp_rows(self) -> int:
        """Query rows of one warp."""
        return self.tile_m // self.num_warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: Q (O leaves through it), then K and V of each stage."""
        cols = -(-self.head_dim // PANEL_COLS) * PANEL_COLS
        return (self.tile_m + 2 * self.stages * self.tile_n) * cols * self.dtype.bytes

    def check(self, target: Target | None = None) -> list[str]:
        """The violated constraints (of ``target``, if given); empty if the configuration is valid."""
        found = broken_flags(self)
        if found:
            return found
        rows_per_step = self.threads // 8
        constraints = [
            (self.dtype in (bf16, f16), f"dtype {self.dtype} is not f16 or bf16"),
            (self.head_dim % 8 == 0 and 8 <= self.head_dim <= 256,
             f"head_dim {self.head_dim} is no multiple of 8 from 8 to 256"),
            (self.tile_m % (16 * self.num_warps) == 0,
             f"tile_m {self.tile_m} is no multiple of 16 rows for each of {self.num_warps} warps"),
            (self.tile_n % 16 == 0 and self.tile_n % rows_per_step == 0,
             f"tile_n {self.tile_n} is no multiple of 16 and of the {rows_per_step} rows that a CTA copies at once"),
            (self.stages >= 2, "the ring has at least 2 stages"),
        ]  # fmt: skip
        return violated(constraints) + shared_excess(self.shared_bytes, target)
