"""PTX text → :class:`warploom.ptx.syntax.Module`.

Names that a block in braces declares are made unique, so that a function has one flat list of instructions and labels.
Instructions get the author's lines that ``.file`` and ``.loc`` say.

Source: PTX ISA, "Syntax", "Directives", "Instruction Statements", "Instruction Operands", "Debugging Directives".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from warploom.core.errors import PtxError
from warploom.ir.statements import SourceLine
from warploom.isa.form import TYPE_BITS
from warploom.ptx.syntax import (
    Address,
    Both,
    Float,
    Function,
    Guard,
    Integer,
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
from warploom.ptx.tokens import END, TokenCursor

Place = tuple[int, int, int]
"""File number, line, column."""
_LIBRARIES = re.compile(
    r"/(site|dist)-packages/|^/usr/include/|/targets/[^/]+/include/|/(cuda[^/]*|nvidia)/(.*/)?include/"
    r"|/include/(cuda|cub|thrust|cccl|nv|cooperative_groups|cutlass|cute)(?![a-z])"
)
"""Folders of Python's packages, and of the headers of CUDA, CCCL and CUTLASS; other headers are an author's."""


@dataclass(frozen=True, slots=True)
class _Location:
    place: Place
    inlined: _Location | None = None


class Lines:
    """Follows the ``.loc`` of a file. Places are named in files whose numbers the end of the text tells."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.files: dict[int, str] = {}
        self._known: dict[Place, _Location] = {}
        self._current: _Location | None = None
        self._assembly = 0  # 2 before the first place in inline assembly, 1 after it
        self._used: dict[int, _Location] = {}  # PTX line → where its code comes from

    def start(self) -> None:
        """A function begins."""
        self._current = None

    def assembly(self, begins: bool) -> None:
        """Inline assembly begins or ends. LLVM counts on by its lines: only the first place in it is the author's."""
        self._assembly = 2 if begins else 0

    def set(self, place: Place, inlined: Place | None) -> None:
        """A ``.loc``. What it is inlined at was a place of its own shortly before. Line 0 is code of the compiler's."""
        if self._assembly == 1 or (place[1] == 0 and inlined is None):
            return
        self._assembly = min(self._assembly, 1)
        outer = None if inlined is None else self._known.get(inlined, _Location(inlined))
        self._current = self._known[place] = _Location(place, outer)

    def here(self, line: int) -> SourceLine:
        """Stands for the current place until the whole text has been read."""
        if self._current is not None:
            self._used[line] = self._current
        return SourceLine(self.name, line, ptx=line)

    def resolved(self, where: SourceLine) -> SourceLine:
        """The author's line of a PTX line, and the calls that were inlined there; without any, the PTX line itself.

        That is the innermost line that is no library's.
        """
        location, chain = self._used.get(where.ptx), list[_Location]()
        if location is None:
            return replace(where, ptx=0)
        while location is not None:
            chain.append(location)
            location = location.inlined
        line, *callers = (self._line(x) for x in [x for x in chain if not self._is_library(x)] or chain[-1:])
        return replace(line, ptx=where.ptx, callers=tuple(callers))

    def _line(self, location: _Location) -> SourceLine:
        file, line, _ = location.place
        return SourceLine(self.files.get(file, f"file {file}"), line)

    def _is_library(self, location: _Location) -> bool:
        return _LIBRARIES.search(self.files.get(location.place[0], "")) is not None


_TEXTURES = ("texref", "samplerref", "surfref")
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


class _Parser(TokenCursor):
    """``registers`` and ``vectors``, those of several parts, are what was declared."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text, name)
        self.registers: dict[str, str] = {}
        self.vectors: dict[str, tuple[PtxRegister, ...]] = {}
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
            elif word in TYPE_BITS:
                kind = word
            elif kind and word in _SPACES:
                pointer = word
            elif word == "ptr":
                pointer = "generic"
            elif word not in ("unified", "managed", *_SPACES):
                if word in _TEXTURES:
                    self.refuse(f"a .{word}: textures and surfaces are not supported, load from global memory")
                self.fail(f"unknown attribute .{word} of a variable")
        if not kind:
            self.fail("expected a type")
        name = self.word()
        while self.accept("["):
            count *= 0 if self.next.text == "]" else self.integer()
            if count < 0:
                self.fail(f"{name} has a negative size")
            self.expect("]")
        size = max(1, TYPE_BITS[kind] // 8)
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
        if isinstance(value, Float) and size in (4, 8):
            return value.pattern(8 * size).to_bytes(size, "little")
        if isinstance(value, Symbol):
            self.refuse(f"{value.name} as an initial value is not supported: a table of functions, or of addresses")
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
        """The name in the function for a name in the current block."""
        return next((s.names[name] for s in reversed(self.scopes) if name in s.names), name)

    def _registers(self, function: Function) -> None:
        self.take()
        kind, parts = self.word().removeprefix("."), ""
        if kind in ("v2", "v4"):
            kind, parts = self.word().removeprefix("."), "xyzw"[: int(kind[1])]
        if kind not in TYPE_BITS:
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

    # Operands

    def operand(self) -> Operand:
        """Take an operand."""
        token = self.next
        if token.text in ("{", "("):
            return self._vector()
        if self.accept("["):
            return self._address()
        if self.accept("!"):
            return Not(PtxRegister(self.named(self.word())))
        if token.text in ("-", "+") or token.kind == "number":
            return self._constant()
        name = self.word()
        if name == "_":
            return PtxRegister("")
        whole, _, part = name.partition(".")
        if self.named(whole) in self.vectors:
            items = self.vectors[self.named(whole)]
            return items["xyzw".index(part)] if part else PtxVector(items)
        name = self.named(name)
        if name.startswith("%") or name in self.registers:  # inline assembly declares registers without the sign
            return PtxRegister(name)
        offset = self._displacement()
        return Symbol(name, offset)

    def _vector(self) -> PtxVector:
        close = "}" if self.take().text == "{" else ")"
        items: list[Operand] = []
        while not self.accept(close):
            items.append(self.operand())
            if self.next.text != close:
                self.expect(",")
        return PtxVector(tuple(items))

    def _constant(self) -> Integer | Float:
        negative = False
        while self.next.text in ("-", "+"):
            negative ^= self.take().text == "-"
        value = self.number("a number")
        if not negative:
            return value
        if isinstance(value, Integer):
            return Integer(-value.value)
        return Float(value.bits ^ 1 << value.width - 1, value.width)

    def _displacement(self) -> int:
        offset = 0
        while self.next.text in ("+", "-"):
            sign = -1 if self.take().text == "-" else 1
            offset += sign * self.integer()
        return offset

    def _address(self) -> Address:
        base = self.operand()
        if isinstance(base, Symbol):
            offset, base = base.offset, Symbol(base.name)
        else:
            offset = self._displacement()
        if not isinstance(base, PtxRegister | Symbol | Integer):
            self.fail("expected the base of an address")
        coordinates = None
        if self.accept(","):
            found = self.operand()
            coordinates = found if isinstance(found, PtxVector) else None
            if coordinates is None:
                self.fail("expected coordinates in braces")
        self.expect("]")
        return Address(base, offset, coordinates)


def _relabelled(operand: Operand, scope: _Scope) -> Operand:
    if isinstance(operand, Symbol) and operand.name in scope.labels:
        return Symbol(scope.labels[operand.name])
    return operand
