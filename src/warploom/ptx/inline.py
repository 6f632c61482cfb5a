"""Calls of ``.func``: the body of the function in place of each call. What is passed lies in local memory.

Source: PTX ISA, "Abstracting the ABI", ``call``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count

from warploom.isa.barriers import SYSTEM_CALLS
from warploom.ptx.syntax import (
    Address,
    Both,
    Function,
    Guard,
    Module,
    Not,
    Operand,
    PtxInstruction,
    PtxLabel,
    PtxRegister,
    PtxVector,
    Symbol,
    Variable,
)

_DEPTH = 32  # of calls within calls


@dataclass(slots=True)
class _Names:
    """The names of one copy of a function: its own get ``suffix``, its parameters are the caller's variables."""

    own: set[str]
    passed: dict[str, str] = field(default_factory=dict[str, str])
    suffix: str = ""

    def of(self, name: str) -> str:
        """The name in the function that the copy goes into."""
        return self.passed.get(name, name + self.suffix if name in self.own else name)

    def operand(self, x: Operand) -> Operand:
        """An operand with the names of the copy."""
        if isinstance(x, PtxRegister):
            return PtxRegister(self.of(x.name))
        if isinstance(x, Symbol):
            return Symbol(self.of(x.name), x.offset)
        if isinstance(x, PtxVector):
            return PtxVector(tuple(map(self.operand, x.items)))
        if isinstance(x, Address):
            base, at = self.operand(x.base), x.coordinates
            assert isinstance(base, PtxRegister | Symbol) or base is x.base
            return replace(
                x, base=base, coordinates=None if at is None else PtxVector(tuple(map(self.operand, at.items)))
            )
        if isinstance(x, Not):
            return Not(PtxRegister(self.of(x.register.name)))
        if isinstance(x, Both):
            return Both(PtxRegister(self.of(x.first.name)), PtxRegister(self.of(x.second.name)))
        return x


def inlined(module: Module, function: Function) -> Function:
    """``function`` without calls. Raises PtxError for functions without a body, and for those that call themselves."""
    result = replace(function, body=[], registers=dict(function.registers), variables=[], targets={})
    _Copier(module, result).copy(function, _Names(set()), (), function.name)
    return result


class _Copier:
    def __init__(self, module: Module, into: Function) -> None:
        self.module, self.into, self.numbers = module, into, count(1)

    def copy(self, function: Function, names: _Names, stack: tuple[str, ...], end: str) -> None:
        """Append a copy of a function's body; it returns to the label ``end``, if it was called."""
        into = self.into
        for variable in function.variables:
            space = "local" if variable.space == "param" else variable.space
            into.variables.append(replace(variable, name=names.of(variable.name), space=space))
        for name, kind in function.registers.items():
            into.registers[names.of(name)] = kind
        for name, labels in function.targets.items():
            into.targets[names.of(name)] = tuple(map(names.of, labels))
        inside = {v.name for v in function.variables if v.space == "param"} | set(names.passed)
        for item in function.body:
            if isinstance(item, PtxLabel):
                into.body.append(PtxLabel(names.of(item.name)))
                continue
            if item.opcode == "call":
                self._call(item, names, (*stack, function.name))
                continue
            if stack and item.opcode == "ret":
                item = replace(item, opcode="bra", modifiers=(), operands=(Symbol(end),))
            into.body.append(self._renamed(item, names, inside))

    @staticmethod
    def _renamed(i: PtxInstruction, names: _Names, inside: set[str]) -> PtxInstruction:
        modifiers = i.modifiers
        if "param" in modifiers and any(_named(x) in inside for x in i.operands):
            modifiers = tuple("local" if m.startswith("param") else m for m in modifiers)
        guard = None if i.guard is None else Guard(PtxRegister(names.of(i.guard.register.name)), i.guard.negated)
        return replace(i, modifiers=modifiers, operands=tuple(map(names.operand, i.operands)), guard=guard)

    def _call(self, i: PtxInstruction, names: _Names, stack: tuple[str, ...]) -> None:
        symbols = [x for x in i.operands if isinstance(x, Symbol)]
        target = symbols[0].name if symbols else ""
        called = self.module.functions.get(target)
        before = i.operands[: i.operands.index(symbols[0])] if symbols else ()
        after = i.operands[len(before) + 1 :]
        if target in SYSTEM_CALLS and (called is None or not called.body):
            places = tuple(Address(Symbol(name)) for name in (*_given(before), *_given(after)))
            system = replace(i, opcode=target, modifiers=(), operands=places)
            self.into.body.append(self._renamed(system, names, set()))
            return
        if called is None or not called.body:
            pointer = any(isinstance(x, PtxRegister) for x in before)
            what = "calls by a pointer are" if pointer else "this function has no body here: calls of it are"
            raise i.refusal(f"{what} not supported")
        if target in stack:
            raise i.refusal("functions that call themselves are not supported")
        if len(stack) > _DEPTH:
            raise i.refusal(f"calls more than {_DEPTH} deep are not supported")
        if i.guard is not None:
            raise i.refusal("calls under a predicate are not supported")
        passed = dict(zip(_listed(called.parameters), _given(after), strict=False))
        passed |= dict(zip(_listed(called.results), _given(before), strict=False))
        if len(passed) != len(called.parameters) + len(called.results):
            raise i.refusal("its arguments are not those of the function")
        number = next(self.numbers)
        own = {*called.registers, *called.targets, *(v.name for v in called.variables)}
        own |= {x.name for x in called.body if isinstance(x, PtxLabel)}
        inner = _Names(own, {formal: names.of(actual) for formal, actual in passed.items()}, f"@{number}")
        end = f"return@{number}"
        self.copy(called, inner, stack, end)
        self.into.body.append(PtxLabel(end))


def _listed(variables: tuple[Variable, ...]) -> list[str]:
    return [v.name for v in variables]


def _given(operands: tuple[Operand, ...]) -> list[str]:
    return [x.name for v in operands if isinstance(v, PtxVector) for x in v.items if isinstance(x, Symbol)]


def _named(x: Operand) -> str:
    return x.base.name if isinstance(x, Address) and isinstance(x.base, Symbol) else ""
