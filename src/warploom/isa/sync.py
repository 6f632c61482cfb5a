"""Barriers among warps: ``bar``, ``mbarrier``, proxy fences, register budgets.

Sources: PTX ISA, "Parallel Synchronization and Communication Instructions" (``bar``, ``mbarrier``, ``fence.proxy``)
and "Miscellaneous Instructions" (``setmaxnreg``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from warploom.core.dtypes import DType, pred, u32
from warploom.isa.base import Instruction, address, inline_ptx
from warploom.isa.effects import (
    Barrier,
    Effect,
    MbarrierArrive,
    MbarrierFence,
    MbarrierInit,
    MbarrierWait,
    ProxyFence,
    RegisterBudget,
    WarpSync,
)


@dataclass(frozen=True, slots=True)
class BarSync(Instruction):
    """``bar.sync id[, threads]``: waits for the barrier. Operand: its number (0 is ``__syncthreads``'s)."""

    threads: int | None = None

    @property
    def mnemonic(self) -> str:
        return "bar.sync"

    @property
    def operand_types(self) -> tuple[DType, ...]:
        return (u32,)

    def effects(self) -> tuple[Effect, ...]:
        return (WarpSync(aligned=True), Barrier(0, self.threads, waits=True))

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        if self.threads is None and operands[0] == "0u":
            return "__syncthreads();"
        count = "" if self.threads is None else f", {self.threads}"
        return inline_ptx(f"bar.sync %0{count};", (), [("r", operands[0])], memory=True)


@dataclass(frozen=True, slots=True)
class BarArrive(Instruction):
    """``bar.arrive id, threads``: arrives without waiting."""

    threads: int

    @property
    def mnemonic(self) -> str:
        return "bar.arrive"

    @property
    def operand_types(self) -> tuple[DType, ...]:
        return (u32,)

    def effects(self) -> tuple[Effect, ...]:
        return (WarpSync(aligned=True), Barrier(0, self.threads, waits=False))

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        return inline_ptx(f"bar.arrive %0, {self.threads};", (), [("r", operands[0])], memory=True)


@dataclass(frozen=True, slots=True)
class MbarrierInitialise(Instruction):
    """``mbarrier.init.shared::cta.b64``: ``count`` arrivals complete a phase. Operand: its address."""

    count: int
    offset: int = 0

    @property
    def mnemonic(self) -> str:
        return f"mbarrier.init.{self.count}"

    @property
    def operand_types(self) -> tuple[DType, ...]:
        return (u32,)

    def effects(self) -> tuple[Effect, ...]:
        return (MbarrierInit(0, self.offset, self.count),)

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        template = f"mbarrier.init.shared::cta.b64 {address(0, self.offset)}, {self.count};"
        return inline_ptx(template, (), [("r", operands[0])], memory=True)


@dataclass(frozen=True, slots=True)
class MbarrierInitFence(Instruction):
    """``fence.mbarrier_init.release.cluster``: initialised mbarriers become visible to the async proxy."""

    @property
    def mnemonic(self) -> str:
        return "fence.mbarrier_init.release.cluster"

    def effects(self) -> tuple[Effect, ...]:
        return (MbarrierFence(),)

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        return inline_ptx(f"{self.mnemonic};", memory=True)


@dataclass(frozen=True, slots=True)
class MbarrierArrival(Instruction):
    """``mbarrier.arrive[.expect_tx]`` by the threads whose predicate holds. Operands: address, predicate.

    The predicate guards the PTX instruction itself, which keeps loop variables in uniform registers where a branch
    around it would not.
    """

    expected_bytes: int | None = None
    offset: int = 0

    @property
    def mnemonic(self) -> str:
        return f"mbarrier.arrive{'' if self.expected_bytes is None else f'.expect_tx.{self.expected_bytes}'}"

    @property
    def operand_types(self) -> tuple[DType, ...]:
        return (u32, pred)

    def effects(self) -> tuple[Effect, ...]:
        return (MbarrierArrive(0, self.offset, self.expected_bytes, guard=1),)

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        where = address(0, self.offset)
        if self.expected_bytes is None:
            arrive = f"mbarrier.arrive.shared::cta.b64 _, {where};"
        else:
            arrive = f"mbarrier.arrive.expect_tx.shared::cta.b64 _, {where}, {self.expected_bytes};"
        return guarded(arrive, 1, [("r", operands[0])], operands[1])


def guarded(instruction: str, position: int, inputs: list[tuple[str, str]], guard: str) -> str:
    """PTX executed under a predicate passed as the asm operand number ``position`` (appended to ``inputs``)."""
    if guard == "true":
        return inline_ptx(instruction, (), inputs, memory=True)
    body = f"{{ .reg .pred guard; setp.ne.u32 guard, %{position}, 0; @guard {instruction} }}"
    return inline_ptx(body, (), [*inputs, ("r", f"(unsigned)({guard})")], memory=True)


@dataclass(frozen=True, slots=True)
class MbarrierTryWait(Instruction):
    """A loop on ``mbarrier.try_wait.parity``: blocks until the phase of that parity completed.

    Operands: address, parity (0 for the first phase).
    """

    offset: int = 0

    @property
    def mnemonic(self) -> str:
        return "mbarrier.try_wait.parity"

    @property
    def operand_types(self) -> tuple[DType, ...]:
        return (u32, u32)

    def effects(self) -> tuple[Effect, ...]:
        return (MbarrierWait(0, self.offset, 1),)

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        body = (
            "{ .reg .pred done; waiting: "
            f"mbarrier.try_wait.parity.shared::cta.b64 done, {address(0, self.offset)}, %1; "
            "@done bra arrived; bra waiting; arrived: }"
        )
        return inline_ptx(body, (), [("r", operands[0]), ("r", operands[1])], memory=True)


@dataclass(frozen=True, slots=True)
class AsyncProxyFence(Instruction):
    """``fence.proxy.async.shared::cta``: the thread's ordinary shared accesses come before later async-proxy ones."""

    @property
    def mnemonic(self) -> str:
        return "fence.proxy.async.shared::cta"

    def effects(self) -> tuple[Effect, ...]:
        return (ProxyFence(),)

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        return inline_ptx(f"{self.mnemonic};", memory=True)


@dataclass(frozen=True, slots=True)
class SetMaxRegisters(Instruction):
    """``setmaxnreg.{inc,dec}.sync.aligned.u32``: a warpgroup's register budget, a multiple of 8 in 24 … 256."""

    registers: int
    direction: Literal["inc", "dec"]

    @property
    def mnemonic(self) -> str:
        return f"setmaxnreg.{self.direction}.sync.aligned.u32"

    def effects(self) -> tuple[Effect, ...]:
        return (WarpSync(aligned=True), RegisterBudget(self.registers, self.direction))

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        return inline_ptx(f"{self.mnemonic} {self.registers};")
