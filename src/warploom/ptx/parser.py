"""PTX text → :class:`warploom.ptx.syntax.Module`.

Names that a block in braces declares are made unique, so that a function has one flat list of instructions and labels.

Source: PTX ISA, "Syntax", "Directives", "Instruction Statements".
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from warploom.core.errors import PtxError
from warploom.ptx.lines import Lines
from warploom.ptx.operands import OperandCursor
from warploom.ptx.syntax import (
    TYPES,
    Both,
    Float,
    Function,
    Guard,
    Integer,
    Module,
    Operand,
    PtxInstruction,
    PtxLabel,
    PtxRegister,
    Symbol,
    Variable,
)
from warploom.ptx.tokens import END

_SPACES = ("global", "const", "shared", "local", "param", "tex")

_MOST_REGISTERS = 1 << 20


def parse(text: str, name: str = "kernel.ptx") -> Module:
    """The module that ``text`` is; messages call it ``name``. Raises PtxError with the line where it is no PTX."""
    try:
        return _Parser(text, name).module()
    except RecursionError:
        raise PtxError(f"{name}: its braces are nested too deeply") from None


@dataclass
class _Scope:
    """Names of one block, as its code calls them → as the function does; where its code starts."""

    start: int
    names: dict[str, str] = field(default_factory=dict[str, str])
    labels: dict[str, str] = field(default_factory=dict[str, str])


class _Parser(OperandCursor):
    def __init__(self, text: str, name: str) -> None:
        super().__init__(text, name)
        self.lines = Lines(name)
        self.result = Module(name)
        self.scopes: list[_Scope] = []
        self.unique = 0

    # Modules

    def module(self) -> Module:
        while self.next is not END:
            self._item()
        for function in self.result.functions.values():
            function.where = self.lines.resolved(function.where)
            function.body = [
                replace(i, where=self.lines.resolved(i.where)) if isinstance(i, PtxInstruction) else i
                for i in function.body
            ]
        if not self.result.target:
            raise PtxError(f"{self.name} is no PTX: it has no .target")
        return self.result

    def _item(self) -> None:
        word = self.next.text
        if word == ".version":
            self.at += 2
        elif word == ".target":
            self.take()
            self.result.target = self.word()
            while self.accept(","):
                self.word()
        elif word == ".address_size":
            self.take()
            if self.integer() != 64:
                self.fail("addresses must have 64 bits")
        elif word == ".file":
            self.take()
            self._file()
        elif word == ".section":
            self.take()
            self.word()
            self._skip_braces()
        elif word in (".visible", ".extern", ".weak", ".common", ";"):
            self.take()
        elif word in (".entry", ".func"):
            self._function(word == ".entry")
        elif word.removeprefix(".") in _SPACES:
            variable = self._variable()
            self.result.variables[variable.name] = variable
        elif word in (".pragma", ".alias"):
            while not self.accept(";"):
                self.take()
        else:
            self.fail("expected a directive of a module")

    def _file(self) -> None:
        index = self.integer()
        self.lines.files[index] = self.take().text.strip('"')
        while self.accept(","):
            self.integer()

    def _skip_braces(self) -> None:
        self.expect("{")
        depth = 1
        while depth:
            if self.next is END:
                self.fail("expected '}'")
            text = self.take().text
            depth += (text == "{") - (text == "}")

    def _variable(self) -> Variable:
        """``.shared .align 16 .b8 name[64]``, with or without its semicolon."""
        space = self.word().removeprefix(".")
        kind, align, pointer, count = "", 0, "", 1
        while self.next.text.startswith("."):
            word = self.word().removeprefix(".")
            if word == "align":
                align = self.integer()
                if align < 1 or align & align - 1:
                    self.fail(f"an alignment of {align} is no power of two")
            elif word in ("v2", "v4"):
                count = int(word[1])
            elif word in TYPES:
                kind = word
            elif kind and word in _SPACES:
                pointer = word
            elif word == "ptr":
                pointer = "generic"
            elif word not in ("unified", "managed", *_SPACES):
                self.fail(f"unknown attribute .{word} of a variable")
        if not kind:
            self.fail("expected a type")
        name = self.word()
        while self.accept("["):
            count *= 0 if self.next.text == "]" else self.integer()
            if count < 0:
                self.fail(f"{name} has a negative size")
            self.expect("]")
        size = max(1, TYPES[kind] // 8)
        initial = self._initial(size) if self.accept("=") else b""
        self.accept(";")
        return Variable(name, space, kind, count * size, align or size, initial, pointer)

    def _initial(self, size: int) -> bytes:
        """``= 5``, ``= {1, 2}``: the bytes of an initial value."""
        if self.accept("{"):
            parts = b""
            while not self.accept("}"):
                parts += self._initial(size)
                self.accept(",")
            return parts
        value = self.operand()
        if isinstance(value, Float) and size >= 4:
            return value.pattern(8 * size).to_bytes(size, "little")
        if not isinstance(value, Integer):
            self.fail("an initial value must be a number")
        return (value.value % (1 << 8 * size)).to_bytes(size, "little")

    # Functions

    def _variables(self) -> tuple[Variable, ...]:
        found: list[Variable] = []
        if self.accept("("):
            while not self.accept(")"):
                found.append(self._variable())
                self.accept(",")
        return tuple(found)

    def _function(self, entry: bool) -> None:
        where = self.lines.here(self.take().line)
        results = () if entry else self._variables()
        function = Function(self.word(), entry, self._variables(), results, where)
        self.registers = function.registers
        while self.next.text.startswith("."):
            word = self.word().removeprefix(".")
            values: list[int] = []
            while self.next.kind == "number":
                values.append(self.integer())
                self.accept(",")
            if self.next.kind == "string":
                self.take()
            function.directives[word] = tuple(values)
        if self.next.text == "{":
            self.lines.start()
            self._braces(function)
            declared = self.result.functions.get(function.name)
            if declared is None or not declared.body:
                self.result.functions[function.name] = function
        else:
            self.result.functions.setdefault(function.name, function)

    def _braces(self, function: Function) -> None:
        self.expect("{")
        self.scopes.append(_Scope(len(function.body)))
        while not self.accept("}"):
            if self.next is END:
                self.fail("expected '}'")
            self._statement(function)
        scope = self.scopes.pop()
        if scope.labels:
            for i in range(scope.start, len(function.body)):
                item = function.body[i]
                if isinstance(item, PtxInstruction):
                    function.body[i] = replace(item, operands=tuple(_relabelled(x, scope) for x in item.operands))
            for name in set(scope.labels.values()) & set(function.targets):
                function.targets[name] = tuple(scope.labels.get(x, x) for x in function.targets[name])

    def _statement(self, function: Function) -> None:
        token = self.next
        if token.text == "{":
            self._braces(function)
        elif token.text == ".loc":
            self._location()
        elif token.kind == "assembly":
            self.lines.assembly("begin" in self.take().text)
        elif token.text == ".reg":
            self._registers(function)
        elif token.text == ".pragma":
            while not self.accept(";"):
                self.take()
        elif token.text in (".shared", ".local", ".param"):
            variable = self._variable()
            function.variables.append(replace(variable, name=self._declare(variable.name)))
        elif token.text == ";":
            self.take()
        elif token.kind == "word" and self.beyond.text == ":":
            self._label(function)
        else:
            self._instruction(function)

    def _declare(self, name: str) -> str:
        """A name of its own for what a block declares."""
        if len(self.scopes) > 1:
            self.unique += 1
            self.scopes[-1].names[name] = f"{name}@{self.unique}"
            return self.scopes[-1].names[name]
        return name

    def named(self, name: str) -> str:
        """What a name in the current block stands for, in the function."""
        return next((s.names[name] for s in reversed(self.scopes) if name in s.names), name)

    def _registers(self, function: Function) -> None:
        self.take()
        kind, parts = self.word().removeprefix("."), ""
        if kind in ("v2", "v4"):
            kind, parts = self.word().removeprefix("."), "xyzw"[: int(kind[1])]
        if kind not in TYPES:
            self.fail(f"registers of type {kind} are not supported; expected a scalar type")
        while not self.accept(";"):
            name = self.word()
            if self.accept("<"):
                count = self.integer()
                if not 0 <= count <= _MOST_REGISTERS:
                    self.fail(f"{count} registers of one name are not supported")
                self.expect(">")
                for i in range(count):
                    function.registers[self._declare(f"{name}{i}")] = kind
            elif parts:
                name = self._declare(name)
                self.vectors[name] = tuple(PtxRegister(f"{name}@{part}") for part in parts)
                function.registers |= {item.name: kind for item in self.vectors[name]}
            else:
                function.registers[self._declare(name)] = kind
            self.accept(",")

    def _label(self, function: Function) -> None:
        name = self.word()
        self.expect(":")
        if self.next.text in (".callprototype", ".calltargets"):
            self.fail("indirect calls are not supported")
        if len(self.scopes) > 1:
            self.unique += 1
            self.scopes[-1].labels[name] = name = f"{name}@{self.unique}"
        if self.next.text == ".branchtargets":
            self.take()
            targets = [self.word()]
            while self.accept(","):
                targets.append(self.word())
            self.expect(";")
            function.targets[name] = tuple(targets)
            return
        function.body.append(PtxLabel(name))

    def _location(self) -> None:
        """``.loc file line column [, function_name label[+offset], inlined_at file line column]``."""
        line = self.take().line
        place = (self.integer(), self.integer(), self.integer())
        inlined: tuple[int, int, int] | None = None
        while self.next.text == "," and self.next.line == line:
            self.take()
            word = self.word()
            if word == "function_name":
                self.word()
                if self.accept("+"):
                    self.integer()
            elif word == "inlined_at":
                inlined = (self.integer(), self.integer(), self.integer())
        self.lines.set(place, inlined)

    # Instructions

    def _instruction(self, function: Function) -> None:
        where = self.lines.here(self.next.line)
        guard = None
        if self.accept("@"):
            negated = self.accept("!")
            guard = Guard(PtxRegister(self.named(self.word())), negated)
        opcode, *modifiers = self.word().replace("::", "\0").split(".")
        operands: list[Operand] = []
        while not self.accept(";"):
            operands.append(self.operand())
            if self.next.text == "|":
                self.take()
                first, second = operands.pop(), self.operand()
                if not isinstance(first, PtxRegister) or not isinstance(second, PtxRegister):
                    self.fail("expected two registers")
                operands.append(Both(first, second))
            if self.next.text != ";":
                self.expect(",")
        written = tuple(m.replace("\0", "::") for m in modifiers)
        function.body.append(PtxInstruction(opcode, written, tuple(operands), guard, where))


def _relabelled(operand: Operand, scope: _Scope) -> Operand:
    if isinstance(operand, Symbol) and operand.name in scope.labels:
        return Symbol(scope.labels[operand.name])
    return operand
