"""``warploom new``: a kernel to begin with, which checks, and its test."""

from __future__ import annotations

import keyword
from pathlib import Path
from typing import Annotated

import typer

from warploom.cli.errors import explains_errors

app = typer.Typer(help="Write something to begin with.", no_args_is_help=True)

_KERNEL = '''"""NAME: y = 2·x, of any length. Check it without a GPU: warploom check NAME.py"""

import numpy as np

from warploom.lang import Global, Kernel, Launch, f32, kernel, u32


@kernel(threads=lambda tile: tile)
def NAME(k: Kernel, x: Global[f32], y: Global[f32], n: u32, *, tile: int = 128) -> None:
    """Each CTA takes ``tile`` elements, each thread one."""
    i = k.cta_x * tile + k.thread
    with k.when(i < n):  # the last CTA may reach beyond the end
        y.store(x.load(i) * 2.0, i)


@NAME.example
def numbers(rng: np.random.Generator, tile: int = 128) -> Launch:
    """How to run it once, and what must come out: float64, and an absolute tolerance."""
    n = 1000  # no multiple of the tile
    x = rng.standard_normal(n).astype(np.float32)
    y = np.full(n, np.nan, np.float32)  # an element that nobody writes shows
    return Launch(grid=-(-n // tile), arguments=[x, y, n], expect={"y": (2.0 * x.astype(np.float64), 1e-6)})
'''

_TEST = '''"""NAME on the emulator, under all checks: no GPU is needed."""

import numpy as np
import pytest
from NAME import NAME, numbers

from warploom.emulate import emulate


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("seed", [None, 1])
def test_NAME(tile, seed):
    launch = numbers(np.random.default_rng(0), tile=tile)
    program = NAME.trace(tile=tile)
    emulate(program, launch.grid, launch.arguments, seed=seed).raise_if_found()
    arrays = dict(zip((p.name for p in program.parameters), launch.arguments, strict=False))  # strides come behind
    for name, (expected, tolerance) in launch.expect.items():
        np.testing.assert_allclose(arrays[name], expected, rtol=0, atol=tolerance)
'''


@app.callback()
def _new() -> None:
    """Write something to begin with."""


@app.command("kernel")
@explains_errors
def kernel(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The kernel's name, and its file's.")],
    folder: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the files go.")] = Path(),
) -> None:
    """Write a kernel that checks, and a test of it.

    NAME.py holds the kernel with an example, test_NAME.py the test for pytest.

    \b
    Example:
      warploom new kernel row_max && warploom check row_max.py && pytest test_row_max.py
    """
    from warploom.core.errors import ProblemError

    if not name.isidentifier() or keyword.iskeyword(name) or name in _TAKEN:
        raise ProblemError(f"{name!r} cannot name a kernel of Python here: take another name, as in row_max")
    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / f"{name}.py": _KERNEL, folder / f"test_{name}.py": _TEST}
    for path in files:
        if path.exists():
            raise ProblemError(f"{path} exists: take another name, or another --folder")
    for path, text in files.items():
        path.write_text(text.replace("NAME", name), encoding="utf-8")
        typer.echo(f"written: {path}")
    typer.echo(f"next: warploom check {folder / name}.py")


_TAKEN = {
    "numbers",
    "numpy",
    "np",
    "warploom",
    "kernel",
    "Kernel",
    "Global",
    "Launch",
    "f32",
    "u32",
    "pytest",
    "emulate",
}
"""Names that the files use."""
