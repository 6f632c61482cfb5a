"""Prints a Program as header-free CUDA C++, to be read beside the Python that it was traced from.

One ``extern "C"`` kernel; NVRTC compiles it without an include path. Statements appear in the order in which they were
written. A float multiplication and an addition are two roundings in a Program: compile with ``--fmad=false``, or the
compiler fuses them. Buffers may overlap (in-place operations), so pointers arrive as integers and nothing is
``__restrict__``.
"""

from __future__ import annotations

import linecache
from collections import Counter
from collections.abc import Iterable, Iterator

from warploom.core.dtypes import pred
from warploom.cuda.expressions import Text, constant, expression
from warploom.cuda.inlining import inlined_values
from warploom.cuda.names import RESERVED, VariableNames, entry_name
from warploom.ir.program import Parameter, Program
from warploom.ir.statements import (
    NOWHERE,
    Branch,
    Const,
    Flow,
    Loop,
    Op,
    Operand,
    Register,
    Roles,
    SourceLine,
    Statement,
    Value,
    When,
    blocks,
    operands_of,
    results_of,
    walk,
)
from warploom.isa.conversion import special
from warploom.isa.cpp import ANY, SUM

COLUMNS = 110
_LONGEST_INLINED = 72
_INDENT = "  "
_TENSOR_MAP = "struct __align__(64) TensorMap { unsigned long long words[16]; };"


def print_cuda(program: Program, *, comments: bool = True) -> str:
    """The CUDA C++ of ``program``. Without ``comments`` the text depends on nothing but the Program's digest."""
    return "\n".join(text for text, _ in _Printer(program, comments).lines()) + "\n"


def source_map(program: Program, *, comments: bool = True) -> dict[int, SourceLine]:
    """For each line (from 1) of the text that :func:`print_cuda` gives, the author's line it came from."""
    lines = _Printer(program, comments).lines()
    return {number: where for number, (_, where) in enumerate(lines, 1) if where != NOWHERE}


