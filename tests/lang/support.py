"""Programs of small kernels, seen from outside: their instructions, and what they compute on the emulator."""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from warploom.emulate import emulate
from warploom.ir.program import Program
from warploom.ir.statements import Loop, Op, When, walk
from warploom.lang import Global, Kernel, KernelFunction, f32, kernel, u32


def mnemonics(program: Program) -> list[str]:
    """The instructions in order, depth first."""
    return [op.instruction.mnemonic for op in program.ops()]


def ops(program: Program, mnemonic: str) -> list[Op]:
    """The instructions whose mnemonic starts so."""
    return [op for op in program.ops() if op.instruction.mnemonic.startswith(mnemonic)]


def loops(program: Program) -> list[Loop]:
    return [s for s in walk(program.body) if isinstance(s, Loop)]


def whens(program: Program) -> list[When]:
    return [s for s in walk(program.body) if isinstance(s, When)]


def run(function: KernelFunction, *arguments: Any, grid: int = 1, **configuration: Any) -> None:
    """Trace and run without findings; arrays are changed in place."""
    emulate(function.trace(**configuration), grid, list(arguments)).raise_if_found()


def lanes(count: int = 32, dtype: Any = np.uint32) -> np.ndarray:
    return np.zeros(count, dtype)


def line_of(function: KernelFunction | Callable[..., Any], text: str) -> int:
    """The line of the source of a kernel that contains ``text``."""
    import inspect

    target = function.function if isinstance(function, KernelFunction) else function
    source, first = inspect.getsourcelines(target)
    found: Sequence[int] = [first + i for i, line in enumerate(source) if text in line]
    assert len(found) == 1, (text, found)
    return found[0]


def traced_with(body, *, share: bool = True, drop_unused: bool = False):
    """A one-warp kernel (out: u32, x: f32, n: u32) with the given body."""

    @kernel(threads=32, share=share, drop_unused=drop_unused)
    def sample(k: Kernel, out: Global[u32], x: Global[f32], n: u32) -> None:
        body(k, out, x, n)

    return sample
