"""PTX text as tokens with their lines, and constants as values.

Source: PTX ISA, "Source Format", "Identifiers", "Constants".
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import NoReturn

from warploom.core.errors import PtxError
from warploom.ptx.syntax import Float, Integer

_TOKEN = re.compile(
    r"""(?P<assembly>//[ ](?:begin|end)[ ]inline[ ]asm)
      | (?P<space>[ \t\r]+|//[^\n]*)
      | (?P<line>\n)
      | (?P<comment>/\*.*?\*/)
      | (?P<string>"(?:[^"\\]|\\.)*")
      | (?P<number>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b
        |0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+U?)
      | (?P<word>[.%$A-Za-z_][\w$%]*(?:(?:\.|::)[\w$]+)*)
      | (?P<mark>::|[-+*/!@|,;:<>=(){}\[\]&~^?])""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Token:
    """``kind`` is ``string``, ``number``, ``word``, ``mark`` or ``assembly``; ``line`` counts from 1.

    ``assembly`` are the comments before and after what compilers take over from inline assembly.
    """

    kind: str
    text: str
    line: int


def tokens(text: str, name: str) -> list[Token]:
    """All tokens of a PTX text. Raises PtxError where it is none."""
    found: list[Token] = []
    at, line = 0, 1
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            if text[at] == "\0":
                break
            raise PtxError(f"{name}:{line}: {text[at]!r} is no PTX")
        kind, value = match.lastgroup or "", match.group()
        if kind not in ("space", "line", "comment"):
            directives = re.findall(r"\.[^.]+", value) if kind == "word" and value.startswith(".") else [value]
            found += [Token(kind, part, line) for part in directives]  # ``.reg.b16`` is two
        line += value.count("\n")
        at = match.end()
    return found


def number(text: str) -> Integer | Float:
    """The constant that a number token writes."""
    lower = text.lower()
    if lower.startswith(("0f", "0d")) and not lower.startswith("0x"):
        return Float(int(lower[2:], 16), 32 if lower[1] == "f" else 64)
    if not lower.startswith("0x") and any(c in lower for c in ".e"):
        return Float(int(struct.unpack("<Q", struct.pack("<d", float(lower)))[0]), 64)
    digits = lower.rstrip("u")
    if digits.startswith("0") and digits.isdigit() and len(digits) > 1:
        return Integer(int(digits, 8))
    return Integer(int(digits, 0))


END = Token("end", "", 0)
"""What comes after the last token."""


class TokenCursor:
    """Goes through the tokens of a text; messages call it ``name``."""

    def __init__(self, text: str, name: str) -> None:
        self.name, self.tokens, self.at = name, tokens(text, name), 0

    @property
    def next(self) -> Token:
        """The next token, which is not taken."""
        return self.tokens[self.at] if self.at < len(self.tokens) else END

    @property
    def beyond(self) -> Token:
        """The token after the next one."""
        return self.tokens[self.at + 1] if self.at + 1 < len(self.tokens) else END

    def take(self) -> Token:
        """Take the next token."""
        token = self.next
        self.at += 1
        return token

    def accept(self, text: str) -> bool:
        """Whether a token of this text comes, which is then taken."""
        if self.next.text == text and self.next.kind != "string":
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> Token:
        """Take a token of this text, which must come."""
        if self.next.text != text:
            self.fail(f"expected {text!r}")
        return self.take()

    def fail(self, what: str) -> NoReturn:
        """Raise PtxError: what was expected here, and what comes."""
        line = self.next.line or (self.tokens[-1].line if self.tokens else 1)
        here = "the end" if self.next is END else repr(self.next.text)
        raise PtxError(f"{self.name}:{line}: {what}, not {here}")

    def refuse(self, what: str) -> NoReturn:
        """Raise PtxError: what is rightly written here, and not supported."""
        raise PtxError(f"{self.name}:{self.next.line or self.tokens[-1].line}: {what}")

    def word(self) -> str:
        """Take a name."""
        if self.next.kind != "word":
            self.fail("expected a name")
        return self.take().text

    def integer(self) -> int:
        """Take an integer, which may have a sign."""
        sign = -1 if self.accept("-") else 1
        value = self.number("an integer")
        if not isinstance(value, Integer):
            self.at -= 1
            self.fail("expected an integer")
        return sign * value.value

    def number(self, what: str) -> Integer | Float:
        """Take a constant."""
        try:
            value = number(self.next.text) if self.next.kind == "number" else None
        except ValueError:
            value = None
        if value is None:
            self.fail(f"expected {what}")
        self.at += 1
        return value
