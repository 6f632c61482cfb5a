"""The configuration of the fused 16×16 matmul and row maximum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from warploom.core.dtypes import DType, bf16, f16
from warploom.kernels.settings import flag, refuse, violated

Method = Literal["serial", "parallel", "registers"]
Mask = Literal["full", "quad"]


@dataclass(frozen=True)
class ReduceConfig:
    """One way to take the row maxima of a product of 16×16 tiles. Each warp has a tile of its own."""

    method: Method = flag(
        "registers",
        "serial: through shared memory, one thread per row (the paper's baseline); parallel: through swizzled shared "
        "memory, all lanes, 16 bytes each; registers: the accumulator never leaves the registers",
        ("serial", "parallel", "registers"),
    )
    repeats: int = flag(1, "products and reductions per warp, each dependent on the one before", (1, 1024))
    num_warps: int = flag(1, "warps per CTA", (1, 2, 4))
    member_mask: Mask = flag("full", "lanes a shuffle names: the warp, or the quad that exchanges", ("full", "quad"))
    wide: bool = flag(False, "serial reads take 16 bytes each, as compilers combine them", (False, True))
    spread: bool = flag(False, "lanes share the exchange: each ends with its own rows' maxima alone", (False, True))
    dtype: DType = flag(bf16, "element type of A and B", (bf16, f16))

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 32 * self.num_warps

    @property
    def barriers(self) -> int:
        """Barriers of each product and reduction."""
        return 0 if self.method == "registers" else 1

    def check(self) -> list[str]:
        """The violated constraints; empty if the configuration is valid."""
        return violated(
            [
                (
                    self.method in ("serial", "parallel", "registers"),
                    f"method is serial, parallel or registers, not {self.method!r}",
                ),
                (self.member_mask in ("full", "quad"), f"member_mask is full or quad, not {self.member_mask!r}"),
                (
                    self.repeats == 1 or (self.repeats >= 2 and self.repeats % 2 == 0),
                    f"repeats is 1 or even (two tiles take turns in shared memory), not {self.repeats}",
                ),
                (
                    not self.wide or self.method == "serial",
                    "wide is for serial reads; parallel ones are 16 bytes each anyway",
                ),
                (not self.spread or self.method == "registers", "spread is for reductions in registers"),
                (1 <= self.num_warps <= 32, f"num_warps is 1 … 32, not {self.num_warps}"),
                (self.dtype in (bf16, f16), f"dtype {self.dtype} is not f16 or bf16"),
            ]
        )

    def require(self) -> None:
        """Raise ConfigError with every reason of :meth:`check`."""
        refuse(f"{self} is no matmul with row maximum", self.check())

    def __str__(self) -> str:
        flags = {"quad_mask": self.member_mask == "quad", "wide": self.wide, "spread": self.spread}
        words = [self.method, *(name for name, on in flags.items() if on)]
        return f"({self.dtype.name.upper()}, 16, 16, 16, {self.num_warps}): {'+'.join(words)}, {self.repeats} repeats"
