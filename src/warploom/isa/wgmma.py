"""``wgmma``: the asynchronous matrix multiply-accumulate of a warpgroup (sm_90a).

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from warploom.core.dtypes import DType, bf16, f16, f32, pred, u32, u64
from warploom.core.errors import VerifyError
from warploom.isa.base import Array, Instruction, braces, inline_ptx, waits_for_groups
from warploom.isa.effects import AsyncMatrix, CommitGroup, Effect, WaitGroup, WarpgroupFence, WarpSync
from warploom.isa.matrix import FragmentSlot
from warploom.layout.catalogue import wgmma_accumulator, wgmma_operand
from warploom.layout.wgmma import element_addresses

M, K = 64, 16


@lru_cache(maxsize=64)
def _accumulator_slot(n: int, first: int) -> FragmentSlot:
    layout = wgmma_accumulator(n)
    return FragmentSlot(layout, f32, first, layout.registers)


@lru_cache(maxsize=8)
def _a_slot(inputs: DType) -> FragmentSlot:
    layout = wgmma_operand(inputs.bits)
    return FragmentSlot(layout, inputs, 0, layout.registers)


@dataclass(frozen=True, slots=True)
class Wgmma(Instruction):
    """``wgmma.mma_async.sync.aligned.m64n{n}k16``: D = A·B (+ D), f16 or bf16 in, f32 out, for four warps.

    Operands: A (a descriptor, or four registers), B's descriptor, whether to accumulate, D's registers; results: the
    same registers. ``transposed_b``: B's rows of K are not contiguous in shared memory (N is); ``transposed_a``: nor
    are A's (M is), which only an A in shared memory may be. Reads and writes happen at any time until the warpgroup
    waits for the committed group.
    """

    n: int
    inputs: DType
    a_source: Literal["shared", "registers"] = "shared"
    transposed_b: bool = False
    transposed_a: bool = False
    ptx = "wgmma.mma_async.sync.aligned.m64n{self.n}k16.f32.{self.inputs}.{self.inputs}"
    does = (WarpSync(aligned=True), AsyncMatrix())

    def __post_init__(self) -> None:
        if self.n % 8 or not 8 <= self.n <= 256:
            raise VerifyError(f"wgmma takes n = 8, 16 … 256, not {self.n}")
        if self.inputs not in (f16, bf16):
            raise VerifyError(f"wgmma here takes f16 or bf16, not {self.inputs}")
        if self.transposed_a and self.a_source != "shared":
            raise VerifyError("wgmma transposes A only where it reads it from shared memory")

    @property
    def a_count(self) -> int:
        """Operands that make up A."""
        return 1 if self.a_source == "shared" else 4

    @property
    def a_slot(self) -> FragmentSlot:
        """A as a fragment, when it is in registers."""
        return _a_slot(self.inputs)

    @property
    def accumulator_slot(self) -> FragmentSlot:
        """D as a fragment among the operands."""
        return _accumulator_slot(self.n, self.a_count + 2)

    @property
    def operand_types(self) -> tuple[DType, ...]:
        """A (a u64 descriptor or four u32), B's u64 descriptor, the predicate, n / 2 f32 registers of D."""
        a = (u64,) if self.a_source == "shared" else (u32,) * 4
        return (*a, u64, pred, *(f32,) * (self.n // 2))

    @property
    def result_types(self) -> tuple[DType, ...]:
        """D: n / 2 f32 registers of each thread of the warpgroup."""
        return (f32,) * (self.n // 2)

    @property
    def optional_operands(self) -> range:
        """D's registers, which are not read where the predicate says not to accumulate."""
        return range(self.a_count + 2, len(self.operand_types))

    def a_addresses(self, descriptor: int) -> Array:
        """Shared byte addresses of A's elements, int64 [64, 16]."""
        return element_addresses(descriptor, M, K, k_contiguous=not self.transposed_a)

    def b_addresses(self, descriptor: int) -> Array:
        """Shared byte addresses of B's elements, int64 [n, 16]."""
        return element_addresses(descriptor, self.n, K, k_contiguous=not self.transposed_b)

    def multiply(self, a: Array, b: Array, c: Array) -> Array:
        """D from A (groups, 64, 16), B (groups, n, 16), C (groups, 64, n), in float32; see ``mma.sync`` on rounding."""
        return np.matmul(a, b.transpose(0, 2, 1)) + c

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        """Inline PTX whose read-write operands are D's registers; the scales of A and B are 1."""
        d = self.n // 2
        a, b, accumulate = operands[: self.a_count], operands[self.a_count], operands[self.a_count + 1]
        a_text = f"%{d}" if self.a_source == "shared" else braces(d, 4)
        of_a = f", {int(self.transposed_a)}" if self.a_source == "shared" else ""
        transpose = f"{of_a}, {int(self.transposed_b)}"
        at = d + self.a_count
        body = (
            f"{{ .reg .pred p; setp.ne.b32 p, %{at + 1}, 0; "
            f"{self.mnemonic} {braces(0, d)}, {a_text}, %{at}, p, 1, 1{transpose}; }}"
        )
        ins = [("l" if self.a_source == "shared" else "r", x) for x in a]
        ins += [("l", b), ("r", f"(unsigned)({accumulate})")]
        return inline_ptx(body, [("+f", r) for r in results], ins, memory=True)


@dataclass(frozen=True, slots=True)
class WgmmaFence(Instruction):
    """``wgmma.fence``: register and shared-memory accesses before it are ordered before the next ``wgmma``."""

    ptx = "wgmma.fence.sync.aligned"
    does = (WarpSync(aligned=True), WarpgroupFence())


@dataclass(frozen=True, slots=True)
class WgmmaCommit(Instruction):
    """``wgmma.commit_group``: closes the group of ``wgmma`` issued since the last commit."""

    ptx = "wgmma.commit_group.sync.aligned"
    does = (WarpSync(aligned=True), CommitGroup("wgmma"))


@dataclass(frozen=True, slots=True)
class WgmmaWait(Instruction):
    """``wgmma.wait_group n``: at most ``pending`` of the newest groups stay unfinished.

    Operands and results are the ``count`` f32 registers that are complete from here on: naming them keeps the compiler
    from moving their uses above the wait.
    """

    pending: int
    count: int
    ptx = "wgmma.wait_group.sync.aligned"

    def __post_init__(self) -> None:
        waits_for_groups(self.pending)

    @property
    def operand_types(self) -> tuple[DType, ...]:
        """``count`` f32 registers of accumulators."""
        return (f32,) * self.count

    @property
    def result_types(self) -> tuple[DType, ...]:
        """The same registers, complete."""
        return (f32,) * self.count

    def effects(self) -> tuple[Effect, ...]:
        """Blocks the warpgroup until at most ``pending`` of its groups are unfinished."""
        return (WarpSync(aligned=True), WaitGroup("wgmma", self.pending))

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        """Inline PTX that reads and writes the registers, and so keeps their uses below it."""
        return inline_ptx(f"{self.mnemonic} {self.pending};", [("+f", r) for r in results], memory=True)