class _Printer:
    def __init__(self, program: Program, comments: bool) -> None:
        self._program = program
        self._comments = comments
        self._inlined = inlined_values(program)
        self._role_registers = _registers_of_one_role(program)
        self._start()
        _shorten(self, program.body, 1)
        self._start()

    def _start(self) -> None:
        """Forgets what was printed and named."""
        self._out: list[tuple[str, SourceLine]] = []
        self._where = NOWHERE
        self._names = VariableNames(RESERVED | {entry_name(self._program.name)})
        self._parameter_names = {p: self._names.fresh(p.name) for p in self._program.parameters}
        for p, name in self._parameter_names.items():
            if p.kind != "tensor_map":
                self._names.bind(p.value, name)
        self._warp = self._names.fresh("warp") if _has_roles(self._program) else ""

    # Lines

    def lines(self) -> list[tuple[str, SourceLine]]:
        """Every line of the text with the author's line it came from (NOWHERE for what the printer added)."""
        self._start()
        self._head()
        for p in self._program.parameters:
            if p.kind == "tensor_map":
                address = self._names.fresh(f"{p.name}_address")
                self._names.bind(p.value, address)
                self._add(1, f"const unsigned long long {address} = (unsigned long long)&{self._parameter_names[p]};")
        if self._warp:  # a shuffle, so that ptxas keeps what depends on it in uniform registers
            self._add(1, f"const unsigned {self._warp} = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);")
        self._declare(1, (r for r in _registers(self._program.body) if r not in self._role_registers))
        self._block(self._program.body, 1)
        self._add(0, "}")
        return self._out

    def _add(self, depth: int, text: str, where: SourceLine = NOWHERE) -> None:
        for line in _wrapped(text, COLUMNS - len(_INDENT) * depth):
            self._out.append((_INDENT * depth + line, where))

    def _comment(self, where: SourceLine, depth: int) -> None:
        if not self._comments or not where.line or (where.file, where.line) == (self._where.file, self._where.line):
            return
        self._where = where
        author = linecache.getline(where.file, where.line).strip()
        text = f"// {where}{'  ' + author if author else ''}"
        room = COLUMNS - len(_INDENT) * depth
        text = text if len(text) <= room else text[: room - 2] + " …"
        # A backslash at the end would continue the comment into the next line.
        self._out.append((_INDENT * depth + text.rstrip("\\ "), where))

    def _head(self) -> None:
        program = self._program
        if self._comments:
            self._add(
                0,
                f"// {program.name}: {program.threads} threads, {_residency(program)}, "
                f"{program.requires}{f'; {program.where}' if program.where.line else ''}",
            )
            if program.shared_bytes:
                self._add(0, f"// Shared memory, {program.shared_bytes} bytes:")
            for region in program.shared:
                self._add(0, f"//   {region.offset:6} … {region.offset + region.bytes:6}  {region.name}")
        if program.shared_bytes or any(op.instruction == special("shared_base") for op in program.ops()):
            self._add(0, "extern __shared__ __align__(1024) unsigned char shared_memory[];")
        if any(p.kind == "tensor_map" for p in program.parameters):
            self._add(0, _TENSOR_MAP)
        for declaration in dict.fromkeys(filter(None, (op.instruction.declaration for op in program.ops()))):
            self._add(0, declaration)
        self._add(0, "")
        cluster = "__cluster_dims__({}, {}, {}) ".format(*program.cluster) if program.cluster_ctas > 1 else ""
        self._add(0, f'extern "C" __global__ void {cluster}__launch_bounds__({program.threads}, {program.min_ctas})')
        if not program.parameters:
            self._add(0, f"{entry_name(program.name)}() {{")
            self._local_memory()
            return
        self._add(0, f"{entry_name(program.name)}(")
        for p in program.parameters:
            comma = "" if p is program.parameters[-1] else ","
            note = f"  // {p.dtype.name}*" if p.kind == "pointer" and self._comments else ""
            self._add(2, f"{_parameter_type(p)} {self._parameter_names[p]}{comma}{note}")
        self._add(0, ") {")
        self._local_memory()

    def _local_memory(self) -> None:
        if self._program.local_bytes:
            self._add(1, f"__align__(16) unsigned char local_memory[{self._program.local_bytes}];")

    def _declare(self, depth: int, registers: Iterable[Register]) -> None:
        by_type: dict[str, list[str]] = {}
        for r in registers:
            by_type.setdefault(r.dtype.cuda, []).append(self._names.of(r))
        for kind, names in by_type.items():
            self._add(depth, f"{kind} {', '.join(names)};")

    # Expressions

    def operand(self, x: Operand) -> Text:
        """The text of an operand: a constant, a name, or the expression of an inlined value."""
        if isinstance(x, Const):
            return constant(x)
        op = self._inlined.get(x)
        return self.expression(op) if op is not None else Text(self._names.of(x))

    def expression(self, op: Op) -> Text:
        """The expression of an operation with the values inlined into it."""
        return expression(op, self.operand, self._inner)

    def _inner(self, x: Operand) -> Op | None:
        return self._inlined.get(x) if isinstance(x, Value) else None

    # Statements

    def statement_text(self, s: Statement) -> str:
        """The statement's own line, without nested blocks."""
        if isinstance(s, Op):
            return " ".join(self._op_text(s))
        if isinstance(s, Loop):
            return self._loop_text(s)
        if isinstance(s, Branch):
            return self._branch_text(s)
        return f"if ({self.operand(s.condition).text}) {{" if isinstance(s, When) else ""

    def _op_text(self, op: Op) -> list[str]:
        """One line, or declarations and the statement apart."""
        if op.instruction.has_expression and len(op.results) == 1:
            result, value = op.results[0], self.expression(op).text
            kind = "" if isinstance(result, Register) else f"const {result.dtype.cuda} "
            return [f"{kind}{self._names.of(result)} = {value};"]
        operands = [self.operand(x).within(ANY) for x in op.operands]
        text = op.instruction.cuda([self._names.of(r) for r in op.results], operands)
        by_type: dict[str, list[str]] = {}
        for r in op.results:
            if not isinstance(r, Register):
                by_type.setdefault(r.dtype.cuda, []).append(self._names.of(r))
        return [*(f"{kind} {', '.join(names)};" for kind, names in by_type.items()), text]

    def _loop_text(self, loop: Loop) -> str:
        index, step = self._names.of(loop.index), self.operand(loop.step)
        advance = f"++{index}" if isinstance(loop.step, Const) and loop.step.value == 1 else f"{index} += {step.text}"
        start, stop = self.operand(loop.start).text, self.operand(loop.stop).within(SUM)
        return f"for ({loop.index.dtype.cuda} {index} = {start}; {index} < {stop}; {advance}) {{"

    def _block(self, body: tuple[Statement, ...], depth: int) -> None:
        for s in body:
            if isinstance(s, Op) and len(s.results) == 1 and s.results[0] in self._inlined:
                continue
            self._comment(s.where, depth)
            if isinstance(s, Op):
                parts = self._op_text(s)
                fits = sum(map(len, parts)) + len(_INDENT) * depth + len(parts) <= COLUMNS
                for text in [" ".join(parts)] if fits else parts:
                    self._add(depth, text, s.where)
            elif isinstance(s, Roles):
                self._roles(s, depth)
            elif isinstance(s, Flow):
                self._flow(s, depth)
            elif isinstance(s, Branch):
                self._add(depth, self.statement_text(s), s.where)
            else:
                if isinstance(s, Loop):
                    self._add(depth, "#pragma unroll 1", s.where)
                self._add(depth, self.statement_text(s), s.where)
                self._block(s.body, depth + 1)
                if isinstance(s, When) and s.otherwise:
                    self._add(depth, "} else {", s.where)
                    self._block(s.otherwise, depth + 1)
                self._add(depth, "}", s.where)

    def _flow(self, flow: Flow, depth: int) -> None:
        """Blocks in braces, so that a jump passes no initialisation of another block's values."""
        reached = {target for block in flow.blocks for s in block if isinstance(s, Branch) for target in s.targets}
        for number, block in enumerate(flow.blocks):
            self._add(depth, f"block_{number}: {{" if number in reached else "{", flow.where)
            self._block(block, depth + 1)
            self._add(depth, "}", flow.where)

    def _branch_text(self, branch: Branch) -> str:
        goto = [f"goto block_{target};" for target in branch.targets]
        if branch.condition is None:
            return goto[0] if goto else "return;"
        condition = self.operand(branch.condition)
        if branch.condition.dtype is pred:
            return f"if ({condition.text}) {goto[0]} else {goto[1]}"
        cases = "".join(f" case {i}: {text}" for i, text in enumerate(goto))
        return f"switch ({condition.text}) {{{cases} default: __builtin_unreachable(); }}"

    def _roles(self, roles: Roles, depth: int) -> None:
        covered = 0  # every warp below is taken by an earlier branch
        for i, role in enumerate(roles.branches):
            test = self._role_test(role.first, role.last, covered)
            keyword = "if" if i == 0 else "} else if"
            self._add(depth, f"{keyword} ({test}) {{" if test else "} else {", role.where)
            if role.first <= covered:
                covered = max(covered, role.last)
            self._comment(role.where, depth + 1)
            change = self._program.register_change(role)
            if change is not None:
                self._add(depth + 1, change.cuda((), ()), role.where)
            self._declare(depth + 1, (r for r in _registers(role.body) if r in self._role_registers))
            self._block(role.body, depth + 1)
        self._add(depth, "}", roles.where)

    def _role_test(self, first: int, last: int, covered: int) -> str:
        """The condition on the warp's number; '' when all warps left are meant."""
        if 0 < first <= covered and last == self._program.warps:
            return ""
        if first <= covered:
            return f"{self._warp} < {last}u"
        if last == first + 1:
            return f"{self._warp} == {first}u"
        above = f"{self._warp} >= {first}u"
        return above if last == self._program.warps else f"{above} && {self._warp} < {last}u"

    def keep_apart(self, value: Value) -> Op:
        """Prints ``value`` on a line of its own after all."""
        return self._inlined.pop(value)

    def longest_inlined(self, s: Statement) -> tuple[int, Value] | None:
        """The longest expression inlined into a statement, with its length."""
        found = [(len(self.operand(x).text), x) for x in operands_of(s) if self._inner(x) and isinstance(x, Value)]
        return max(found, key=lambda pair: pair[0], default=None)


