"""``warploom show``: the CUDA, the Program or the flags of a rung."""

from __future__ import annotations

from typing import Annotated

import typer

from warploom.cli.errors import explains_errors
from warploom.cli.options import DTypeName, HeadDim, Settings

app = typer.Typer(help="The generated code of a kernel.", no_args_is_help=True)


@app.callback()
def _show() -> None:
    """The generated code of a kernel: nothing is compiled or run."""


@app.command("attention")
@explains_errors
def attention(
    rung: Annotated[str, typer.Option(help="A rung's number or name.")] = "1",
    what: Annotated[str, typer.Option(metavar="cuda|program|config", help="What to print.")] = "cuda",
    set_: Settings = None,
    head_dim: HeadDim = 128,
    dtype: DTypeName = "bf16",
) -> None:
    """Print the CUDA C++ of a rung, its Program, or its flags with their meanings.

    \b
    Examples:
      warploom show attention --rung 2
      warploom show attention --rung best --what config
    """
    if what not in ("cuda", "program", "config"):
        raise typer.BadParameter(f"--what is cuda, program or config, not {what!r}")
    from warploom.cli.ladder import attention_rungs

    _, (chosen,) = attention_rungs([rung], set_, 256, 1, head_dim, dtype)
    if what == "config":
        typer.echo(f"{chosen.key} · {chosen.name}: {chosen.changes}\n{chosen.config}\n")
        typer.echo(_flags(chosen.config))
        return
    from warploom.ops.attention import trace

    program = trace(chosen.config)
    if what == "program":
        typer.echo(program.text, nl=False)
        return
    from warploom.cuda.printer import print_cuda

    typer.echo(print_cuda(program), nl=False)


def _flags(config: object) -> str:
    """One flag a line: name, value, meaning."""
    import dataclasses

    lines: list[str] = []
    for f in dataclasses.fields(config):  # type: ignore[arg-type]
        lines.append(f"{f.name:18} {getattr(config, f.name)!s:8} {f.metadata.get('doc', '')}")
    return "\n".join(lines)
