"""Operands of PTX instructions: registers, constants, symbols, vectors, addresses.

Source: PTX ISA, "Instruction Operands".
"""

from __future__ import annotations

from warploom.ptx.syntax import Address, Float, Integer, Not, Operand, PtxRegister, PtxVector, Symbol
from warploom.ptx.tokens import TokenCursor


class OperandCursor(TokenCursor):
    """A cursor that takes operands; ``registers`` and ``vectors``, those of several parts, are what was declared."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text, name)
        self.registers: dict[str, str] = {}
        self.vectors: dict[str, tuple[PtxRegister, ...]] = {}

    def named(self, name: str) -> str:
        """The name in the function for a name of the text; blocks of the text may rename."""
        return name

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
