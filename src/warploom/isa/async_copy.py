"""Asynchronous copies: ``cp.async`` (sm_80), bulk copies and reductions, and bulk tensor copies (sm_90, the TMA).

Sources: PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy" (``cp.async``, commit and wait groups,
``cp.async.bulk``, ``cp.reduce.async.bulk``, ``cp.async.bulk.tensor``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from warploom.core.dtypes import DType, pred, s32, u32, u64
from warploom.core.errors import VerifyError
from warploom.isa.base import Instruction, Open, address, waits_for_groups
from warploom.isa.effects import (
    AsyncCopy,
    BulkLoad,
    BulkStore,
    BulkTensorCopy,
    CommitGroup,
    CopyArrival,
    Effect,
    WaitGroup,
)
from warploom.isa.sync import guarded

Queue = Literal["cp.async", "bulk"]
Eviction = Literal["", "first", "last"]
POLICIES: dict[Eviction, int] = {"first": 0x12F0000000000000, "last": 0x14F0000000000000}
"""What createpolicy.fractional.L2::evict_{first,last} with a fraction of 1 returns (sm_90)."""


@dataclass(frozen=True, slots=True)
class CpAsync(Instruction):
    """``cp.async.{ca,cg}.shared.global``: 4, 8 or 16 bytes a thread (``cg`` 16 only), bypassing registers.

    Operands: shared address, global address and, with ``zero_fill``, the count of bytes to read (the rest is zero).
    ``prefetch`` is the L2 prefetch size in bytes (64, 128, 256) or 0. ``eviction``: as of :class:`TensorCopy` (sm_90).
    """

    bytes: Literal[4, 8, 16]
    cache: Literal["ca", "cg"] = "cg"
    zero_fill: bool = False
    prefetch: int = 0
    shared_offset: int = 0
    global_offset: int = 0
    eviction: Eviction = ""

    def __post_init__(self) -> None:
        if self.bytes not in (4, 8, 16) or (self.cache == "cg" and self.bytes != 16):
            raise VerifyError(
                f"cp.async.{self.cache} copies {'16' if self.cache == 'cg' else '4, 8 or 16'} bytes a "
                f"thread, not {self.bytes}"
            )
        if self.prefetch not in (0, 64, 128, 256):
            raise VerifyError(f"cp.async prefetches 64, 128 or 256 bytes into the L2, not {self.prefetch}")

    @property
    def mnemonic(self) -> str:
        """With cache operator, hints and size: ``cp.async.cg.shared.global.L2::evict_first.L2::128B.16``."""
        return self._opcode(f".L2::evict_{self.eviction}" if self.eviction else "") + f".{self.bytes}"

    def _opcode(self, priority: str) -> str:
        hint = f".L2::{self.prefetch}B" if self.prefetch else ""
        return f"cp.async.{self.cache}.shared.global{priority}{hint}"

    @property
    def operand_types(self) -> tuple[DType, ...]:
        """Shared address (u32), global address (u64), and with ``zero_fill`` the bytes to read (u32)."""
        return (u32, u64, u32) if self.zero_fill else (u32, u64)

    @property
    def since(self) -> str:
        """L2 priorities came with sm_90."""
        return "sm_90" if self.eviction else "sm_80"

    @property
    def open(self) -> tuple[Open, ...]:
        """More bytes to read than the copy has."""
        size, what = self.bytes, f"reads {{}} bytes of a copy of {self.bytes}"
        return (Open(2, lambda _, valid: valid > size, what, "clamp it (k.minimum)"),) if self.zero_fill else ()

    def effects(self) -> tuple[Effect, ...]:
        """A copy that stays in flight until the thread waits for its group."""
        valid = 2 if self.zero_fill else None
        return (AsyncCopy(0, 1, self.bytes, self.shared_offset, self.global_offset, valid),)

    @property
    def template(self) -> str:
        """Offsets are immediates of the addresses, size and policy immediates of their own."""
        hint, policy = (".L2::cache_hint", f", {POLICIES[self.eviction]:#x}") if self.eviction else ("", "")
        places = f"{address(0, self.shared_offset)}, {address(1, self.global_offset)}"
        valid = ", %2" if self.zero_fill else ""
        return f"{self._opcode(hint)} {places}, {self.bytes}{valid}{policy};"


@dataclass(frozen=True, slots=True)
class CommitCopies(Instruction):
    """``cp.async[.bulk].commit_group``: closes the group of copies this thread has issued."""

    queue: Queue = "cp.async"

    @property
    def mnemonic(self) -> str:
        """``cp.async.commit_group``, or ``cp.async.bulk.commit_group`` for bulk stores."""
        return f"cp.async{'.bulk' if self.queue == 'bulk' else ''}.commit_group"

    def effects(self) -> tuple[Effect, ...]:
        """Closes this thread's group in ``queue``; an empty group counts as one."""
        return (CommitGroup(self.queue),)


