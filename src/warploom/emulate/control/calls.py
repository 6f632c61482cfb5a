"""What a kernel prints, assertions that fail, and ``trap``.

Source: CUDA C++ Programming Guide, "Formatted Output", "Assertion": arguments lie one behind the other, each at its
natural alignment; floats are doubles.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from warploom.emulate.control.context import Context, Step
from warploom.emulate.control.frames import Frame
from warploom.ir.statements import Op
from warploom.isa.effects import Abort, Printed
from warploom.isa.memory import from_generic

_DIRECTIVE = re.compile(r"%([-+ #0]*)(\*|\d*)((?:\.(?:\*|\d*))?)(hh|h|ll|l|z|t|j|)([diuoxXcsfFeEgGaAp%])")
_LONG = ("ll", "l", "z", "t", "j")
_SIGNED = "di"
_Next = Callable[[str], "int | float"]


def _acting(frame: Frame) -> Iterator[tuple[int, int, int]]:
    """(position in the frame, row, lane) of each thread."""
    for i, lane in zip(*(x.tolist() for x in np.nonzero(frame.acting())), strict=True):
        yield i, int(frame.rows[i]), lane


def print_step(run: Context, op: Op, effect: Printed) -> Step:
    """Return the step that prints what the active lanes pass to ``printf``."""
    keys, text = run.keys(op), effect.format

    def prints(frame: Frame) -> None:
        first = run.report.first
        arrays = [frame.full(run.observe(frame, key, op, "a value")) for key in keys]
        for i, row, lane in _acting(frame):
            run.printed.append((first + row, _formatted(run, str(text), _values([x[i, lane] for x in arrays]))))

    def calls(frame: Frame) -> None:
        for key in keys:
            run.observe(frame, key, op, "an address")
        formats, places = (frame.full(frame.env[keys[k]]) for k in (int(text), effect.arguments))
        counts = np.zeros((frame.n, 32), np.uint32)
        for i, row, lane in _acting(frame):
            given = _Arguments(run, op, row, lane, int(places[i, lane]))
            line = _formatted(run, run.memory.text(int(formats[i, lane])), given.next)
            run.printed.append((run.report.first + row, line))
            counts[i, lane] = given.taken
        frame.write(op.results[0], counts)

    return prints if isinstance(text, str) else calls


def _values(registers: list[Any]) -> _Next:
    """A thread's values one after the other, as :mod:`struct` calls the type that is asked for."""
    left = iter(registers)

    def following(kind: str) -> int | float:
        value = next(left)
        if kind == "d":
            return float(value)
        return int(value) % (1 << 8 * struct.calcsize(kind)) if kind.isupper() else int(value)

    return following


def abort_step(run: Context, op: Op, effect: Abort) -> Step:
    """The step of ``trap``, or of an assertion that has failed."""
    keys = run.keys(op)

    def step(frame: Frame) -> None:
        for i, row, lane in _acting(frame):
            text = "trap ends the launch: a check of the kernel's own has failed"
            if effect.assertion is not None:
                values = [int(frame.full(frame.env[keys[k]])[i, lane]) for k in effect.assertion]
                message, file, function = (run.memory.text(values[k]) for k in (0, 1, 3))
                text = f"the assertion `{message}` fails ({file}:{values[2]}, in {function})"
            run.report.add("assert", op.where, text, row, lane)

    return step


class _Arguments:
    """The arguments of one thread's call, read one after the other from its local memory."""

    def __init__(self, run: Context, op: Op, row: int, lane: int, place: int) -> None:
        self.run, self.op, self.row, self.lane = run, op, row, lane
        (local,) = from_generic("local").meaning(np.array([place], np.uint64))
        self.place, self.taken = int(local[0]), 0

    def next(self, kind: str) -> int | float:
        """The next argument as :mod:`struct` calls its type."""
        size = struct.calcsize(kind)
        self.place = -(-self.place // size) * size
        data = self.run.local.thread_bytes(self.row, self.lane, self.place, size, self.op)
        self.place += size
        self.taken += 1
        return struct.unpack(f"<{kind}", data)[0]


def _formatted(run: Context, text: str, following: _Next) -> str:
    """The text that ``printf`` would print."""

    def one(found: re.Match[str]) -> str:
        flags, width, precision, length, kind = found.groups()
        if kind == "%":
            return "%"
        width = str(following("i")) if width == "*" else width
        precision = f".{following('i')}" if precision == ".*" else precision
        head = f"%{flags}{width}{precision}"
        if kind in "fFeEgGaA":
            value = following("d")
            return float(value).hex() if kind in "aA" else f"{head}{kind}" % value
        if kind in "sp":
            value = int(following("Q"))
            return f"{head}s" % (run.memory.text(value) if kind == "s" else f"{value:#x}")
        code = "q" if length in _LONG else "i"
        value = following(code if kind in _SIGNED else code.upper())
        return f"{head}c" % (int(value) & 0xFF) if kind == "c" else f"{head}{'d' if kind in 'diu' else kind}" % value

    return _DIRECTIVE.sub(one, text)
