"""The matrix product on sm_90a: the configuration of its kernel, what it takes, and the ones to choose from."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.core.dtypes import DType, bf16, f16, f32
from warploom.core.targets import TARGETS, Target
from warploom.kernels.settings import broken_flags, flag, refuse, shared_excess

PANEL_COLS = 64
ROWS = 64
BARRIER_BYTES = 256
COLUMN_STEP = 32
"""What tile_n is a multiple of."""
_MOST_ACCUMULATORS = {1: 192, 2: 192, 3: 96}
_SHARED_LIMIT = TARGETS["sm_90a"].shared_per_block


@dataclass(frozen=True)
class MatmulSm90:
    """A kernel of :mod:`.sm90_kernel`: a producer warpgroup, and ``consumers`` that multiply 64 rows or more each."""

    tile_m: int = flag(128, "rows of C per tile (BM)", (64, 128, 192, 256))
    tile_n: int = flag(256, "columns of C per tile (BN)", (64, 96, 128, 160, 192, 256))
    stages: int = flag(4, "tiles of A and B in flight (STAGES)", (2, 3, 4, 5, 6, 7, 8))
    consumers: int = flag(2, "consumer warpgroups", (1, 2, 3))
    dtype: DType = flag(f16, "element type of A and B", (f16, bf16))
    block_stride: int = flag(
        8, "rows of tiles that walk along N together, for the L2; 0: row by row", (0, 4, 8, 16, 32)
    )
    pingpong: bool = flag(False, "two consumers with a tile each: one multiplies while the other stores")
    split_k: int = flag(1, "parts that K is cut into; their sums are added in order by a second kernel", (1, 2, 4, 8))

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 128 * (self.consumers + 1)

    @property
    def tile_k(self) -> int:
        """Depth of a shared tile: one swizzled row of 128 bytes."""
        return PANEL_COLS

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
        return -(-self.tile_n // PANEL_COLS) * PANEL_COLS

    @property
    def stage_bytes(self) -> int:
        """One k-tile of A and B, at most."""
        return (self.tile_m + self.loaded_cols) * self.tile_k * self.dtype.bytes

    @property
    def _panel_bytes(self) -> int:
        return 2 * self.consumers * ROWS * self.panel_cols

    @property
    def panels(self) -> int:
        """Panels of C that a consumer may have on their way out at once: as many as fit beside the stages, to 5."""
        most = (_SHARED_LIMIT - BARRIER_BYTES - self.stages * self.stage_bytes) // self._panel_bytes
        own = self.consumer_rows // ROWS * (self.tile_n // self.panel_cols)
        return max((n for n in (1, 2, 3, 4, 5) if n <= most and own % n == 0), default=1)

    def shared_bytes(self, out_dtype: DType | None = None) -> int:
        """Dynamic shared memory for an output type (by default a 16-bit one); f32 leaves from the registers."""
        staging = 0 if out_dtype is f32 else self.panels * self._panel_bytes
        return self.stages * self.stage_bytes + staging + BARRIER_BYTES

    def check(self, target: Target | None = None) -> list[str]:
        """The violated constraints (of ``target``, if given); empty if the configuration is valid."""
        found = broken_flags(self)
        if found:
            return found
        step = ROWS * (1 if self.pingpong else self.consumers)
        accumulators = self.consumer_rows * self.tile_n // 128
        most = _MOST_ACCUMULATORS.get(self.consumers, 0)
        constraints = [
            (self.dtype in (bf16, f16), f"dtype {self.dtype} is not f16 or bf16"),
            (1 <= self.consumers <= 3, f"there are 1 to 3 consumer warpgroups, not {self.consumers}"),
            (self.stages >= 2, "the ring has at least 2 stages"),
            (not self.pingpong or self.consumers == 2, "pingpong is between two consumers"),
            (self.tile_n % COLUMN_STEP == 0 and COLUMN_STEP <= self.tile_n <= 256,
             f"tile_n {self.tile_n} is no multiple of {COLUMN_STEP} from {COLUMN_STEP} to 256"),
            (self.tile_m <= 256 and self.tile_m % step == 0, f"tile_m {self.tile_m} is no multiple of {step} up to 256"),
            (accumulators <= most,
             f"{accumulators} accumulators a thread are more than the {most} that leave room to work"),
            (target is None or target.has_wgmma, f"{target and target.name} has no wgmma: this kernel needs sm_90a"),
        ]  # fmt: skip
        problems = [problem for valid, problem in constraints if not valid]
        return problems or shared_excess(self.shared_bytes(), target)

    def require(self, target: Target | None = None) -> None:
        """Raise ConfigError with the constraints that :meth:`check` found violated."""
        refuse(f"{self} is not valid", self.check(target))
