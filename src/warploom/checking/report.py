"""What a checked run found, as JSON: findings, and wavefronts of shared-memory accesses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from warploom.checking.coverage import Uncovered
from warploom.checking.kernel_file import ExampleResult
from warploom.core.errors import WarploomError
from warploom.emulate import Emulation, Finding
from warploom.ir.statements import NOWHERE

ACCESS_CLASSES = ("ldmatrix", "st.shared", "ld.shared", "cp.async")
"""Shared-memory accesses that every row counts; others follow where a kernel has them."""


def finding_json(finding: Finding) -> dict[str, Any]:
    """A finding with its source lines as text, and the lines that called them, the innermost first."""
    found = dataclasses.asdict(finding)
    del found["between"]  # means something to this run alone
    return found | {
        "grade": finding.grade,
        "where": str(finding.where),
        "other": str(finding.other) if finding.other is not None else None,
        "where_called_from": [str(caller) for caller in finding.where.callers],
        "other_called_from": [str(caller) for caller in (finding.other or NOWHERE).callers],
        "loops": [{"line": str(line), "index": index} for line, index in finding.loops],
        "follows": [finding_json(other) for other in finding.follows],
    }


def uncovered_json(missed: Iterable[Uncovered]) -> list[dict[str, Any]]:
    """Return each line that no run exercised for JSON: its kind, what was not seen, what to change in the example."""
    return [
        {"kind": x.kind, "where": str(x.where), "file": x.where.file, "message": x.message, "cure": x.cure}
        for x in missed
    ]


def error_json(error: WarploomError) -> dict[str, Any]:
    """An error that ended a check: its type, its message, and the author's line where it is known."""
    where = error.where or NOWHERE
    return {
        "kind": type(error).__name__,
        "message": str(error),
        "file": where.file or None,
        "line": where.line or None,
        "called_from": [str(caller) for caller in where.callers],
    }


def wavefronts_json(emulation: Emulation) -> dict[str, dict[str, int]]:
    """Executed and ideal wavefronts of each class of shared-memory access, and the instructions that made them."""
    classes = dict.fromkeys((*ACCESS_CLASSES, *emulation.traffic.shared))
    found = {name: emulation.traffic[name] for name in classes}
    return {name: {"actual": w.actual, "ideal": w.ideal, "accesses": w.accesses} for name, w in found.items()}


def wrong_elements(result: ExampleResult) -> Iterator[str]:
    """Yield the number of wrong elements and the first of them; nothing if the result is right."""
    if result.ok:
        return
    nans = f", {result.nans} of them NaN" if result.nans else ""
    where = f": {result.pattern}" if result.pattern else ""
    yield f"{result.wrong} of {result.count} elements are wrong{nans}{where}; the first:"
    for index, got, expected in result.first:
        yield f"{result.name}[{', '.join(map(str, index))}] is {got:.6g}, expected {expected:.6g}"