def _shorten(printer: _Printer, body: tuple[Statement, ...], depth: int) -> None:
    """Gives values their own line again where inlining makes a line or an operand too long."""
    for statement in body:
        _shorten_one(printer, statement, depth)
        for block in blocks(statement):
            _shorten(printer, block, depth + 1)


def _shorten_one(printer: _Printer, statement: Statement, depth: int) -> None:
    while (longest := printer.longest_inlined(statement)) is not None:
        length, value = longest
        fits = len(printer.statement_text(statement)) + len(_INDENT) * depth <= COLUMNS
        if length <= _LONGEST_INLINED and (fits or length <= 12):
            return
        _shorten_one(printer, printer.keep_apart(value), depth)


def _residency(program: Program) -> str:
    clusters = "" if program.cluster_ctas == 1 else ", clusters of {}×{}×{}".format(*program.cluster)
    return f"at least {program.min_ctas} CTA{'s' if program.min_ctas > 1 else ''} per SM{clusters}"


def _parameter_type(parameter: Parameter) -> str:
    if parameter.kind == "tensor_map":
        return "const __grid_constant__ TensorMap"
    return f"const {parameter.value.dtype.cuda}"


def _has_roles(program: Program) -> bool:
    return any(isinstance(s, Roles) for s in program.statements())


