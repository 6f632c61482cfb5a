"""The configuration of the ``wgmma``/TMA attention generator (sm_90a)."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from warploom.core.dtypes import DType, bf16, f16
from warploom.core.errors import ConfigError
from warploom.core.targets import Target
from warploom.kernels.mapped import PANEL_COLS
from warploom.kernels.settings import broken_flags, element_type, flag, override, refuse, shared_excess, type_name
from warploom.kernels.specialised import BARRIER_BYTES, WARPGROUP_ROWS, Specialised

SUM_COLS = 8
"""The narrowest step of ``wgmma``'s N: all eight hold the row's sum."""


@dataclass(frozen=True)
class HopperConfig(Specialised):
    """One warp-specialised attention kernel: a producer warpgroup and ``consumers`` that own 64 query rows each."""

    consumers: int = flag(2, "consumer warpgroups, 64 query rows each", (1, 2, 3))
    tile_n: int = flag(128, "keys per step", (48, 64, 80, 96, 112, 128, 144, 160, 176))
    stages: int = flag(2, "K and V tiles in flight", (2, 3))
    head_dim: int = flag(128, "elements per head", (64, 128, 256))
    dtype: DType = flag(bf16, "element type of Q, K, V and O", (bf16, f16))
    overlap: bool = flag(True, "issue the next Q·Kᵀ before this block's softmax")
    pingpong: bool = flag(True, "consumers take turns at the tensor cores")
    flat: bool = flag(True, "persistent: the next tile's first Q·Kᵀ is issued with this tile's last P·V")
    q_in_registers: bool = flag(True, "Q as the register operand of Q·Kᵀ, loaded once a tile")
    lazy_rescale: bool = flag(True, "rescale O only when a row's maximum grew by more than 2^8; exact")
    carry_max: bool = flag(
        False, "a block takes over the row maxima; where P shows that they grew, its scores are formed again"
    )
    sum_column: bool = flag(False, "the row sums are one more column of P·V: ones stand beside V")
    skip_hidden: bool = flag(False, "a consumer passes over key blocks that its own rows do not see")
    hold: bool = flag(True, "a satisfied mbarrier wait keeps ptxas from moving the wait above the exponentials")
    opt_level: int = flag(3, "ptxas's optimisation level", (3,))

    @property
    def folded_scale(self) -> bool:
        """The scale is always folded into the exponential."""
        return True

    @property
    def peel(self) -> bool:
        """The first block of a tile is always a case of its own."""
        return True

    @property
    def tile_m(self) -> int:
        """Query rows per CTA."""
        return WARPGROUP_ROWS * self.consumers

    @property
    def panels(self) -> int:
        """64-column panels of a shared tile: head_dim rounded up."""
        return -(-self.head_dim // PANEL_COLS)

    @property
    def tile_cols(self) -> int:
        """Columns of a shared tile."""
        return self.panels * PANEL_COLS

    @property
    def value_cols(self) -> int:
        """Columns of a shared V tile: with ``sum_column`` one more panel, of which the first columns are ones."""
        return self.tile_cols + (PANEL_COLS if self.sum_column else 0)

    @property
    def output_cols(self) -> int:
        """Columns of the accumulator of P·V: head_dim in steps of 16, and eight for the row sums."""
        return -(-self.head_dim // 16) * 16 + (SUM_COLS if self.sum_column else 0)

    @property
    def q_buffers(self) -> int:
        """Q tiles: with the flat pipeline one is multiplied while the other is stored from and loaded again."""
        return 2 if self.flat else 1

    @property
    def most_hidden(self) -> int:
        """Key blocks that the last consumer's rows see and the first one's may not, at most."""
        return -(-(self.tile_m - WARPGROUP_ROWS) // self.tile_n)

    @property
    def shared_bytes(self) -> int:
        """Shared memory for the tiles and the mbarriers, in bytes."""
        q, keys = self.q_buffers * self.tile_m * self.tile_cols, self.stages * self.tile_n
        return (q + keys * (self.tile_cols + self.value_cols)) * self.dtype.bytes + BARRIER_BYTES

    def check(self, target: Target | None = None) -> list[str]:
        """Every reason why this is no kernel (for ``target``, if given); empty if it is one."""
        found = broken_flags(self)
        if found:
            return found
        if self.dtype not in (bf16, f16):
            found.append(f"dtype {self.dtype} is not f16 or bf16")
        if self.head_dim % 8 or not 8 <= self.head_dim <= 256:
            found.append(f"head_dim {self.head_dim} is no multiple of 8 from 8 to 256")
        found += self._role_problems()
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            found.append(f"tile_n {self.tile_n} is no multiple of 16 from 16 to 256")
        if self.stages < 2:
            found.append("the ring has at least 2 stages")
        if self.pingpong and self.consumers == 1:
            found.append("pingpong is between consumers: one has nobody to take turns with")
        if self.flat and not self.overlap:
            found.append("the flat pipeline overlaps by itself")
        if self.pingpong and not self.overlap:
            found.append("pingpong takes turns at overlapped products: set overlap")
        if self.carry_max and not self.lazy_rescale:
            found.append("carry_max leaves maxima behind for longer than lazy_rescale does: set it too")
        if self.sum_column and (self.head_dim % PANEL_COLS or self.output_cols > 256):
            found.append(f"sum_column puts ones behind V's last panel: head_dim {self.head_dim} is not 64, 128 or 192")
        if self.sum_column and self.carry_max and self.dtype is not bf16:
            found.append("sum_column with carry_max needs bf16: f16's exponents leave no room for maxima that grew")
        if self.skip_hidden and self.consumers == 1:
            found.append("skip_hidden is for consumers whose rows differ: one consumer sees every block that is loaded")
        if self.skip_hidden and self.most_hidden > self.stages:
            found.append(
                f"skip_hidden passes over up to {self.most_hidden} blocks at once, more than {self.stages} stages hold"
            )
        if self.hold and not self.overlap:
            found.append("hold holds back the wait of an overlapped product: set overlap")
        if target is not None and not target.has_wgmma:
            found.append(f"{target.name} has no wgmma: this kernel runs on sm_90a alone")
        return found + shared_excess(self.shared_bytes, target)

    def require(self, target: Target | None = None) -> None:
        """Raise ConfigError with every reason of :meth:`check`."""
        refuse(f"{self} is no attention kernel", self.check(target))

    def __str__(self) -> str:
        words = [n for n in _WORDS if getattr(self, n)]
        kind = type_name(self.dtype)
        name = {"bf16": "BF16", "f16": "FP16"}.get(kind, kind)
        head = f"wgmma ({name}, {self.head_dim}, {self.tile_m}, {self.tile_n}, {self.consumers} consumers"
        return f"{head}, {self.stages} stages): " + "+".join(words)

    def with_settings(self, settings: dict[str, str]) -> HopperConfig:
        """This config with flags overridden by text, as ``--set FLAG=VALUE`` gives it."""
        return override(self, settings, "wgmma attention")

    @classmethod
    def parse(cls, text: str) -> HopperConfig:
        """A config from what :meth:`__str__` prints. Raises ConfigError for words not known."""
        number = r"\s*(\d+)\s*"
        pattern = rf"wgmma \(\s*(\w+)\s*,{number},{number},{number},{number}consumers,{number}stages\)\s*:?\s*(.*)"
        match = re.fullmatch(pattern, text.strip())
        if match is None:
            raise ConfigError(
                f"{text!r} is no configuration; write wgmma (BF16, 128, 128, 128, 2 consumers, 2 stages): …"
            )
        kind, head_dim, _, tile_n, consumers, stages, rest = match.groups()
        words = [w.strip() for w in rest.split("+") if w.strip()]
        unknown = [w for w in words if w not in _WORDS]
        if unknown:
            raise ConfigError(f"{unknown[0]!r} is no flag of wgmma attention; known: {', '.join(_WORDS)}")
        flags = {name: name in words for name in _WORDS}
        return cls(int(consumers), int(tile_n), int(stages), int(head_dim), element_type("the type", kind), **flags)


_WORDS = tuple(f.name for f in fields(HopperConfig) if f.type == "bool")
