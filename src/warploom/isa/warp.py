"""Instructions among the lanes of one warp: shuffles, votes, ``__syncwarp``; and the special registers.

Sources: PTX ISA, "Parallel Synchronization and Communication Instructions" (``shfl.sync``, ``vote.sync``,
``bar.warp.sync``, ``elect.sync``) and "Special Registers".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from warploom.core.dtypes import DType, f32, f64, pred, s32, s64, u32, u64
from warploom.isa.base import ANY, PREFIX, PRIMARY, Array, Instruction, Lanewise, Open, takes
from warploom.isa.effects import Effect, ReadSpecial, WarpSync

FULL_MASK = 0xFFFFFFFF
_LANES = np.arange(32, dtype=np.uint32)
_CALL = {"xor": "__shfl_xor_sync", "idx": "__shfl_sync", "up": "__shfl_up_sync", "down": "__shfl_down_sync"}

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


@dataclass(frozen=True, slots=True)
class Shuffle(Instruction):
    """``shfl.sync.{bfly,idx,up,down}.b32``: operands value, lane argument (its low 5 bits count), member mask.

    ``clamp`` is PTX's: the last lane to read from (for ``up`` the first), and from bit 8 on the bits of a lane that
    make groups which exchange among themselves; None for the whole warp. A lane whose source lies outside keeps its own
    value.
    """

    mode: Literal["xor", "idx", "up", "down"]
    dtype: DType
    clamp: int | None = None
    moves_bits: ClassVar[bool] = True
    takes = ("dtype", u32, u32)
    gives = ("dtype",)
    does = (WarpSync(mask=2),)
    clobbers_memory = False

    def __post_init__(self) -> None:
        takes("shfl", self.dtype, (u32, s32, u64, s64, f32, f64))
        if self.clamp == self._whole_warp:  # one name for one instruction
            object.__setattr__(self, "clamp", None)

    @property
    def _whole_warp(self) -> int:
        return 0 if self.mode == "up" else 31

    @property
    def mnemonic(self) -> str:
        """Mode and type: ``shfl.sync.bfly.f32`` (PTX ISA, "shfl.sync"); the clamp if not the whole warp's."""
        groups = "" if self.clamp is None else f".{self.clamp:#x}"
        return f"shfl.sync.{'bfly' if self.mode == 'xor' else self.mode}.{self.dtype.name}{groups}"

    def expression(self, operands: Sequence[str]) -> str:
        """``__shfl_xor_sync(mask, value, lane)`` and its like."""
        value, lane, mask = operands
        return f"{_CALL[self.mode]}({mask}, {value}, {lane})"

    @property
    def binds(self) -> tuple[int, tuple[int, ...]]:
        """As a call."""
        return PRIMARY, (ANY, ANY, ANY)

    @property
    def open(self) -> tuple[Open, ...]:
        """A lane or distance beyond the warp."""
        cure = "the hardware takes it modulo 32; keep it below"
        return (Open(1, lambda _, lane: lane > 31, "names lane or distance {} of 32", cure),)

    @property
    def has_expression(self) -> bool:
        """Whether it is one of CUDA's calls: of the whole warp."""
        return self.clamp is None

    @property
    def template(self) -> str:
        """Of a part of the warp."""
        mode = "bfly" if self.mode == "xor" else self.mode
        return f"shfl.sync.{mode}.b32 %0, %1, %2, {self.clamp:#x}, %3;"

    def source_lanes(self, argument: Array) -> Array:
        """The lane each lane reads from, shape (warps, 32); ``argument`` is the lane operand of that shape."""
        lane = np.broadcast_to(_LANES, argument.shape).astype(np.int64)
        n = argument.astype(np.int64) & 31
        clamp = self._whole_warp if self.clamp is None else self.clamp
        group = clamp >> 8 & 31
        first, last = lane & group, (lane & group) | (clamp & 31 & ~group)
        if self.mode == "up":
            source = lane - n
            return np.where(source < last, lane, source)
        source = {"xor": lane ^ n, "idx": first | (n & ~group), "down": lane + n}[self.mode]
        return np.where(source > last, lane, source)

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """Each lane's value of its source lane, bit for bit."""
        return (np.take_along_axis(operands[0], self.source_lanes(operands[1]), axis=1),)


@dataclass(frozen=True, slots=True)
class Vote(Instruction):
    """``vote.sync.{any,all,ballot}``: operands predicate, member mask. Only members count."""

    mode: Literal["any", "all", "ballot"]
    ptx = "vote.sync.{self.mode}"
    call = "__{self.mode}_sync({1}, {0})"
    takes = (pred, u32)
    does = (WarpSync(mask=1),)

    @property
    def result_types(self) -> tuple[DType, ...]:
        """A predicate that all members share; for ``ballot`` one bit per lane."""
        return (u32 if self.mode == "ballot" else pred,)

    @property
    def binds(self) -> tuple[int, tuple[int, ...]]:
        """As a call."""
        return PRIMARY, (ANY, ANY)

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """The vote among the lanes of each lane's mask, the same for all members."""
        holds, mask = operands
        member = ((mask[:, :, None] >> _LANES) & 1).astype(bool)  # (warps, lane, member)
        votes = np.broadcast_to(holds[:, None, :], member.shape)
        if self.mode == "ballot":
            bits = (member & votes).astype(np.uint64) << np.arange(32, dtype=np.uint64)
            return (bits.sum(axis=2).astype(np.uint32),)
        if self.mode == "any":
            return (np.logical_or.reduce(member & votes, axis=2),)
        return (np.logical_and.reduce(~member | votes, axis=2),)


@dataclass(frozen=True, slots=True)
class SyncWarp(Instruction):
    """``bar.warp.sync``: the members meet, and see each other's memory accesses from before it. Operand: the mask."""

    ptx = "bar.warp.sync"
    call = "__syncwarp({0})"
    takes = (u32,)
    does = (WarpSync(mask=0, orders_memory=True),)


@dataclass(frozen=True, slots=True)
class Elect(Instruction):
    """``elect.sync`` (sm_90): true in one lane of a full warp, and PTX does not say which; here the last."""

    ptx = "elect.sync"
    inline = "{{ .reg .pred p; .reg .b32 d; elect.sync d|p, 0xffffffff; selp.u32 %0, 1, 0, p; }}"
    clobbers_memory = False
    gives = (pred,)
    does = (WarpSync(aligned=True),)

    @property
    def since(self) -> str:
        """It came with sm_90."""
        return "sm_90"

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """The last lane: where a kernel counts on the first, lanes race that nothing orders."""
        return ((_LANES == 31)[None, :],)
