"""The table of what reaches the shared memory of other CTAs of a cluster (sm_90): ``mapa``, ``st.async``.

Source: PTX ISA, "Data Movement and Conversion Instructions" (``mapa``, ``st.async``).
"""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
from __future__ import annotations

import numpy as np

from warploom.isa.base import Array
from warploom.isa.effects import AsyncStore
from warploom.isa.form import Formed, form, named
from warploom.isa.spaces import from_generic, to_generic

WINDOW_BITS = 24
"""The emulator's shared::cluster addresses: rank + 1 above this bit, the CTA's own shared address below it."""


def _mapped(address: Array, rank: Array) -> Array:
    """The address with the rank in its window; what the hardware returns is its own affair."""
    return (address & np.uint32((1 << WINDOW_BITS) - 1)) + (rank + np.uint32(1) << np.uint32(WINDOW_BITS))


def _mapped_generic(address: Array, rank: Array) -> Array:
    (own,) = from_generic("shared").meaning(address)
    return to_generic("shared").meaning(_mapped(own, rank))[0]


form("mapa.shared::cluster.u32 d, a, cta:u32", meaning=_mapped, let=lambda _: {"cta_rank": 1}, since="sm_90")
form("mapa.u64 d, a, cta:u32", meaning=_mapped_generic, let=lambda _: {"cta_rank": 1}, since="sm_90")
form(
    "st.async{.weak}.shared::cluster.mbarrier::complete_tx::bytes.v4.{type} [target]:u32, a*4:b32, [barrier]:u32",
    type="b32 u32 s32 f32",
    name="st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32",
    operands="target barrier a",
    effects=lambda i: (AsyncStore(0, 1, 2, i.target_offset, i.barrier_offset),),
    since="sm_90",
    asm="volatile memory",
)


def map_shared() -> Formed:
    """``mapa``: the place of a shared address in the CTA of a rank. Operands: address, rank."""
    return named("mapa.shared::cluster.u32")
