"""Facts from the author's source and bytecode that traced values do not have.

- Names of values: a traced function cannot see the names it assigns to, so a value computed on the line of ``row = …``
  is called ``row``. Unnamed values keep numbers.
- Words that are named and not called: a statement ``k.syncthreads`` does nothing.
- Names that a block of the running kernel binds anew. A block's body is traced once. So a name that a loop binds anew
  after reading its old value, ``s = s + x``, carries nothing to the next iteration: what looks like a sum adds nothing
  up. And a Python number that a condition's body binds, ``found = 1``, is bound whether the condition holds or not.
"""

from __future__ import annotations

import ast
import dis
import linecache
import math
from collections.abc import Generator
from contextlib import contextmanager
from functools import lru_cache
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

from warploom.core.dtypes import f32, s32
from warploom.core.errors import TraceError
from warploom.ir.statements import SourceLine
from warploom.lang.values import Mutable, Number, Traced


@lru_cache(maxsize=256)
def _assignments(file: str) -> dict[int, tuple[int, str]]:
    """Line → (last line of the statement, assigned name) for every simple assignment in a source file."""
    source = "".join(linecache.getlines(file))
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return {}
    found: dict[int, tuple[int, str]] = {}
    for node in ast.walk(tree):
        target: ast.expr | None = None
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
        elif isinstance(node, ast.AnnAssign | ast.AugAssign) and node.value is not None:
            target = node.target
        if isinstance(target, ast.Name) and isinstance(node, ast.stmt):
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                name = target.id if found.get(line, (0, target.id))[1] == target.id else ""  # two on one line: neither
                found[line] = node.end_lineno or node.lineno, name
    return found


def name_at(file: str, line: int) -> str:
    """The name assigned by the statement on ``line`` of ``file``, or '' if it is no simple assignment."""
    return _assignments(file).get(line, (0, ""))[1]


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
                f"{text} is named here and not called, which does nothing: write {text}(), or leave it out"
            ).at(where)
        if instruction.opname.startswith(_NAMES):
            text = name
            if instruction.opname == "LOAD_GLOBAL":
                names.add(name)
        else:
            text = f"{text or '…'}.{name}" if instruction.opname == "LOAD_ATTR" else ""
        read = instruction.positions
    return frozenset(names).union(*(refuse_uncalled(x) for x in code.co_consts if isinstance(x, CodeType)))


def _is_all(code: CodeType, at: dis.Positions | None) -> bool:
    """Whether an expression is a whole statement by its source, and not part of one, as in ``match x:``."""
    if at is None or None in at:
        return True
    first, last = (linecache.getline(code.co_filename, line or 0).encode() for line in (at.lineno, at.end_lineno))
    before, after = first[: at.col_offset].rstrip(), last[at.end_col_offset :].lstrip()
    while before.endswith(b"(") and after.startswith(b")"):
        before, after = before[:-1].rstrip(), after[1:].lstrip()
    return before[-1:] in b":;" and after[:1] in b"#;"


_OF_NAMES = tuple(f"{way}_{of}" for way in ("LOAD", "STORE") for of in ("FAST", "NAME", "DEREF", "GLOBAL"))


@contextmanager
def refuse_rebinding(frame: FrameType | None, *, loop: bool) -> Generator[None, None, None]:
    """Raise TraceError where the author's code inside binds a name anew that it needs a register for.

    In a loop's body that is a name whose old value the body reads first; in a condition's, a number that is read after.
    """
    if frame is None:
        yield
        return
    before, first = _values(frame), frame.f_lasti
    yield
    last = frame.f_lasti
    for name, now in _values(frame).items():
        old = before.get(name)
        if old is None or _same(old, now):
            continue
        inside, after = _ways(frame, name, first, last), _ways(frame, name, last)
        bound = [line for way, line in inside if way == "STORE"]
        reads = [way for way, _ in (inside if loop else after)][:1] == ["LOAD"]
        if not (bound and reads) or (isinstance(now, Traced) and not loop):
            continue
        where = SourceLine(frame.f_code.co_filename, bound[0])
        if loop:
            why = "in a loop, which reads its old value: the body is traced once, so the new value does not "
            why += "reach the next iteration"
        else:
            why = f"to {now} under a condition, and read after it: the body is traced in any case, so the "
            why += f"name is {now} for all threads"
        raise TraceError(f"{name!r} is bound anew {why}. {_cure(name, old, now)}").at(where)


def _same(old: Number, now: Number) -> bool:
    """Whether a name still has its value. A register may have taken another's place: loops carry it."""
    if isinstance(now, Traced):
        return isinstance(now, Mutable) or (isinstance(old, Traced) and old.ir is now.ir)
    return not isinstance(old, Traced) and old == now


def _cure(name: str, old: Number, now: Number) -> str:
    write = f"write {name}.set(…) or {name} += … inside"
    if isinstance(old, Mutable):
        return f"It was a register before: {write}"
    dtype = next((x.dtype for x in (now, old) if isinstance(x, Traced)), f32 if isinstance(now, float) else s32)
    value = "…" if isinstance(old, Traced) else repr(old)
    return f"Make it a register before, {name} = k.register({dtype}, {value}), and {write}"


def _values(frame: FrameType) -> dict[str, Number]:
    """The author's names of values and numbers."""
    named: dict[str, Any] = dict(frame.f_locals)
    return {name: x for name, x in named.items() if isinstance(x, Number)}


@lru_cache(maxsize=256)
def _accesses(code: CodeType) -> tuple[tuple[int, int, str, str], ...]:
    """(offset, line, LOAD or STORE, name) of each access to a name in the author's code."""
    found: list[tuple[int, int, str, str]] = []
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        if instruction.positions is not None and instruction.positions.lineno is not None:
            line = instruction.positions.lineno
        if instruction.opname.startswith(_OF_NAMES):
            given: Any = instruction.argval  # one name, or two of instructions that access two
            names = (given,) if isinstance(given, str) else given
            ways = [part for part in instruction.opname.split("_") if part in ("LOAD", "STORE")]
            found += [(instruction.offset, line, way, name) for way, name in zip(ways, names, strict=False)]
    return tuple(found)


def _ways(frame: FrameType, name: str, first: int, last: float = math.inf) -> list[tuple[str, int]]:
    """(LOAD or STORE, line) of each access to a name between two offsets of the author's code."""
    return [(way, line) for at, line, way, of in _accesses(frame.f_code) if first < at < last and of == name]
