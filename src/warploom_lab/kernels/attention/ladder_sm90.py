"""The ladder's ``wgmma`` attention kernels: what the production kernel does, one idea after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from warploom.core.targets import Target
from warploom.kernels.attention.forward_sm90 import ForwardSm90
from warploom.kernels.settings import flag, violated


@dataclass(frozen=True)
class RungSm90(ForwardSm90):
    """The production kernel with the consumers of :mod:`.ladder_sm90_kernel`: without what the rungs above add."""

    word: ClassVar[str] = "attention_wgmma"
    consumer: ClassVar[str] = "warploom_lab.kernels.attention.ladder_sm90_kernel:RungConsumer"

    overlap: bool = flag(True, "issue the next Q·Kᵀ before this block's softmax")
    lazy_rescale: bool = flag(True, "rescale O only when a row's maximum grew by more than 2^8; exact")
    hold: bool = flag(False, "a satisfied mbarrier wait keeps ptxas from moving the wait above the exponentials")

    def check(self, target: Target | None = None) -> list[str]:
        """The violated constraints (of ``target``, if given); empty if the configuration is valid."""
        return super().check(target) + violated(
            [
                (
                    self.overlap or not (self.turns or self.persistent or self.hold),
                    "turns, persistence and hold are about overlapped products: set overlap",
                ),
                (not (self.sum_column or self.skip_masked), "sum_column and skip_masked are the production kernel's"),
            ]
        )
