"""Who a thread is: special registers.

Source: PTX ISA, "Special Registers".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from warploom.core.dtypes import DType, u32, u64
from warploom.isa.base import PREFIX, Instruction, Lanewise
from warploom.isa.effects import Effect, ReadSpecial

FULL_MASK = 0xFFFFFFFF

SPECIAL_REGISTERS: dict[str, tuple[DType, str]] = {
    "tid.x": (u32, "threadIdx.x"),
    "ctaid.x": (u32, "blockIdx.x"),
    "ctaid.y": (u32, "blockIdx.y"),
    "ctaid.z": (u32, "blockIdx.z"),
    "nctaid.x": (u32, "gridDim.x"),
    "nctaid.y": (u32, "gridDim.y"),
    "nctaid.z": (u32, "gridDim.z"),
    "cluster_ctarank": (u32, "__clusterRelativeBlockRank()"),
    "cluster_nctarank": (u32, "__clusterSizeInBlocks()"),
    **{f"cluster_ctaid.{axis}": (u32, f"__clusterRelativeBlockIdx().{axis}") for axis in "xyz"},
    **{f"clusterid.{axis}": (u32, f"__clusterIdx().{axis}") for axis in "xyz"},
    "shared_base": (u32, "(unsigned)__cvta_generic_to_shared(shared_memory)"),
    "local_base": (u32, "(unsigned)__cvta_generic_to_local(local_memory)"),
    "clock64": (u64, "(unsigned long long)clock64()"),
}
"""Name → (type, CUDA C++): what :class:`Special` can read. ``shared_base`` is the address of dynamic shared memory,
``local_base`` of a thread's own.

``clusterid`` is the cluster's place in the grid of clusters, ``cluster_ctaid`` the CTA's in its cluster,
``cluster_ctarank`` the same as one number, x fastest.
"""


@dataclass(frozen=True, slots=True)
class Special(Lanewise):
    """Reads a special register (a key of :data:`SPECIAL_REGISTERS`)."""

    register: str
    ptx = "special.{self.register}"

    @property
    def result_types(self) -> tuple[DType, ...]:
        """The register's type, from :data:`SPECIAL_REGISTERS`."""
        return (SPECIAL_REGISTERS[self.register][0],)

    def effects(self) -> tuple[Effect, ...]:
        """The emulator fills in the value of each thread."""
        return (ReadSpecial(self.register),)

    @property
    def since(self) -> str:
        """Clusters came with sm_90."""
        return "sm_90" if self.register.startswith("cluster") else "sm_80"

    @property
    def binds(self) -> tuple[int, tuple[int, ...]]:
        """As a cast."""
        return PREFIX, ()

    def expression(self, operands: Sequence[str]) -> str:
        """CUDA's name of it: ``threadIdx.x``."""
        return SPECIAL_REGISTERS[self.register][1]


@dataclass(frozen=True, slots=True)
class ReadClock(Instruction):
    """``clock64()``: the SM's cycle counter; never shared or dropped, so that it stays where it is written."""

    ptx = "mov.u64.clock64"
    inline = "mov.u64 %0, %%clock64;"  # volatile, so that two reads are never joined
    gives = (u64,)
    does = (ReadSpecial("clock64"),)
