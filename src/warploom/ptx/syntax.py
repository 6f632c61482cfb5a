"""The syntax tree of PTX: modules, functions, instructions, operands.

Source: PTX ISA, "Syntax", "State Spaces, Types, and Variables", "Instruction Operands".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, TypeAlias

import numpy as np

from warploom.core.errors import PtxError, VerifyError
from warploom.ir.statements import SourceLine

_MOST_SHOWN = 100
"""Characters of the operands in a message."""


@dataclass(frozen=True, slots=True)
class PtxRegister:
    """A virtual or special register: ``%r12``, ``%tid.x``; ``_`` is the sink, whose name is empty."""

    name: str

    def __str__(self) -> str:
        return self.name or "_"


@dataclass(frozen=True, slots=True)
class Integer:
    """An integer constant."""

    value: int

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True)
class Float:
    """A floating-point constant by its bits: ``0f3F800000`` (32), ``0d…`` and decimals (64)."""

    bits: int
    width: Literal[32, 64]

    @property
    def value(self) -> float:
        """The constant as a Python float."""
        return struct.unpack("<f" if self.width == 32 else "<d", self.bits.to_bytes(self.width // 8, "little"))[0]

    def pattern(self, width: int) -> int:
        """The bits of the number as a float of 32 or 64 bits. Raises VerifyError for another width."""
        if width == self.width:
            return self.bits
        if width not in (32, 64):
            raise VerifyError(f"the type .b{width} for the constant {self} is not supported")
        with np.errstate(over="ignore"):
            return int(np.float64(self.value).astype(f"f{width // 8}").view(f"u{width // 8}"))

    def __str__(self) -> str:
        return f"0{'f' if self.width == 32 else 'd'}{self.bits:0{self.width // 4}X}"


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable, function or label by name, and a displacement in bytes."""

    name: str
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.name}+{self.offset}" if self.offset else self.name


@dataclass(frozen=True, slots=True)
class PtxVector:
    """Several operands in braces or parentheses."""

    items: tuple[Operand, ...]

    def __str__(self) -> str:
        return "{" + ", ".join(map(str, self.items)) + "}"


@dataclass(frozen=True, slots=True)
class Address:
    """``[base + offset]``; ``coordinates`` of a tensor copy, ``[map, {x, y}]``."""

    base: PtxRegister | Symbol | Integer
    offset: int = 0
    coordinates: PtxVector | None = None

    def __str__(self) -> str:
        return f"[{self.base}{f'+{self.offset}' if self.offset else ''}]"


@dataclass(frozen=True, slots=True)
class Not:
    """A predicate operand negated: ``!%p1``."""

    register: PtxRegister

    def __str__(self) -> str:
        return f"!{self.register}"


@dataclass(frozen=True, slots=True)
class Both:
    """Two destinations at once: ``%p1|%p2``."""

    first: PtxRegister
    second: PtxRegister

    def __str__(self) -> str:
        return f"{self.first}|{self.second}"


Operand: TypeAlias = PtxRegister | Integer | Float | Symbol | PtxVector | Address | Not | Both


def parts(x: Operand) -> tuple[Operand, ...]:
    """Both destinations of two at once, the base and the coordinates of an address, any other operand itself."""
    if isinstance(x, Both):
        return x.first, x.second
    if isinstance(x, Address):
        return (x.base,) if x.coordinates is None else (x.base, x.coordinates)
    return (x,)


def leaves(x: Operand) -> Iterator[Operand]:
    """The registers, symbols and constants in an operand."""
    for part in parts(x):
        inner = part.items if isinstance(part, PtxVector) else (part.register,) if isinstance(part, Not) else ()
        yield from chain.from_iterable(map(leaves, inner)) if inner else (part,)


@dataclass(frozen=True, slots=True)
class Guard:
    """``@%p`` or ``@!%p`` before an instruction."""

    register: PtxRegister
    negated: bool


@dataclass(frozen=True, slots=True)
class PtxInstruction:
    """One instruction: ``ld.global.v4.b32`` has the opcode ``ld`` and the modifiers ``global``, ``v4``, ``b32``."""

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Guard | None
    where: SourceLine

    @property
    def form(self) -> str:
        """The opcode with its modifiers, as written."""
        return ".".join((self.opcode, *self.modifiers))

    def refusal(self, why: str) -> PtxError:
        """The error that says why the instruction is refused."""
        operands = ", ".join(map(str, self.operands))
        if len(operands) > _MOST_SHOWN:
            operands = operands[:_MOST_SHOWN] + " …"
        return PtxError(f"{self.where}: {self.form} {operands}: {why}")


@dataclass(frozen=True, slots=True)
class PtxLabel:
    """A place to branch to."""

    name: str


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of a state space: ``bytes`` in all (0: an array whose size the launch gives), and how it begins.

    ``pointer`` is the state space that a parameter points to as its declaration says, '' if it does not.
    """

    name: str
    space: str
    type: str
    bytes: int
    align: int
    initial: bytes = b""
    pointer: str = ""


WORKSPACE = Variable("%envreg", "global", "b32", 8, 8)
"""What the system gives a cooperative launch; the second word is where the CTAs of the grid meet (``grid.sync()``)."""
ENVIRONMENT = {"%envreg2": 0, "%envreg1": 1}
"""The registers that hold the low (0) and the high half of its address."""


@dataclass(slots=True)
class Function:
    """An ``.entry`` or a ``.func``: ``registers`` are name → type; ``targets`` lists of labels for ``brx.idx``."""

    name: str
    entry: bool
    parameters: tuple[Variable, ...]
    results: tuple[Variable, ...]
    where: SourceLine
    body: list[PtxInstruction | PtxLabel] = field(default_factory=list[PtxInstruction | PtxLabel])
    registers: dict[str, str] = field(default_factory=dict[str, str])
    variables: list[Variable] = field(default_factory=list[Variable])
    targets: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])


@dataclass(slots=True)
class Module:
    """A PTX file: its target (``sm_90a``), variables and functions by name."""

    name: str
    target: str = ""
    variables: dict[str, Variable] = field(default_factory=dict[str, Variable])
    functions: dict[str, Function] = field(default_factory=dict[str, Function])

    @property
    def entries(self) -> list[Function]:
        """The kernels of the module."""
        return [f for f in self.functions.values() if f.entry]
