"""Lines of the author's source as a message shows them."""

from __future__ import annotations

import linecache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from warploom.ir.statements import SourceLine

_EXCERPT = 1  # lines of source shown before and after


def excerpt(where: SourceLine) -> str:
    """The author's line with its neighbours, the line itself marked, and the lines that called it."""
    first, last = max(1, where.line - _EXCERPT), where.line + _EXCERPT
    lines = [f"  {where.file}:{where.line}"]
    for number in range(first, last + 1):
        text = linecache.getline(where.file, number).rstrip()
        if text or number == where.line:
            lines.append(f"  {'>' if number == where.line else ' '} {number:4d} | {text}")
    for caller in where.callers:
        lines += [f"    called from {caller}", f"      {linecache.getline(caller.file, caller.line).strip()}"]
    return "\n".join(lines)
