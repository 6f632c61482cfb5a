"""A Program: one kernel for one configuration, as a tree of statements; its text, and the arguments of its launch.

A Program says nothing about how it runs: the package cuda prints it, the emulator executes it. In its text statements
are one line each and values numbered in order of appearance, without source lines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from warploom.core.arguments import MOST_STRIDE, check_names
from warploom.core.dtypes import DType
from warploom.core.errors import ProblemError
from warploom.ir.statements import (
    NOWHERE,
    Branch,
    Const,
    Flow,
    Loop,
    Op,
    Operand,
    Register,
    Role,
    Roles,
    SharedRegion,
    SourceLine,
    Statement,
    Value,
    When,
    walk,
)
from warploom.isa.barriers import set_max_registers
from warploom.isa.effects import Effect
from warploom.isa.instruction import Instruction


class ValueNumbers:
    """Stable numbers for values: the first to appear is %0."""

    def __init__(self) -> None:
        self._numbers: dict[Value, int] = {}

    def __call__(self, operand: Operand) -> str:
        if isinstance(operand, Const):
            value = operand.value
            text = value.hex() if isinstance(value, float) else str(value)
            return f"{operand.dtype.name}({text})"
        number = self._numbers.setdefault(operand, len(self._numbers))
        label = f".{operand.name}" if operand.name else ""
        return f"{'$' if isinstance(operand, Register) else '%'}{number}{label}"


def block_text(body: tuple[Statement, ...], names: ValueNumbers) -> list[str]:
    """The statements of a kernel, a line or more for each."""
    lines: list[str] = []
    _block(body, 1, names, lines)
    return lines


def _block(body: tuple[Statement, ...], depth: int, names: ValueNumbers, lines: list[str]) -> None:
    pad = "  " * depth
    for s in body:
        if isinstance(s, Op):
            results = ", ".join(f"{names(r)}" for r in s.results)
            operands = ", ".join(names(x) for x in s.operands)
            lines.append(f"{pad}{results + ' = ' if results else ''}{instruction_text(s)} {operands}".rstrip())
        elif isinstance(s, Loop):
            bounds = f"{names(s.start)} .. {names(s.stop)} step {names(s.step)}"
            lines.append(f"{pad}loop {names(s.index)} in {bounds}:")
            _block(s.body, depth + 1, names, lines)
        elif isinstance(s, When):
            lines.append(f"{pad}when{' uniform' if s.uniform else ''} {names(s.condition)}:")
            _block(s.body, depth + 1, names, lines)
            if s.otherwise:
                lines.append(f"{pad}otherwise:")
                _block(s.otherwise, depth + 1, names, lines)
        elif isinstance(s, Roles):
            _roles(s, depth, names, lines)
        elif isinstance(s, Flow):
            for number, block in enumerate(s.blocks):
                lines.append(f"{pad}block {number}:")
                _block(block, depth + 1, names, lines)
        else:
            lines.append(f"{pad}{_branch(s, names)}")


def _branch(branch: Branch, names: ValueNumbers) -> str:
    targets = ", ".join(map(str, branch.targets)) or "end"
    condition = "" if branch.condition is None else f" by {names(branch.condition)}"
    return f"go{' uniform' if branch.uniform else ''} to {targets}{condition}"


def _roles(roles: Roles, depth: int, names: ValueNumbers, lines: list[str]) -> None:
    for role in roles.branches:
        budget = f", {role.registers} registers" if role.registers else ""
        lines.append(f"{'  ' * depth}warps {role.first}..{role.last}{budget}:")
        _block(role.body, depth + 1, names, lines)


def instruction_text(op: Op) -> str:
    """The instruction's mnemonic and the fields that the mnemonic leaves out."""
    return " ".join([op.instruction.mnemonic, *op.instruction.details])


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
        """The strides of the parameter, as a Program's text has them."""
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

    def register_change(self, role: Role) -> Instruction | None:
        """The ``setmaxnreg`` at the start of a role; None where it keeps the registers of the launch."""
        launched = self.launch_registers
        if role.registers is None or role.registers == launched:
            return None
        return set_max_registers(role.registers, "inc" if role.registers > launched else "dec")

    @cached_property
    def text(self) -> str:
        """The Program as text, without source lines: equal texts are equal programs."""
        names = ValueNumbers()
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


Strides = Sequence[int]


def in_order(
    program: Program,
    arguments: Sequence[Any] | Mapping[str, Any],
    layout: Callable[[Parameter, Any], tuple[Sequence[int], Strides]],
) -> list[Any]:
    """An argument for each parameter. Strides that are not given, by name, are those of their arrays.

    ``layout``: (shape, strides in elements) of the array that is given for a parameter. Raises ProblemError for too
    many, too few or unknown arguments, and for arrays of other dimensions than the kernel's.
    """
    named = arguments if isinstance(arguments, Mapping) else _by_name(program, arguments)
    taken = {p.name: p.stride_of is None for p in program.parameters}
    missing = [name for name, must in taken.items() if must and name not in named]
    check_names(program.name, missing, sorted(set(named) - set(taken)))
    found = dict(named)
    strides = {p.name: p.stride_of for p in program.parameters if p.stride_of and p.name not in named}
    arrays = {name for name, _ in strides.values()}
    known = {p.name: _strides(p, *layout(p, named[p.name])) for p in program.parameters if p.name in arrays}
    found |= {name: known[array][dimension] for name, (array, dimension) in strides.items()}
    return [found[name] for name in taken]


def _by_name(program: Program, arguments: Sequence[Any]) -> dict[str, Any]:
    names = [p.name for p in program.parameters if p.stride_of is None]
    if len(arguments) != len(names):
        raise ProblemError(f"{program.name} takes {len(names)} arguments ({', '.join(names)}), not {len(arguments)}")
    return dict(zip(names, arguments, strict=True))


def _strides(of: Parameter, shape: Sequence[int], strides: Strides) -> Strides:
    """The strides that a kernel takes of an array; 0 for one that says nothing and is none that it takes."""
    name, count, last = of.name, of.strides, f"{of.strides + 1} whose last elements lie side by side"
    if len(shape) not in (count, count + 1):
        raise ProblemError(f"argument {name} has {len(shape)} dimensions; the kernel takes {count}, or {last}")
    tells = [size > 1 and 0 not in shape for size in shape]
    if len(shape) > count and tells[-1] and strides[-1] != 1:
        raise ProblemError(
            f"argument {name} has the stride {strides[-1]} between its last elements; the kernel takes {count} "
            f"dimensions, or {last}: copy it"
        )
    found = [stride if 0 <= stride <= MOST_STRIDE else 0 for stride in strides[:count]]
    for dimension, stride in enumerate(strides[:count]):
        if tells[dimension] and found[dimension] != stride:
            raise ProblemError(
                f"argument {name} has the stride {stride} in dimension {dimension}; kernels take 0 to {MOST_STRIDE}: "
                "copy it"
            )
    return found