def _registers(body: tuple[Statement, ...]) -> list[Register]:
    """The mutable registers of ``body``, in order of their first mention."""
    mentioned = (x for s in walk(body) for x in (*results_of(s), *operands_of(s)))
    return list(dict.fromkeys(x for x in mentioned if isinstance(x, Register)))


def _registers_of_one_role(program: Program) -> set[Register]:
    """The registers that one role alone mentions: they are declared in its branch."""
    branches = [role for s in program.body if isinstance(s, Roles) for role in s.branches]
    outside = tuple(s for s in program.body if not isinstance(s, Roles))
    counts = Counter(r for role in branches for r in _registers(role.body))
    return {r for r, count in counts.items() if count == 1} - set(_registers(outside))


def _wrapped(text: str, room: int) -> Iterator[str]:
    """``text`` over several lines: at the parts of an asm statement, and at commas, never inside a string."""
    if len(text) <= room:
        yield text
        return
    parts = _split(text, (" ::: ", " :: ", " : ")) if text.startswith("asm") else [text]
    for i, part in enumerate(parts):
        line = ""
        for piece in _split(part, (", ",)):
            if line and len(line) + len(piece) > room - 1:
                yield line.rstrip()
                line = "//      " if text.startswith("//") else "      "
            line += piece if line else f"{'    ' if i else ''}{piece.lstrip()}"
        yield line.rstrip()


def _split(text: str, separators: tuple[str, ...]) -> list[str]:
    """``text`` in pieces, cut before ``:`` and after ``,``, except inside string literals."""
    pieces: list[str] = []
    start, quoted = 0, False
    firsts = {x[0] for x in separators}
    for i, letter in enumerate(text):
        if letter == '"':
            quoted = not quoted
        if quoted or letter not in firsts:
            continue
        found = next((x for x in separators if text.startswith(x, i)), None)
        if found is not None:
            cut = i + len(found) if found == ", " else i
            pieces.append(text[start:cut])
            start = cut
    return [*pieces, text[start:]]
