"""``warploom show``: the CUDA, the Program or the flags of a kernel."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from warploom.cli.errors import explains_errors
from warploom.cli.options import grouped
from warploom_lab.cli.subjects import Subject


@explains_errors
@grouped
def show(
    subject: Subject,
    kind: Annotated[
        str, typer.Option("--what", metavar="cuda|program|config", help="What to print; config: a rung's flags.")
    ] = "cuda",
) -> None:
    """The generated code of a kernel: CUDA C++, Program or flags.

    Nothing is compiled or run.

    \b
    Examples:
      warploom show attention --rung 2
      warploom show attention --rung best --what config
      warploom show gemm --rung best32 --set BM=64 --what config
      warploom show my_kernels.py:row_max --what program --set tile=64
    """
    known = ("cuda", "program", "config") if subject.is_rung else ("cuda", "program")
    if kind not in known:
        raise typer.BadParameter(f"--what is {' or '.join(known)} of {subject.what}, not {kind!r}")
    if kind == "config":
        rung = subject.chosen()
        typer.echo(f"{rung.key} · {rung.name}: {rung.changes}\n{rung.config}\n")
        for f in dataclasses.fields(rung.config):
            typer.echo(f"{f.name:18} {getattr(rung.config, f.name)!s:8} {f.metadata.get('doc', '')}")
    elif kind == "program":
        typer.echo(subject.program().text, nl=False)
    else:
        from warploom.cuda.printer import print_cuda

        typer.echo(print_cuda(subject.program()), nl=False)
