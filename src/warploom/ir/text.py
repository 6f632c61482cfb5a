"""Statements as text: one line each, names numbered in order of appearance, no source lines."""

from __future__ import annotations

from warploom.ir.statements import Branch, Const, Flow, Loop, Op, Operand, Register, Roles, Statement, Value, When


class Names:
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


def block_text(body: tuple[Statement, ...], names: Names) -> list[str]:
    """The statements of a kernel, a line or more for each."""
    lines: list[str] = []
    _block(body, 1, names, lines)
    return lines


def _block(body: tuple[Statement, ...], depth: int, names: Names, lines: list[str]) -> None:
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


def _branch(branch: Branch, names: Names) -> str:
    targets = ", ".join(map(str, branch.targets)) or "end"
    condition = "" if branch.condition is None else f" by {names(branch.condition)}"
    return f"go{' uniform' if branch.uniform else ''} to {targets}{condition}"


def _roles(roles: Roles, depth: int, names: Names, lines: list[str]) -> None:
    for role in roles.branches:
        budget = f", {role.registers} registers" if role.registers else ""
        lines.append(f"{'  ' * depth}warps {role.first}..{role.last}{budget}:")
        _block(role.body, depth + 1, names, lines)


def instruction_text(op: Op) -> str:
    """The instruction's mnemonic and the fields that the mnemonic leaves out."""
    return " ".join([op.instruction.mnemonic, *op.instruction.details])
