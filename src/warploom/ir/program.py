"""A Program: one kernel for one configuration, as a frozen tree of statements.

A Program says nothing about how it runs: the package cuda prints it, the emulator executes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from warploom.core.dtypes import DType
from warploom.ir.statements import NOWHERE, Op, Role, SharedRegion, SourceLine, Statement, Value, walk
from warploom.ir.text import Names, block_text
from warploom.isa.barriers import set_max_registers
from warploom.isa.effects import Effect
from warploom.isa.form import Formed

REGISTERS_PER_SM = 65536


@dataclass(frozen=True, slots=True)
class Parameter:
    """A kernel parameter. ``pointer``: ``dtype`` is the element type; ``scalar``: the register type.

    ``tensor_map``: a 128-byte TMA descriptor passed as a ``__grid_constant__``. ``strides``: how many strides of its
    array come with a pointer; the scalar that is one of them is ``stride_of`` (the pointer's name, the dimension).
    """

    name: str
    kind: Literal["pointer", "scalar", "tensor_map"]
    dtype: DType
    value: Value
    strides: int = 0
    stride_of: tuple[str, int] | None = None

    @property
    def stride_text(self) -> str:
        """What a Program's text says of strides."""
        if self.stride_of is not None:
            return f" stride {self.stride_of[1]} of {self.stride_of[0]}"
        return f" with {self.strides} strides" if self.strides else ""


@dataclass(frozen=True)
class Program:
    """A traced kernel: everything that printer and emulator need, and nothing of the GPU it may run on.

    Programs are equal where their texts are, so that a copy, and one from another process, equals its original.

    ``threads`` per CTA (a multiple of 32), ``min_ctas`` the residency asked of ptxas, ``shared_bytes`` of dynamic
    shared memory, ``opt_level`` ptxas's (0 … 3), ``requires`` the least architecture ("sm_80", "sm_90a"), ``cluster``
    the CTAs along x, y and z that run together on neighbouring SMs (their grid is a multiple of it), ``local_bytes``
    of local memory for each thread.
    """

    name: str
    parameters: tuple[Parameter, ...]
    threads: int
    body: tuple[Statement, ...]
    shared: tuple[SharedRegion, ...] = ()
    shared_bytes: int = 0
    min_ctas: int = 1
    opt_level: int = 3
    max_registers: int | None = None
    requires: str = "sm_80"
    cluster: tuple[int, int, int] = (1, 1, 1)
    local_bytes: int = 0
    where: SourceLine = field(default=NOWHERE, compare=False)

    @property
    def warps(self) -> int:
        """Warps per CTA."""
        return self.threads // 32

    @property
    def cluster_ctas(self) -> int:
        """CTAs of a cluster."""
        return self.cluster[0] * self.cluster[1] * self.cluster[2]

    @property
    def launch_registers(self) -> int:
        """Registers per thread that ptxas plans with where budgets change: an SM's over its threads, in steps of 8."""
        fitting = REGISTERS_PER_SM // max(1, self.threads * self.min_ctas) // 8 * 8
        return min(255, fitting, self.max_registers or 255)

    def register_change(self, role: Role) -> Formed | None:
        """What a role begins with to have its budget; None where it keeps the registers of the launch."""
        launched = self.launch_registers
        if role.registers is None or role.registers == launched:
            return None
        return set_max_registers(role.registers, "inc" if role.registers > launched else "dec")

    @cached_property
    def text(self) -> str:
        """The Program as text, without source lines: equal texts are equal programs."""
        names = Names()
        lines = [
            f"kernel {self.name}: {self.threads} threads, min_ctas {self.min_ctas}, "
            f"{self.shared_bytes} bytes shared, opt_level {self.opt_level}, "
            f"max_registers {self.max_registers}, requires {self.requires}"
        ]
        if self.cluster_ctas > 1:
            lines.append(f"  cluster {self.cluster}")
        if self.local_bytes:
            lines.append(f"  {self.local_bytes} bytes local")
        lines += [f"  parameter {names(p.value)} {p.kind} {p.dtype.name}{p.stride_text}" for p in self.parameters]
        lines += [f"  shared {r.name}: {r.bytes} bytes at {r.offset}" for r in self.shared]
        return "\n".join([*lines, *block_text(self.body, names)]) + "\n"

    @cached_property
    def digest(self) -> str:
        """A hash of :attr:`text` that is stable across processes and machines."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Program) and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)  # of the whole tree it would take long, and caches ask often

    def __str__(self) -> str:
        return self.text

    def statements(self) -> Iterator[Statement]:
        """Every statement, depth first."""
        return walk(self.body)

    def ops(self) -> Iterator[Op]:
        """Every instruction, depth first."""
        return iter(self._ops)

    @cached_property
    def _ops(self) -> tuple[Op, ...]:
        return tuple(s for s in walk(self.body) if isinstance(s, Op))

    @cached_property
    def effects(self) -> tuple[tuple[Op, Effect], ...]:
        """Every effect with its instruction, depth first."""
        return tuple((op, effect) for op in self._ops for effect in op.instruction.effects())