@dataclass(frozen=True, slots=True)
class WaitCopies(Instruction):
    """``cp.async[.bulk].wait_group[.read] n``: at most ``pending`` of this thread's newest groups stay unfinished."""

    pending: int
    queue: Queue = "cp.async"
    reads_only: bool = False
    inline = "{self.mnemonic} {self.pending};"

    def __post_init__(self) -> None:
        waits_for_groups(self.pending)

    @property
    def mnemonic(self) -> str:
        """``cp.async.wait_group``; for bulk stores ``cp.async.bulk.wait_group``, with ``.read`` for the sources."""
        bulk, read = (".bulk" if self.queue == "bulk" else ""), (".read" if self.reads_only else "")
        return f"cp.async{bulk}.wait_group{read}"

    def effects(self) -> tuple[Effect, ...]:
        """Waits for this thread's own groups only: a barrier must follow before others read the data."""
        return (WaitGroup(self.queue, self.pending, self.reads_only),)


@dataclass(frozen=True, slots=True)
class CopiesArrive(Instruction):
    """``cp.async.mbarrier.arrive[.noinc]``: each thread arrives when the copies that it has started are done.

    Operand: the mbarrier's address. ``counted``: these arrivals are among those it was initialised for (``.noinc``);
    otherwise the phase counts one more for each.
    """

    counted: bool
    offset: int = 0
    takes = (u32,)
    inline = "{self.mnemonic}.shared.b64 {address};"

    @property
    def mnemonic(self) -> str:
        """As in PTX (PTX ISA, "cp.async.mbarrier.arrive")."""
        return f"cp.async.mbarrier.arrive{'.noinc' if self.counted else ''}"

    def effects(self) -> tuple[Effect, ...]:
        """Arrivals that come when the copies land."""
        return (CopyArrival(0, self.offset, self.counted),)


@dataclass(frozen=True, slots=True)
class TensorCopy(Instruction):
    """``cp.async.bulk.tensor.{1..5}d``: one box of a tensor map, between global and shared memory.

    Operands of a load: shared address, tensor map, mbarrier address, predicate, coordinates (innermost first) and, with
    ``multicast``, the mask of the cluster's CTAs that receive it (bit r: rank r), at the same place of each, on the
    mbarrier at the same place of each; of a store: shared address, tensor map, predicate, coordinates. The threads
    whose predicate holds issue it (one should). ``eviction`` of a load is its L2 priority: what is read once goes
    first, what other CTAs read again goes last. ``reduction`` of a store: each element is combined with what is there
    (``cp.reduce.async.bulk.tensor``).
    """

    direction: Literal["load", "store"]
    rank: int
    shared_offset: int = 0
    barrier_offset: int = 0
    eviction: Eviction = ""
    multicast: bool = False
    reduction: Literal["", "add", "min", "max"] = ""

    def __post_init__(self) -> None:
        if self.reduction and self.direction != "store":
            raise VerifyError("a tensor copy reduces into global memory alone")

    @property
    def mnemonic(self) -> str:
        """Rank, direction and hints: ``cp.async.bulk.tensor.2d.load.multicast::cluster.L2::evict_last``."""
        if self.reduction:
            return f"cp.reduce.async.bulk.tensor.{self.rank}d.store.{self.reduction}"
        hint = f".L2::evict_{self.eviction}" if self.eviction else ""
        several = ".multicast::cluster" if self.multicast else ""
        return f"cp.async.bulk.tensor.{self.rank}d.{self.direction}{several}{hint}"

    @property
    def _first_coordinate(self) -> int:
        return 4 if self.direction == "load" else 3

    @property
    def operand_types(self) -> tuple[DType, ...]:
        """In the order that the class lists: addresses are u32, the tensor map u64, coordinates s32."""
        head = (u32, u64, u32, pred) if self.direction == "load" else (u32, u64, pred)
        return (*head, *(s32,) * self.rank, *(u32,) * self.multicast)

    def effects(self) -> tuple[Effect, ...]:
        """One box through the async proxy, guarded by the predicate; a load completes on its mbarrier."""
        first = self._first_coordinate
        coordinates = tuple(range(first, first + self.rank))
        barrier = 2 if self.direction == "load" else None
        mask = first + self.rank if self.multicast else None
        return (
            BulkTensorCopy(
                self.direction,
                1,
                0,
                self.shared_offset,
                coordinates,
                barrier,
                self.barrier_offset,
                first - 1,
                mask,
                self.reduction,
            ),
        )

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        """Inline PTX under the predicate; an L2 priority goes as the policy that ``createpolicy`` would return."""
        first, last = self._first_coordinate, self._first_coordinate + self.rank
        guard, coordinates = operands[first - 1], operands[first:last]
        listed = ", ".join(f"%{i + first - 1}" for i in range(self.rank))
        ins = list(zip("rlr", operands[: first - 1], strict=False)) + [("r", c) for c in coordinates]
        ins += [("h", f"(unsigned short)({mask})") for mask in operands[last:]]
        shared = address(0, self.shared_offset)
        if self.direction == "load":
            several, mask = (".multicast::cluster", f", %{last - 1}") if self.multicast else ("", "")
            hint, policy = (".L2::cache_hint", f", {POLICIES[self.eviction]:#x}") if self.eviction else ("", "")
            text = (
                f"cp.async.bulk.tensor.{self.rank}d.shared::cluster.global.mbarrier::complete_tx::bytes{several}{hint} "
                f"{shared}, [%1, {{{listed}}}], {address(2, self.barrier_offset)}{mask}{policy};"
            )
        else:
            reduce, how = (".reduce", f".{self.reduction}.tile") if self.reduction else ("", "")
            text = f"cp{reduce}.async.bulk.tensor.{self.rank}d.global.shared::cta{how}.bulk_group [%1, {{{listed}}}], "
            text += f"{shared};"
        return guarded(text, len(ins), ins, guard)


