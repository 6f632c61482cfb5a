"""Names that a block of the running kernel binds anew although it has read the old value: ``s = s + x`` in a loop.

A loop's body is traced once, so such a name carries nothing to the next iteration: what looks like a sum adds nothing
up. Which names a block reads before it binds them is in the bytecode between the block's beginning and its end.
"""

from __future__ import annotations

import dis
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from warploom.core.errors import TraceError
from warploom.ir.statements import SourceLine
from warploom.lang.values import Mutable, Number, Traced

_OF_NAMES = tuple(f"{way}_{of}" for way in ("LOAD", "STORE") for of in ("FAST", "NAME", "DEREF", "GLOBAL"))


@contextmanager
def refuse_rebinding(frame: FrameType | None) -> Generator[None, None, None]:
    """Raise TraceError where the author's code inside, a loop's body, binds a name anew that it read before."""
    if frame is None:
        yield
        return
    before, first = _values(frame), frame.f_lasti
    yield
    for name, now in _values(frame).items():
        old = before.get(name)
        if old is None or not isinstance(now, Traced) or (isinstance(old, Traced) and old.ir is now.ir):
            continue
        line = _read_then_bound(frame, name, first, frame.f_lasti)
        if line is not None:
            where = SourceLine(frame.f_code.co_filename, line)
            raise TraceError(
                f"{name!r} is bound anew in a loop, which reads its old value ({where}): the body is traced once, so "
                f"the new value does not reach the next iteration. Make it a register before the loop, "
                f"{name} = k.register({now.dtype}, …), and write {name}.set(…) or {name} += … inside"
            )


def _values(frame: FrameType) -> dict[str, Number]:
    """The author's names of values and numbers, but for mutable registers, which loops do carry."""
    named: dict[str, Any] = dict(frame.f_locals)
    return {name: x for name, x in named.items() if isinstance(x, Number) and not isinstance(x, Mutable)}


def _read_then_bound(frame: FrameType, name: str, first: int, last: int) -> int | None:
    """The line that binds a name, where the code between two offsets reads the name before it binds it."""
    read, line = False, frame.f_lineno
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.positions is not None and instruction.positions.lineno is not None:
            line = instruction.positions.lineno
        if not first < instruction.offset < last or not instruction.opname.startswith(_OF_NAMES):
            continue
        given: Any = instruction.argval  # one name, or two of instructions that access two
        names = (given,) if isinstance(given, str) else given
        ways = [part for part in instruction.opname.split("_") if part in ("LOAD", "STORE")]
        for way, of in zip(ways, names, strict=False):
            if of != name:
                continue
            if way == "STORE":
                return line if read else None
            read = True
    return None
