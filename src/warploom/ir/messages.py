"""How messages about a Program name its lines and values."""

from __future__ import annotations

from warploom.ir.statements import NOWHERE, Const, Operand, SourceLine


def at(where: SourceLine) -> str:
    """The author's line as the start of a message."""
    return f"{where.stack}: " if where != NOWHERE else ""


def label(operand: Operand) -> str:
    """An operand by its name, number or value."""
    if isinstance(operand, Const):
        return f"the constant {operand.value}"
    return f"'{operand.name}'" if operand.name else f"value {operand.number}"
