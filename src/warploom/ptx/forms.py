"""The form of an instruction: its opcode, modifiers and operands.

One that is not wholly understood is refused with its line: every modifier must have been taken by name.
"""

from __future__ import annotations

from warploom.core.errors import PtxError
from warploom.ptx.syntax import TYPES, Integer, Operand, PtxInstruction

_SHOWN = 100  # of the operands in a message


class ModifierReader:
    """Takes the modifiers of an instruction one by one, so that one that nobody asked for is refused at the end."""

    def __init__(self, instruction: PtxInstruction) -> None:
        self.instruction = instruction
        self.opcode = instruction.opcode
        self._left = list(instruction.modifiers)

    def refusal(self, why: str = "this form is not supported") -> PtxError:
        """The error to raise for this instruction."""
        i = self.instruction
        operands = ", ".join(map(str, i.operands))
        if len(operands) > _SHOWN:
            operands = operands[:_SHOWN] + " …"
        return PtxError(f"{i.where}: {i.form} {operands}: {why}")

    def flag(self, name: str) -> bool:
        """Whether a modifier is there."""
        if name in self._left:
            self._left.remove(name)
            return True
        return False

    def one_of(self, *names: str, default: str = "") -> str:
        """The first of these modifiers that is there, else ``default``."""
        return next((name for name in names if self.flag(name)), default)

    def need(self, *names: str) -> None:
        """Take modifiers that must all be there."""
        if not all(self.flag(name) for name in names):
            raise self.refusal()

    def which(self, *names: str) -> str:
        """The first of these modifiers that the instruction has. Raises PtxError where it has none."""
        found = self.one_of(*names)
        if not found:
            raise self.refusal()
        return found

    def immediate(self) -> int:
        """The only operand, an integer."""
        (given,) = self.operands(1)
        if not isinstance(given, Integer):
            raise self.refusal("its operand must be a number")
        return given.value

    def drop(self, *prefixes: str) -> None:
        """Leave out modifiers that change speed alone: cache hints and their like."""
        self._left = [m for m in self._left if not m.startswith(prefixes)]

    def types(self) -> list[str]:
        """The type modifiers, in order."""
        found = [m for m in self._left if m in TYPES]
        self._left = [m for m in self._left if m not in TYPES]
        return found

    def type(self, *allowed: str) -> str:
        """The only type modifier, one of those that are ``allowed``, if any are named."""
        found = self.types()
        if len(found) != 1:
            raise self.refusal("it must name one type")
        if allowed and found[0] not in allowed:
            raise self.refusal()
        return found[0]

    def operands(self, *counts: int) -> tuple[Operand, ...]:
        """The operands. Raises PtxError for another count of them."""
        given = self.instruction.operands
        if len(given) not in counts:
            raise self.refusal(f"it has {len(given)} operands")
        return given

    def done(self) -> None:
        """Refuse the form if a modifier is left that nobody asked for."""
        if self._left:
            raise self.refusal(f".{self._left[0]} is not supported")
