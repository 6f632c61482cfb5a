"""Addresses in the shared memory of other CTAs of a cluster (sm_90).

Source: PTX ISA, "Data Movement and Conversion Instructions" (``mapa``).
Remote arrivals are :class:`warploom.isa.sync.MbarrierArrival`, multicast copies
:class:`warploom.isa.async_copy.TensorCopy`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from warploom.core.dtypes import u32
from warploom.isa.base import Array, Instruction, Lanewise, address
from warploom.isa.effects import AsyncStore, Effect

WINDOW_BITS = 24
"""The emulator's shared::cluster addresses: rank + 1 above this bit, the CTA's own shared address below it."""


@dataclass(frozen=True, slots=True)
class MapShared(Lanewise):
    """``mapa.shared::cluster.u32``: the place of a shared address in the CTA of a rank. Operands: address, rank."""

    ptx = "mapa.shared::cluster.u32"
    takes = (u32, u32)
    gives = (u32,)

    @property
    def since(self) -> str:
        """It came with sm_90."""
        return "sm_90"

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """The address with the rank in its window; what the hardware returns is its own affair."""
        address, rank = operands
        return ((address & np.uint32((1 << WINDOW_BITS) - 1)) + (rank + np.uint32(1) << np.uint32(WINDOW_BITS)),)


@dataclass(frozen=True, slots=True)
class StoreAsync(Instruction):
    """``st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32``: 16 bytes a thread to a CTA of the cluster.

    Operands: the address and the mbarrier's, both as :class:`MapShared` gives them, of one CTA; four words (u32).
    """

    target_offset: int = 0
    barrier_offset: int = 0
    ptx = "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
    takes = (u32,) * 6

    def effects(self) -> tuple[Effect, ...]:
        """One store a thread, which lands late."""
        return (AsyncStore(0, 1, 2, self.target_offset, self.barrier_offset),)

    @property
    def template(self) -> str:
        """The words are one vector."""
        places = f"{address(0, self.target_offset)}, {{%2, %3, %4, %5}}, {address(1, self.barrier_offset)}"
        return f"{self.mnemonic} {places};"
