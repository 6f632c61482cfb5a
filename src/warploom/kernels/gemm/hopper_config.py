"""The configuration of the ``wgmma``/TMA GEMM generator (sm_90a)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any

from warploom.core.dtypes import DType, bf16, f16, f32
from warploom.core.errors import ConfigError
from warploom.core.targets import TARGETS, Target
from warploom.kernels.mapped import PANEL_COLS
from warploom.kernels.settings import broken_flags, override
from warploom.kernels.specialised import BARRIER_BYTES, WARPGROUP_ROWS, Specialised

COLUMN_STEP = 32
"""What tile_n is a multiple of."""
_SHARED_LIMIT = TARGETS["sm_90a"].shared_per_block


def _flag(default: Any, doc: str, choices: tuple[Any, ...] = (False, True)) -> Any:
    return field(default=default, metadata={"doc": doc, "choices": choices})


@dataclass(frozen=True)
class HopperGemmConfig(Specialised):
    """One warp-specialised GEMM kernel: a producer warpgroup and ``consumers`` that multiply, f32 accumulators."""

    tile_m: int = _flag(128, "rows of C per tile (BM)", (64, 128, 192, 256))
    tile_n: int = _flag(256, "columns of C per tile (BN)", (64, 96, 128, 160, 192, 256))
    stages: int = _flag(4, "tiles of A and B in flight (STAGES)", (2, 3, 4, 5, 6, 7, 8))
    consumers: int = _flag(2, "consumer warpgroups", (1, 2, 3))
    dtype: DType = _flag(f16, "element type of A and B", (f16, bf16))
    block_stride: int = _flag(0, "rows of tiles that walk along N together, for the L2; 0: row by row",
                              (0, 4, 8, 16, 32))  # fmt: skip
    in_flight: bool = _flag(False, "a k-tile's products are waited for while the next one's run")
    persistent: bool = _flag(False, "one CTA per multiprocessor: the next tile's loads run during this one's epilogue")
    pingpong: bool = _flag(False, "two consumers with a tile each: one multiplies while the other stores")
    cluster: int = _flag(1, "CTAs below each other that load B together: each half of it, for both", (1, 2))
    split_k: int = _flag(1, "parts that K is cut into; their sums are added in order by a second kernel", (1, 2, 4, 8))
    opt_level: int = _flag(3, "ptxas's optimisation level", (3,))

    # -- what the mma.sync generator's configuration has as flags
    @property
    def tile_k(self) -> int:
        """Depth of a shared tile: one swizzled row of 128 bytes."""
        return PANEL_COLS

    @property
    def accumulate(self) -> DType:
        """Type of the accumulators."""
        return f32

    @property
    def pipelined(self) -> bool:
        """The first k-tile is a case of its own: K = 0 has none."""
        return True

    @property
    def static_strides(self) -> bool:
        """Strides are the tensor maps' matter."""
        return False

    # -- derived
    @property
    def consumer_rows(self) -> int:
        """Rows of a tile that one consumer multiplies."""
        return self.tile_m if self.pingpong else self.tile_m // self.consumers

    @property
    def blocks(self) -> int:
        """Accumulators of 64 rows per consumer."""
        return self.consumer_rows // WARPGROUP_ROWS

    @property
    def store_box(self) -> tuple[int, int]:
        """Rows and columns of C that one bulk store takes: of 64 columns where they divide the tile, else 32."""
        return WARPGROUP_ROWS, COLUMN_STEP if self.tile_n % PANEL_COLS else PANEL_COLS

    @property
    def panels(self) -> int:
        """Boxes of :attr:`store_box` side by side in a tile of C."""
        return self.tile_n // self.store_box[1]

    @property
    def loaded_cols(self) -> int:
        """Columns of B that whole panels of a tile take, where B's rows run along N."""
        return -(-self.tile_n // PANEL_COLS) * PANEL_COLS

    @property
    def stage_bytes(self) -> int:
        """One k-tile of A and B, at most."""
        return (self.tile_m + self.loaded_cols) * self.tile_k * self.dtype.bytes

    @property
    def _store_bytes(self) -> int:
        """A panel of a 16-bit C for each consumer."""
        return 2 * self.consumers * self.store_box[0] * self.store_box[1]

    def most_stages(self, shared_bytes: int = _SHARED_LIMIT) -> int:
        """The most stages, of 8, that leave room for a panel of C per consumer; 2 even where those do not fit."""
        room = shared_bytes - BARRIER_BYTES - self._store_bytes
        return max(2, min(8, room // self.stage_bytes))

    @property
    def store_panels(self) -> int:
        """Panels of C per consumer that may be on their way out at once: as many as fit beside the stages, to 5."""
        room = _SHARED_LIMIT - BARRIER_BYTES - self.stages * self.stage_bytes
        most = room // self._store_bytes
        return max((n for n in (1, 2, 3, 4, 5) if n <= most and self.blocks * self.panels % n == 0), default=1)

    def shared_bytes(self, out_dtype: DType | None = None) -> int:
        """Dynamic shared memory for an output type (by default a 16-bit one); f32 leaves from the registers."""
        staging = 0 if out_dtype is f32 else self.store_panels * self._store_bytes
        return self.stages * self.stage_bytes + staging + BARRIER_BYTES

    # -- whether it fits
    def check(self, target: Target | None = None, **_operands: bool) -> list[str]:
        """Every reason why this is no kernel (for ``target``, if given); empty if it is one. Any operand order fits."""
        found = broken_flags(self)
        if found:
            return found
        found = self._sizes()
        if self.dtype not in (bf16, f16):
            found.append(f"dtype {self.dtype} is not f16 or bf16")
        if self.stages < 2:
            found.append("the ring has at least 2 stages")
        if self.cluster not in (1, 2) or (self.cluster == 2 and self.tile_n % (2 * PANEL_COLS)):
            found.append(f"a cluster is 1 CTA, or 2 with a tile_n that is a multiple of {2 * PANEL_COLS}")
        if self.pingpong and (self.consumers != 2 or not self.persistent):
            found.append("pingpong is between two consumers of a persistent kernel")
        if target is not None:
            if not target.has_wgmma:
                found.append(f"{target.name} has no wgmma: this kernel runs on sm_90a alone")
            elif not found and self.shared_bytes() > target.shared_per_block:
                found.append(
                    f"needs {self.shared_bytes()} bytes of shared memory, {target.name} has "
                    f"{target.shared_per_block} per CTA"
                )
        return found

    def _sizes(self) -> list[str]:
        found = self._role_problems()
        if found:
            return found
        if self.tile_n % COLUMN_STEP or not COLUMN_STEP <= self.tile_n <= 256:
            found.append(f"tile_n {self.tile_n} is no multiple of {COLUMN_STEP} from {COLUMN_STEP} to 256")
        parts = 1 if self.pingpong else self.consumers
        if self.tile_m <= 0 or self.tile_m > 256 or self.tile_m % (WARPGROUP_ROWS * parts):
            found.append(f"tile_m {self.tile_m} is no multiple of {WARPGROUP_ROWS * parts} up to 256")
        elif not found:
            accumulators = self.blocks * self.tile_n // 2
            most = _ACCUMULATORS[self.consumers]
            if accumulators > most:
                found.append(f"{accumulators} accumulators a thread are more than the {most} that leave room to work")
        return found

    def require(self, target: Target | None = None, **operands: bool) -> None:
        """Raise ConfigError with every reason of :meth:`check`."""
        problems = self.check(target, **operands)
        if problems:
            raise ConfigError(f"{self} is no wgmma GEMM kernel: " + "; ".join(problems))

    # -- notation
    def __str__(self) -> str:
        """``wgmma,BM=128,BN=256,STAGES=4,CONSUMERS=2``, then the flags that differ from the defaults."""
        words = ["wgmma", *(f"{word}={getattr(self, name)}" for word, name in _WORDS.items())]
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name not in _WORDS.values() and value != f.default:
                text = value.name if isinstance(value, DType) else value
                words.append(f.name if value is True else f"{f.name}={text}")
        return ",".join(words)

    @classmethod
    def parse(cls, text: str) -> HopperGemmConfig:
        """A config from what :meth:`__str__` prints. Raises ConfigError for words it does not know."""
        settings: dict[str, str] = {}
        first, *words = (w.strip() for w in text.split(","))
        if first != "wgmma":
            raise ConfigError(f"{text!r} is no wgmma GEMM kernel; write wgmma,BM=128,BN=256,STAGES=4,CONSUMERS=2")
        for word in filter(None, words):
            match = re.fullmatch(r"(\w+)(?:\s*=\s*(\w+))?", word)
            if match is None:
                raise ConfigError(f"{word!r} is no setting; write wgmma,BM=128,BN=256,STAGES=4,CONSUMERS=2")
            settings[match[1]] = match[2] or "true"
        return cls().with_settings(settings)

    def with_settings(self, settings: dict[str, str]) -> HopperGemmConfig:
        """This config with flags overridden by text, as ``--set FLAG=VALUE`` gives it; BM, BN, … work too."""
        return override(self, settings, "wgmma gemm", _WORDS)


_WORDS = {"BM": "tile_m", "BN": "tile_n", "STAGES": "stages", "CONSUMERS": "consumers"}
_ACCUMULATORS = {1: 192, 2: 192, 3: 96}


def operand_box(outer: int, depth: int, k_contiguous: bool) -> tuple[int, int]:
    """The TMA box (rows, columns) of A or B as stored: whole tiles of rows along K, or panels across it."""
    return (outer, PANEL_COLS) if k_contiguous else (depth, PANEL_COLS)
