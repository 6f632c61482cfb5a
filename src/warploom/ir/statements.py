"""The parts of a Program: values of a thread, and a frozen tree of statements over them.

Values are single-assignment registers of a thread; :class:`Register` is the one mutable kind, written by instructions
that name it as a result.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from warploom.core.dtypes import DType
from warploom.isa.instruction import Instruction
from warploom.layout.shared import SharedLayout


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the author's source, and the line of the PTX that came of it (0 where there is none).

    ``callers`` are the calls of the author's own functions that led there, the innermost first. Lines that differ in
    them alone are equal: a helper's line is one line.
    """

    file: str
    line: int
    function: str = ""
    ptx: int = field(default=0, compare=False)
    callers: tuple[SourceLine, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, function: Any) -> SourceLine:
        """The line where a function is defined; :data:`NOWHERE` for what is none of Python's."""
        code = getattr(inspect.unwrap(function), "__code__", None)
        return NOWHERE if code is None else cls(code.co_filename, code.co_firstlineno, code.co_name)

    def __str__(self) -> str:
        author = f"{self.file.rsplit('/', 1)[-1]}:{self.line}"
        return f"{author} (PTX line {self.ptx})" if self.ptx else author

    @property
    def calls(self) -> str:
        """The calls that led there, to be written behind the line; empty if there are none."""
        return f" (called from {', '.join(map(str, self.callers))})" if self.callers else ""

    @property
    def stack(self) -> str:
        """The line, and the calls that led there."""
        return f"{self}{self.calls}"


NOWHERE = SourceLine("", 0)

Violation: TypeAlias = tuple[SourceLine, str]
"""A rule that a Program breaks: the author's line, and what is wrong there."""


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
class SharedRegion:
    """A named range of shared memory, in bytes from its start. Regions may overlap when aliasing was asked for."""

    name: str
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class TileRegion(SharedRegion):
    """A region of shared memory that is a tile, laid out by its author.

    ``layout`` is that of one stage (None: of memory that PTX declares). Of several stages, ``stage_bytes`` from one to
    the next (0: it is one stage, or all).
    """

    layout: SharedLayout | None = None
    stage_bytes: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next; 0: it has but one."""
        return self.layout.row_bytes if self.layout is not None and self.layout.rows > 1 else 0

    @property
    def panel_bytes(self) -> int:
        """Bytes from one panel to the next; 0: it has but one."""
        return self.layout.panels[1].byte_offset if self.layout is not None and len(self.layout.panels) > 1 else 0

    @property
    def swizzle_bytes(self) -> int | None:
        """The width that is swizzled, in bytes; None: in no way that the hardware knows."""
        return self.layout.swizzle.row_bytes if self.layout is not None else 0

    def names(self, place: int) -> str:
        """A place in shared memory in the author's terms: tile, stage, row and column, as far as there are several."""
        inside, found = place - self.offset, [self.name]
        if self.stage_bytes:
            found.append(f"stage {inside // self.stage_bytes}")
            inside %= self.stage_bytes
        if self.layout is not None and inside < self.layout.bytes:
            row, col = self.layout.element_at(inside)
            found += [f"row {row}"] * (self.layout.rows > 1) + [f"column {col}"] * (self.layout.cols > 1)
        return ", ".join(found)

    def room(self, place: int) -> int:
        """The bytes from a place in shared memory to the end of its stage, or of the tile."""
        inside = place - self.offset
        if not self.stage_bytes or self.layout is None:
            return self.bytes - inside
        return self.layout.bytes - inside % self.stage_bytes


@dataclass(frozen=True, slots=True)
class Op:
    """One instruction. A result may be a :class:`Register`, which it overwrites.

    ``within`` tells of each operand that is a shared address, or a descriptor of one, from which tile the author formed
    it: where the access must stay. It is empty where that is known of none. ``relies_on`` is the author's reason for an
    order that PTX does not promise. Neither changes anything in what is printed.
    """

    instruction: Instruction
    operands: tuple[Operand, ...]
    results: tuple[Value, ...]
    where: SourceLine = NOWHERE
    within: tuple[TileRegion | None, ...] = ()
    relies_on: str = ""

    def tile(self, operand: int) -> TileRegion | None:
        """The tile from which the operand at this position was formed, if that is known."""
        return self.within[operand] if self.within else None


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
    """The body of warps ``first`` ≤ w < ``last`` of the CTA, and their register budget (``setmaxnreg``), if any."""

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


@dataclass(frozen=True, slots=True)
class Branch:
    """The way of the threads at the end of a block of a :class:`Flow`; ``targets`` are numbers of its blocks.

    Without targets the threads end. A predicate as ``condition`` chooses the first of two targets where it holds, an
    unsigned integer (``brx.idx``) the target of that number. ``uniform`` claims that all active lanes of a warp agree.
    """

    targets: tuple[int, ...]
    condition: Operand | None = None
    uniform: bool = False
    where: SourceLine = NOWHERE


@dataclass(frozen=True, slots=True)
class Flow:
    """Control flow that is no tree: basic blocks, each of which ends with its only :class:`Branch`.

    Threads start at block 0. Of the lanes of a warp, those in the block of the lowest number go first, so that they
    meet again where their ways join: blocks stand in an order in which only loops lead back. Values belong to their
    block; what is used in another one is a :class:`Register`.
    """

    blocks: tuple[tuple[Statement, ...], ...]
    where: SourceLine = NOWHERE


Statement: TypeAlias = Op | Loop | When | Roles | Branch | Flow


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
    return statement.blocks if isinstance(statement, Flow) else ()


def with_blocks(statement: Statement, nested: Sequence[tuple[Statement, ...]]) -> Statement:
    """The statement with other nested blocks, as many as :func:`blocks` gives."""
    if isinstance(statement, Loop):
        return replace(statement, body=nested[0])
    if isinstance(statement, When):
        return replace(statement, body=nested[0], otherwise=nested[1])
    if isinstance(statement, Roles):
        branches = zip(statement.branches, nested, strict=True)
        return replace(statement, branches=tuple([replace(branch, body=body) for branch, body in branches]))
    return replace(statement, blocks=tuple(nested)) if isinstance(statement, Flow) else statement


def operands_of(statement: Statement) -> tuple[Operand, ...]:
    """The operands a statement reads itself (not those of nested statements)."""
    if isinstance(statement, Op):
        return statement.operands
    if isinstance(statement, Loop):
        return (statement.start, statement.stop, statement.step)
    if isinstance(statement, When):
        return (statement.condition,)
    if isinstance(statement, Branch) and statement.condition is not None:
        return (statement.condition,)
    return ()


def results_of(statement: Statement) -> tuple[Value, ...]:
    """The values a statement defines or registers it writes itself."""
    if isinstance(statement, Op):
        return statement.results
    if isinstance(statement, Loop):
        return (statement.index,)
    return ()


def label(operand: Operand) -> str:
    """An operand by its name, number or value."""
    if isinstance(operand, Const):
        return f"the constant {operand.value}"
    return f"'{operand.name}'" if operand.name else f"value {operand.number}"
