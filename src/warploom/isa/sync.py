"""``mbarrier``: barriers in shared memory.

Source: PTX ISA, "Parallel Synchronization and Communication Instructions" (``mbarrier``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from warploom.core.dtypes import pred, u32
from warploom.core.errors import VerifyError
from warploom.isa.base import Instruction, address, inline_ptx
from warploom.isa.effects import (
    ClusterScope,
    Effect,
    MbarrierArrive,
    MbarrierInit,
    MbarrierWait,
)
from warploom.isa.effects import MbarrierInvalidate as Invalidation


@dataclass(frozen=True, slots=True)
class MbarrierInitialise(Instruction):
    """``mbarrier.init.shared::cta.b64``: ``count`` arrivals complete a phase. Operand: its address."""

    count: int
    offset: int = 0
    ptx = "mbarrier.init.{self.count}"
    inline = "mbarrier.init.shared::cta.b64 {address}, {self.count};"
    takes = (u32,)

    def __post_init__(self) -> None:
        if not 1 <= self.count < 1 << 20:
            raise VerifyError(f"an mbarrier counts 1 to {(1 << 20) - 1} arrivals, not {self.count}")

    def effects(self) -> tuple[Effect, ...]:
        """From here on those bytes are an mbarrier in its first phase."""
        return (MbarrierInit(0, self.offset, self.count),)


@dataclass(frozen=True, slots=True)
class MbarrierArrival(Instruction):
    """``mbarrier.arrive[.expect_tx]`` by the threads whose predicate holds. Operands: address, predicate.

    The predicate guards the PTX instruction itself, which keeps loop variables in uniform registers where a branch
    around it would not. ``remote``: the address comes from :class:`MapShared`, and the mbarrier is another CTA's.
    A ``count`` of 0 is ``mbarrier.expect_tx``: bytes, and no arrival (a negative number: ``mbarrier.complete_tx``);
    ``drops`` is ``mbarrier.arrive_drop``.
    ``scope`` ``"cluster"`` (``.release.cluster``) publishes writes to the whole cluster, at the price of a fence of
    the whole GPU (``MEMBAR.ALL.GPU`` in sm_90a's SASS); giving back a stage that was only read needs none.
    """

    expected_bytes: int | None = None
    offset: int = 0
    remote: bool = False
    scope: ClusterScope = "cta"
    count: int = 1
    drops: bool = False
    takes = (u32, pred)

    def __post_init__(self) -> None:
        counts = (0, 1) if self.expected_bytes is not None else range(1, 1 << 20)
        if self.count not in counts or (self.drops and self.count == 0):
            raise VerifyError(f"an arrival counts 1 or more, and 1 (none: 0) where it expects bytes, not {self.count}")

    @property
    def mnemonic(self) -> str:
        """With bytes, scope and space: ``mbarrier.arrive.expect_tx.4096`` (PTX ISA, "mbarrier.arrive")."""
        if self.count == 0:
            return f"mbarrier.{self._bytes}{'.shared::cluster' if self.remote else ''}"
        name = f"mbarrier.{self._opcode}" + self._qualifiers(
            "" if self.expected_bytes is None else f".{self.expected_bytes}"
        )
        return name if self.count == 1 else f"{name}.{self.count}"

    @property
    def _bytes(self) -> str:
        expected = self.expected_bytes or 0
        return f"expect_tx.{expected}" if expected >= 0 else f"complete_tx.{-expected}"

    @property
    def _opcode(self) -> str:
        return "arrive_drop" if self.drops else "arrive"

    def _qualifiers(self, count: str = "") -> str:
        expect = "" if self.expected_bytes is None else f".expect_tx{count}"
        release = ".release.cluster" if self.scope == "cluster" else ""
        return f"{expect}{release}{'.shared::cluster' if self.remote else ''}"

    def effects(self) -> tuple[Effect, ...]:
        """One arrival per thread whose predicate holds, after it raised the bytes to expect."""
        return (
            MbarrierArrive(0, self.offset, self.expected_bytes, 1, self.remote, self.scope, self.count, self.drops),
        )

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        """Inline PTX under the predicate; the state that the arrival returns is dropped."""
        space = "" if self.remote else ".shared::cta"
        count = f", {self.count}" if self.count > 1 else ""
        count = count if self.expected_bytes is None else f", {self.expected_bytes}"
        if self.count == 0:
            scope = "cluster.shared::cluster" if self.remote else "cta.shared::cta"
            name, size = self._bytes.split(".")
            expect = f"mbarrier.{name}.relaxed.{scope}.b64 {address(0, self.offset)}, {size};"
            return guarded(expect, 1, [("r", operands[0])], operands[1])
        arrive = f"mbarrier.{self._opcode}{self._qualifiers()}{space}.b64 _, {address(0, self.offset)}{count};"
        return guarded(arrive, 1, [("r", operands[0])], operands[1])


@dataclass(frozen=True, slots=True)
class MbarrierArrivalAmidst(Instruction):
    """``mbarrier.arrive.noComplete``: ``count`` arrivals of each thread, by which the phase must not end.

    Operand: address.
    """

    count: int
    offset: int = 0
    ptx = "mbarrier.arrive.noComplete.{self.count}"
    inline = (  # PTX gives a state in any case
        "{{ .reg .b64 state; mbarrier.arrive.noComplete.shared.b64 state, {address}, {self.count}; }}"
    )
    takes = (u32,)

    def effects(self) -> tuple[Effect, ...]:
        """Arrivals, as others."""
        return (MbarrierArrive(0, self.offset, count=self.count, completes=False),)


def guarded(instruction: str, position: int, inputs: list[tuple[str, str]], guard: str) -> str:
    """PTX executed under a predicate passed as the asm operand number ``position`` (appended to ``inputs``)."""
    if guard == "true":
        return inline_ptx(instruction, (), inputs, memory=True)
    body = f"{{ .reg .pred guard; setp.ne.u32 guard, %{position}, 0; @guard {instruction} }}"
    return inline_ptx(body, (), [*inputs, ("r", f"(unsigned)({guard})")], memory=True)


@dataclass(frozen=True, slots=True)
class MbarrierTryWait(Instruction):
    """A loop on ``mbarrier.try_wait.parity``: blocks until the phase of that parity completed.

    Operands: address, parity (0 for the first phase). ``scope`` ``"cluster"`` acquires what other CTAs of the cluster
    released at that scope, at the price of the L1 cache's lines (``CCTL.IVALL`` in sm_90a's SASS).
    """

    offset: int = 0
    scope: ClusterScope = "cta"
    takes = (u32, u32)
    inline = (  # a loop: one try_wait may give up before the phase completes
        "{{ .reg .pred done; waiting: {self.mnemonic}.shared::cta.b64 done, {address}, %1; "
        "@done bra arrived; bra waiting; arrived: }}"
    )

    @property
    def mnemonic(self) -> str:
        """``mbarrier.try_wait.parity``, with ``.acquire.cluster`` at that scope (PTX ISA, "mbarrier.try_wait")."""
        return f"mbarrier.try_wait.parity{'.acquire.cluster' if self.scope == 'cluster' else ''}"

    def effects(self) -> tuple[Effect, ...]:
        """Blocks each executing thread until the phase has completed."""
        return (MbarrierWait(0, self.offset, 1, self.scope),)


@dataclass(frozen=True, slots=True)
class MbarrierTestWait(Instruction):
    """``mbarrier.test_wait.parity``: whether the phase of that parity completed, without waiting for it.

    Operands and ``scope`` are those of :class:`MbarrierTryWait`. ``relaxed``: it acquires nothing.
    """

    offset: int = 0
    scope: ClusterScope = "cta"
    relaxed: bool = False
    takes = (u32, u32)
    gives = (pred,)

    @property
    def mnemonic(self) -> str:
        """The scope's qualifier where it is the cluster's (PTX ISA, "mbarrier.test_wait")."""
        order = ".relaxed.cta" if self.relaxed else ".acquire.cluster" if self.scope == "cluster" else ""
        return f"mbarrier.test_wait.parity{order}"

    def effects(self) -> tuple[Effect, ...]:
        """A look at the phase; it acquires where that has completed."""
        return (MbarrierWait(0, self.offset, 1, self.scope, blocks=False, acquires=not self.relaxed),)

    @property
    def template(self) -> str:
        """Without ``.relaxed``, which older PTX lacks."""
        test = f"mbarrier.test_wait.parity{'.acquire.cluster' if self.scope == 'cluster' else ''}.shared::cta.b64"
        return f"{{ .reg .pred done; {test} done, {address(1, self.offset)}, %2; selp.u32 %0, 1, 0, done; }}"


@dataclass(frozen=True, slots=True)
class MbarrierInvalidate(Instruction):
    """``mbarrier.inval``: the 8 bytes are ordinary memory again. Operand: address."""

    offset: int = 0
    ptx = "mbarrier.inval"
    inline = "mbarrier.inval.shared::cta.b64 {address};"
    takes = (u32,)

    def effects(self) -> tuple[Effect, ...]:
        """The end of an mbarrier."""
        return (Invalidation(0, self.offset),)
