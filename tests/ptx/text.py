"""PTX kernels for tests, written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import warploom
from warploom.emulate import Finding

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"
REGISTERS = """
    .reg .pred %p<20>; .reg .b16 %h<20>; .reg .b32 %r<60>; .reg .f32 %f<40>; .reg .b64 %d<40>; .reg .f64 %e<20>;
"""
SIZES = {1: "b8", 2: "b16", 4: "b32", 8: "b64"}


def kernel(body: str, parameters: Sequence[str] = ("u64",), before: str = "", target: str = "sm_80") -> str:
    """A module with one kernel ``k``; parameters p0, p1 … of these types; %d0, %d1 … hold them if they are u64."""
    listed = ", ".join(f".param .{kind} p{i}" for i, kind in enumerate(parameters))
    loads = "\n".join(
        f"    ld.param.{kind} {'%d' if kind == 'u64' else '%r5'}{i}, [p{i}];" for i, kind in enumerate(parameters)
    )
    head = HEAD.replace("sm_80", target)
    return f"{head}{before}\n.visible .entry k({listed})\n{{{REGISTERS}{loads}\n{body}\n    ret;\n}}\n"


def check(text: str, arguments: Any, block: Any = 32, grid: Any = 1, **options: Any) -> Any:
    """:func:`warploom.check_ptx`."""
    return warploom.check_ptx(text, grid, block, arguments, **options)


def kinds(findings: Sequence[Finding]) -> set[str]:
    """The kinds of findings."""
    return {finding.kind for cause in findings for finding in (cause, *cause.follows)}


def lanewise(instruction: str, operands: Sequence[np.ndarray[Any, Any]], result: Any) -> np.ndarray[Any, Any]:
    """What ``instruction`` makes of operands, one element a thread; it writes %out from %in0, %in1 …"""
    count = operands[0].size
    sizes = [*(x.dtype.itemsize for x in operands), np.dtype(result).itemsize]
    declared = "".join(
        f".reg .{SIZES[n]} %{name};\n"
        for n, name in zip(sizes, [*(f"in{i}" for i in range(len(operands))), "out"], strict=True)
    )
    body = declared + "mov.u32 %r0, %tid.x;\n mov.u32 %r1, %ctaid.x;\n mad.lo.u32 %r0, %r1, 32, %r0;\n"
    for i, n in enumerate(sizes):
        body += f"mad.wide.u32 %d{20 + i}, %r0, {n}, %d{i};\n"
    for i, n in enumerate(sizes[:-1]):
        body += f"ld.global.{SIZES[n]} %in{i}, [%d{20 + i}];\n"
    body += f"{instruction}\nst.global.{SIZES[sizes[-1]]} [%d{20 + len(operands)}], %out;\n"
    out = np.zeros(count, result)
    assert count % 32 == 0
    run = check(kernel(body, ["u64"] * len(sizes)), [*operands, out], grid=count // 32)
    assert run.findings == ()
    return out