@dataclass(frozen=True, slots=True)
class BulkStoreBytes(Instruction):
    """``cp[.reduce].async.bulk.global.shared::cta.bulk_group``: consecutive bytes of shared memory to global memory.

    Operands: shared address, global address, predicate of the threads that issue it (one should). ``bytes`` and both
    addresses are multiples of 16. ``adds``: f32 elements are added to what is there.
    """

    bytes: int
    adds: bool = False
    shared_offset: int = 0
    global_offset: int = 0
    takes = (u32, u64, pred)

    def __post_init__(self) -> None:
        if self.bytes % 16 or self.bytes <= 0:
            raise VerifyError(f"a bulk copy moves a positive multiple of 16 bytes, not {self.bytes}")

    @property
    def mnemonic(self) -> str:
        """``cp.async.bulk.…``, or ``cp.reduce.async.bulk.….add.f32``."""
        reduce, add = (".reduce", ".add.f32") if self.adds else ("", "")
        return f"cp{reduce}.async.bulk.global.shared::cta.bulk_group{add}"

    def effects(self) -> tuple[Effect, ...]:
        """One copy through the async proxy; its source is free, and its result there, when its group says so."""
        return (BulkStore(0, 1, self.bytes, self.shared_offset, self.global_offset, 2, self.adds),)

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        """Inline PTX under the predicate."""
        places = f"{address(1, self.global_offset)}, {address(0, self.shared_offset)}"
        ins = list(zip("rl", operands[:2], strict=True))
        return guarded(f"{self.mnemonic} {places}, {self.bytes};", 2, ins, operands[2])


@dataclass(frozen=True, slots=True)
class BulkLoadBytes(Instruction):
    """``cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes``: consecutive bytes to this CTA's memory.

    Operands: shared address, global address, count of bytes, mbarrier address, predicate of the threads that issue it
    (one should). The count and both addresses are multiples of 16.
    """

    shared_offset: int = 0
    global_offset: int = 0
    barrier_offset: int = 0
    ptx = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    takes = (u32, u64, u32, u32, pred)

    def effects(self) -> tuple[Effect, ...]:
        """One copy through the async proxy."""
        return (BulkLoad(0, 1, 2, 3, 4, self.shared_offset, self.global_offset, self.barrier_offset),)

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        """Inline PTX under the predicate."""
        places = f"{address(0, self.shared_offset)}, {address(1, self.global_offset)}, %2"
        ins = list(zip("rlrr", operands[:4], strict=True))
        return guarded(f"{self.mnemonic} {places}, {address(3, self.barrier_offset)};", 4, ins, operands[4])
