"""Words that are named and not called: a statement ``k.syncthreads`` does nothing. The bytecode says where one is."""

from __future__ import annotations

import dis
import linecache
from functools import lru_cache
from types import CellType, CodeType, FunctionType

from warploom.core.errors import TraceError
from warploom.ir.statements import SourceLine

_NAMES = tuple(f"LOAD_{of}" for of in ("FAST", "NAME", "DEREF", "GLOBAL"))


def refuse_uncalled_from(function: FunctionType) -> None:
    """:func:`refuse_uncalled` of a function, of those of its module that it names, and of those that they name."""
    found = [function]
    for one in found:
        named = [one.__globals__.get(name) for name in refuse_uncalled(one.__code__)]
        named += [cell.cell_contents for cell in one.__closure__ or () if cell != CellType()]
        functions = (x for x in named if isinstance(x, FunctionType) and x.__module__ == function.__module__)
        found += [x for x in functions if x not in found]


@lru_cache(maxsize=256)
def refuse_uncalled(code: CodeType) -> frozenset[str]:
    """Raise TraceError where a statement of the author's function, or of one within it, is a name or an attribute.

    Returns the global names that they read.
    """
    text, read, names = "", None, set[str]()  # of the name or attribute that was loaded last
    for instruction in dis.get_instructions(code):
        name = str(instruction.argval)
        if instruction.opname == "POP_TOP" and text not in ("", *code.co_varnames[:1]) and _is_all(code, read):
            where = SourceLine(code.co_filename, (read and read.lineno) or code.co_firstlineno)
            raise TraceError(
                f"{where}: {text} is named here and not called, which does nothing: write {text}(), or leave it out"
            )
        if instruction.opname.startswith(_NAMES):
            text = name
            if instruction.opname == "LOAD_GLOBAL":
                names.add(name)
        else:
            text = f"{text or '…'}.{name}" if instruction.opname == "LOAD_ATTR" else ""
        read = instruction.positions
    return frozenset(names).union(*(refuse_uncalled(x) for x in code.co_consts if isinstance(x, CodeType)))


def _is_all(code: CodeType, at: dis.Positions | None) -> bool:
    """Whether an expression is a whole statement by its source: not of one that is there, as ``match x:``."""
    if at is None or None in at:
        return True
    first, last = (linecache.getline(code.co_filename, line or 0).encode() for line in (at.lineno, at.end_lineno))
    before, after = first[: at.col_offset].rstrip(), last[at.end_col_offset :].lstrip()
    while before.endswith(b"(") and after.startswith(b")"):
        before, after = before[:-1].rstrip(), after[1:].lstrip()
    return before[-1:] in b":;" and after[:1] in b"#;"
