"""``warploom pack``: compiled kernels in one file, for machines that shall not compile."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from warploom.cli.errors import explains_errors
from warploom.cli.output import note, write_json


@explains_errors
def pack(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE.py", exists=True, dir_okay=False, help="A file with a function plans()."),
    ],
    archs: Annotated[str, typer.Option("--for", metavar="ARCH,…", help="Architectures: sm_90a, sm_80, …")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The pack.")] = Path("kernels.pack"),
    json: Annotated[bool, typer.Option("--json", help="What was packed as JSON on standard output.")] = False,
) -> None:
    """Compile kernels ahead, into a file that runs without a compiler.

    plans() in the file returns plans of calls (warploom.plan, warploom.plan_matmul, …) on NumPy arrays that lie as
    those of the calls. No GPU is needed. Processes that have the pack's path in WARPLOOM_PACK take kernels from there
    before they look into their cache.

    \b
    Example:
      warploom pack calls.py --for sm_90a,sm_80
    """
    from warploom.checking.kernel_file import of_the_user
    from warploom.core.errors import ProblemError
    from warploom.ops.warmup import pack as write

    names = of_the_user(f"{file} cannot be run", lambda: runpy.run_path(str(file)))
    plans: Callable[[], Any] | None = names.get("plans")
    if plans is None:
        raise ProblemError(f"{file} has no function plans() that returns plans, such as [warploom.plan(q, k, v)]")
    planned = partial(of_the_user, f"plans() of {file} fails", lambda: list(plans()))
    done = write(out, planned, [name.strip() for name in archs.split(",")])
    if json:
        write_json({"file": str(out), "kernels": done.kernels, "bytes": done.bytes, "left_out": done.left_out}, "-")
    else:
        typer.echo(f"{len(done.kernels)} kernels in {out}, {done.bytes} bytes: {', '.join(done.kernels)}")
    for name in done.left_out:
        note(f"not in the pack: {name}, which is made of what only one process knows (an epilogue with an object)")
