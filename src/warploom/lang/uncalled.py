"""Words that are named and not called: a statement ``k.syncthreads`` does nothing. The bytecode says where one is."""

from __future__ import annotations

import dis
from functools import lru_cache
from types import CodeType

from warploom.core.errors import TraceError
from warploom.ir.statements import SourceLine

_NAMES = tuple(f"LOAD_{of}" for of in ("FAST", "NAME", "DEREF", "GLOBAL"))


@lru_cache(maxsize=256)
def refuse_uncalled(code: CodeType) -> None:
    """Raise TraceError where a statement of the author's function, or of one within it, is a name or an attribute."""
    text = ""  # of the name or attribute that was loaded last
    for instruction in dis.get_instructions(code):
        if instruction.opname == "POP_TOP" and text not in ("", *code.co_varnames[:1]):  # self.x: int loads self
            at = instruction.positions
            where = SourceLine(code.co_filename, (at and at.lineno) or code.co_firstlineno)
            raise TraceError(
                f"{where}: {text} is named here and not called, which does nothing: write {text}(), or leave it out"
            )
        if instruction.opname.startswith(_NAMES):
            text = str(instruction.argval)
        else:
            text = f"{text or '…'}.{instruction.argval}" if instruction.opname == "LOAD_ATTR" else ""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            refuse_uncalled(inner)
