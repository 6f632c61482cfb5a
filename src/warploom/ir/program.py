"""A Program: one kernel for one configuration, as a frozen tree of statements.

Values are single-assignment registers of a thread; :class:`Register` is the one mutable kind, written by instructions
that name it as a result. A Program says nothing about how it runs: the CUDA room prints it, the emulator executes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

from warploom.core.dtypes import DType
from warploom.isa.base import Instruction


@dataclass(frozen=True, slots=True)
class SourceLine:
    """Where the author wrote it."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"


NOWHERE = SourceLine("", 0)


@dataclass(frozen=True, slots=True)
class Const:
    """An immediate. Integers are Python ints (may be negative for unsigned types: they wrap), floats are floats."""

    dtype: DType
    value: int | float | bool


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A single-assignment register of each thread. ``name`` is the author's, made unique per Program."""

    number: int
    dtype: DType
    name: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Register(Value):
    """A mutable register of each thread: carried through loops, written in place by accumulating instructions."""


Operand: TypeAlias = Value | Const


@dataclass(frozen=True, slots=True)
class Op:
    """One instruction. A result may be a :class:`Register`, which it overwrites."""

    instruction: Instruction
    operands: tuple[Operand, ...]
    results: tuple[Value, ...]
    where: SourceLine = NOWHERE


@dataclass(frozen=True, slots=True)
class Loop:
    """``for (index = start; index < stop; index += step)`` with a body that is not unrolled."""

    index: Value
    start: Operand
    stop: Operand
    step: Operand
    body: tuple[Statement, ...]
    where: SourceLine = NOWHERE


@dataclass(frozen=True, slots=True)
class When:
    """``if (condition) body else otherwise``. ``uniform`` claims that all active lanes of a warp agree."""

    condition: Operand
    body: tuple[Statement, ...]
    otherwise: tuple[Statement, ...] = ()
    uniform: bool = False
    where: SourceLine = NOWHERE


@dataclass(frozen=True, slots=True)
class Role:
    """What warps ``first`` ≤ w < ``last`` of the CTA do, and their register budget (``setmaxnreg``), if any."""

    first: int
    last: int
    body: tuple[Statement, ...]
    registers: int | None = None
    where: SourceLine = NOWHERE


@dataclass(frozen=True, slots=True)
class Roles:
    """Warp specialisation: one if/else chain over disjoint ranges of warps."""

    branches: tuple[Role, ...]
    where: SourceLine = NOWHERE


Statement: TypeAlias = Op | Loop | When | Roles


@dataclass(frozen=True, slots=True)
class Parameter:
    """A kernel parameter. ``pointer``: ``dtype`` is the element type; ``scalar``: the register type.

    ``tensor_map``: a 128-byte TMA descriptor passed as a ``__grid_constant__``.
    """

    name: str
    kind: Literal["pointer", "scalar", "tensor_map"]
    dtype: DType
    value: Value


@dataclass(frozen=True, slots=True)
class SharedRegion:
    """A named range of shared memory, in bytes from its start. Regions may overlap when aliasing was asked for."""

    name: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class Program:
    """A traced kernel: everything that the CUDA room and the emulator need, and nothing of the GPU it may run on.

    ``threads`` per CTA (a multiple of 32), ``min_ctas`` the residency asked of ptxas, ``shared_bytes`` of dynamic
    shared memory, ``opt_level`` ptxas's (0 … 3), ``requires`` the least architecture ("sm_80", "sm_90a"), ``cluster``
    the CTAs along x, y and z that run together on neighbouring SMs (their grid is a multiple of it).
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
    where: SourceLine = field(default=NOWHERE, compare=False)

    @property
    def warps(self) -> int:
        """Warps per CTA."""
        return self.threads // 32

    @property
    def cluster_ctas(self) -> int:
        """CTAs of a cluster."""
        return self.cluster[0] * self.cluster[1] * self.cluster[2]

    @cached_property
    def text(self) -> str:
        """The Program as text, without source lines: equal texts are equal programs."""
        from warploom.ir.text import program_text

        return program_text(self)

    @cached_property
    def digest(self) -> str:
        """A hash of :attr:`text` that is stable across processes and machines."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def __str__(self) -> str:
        return self.text

    def statements(self) -> Iterator[Statement]:
        """Every statement, depth first."""
        return walk(self.body)

    def ops(self) -> Iterator[Op]:
        """Every instruction, depth first."""
        return (s for s in walk(self.body) if isinstance(s, Op))


def walk(body: tuple[Statement, ...]) -> Iterator[Statement]:
    """Every statement of ``body``, depth first."""
    waiting = list(reversed(body))
    while waiting:
        statement = waiting.pop()
        yield statement
        if not isinstance(statement, Op):
            for block in reversed(blocks(statement)):
                waiting.extend(reversed(block))


def blocks(statement: Statement) -> tuple[tuple[Statement, ...], ...]:
    """The nested blocks of a statement."""
    if isinstance(statement, Loop):
        return (statement.body,)
    if isinstance(statement, When):
        return (statement.body, statement.otherwise)
    if isinstance(statement, Roles):
        return tuple(branch.body for branch in statement.branches)
    return ()


def operands_of(statement: Statement) -> tuple[Operand, ...]:
    """The operands a statement reads itself (not those of nested statements)."""
    if isinstance(statement, Op):
        return statement.operands
    if isinstance(statement, Loop):
        return (statement.start, statement.stop, statement.step)
    if isinstance(statement, When):
        return (statement.condition,)
    return ()


def results_of(statement: Statement) -> tuple[Value, ...]:
    """The values a statement defines or registers it writes itself."""
    if isinstance(statement, Op):
        return statement.results
    if isinstance(statement, Loop):
        return (statement.index,)
    return ()
