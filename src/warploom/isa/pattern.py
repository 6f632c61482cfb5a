"""The pattern of an instruction form, ``add{.rnd}{.ftz}.f32 d, a, b``, read into slots for modifiers and operands.

Modifiers: ``.f32`` stands as it is; ``.{type}`` is one word of a set; ``{.rnd}`` may be left out; ``{.ftz}`` without a
set is the word itself; ``{op}`` is the opcode. Operands: ``d`` is written, all others are read.

- ``d|p?``: a second result, which may be left out; ``c?``: an operand that may be left out
- ``c:u32``: its type, ``c:u32=b16``: PTX's register is another; ``c?bool``: it is there where a word stands in the
  slot ``bool``
- ``[at]``: an address with a displacement ``offset`` (``[to]``: ``to_offset``); ``#n``: an immediate
- ``[map, at*rank:s32]``: a box of a tensor map, with coordinates; ``_``: a result that nobody takes
- ``^guard:pred``: the threads for which it holds execute the instruction
- ``d*vec``: as many registers as the word in the slot ``vec`` says
- ``^in`` and ``^out``: the carry, which the text does not show; ``^c``, ``#^n``: others that it does not show
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

_SLOT = re.compile(r"\{\.(\w+)\}|\.\{(\w+)\}|\.([\w:]+)|\{(\w+)\}|^(\w+)")
_PLACE = re.compile(r"(\[)?(#\^|#|\^)?(\w+)(\])?(?:\*(\w+))?(?::(\w+))?(?:=(\w+))?(\?(\w*))?$")


@dataclass(frozen=True, slots=True)
class ModifierSlot:
    """A place for a modifier, one of ``words``. The opcode is the first slot; fixed words have no ``name``.

    ``since`` names the first architecture of words that came later than the form.
    """

    name: str
    words: tuple[str, ...]
    optional: bool
    since: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class OperandPlace:
    """An operand of a form; ``type`` and ``count`` name types and slots, ``given`` the slot that decides about it.

    ``written`` is the type of PTX's register where Programs have another, ``paired``: it stands behind a ``|``,
    ``hidden``: the text does not show it (the carry).
    """

    name: str
    kind: Literal["result", "value", "address", "number", "sink"]
    type: str
    written: str
    count: str
    optional: bool
    given: str
    paired: bool
    hidden: bool
    box: Literal["", "map", "coordinates"] = ""

    @property
    def is_read(self) -> bool:
        """Whether registers stand there that the instruction reads."""
        return self.kind in ("value", "address")

    @property
    def is_register(self) -> bool:
        """Whether registers stand there."""
        return self.is_read or self.kind == "result"

    @property
    def offset(self) -> str:
        """The name of an address's displacement, ``offset`` for ``[at]``; '' for what is no address."""
        if self.kind != "address":
            return ""
        return "offset" if self.name == "at" else f"{self.name}_offset"


def slots_of(head: str, sets: Mapping[str, str]) -> tuple[ModifierSlot, ...]:
    """The opcode and the modifiers of a pattern; ``sets``: slot → its words, ``bf16@sm_90`` for one of sm_90 on."""
    found: list[ModifierSlot] = []
    end = 0
    for match in _SLOT.finditer(head):
        if match.start() != end:
            break
        end = match.end()
        maybe, needed, fixed, opcode, literal = match.groups()
        name = maybe or needed or opcode or ""
        if needed and name not in sets:
            raise ValueError(f"{head}: no words are given for {name}")
        listed = (sets.get(name, name) if name else fixed or literal).split()
        since = {word: first for word, _, first in (x.partition("@") for x in listed) if first}
        found.append(
            ModifierSlot("op" if literal else name, tuple(x.partition("@")[0] for x in listed), bool(maybe), since)
        )
    if end != len(head):
        raise ValueError(f"{head}: {head[end:]!r} is no modifier")
    return tuple(found)


def places_of(tail: str) -> tuple[OperandPlace, ...]:
    """The operands of a pattern, in the order of the text."""
    found: list[OperandPlace] = []
    for part in filter(None, map(str.strip, re.split(r",(?![^\[]*\])", tail))):
        box = re.fullmatch(r"\[(\w+), (.*)\]", part)
        if box is not None:
            inner = places_of(f"{box[1]}:u64, {box[2]}")
            found += [replace(inner[0], box="map"), replace(inner[1], box="coordinates")]
            continue
        for position, text in enumerate(part.split("|")):
            match = _PLACE.match(text)
            if match is None:
                raise ValueError(f"{tail}: {text!r} is no operand")
            opens, mark, name, _, count, kind, register, optional, given = match.groups()
            written = name in ("d", "out") or position > 0
            what = "address" if opens else "number" if mark in ("#", "#^") else "result" if written else "value"
            what = "sink" if name == "_" else what
            found.append(
                OperandPlace(
                    name,
                    what,
                    kind or "",
                    register or "",
                    count or "",
                    bool(optional),
                    given or "",
                    position > 0,
                    mark in ("^", "#^"),
                )
            )
    return tuple(found)
