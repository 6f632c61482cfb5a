"""The configuration of the GEMM generator with a TMA producer, and consumers of ``wgmma`` or ``mma.sync``."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace

from warploom.core.dtypes import DType, bf16, f16, f32
from warploom.core.errors import ConfigError
from warploom.core.targets import TARGETS, Target
from warploom.kernels.mapped import PANEL_COLS
from warploom.kernels.settings import broken_flags, flag, override, refuse, shared_excess
from warploom.kernels.specialised import BARRIER_BYTES, WARPGROUP, WARPGROUP_ROWS, Specialised

COLUMN_STEP = 32
"""What tile_n is a multiple of."""
WGMMA, MMA_TMA = "wgmma", "mma+tma"
NOTATIONS = WGMMA, MMA_TMA
"""First words of the notation: by what the consumers multiply."""
_EXAMPLE = f"{WGMMA},BM=128,BN=256,STAGES=4,CONSUMERS=2"
_ATOM = 16
"""Rows and columns that one ``ldmatrix.x4`` covers."""
_WARP_BOX_ROWS = 32
_MOST_WARP_CONSUMERS = 2
_WORK_REGISTERS = 36  # addresses, the ring, the epilogue
_SHARED_LIMIT = TARGETS["sm_90a"].shared_per_block


@dataclass(frozen=True)
class HopperGemmConfig(Specialised):
    """One warp-specialised GEMM kernel: a producer warpgroup and ``consumers`` that multiply.

    With ``mma_sync`` the four warps of a consumer share its part of the tile as :attr:`warps` tells, and each loads its
    fragments by ``ldmatrix``.
    """

    tile_m: int = flag(128, "rows of C per tile (BM)", (64, 128, 192, 256))
    tile_n: int = flag(256, "columns of C per tile (BN)", (64, 96, 128, 160, 192, 256))
    stages: int = flag(4, "tiles of A and B in flight (STAGES)", (2, 3, 4, 5, 6, 7, 8))
    consumers: int = flag(2, "consumer warpgroups", (1, 2, 3))
    dtype: DType = flag(f16, "element type of A and B", (f16, bf16))
    block_stride: int = flag(0, "rows of tiles that walk along N together, for the L2; 0: row by row",
                              (0, 4, 8, 16, 32))  # fmt: skip
    in_flight: bool = flag(False, "a k-tile's products are waited for while the next one's run")
    persistent: bool = flag(False, "one CTA per multiprocessor: the next tile's loads run during this one's epilogue")
    pingpong: bool = flag(False, "two consumers with a tile each: one multiplies while the other stores")
    cluster: int = flag(1, "CTAs below each other that load B together: each half of it, for both", (1, 2))
    split_k: int = flag(1, "parts that K is cut into; their sums are added in order by a second kernel", (1, 2, 4, 8))
    opt_level: int = flag(3, "ptxas's optimisation level", (3,))
    mma_sync: bool = flag(False, "consumers multiply fragments by mma.sync, not tiles by wgmma")
    accumulate: DType = flag(f32, "type of the accumulators; f16 with mma.sync alone", (f32, f16))

    # -- what the mma.sync generator's configuration has as flags
    @property
    def tile_k(self) -> int:
        """Depth of a shared tile: one swizzled row of 128 bytes."""
        return PANEL_COLS

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
    def instruction(self) -> str:
        """What multiplies."""
        return "mma.sync" if self.mma_sync else "wgmma"

    @property
    def consumer_rows(self) -> int:
        """Rows of a tile that one consumer multiplies."""
        return self.tile_m if self.pingpong else self.tile_m // self.consumers

    @property
    def warps(self) -> tuple[int, int]:
        """A consumer's warps along rows and columns of its part (``mma.sync``): the least loads, the widest."""
        fitting = [
            (m, n) for m, n in ((1, 4), (2, 2), (4, 1))
            if self.consumer_rows % (_ATOM * m) == 0 and self.tile_n % (_ATOM * n) == 0
        ]  # fmt: skip
        return min(fitting, key=lambda w: (self.consumer_rows // w[0] + self.tile_n // w[1], w[1]), default=(1, 4))

    @property
    def warp_tile(self) -> tuple[int, int]:
        """Rows and columns of one warp (``mma.sync``)."""
        return self.consumer_rows // self.warps[0], self.tile_n // self.warps[1]

    @property
    def blocks(self) -> int:
        """Accumulators of 64 rows per consumer; of ``mma.sync`` each warp has one of its own."""
        return 1 if self.mma_sync else self.consumer_rows // WARPGROUP_ROWS

    @property
    def storers(self) -> int:
        """How many parts of the tile are stored on their own: by consumers, of ``mma.sync`` by warps."""
        return self.consumers * (4 if self.mma_sync else 1)

    @property
    def store_box(self) -> tuple[int, int]:
        """Rows and columns of C that one bulk store takes: of 64 columns where they divide the tile, else 32 or 16."""
        rows, cols = self.warp_tile if self.mma_sync else (WARPGROUP_ROWS, self.tile_n)
        most = _WARP_BOX_ROWS if self.mma_sync else WARPGROUP_ROWS
        width = next((n for n in (PANEL_COLS, COLUMN_STEP) if cols % n == 0), _ATOM)
        return (most if rows % most == 0 else _ATOM), width

    @property
    def store_boxes(self) -> tuple[int, int]:
        """Boxes of :attr:`store_box` below each other and side by side in what one block of accumulators holds."""
        rows, cols = self.warp_tile if self.mma_sync else (WARPGROUP_ROWS, self.tile_n)
        return rows // self.store_box[0], cols // self.store_box[1]

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
        """A box of a 16-bit C for each that stores."""
        return 2 * self.storers * self.store_box[0] * self.store_box[1]

    def most_stages(self, shared_bytes: int = _SHARED_LIMIT) -> int:
        """The most stages, of 8, that leave room for a box of C for each that stores; 2 even where none does."""
        room = shared_bytes - BARRIER_BYTES - self._store_bytes
        return max(2, min(8, room // self.stage_bytes))

    @property
    def store_panels(self) -> int:
        """Boxes of C that each may have on their way out at once: as many as fit beside the stages, to 5."""
        room = _SHARED_LIMIT - BARRIER_BYTES - self.stages * self.stage_bytes
        most = room // self._store_bytes
        own = self.blocks * self.store_boxes[0] * self.store_boxes[1]
        return max((n for n in (1, 2, 3, 4, 5) if n <= most and own % n == 0), default=1)

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
        if self.mma_sync and self.in_flight:
            found.append("in_flight is wgmma's: mma.sync ends when its result is there")
        if self.accumulate is not f32 and not (self.mma_sync and self.accumulate is f16 and self.dtype is f16):
            found.append(f"sums are f32, or f16 of f16 inputs by mma.sync, not {self.accumulate}")
        if target is not None:
            if not target.has_wgmma:
                found.append(f"{target.name} has no wgmma: this kernel runs on sm_90a alone")
            elif not found:
                found += shared_excess(self.shared_bytes(), target)
        return found

    def _sizes(self) -> list[str]:
        found = self._role_problems()
        if found:
            return found
        if self.tile_n % COLUMN_STEP or not COLUMN_STEP <= self.tile_n <= 256:
            found.append(f"tile_n {self.tile_n} is no multiple of {COLUMN_STEP} from {COLUMN_STEP} to 256")
        parts = 1 if self.pingpong else self.consumers
        step = WARPGROUP_ROWS * (1 if self.mma_sync and parts == 2 else parts)  # two may share a panel's rows
        if self.tile_m <= 0 or self.tile_m > 256 or self.tile_m % step:
            found.append(f"tile_m {self.tile_m} is no multiple of {step} up to 256")
        elif not found:
            found += self._warp_sizes() if self.mma_sync else self._register_sizes(_ACCUMULATORS[self.consumers])
        return found

    def _warp_sizes(self) -> list[str]:
        """Why the parts of the warps do not fit panels or registers."""
        if self.consumers > _MOST_WARP_CONSUMERS:
            return [f"mma.sync has at most {_MOST_WARP_CONSUMERS} consumers: more have too few registers for fragments"]
        if any(x & (x - 1) for x in self.warp_tile):
            return [f"a warp's part of {self.warp_tile[0]}×{self.warp_tile[1]} does not divide panels of {PANEL_COLS}"]
        fragments = 2 * sum(self.warp_tile) // 4  # two k-steps
        return self._register_sizes(self.consumer_registers - fragments - _WORK_REGISTERS)

    def _register_sizes(self, most: int) -> list[str]:
        accumulators = self.consumer_rows * self.tile_n // WARPGROUP // (2 if self.accumulate is f16 else 1)
        if accumulators <= most:
            return []
        return [f"{accumulators} accumulators a thread are more than the {most} that leave room to work"]

    def require(self, target: Target | None = None, **operands: bool) -> None:
        """Raise ConfigError with every reason of :meth:`check`."""
        refuse(f"{self} is no {self.instruction} GEMM kernel", self.check(target, **operands))

    # -- notation
    def __str__(self) -> str:
        """``wgmma,BM=128,BN=256,STAGES=4,CONSUMERS=2``, then the flags that differ from the defaults.

        With ``mma_sync`` the first word is ``mma+tma``.
        """
        words = [
            MMA_TMA if self.mma_sync else WGMMA,
            *(f"{word}={getattr(self, name)}" for word, name in _WORDS.items()),
        ]
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name not in (*_WORDS.values(), "mma_sync") and value != f.default:
                text = value.name if isinstance(value, DType) else value
                words.append(f.name if value is True else f"{f.name}={text}")
        return ",".join(words)

    @classmethod
    def parse(cls, text: str, **types: DType) -> HopperGemmConfig:
        """A config from what :meth:`__str__` prints. Raises ConfigError for words it does not know.

        ``types`` (dtype, accumulate) hold where the text leaves them out.
        """
        settings: dict[str, str] = {}
        first, *words = (w.strip() for w in text.split(","))
        if first not in NOTATIONS:
            raise ConfigError(f"{text!r} is no {' or '.join(NOTATIONS)} GEMM kernel; write {_EXAMPLE}")
        for word in filter(None, words):
            match = re.fullmatch(r"(\w+)(?:\s*=\s*(\w+))?", word)
            if match is None:
                raise ConfigError(f"{word!r} is no setting; write {_EXAMPLE}")
            settings[match[1]] = match[2] or "true"
        config = cls(mma_sync=first == MMA_TMA).with_settings(settings)
        return replace(config, **{name: dtype for name, dtype in types.items() if name not in settings})

    def with_settings(self, settings: dict[str, str]) -> HopperGemmConfig:
        """This config with flags overridden by text, as ``--set FLAG=VALUE`` gives it; BM, BN, … work too."""
        return override(self, settings, f"{MMA_TMA if self.mma_sync else WGMMA} gemm", _WORDS)


_WORDS = {"BM": "tile_m", "BN": "tile_n", "STAGES": "stages", "CONSUMERS": "consumers"}
_ACCUMULATORS = {1: 192, 2: 192, 3: 96}


def operand_box(outer: int, depth: int, k_contiguous: bool) -> tuple[int, int]:
    """The TMA box (rows, columns) of A or B as stored: whole tiles of rows along K, or panels across it."""
    return (outer, PANEL_COLS) if k_contiguous else (depth, PANEL_COLS)
