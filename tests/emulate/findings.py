"""What the tests of findings share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from warploom.emulate import Emulation, Finding
from warploom.ir.program import Program
from warploom.ir.statements import Op


def every(run: Emulation) -> list[Finding]:
    """All findings, also those that others explain."""
    return [f for cause in run.findings for f in (cause, *cause.follows)]


def kinds(run: Emulation) -> set[str]:
    return {f.kind for f in every(run)}


def numbers(count: int) -> np.ndarray[Any, Any]:
    return np.arange(count, dtype=np.uint32)


def without(program: Program, mnemonic: str) -> Program:
    """The program without its top-level instructions of that name (verify would refuse to trace some of these)."""
    kept = tuple(s for s in program.body if not (isinstance(s, Op) and s.instruction.mnemonic == mnemonic))
    assert len(kept) < len(program.body)
    return replace(program, body=kept)
