"""``k.print``: a Python format of values, printed by threads as they run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import Formatter

from warploom.core.dtypes import DType, f32, s32
from warploom.core.errors import TraceError, shown
from warploom.isa.barriers import printf
from warploom.lang.fragments import Fragment, FragmentWords
from warploom.lang.values import Mutable, Traced, holds_bits

_SPEC = re.compile(r"([-+ #0]*\d*(?:\.\d+)?)([a-zA-Z]?)")
_INTEGERS, _FLOATS = "duxXo", "gGeEfFa"
"""Letters of a format, that without one first."""
_MOST = 32
"""Values that ``printf`` takes on a GPU (CUDA C++ Programming Guide, "Limitations" of formatted output)."""
_WHERE = "CTA {},{},{} warp {} lane {}: "
_INDICES = (*[("CTA", 2**31)] * 3, ("warp", 32), ("lane", 32))
"""What a line begins with, and how many of each there can be."""
Shown = Traced | Fragment | Sequence[Traced]


class PrintWords(FragmentWords):
    """Printing from a kernel."""

    def print(
        self,
        text: str,
        *values: Shown | int | float | str,
        lane: int | None = None,
        warp: int | None = None,
        cta: int | tuple[int, ...] | None = None,
    ) -> None:
        """Print a line for each thread that comes here, or for one lane, warp or CTA: ``k.print("m = {}", m, lane=0)``.

        ``{}`` takes a value, a fragment (the elements that the thread holds) or a list of values, ``{:.3f}`` and
        ``{:x}`` with a format; 16-bit elements as loaded are printed by value. A line begins with its CTA, warp and
        lane; ``cta`` is an index along x or one along each axis. The emulator keeps the lines in ``printed``, warp by
        warp; on a GPU it is ``printf``, which the host sees when it synchronises. Raises TraceError for more than 27
        values.
        """
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TraceError(f"k.print begins with a text, as in k.print('x = {{}}', x), not with {shown(text)}")
        where = (self.cta_x, self.cta_y, self.cta_z, self.warp, self.lane)
        given = iter([*where, *values])
        pieces, arguments = list[str](), list[Traced]()
        for literal, field, spec, _ in Formatter().parse(_WHERE + text):
            pieces.append(literal.replace("%", "%%"))
            if field is None:
                continue
            value = next(given, None)
            if field or value is None:
                raise TraceError(f"k.print takes a value for each {{}} of {text!r}, in their order")
            pieces.append(self._directives(value, spec or "", arguments))
        if next(given, None) is not None:
            raise TraceError(f"k.print has more values than {text!r} has {{}}")
        if len(arguments) > _MOST:
            most = _MOST - len(where)
            raise TraceError(f"k.print prints at most {most} values, not {len(arguments) - len(where)}: print a part")
        asked = (*(cta if isinstance(cta, tuple) else (cta,)), None, None)[:3]
        condition: Traced | None = None
        for index, number, (what, count) in zip(where, (*asked, warp, lane), _INDICES, strict=True):
            if number is not None:
                _check_index(number, what, count)
                condition = index == number if condition is None else condition & (index == number)
        instruction = printf("".join(pieces) + "\n", tuple(x.dtype for x in arguments))
        if condition is None:
            self.emit(instruction, arguments)
            return
        with self.when(condition):
            self.emit(instruction, arguments)

    def _directives(self, value: Shown | float | str, spec: str, arguments: list[Traced]) -> str:
        """The directives of ``printf`` for a value, whose registers join the arguments."""
        if isinstance(value, Fragment):
            value = value.elements()
        if isinstance(value, Sequence) and not isinstance(value, str):
            return f"[{' '.join(self._directives(x, spec, arguments) for x in value)}]"
        if not isinstance(value, Traced):
            return format(value, spec).replace("%", "%%")
        if holds_bits(value):
            value = self.convert(value, f32 if value.element.is_float else s32)
        arguments.append(value.get() if isinstance(value, Mutable) else value)
        return _directive(value.dtype, spec)


def _check_index(number: int, what: str, count: int) -> None:
    """Refuse an index that nothing has, of which no line would come."""
    if isinstance(number, int) and not 0 <= number < count:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TraceError(f"k.print: there is no {what} {number}: they are counted from 0 to {count - 1}")


def _directive(dtype: DType, spec: str) -> str:
    """The directive of a format of Python's for a register; TraceError for one that C has not."""
    found, known = _SPEC.fullmatch(spec), _FLOATS if dtype.is_float else _INTEGERS
    kind = found and (found[2] or known[0])
    if not found or not kind or kind not in known:
        raise TraceError(f"k.print formats {dtype} by one of {', '.join(known)} with a width, not by {shown(spec)}")
    if kind == "d" and dtype.kind == "unsigned":
        kind = "u"
    return f"%{found[1]}{'ll' if dtype.bits == 64 and not dtype.is_float else ''}{kind}"
