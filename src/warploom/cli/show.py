"""``warploom show``: the CUDA, the Program or the flags of a rung."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warploom.cli.errors import explains_errors
from warploom.cli.options import (
    Accumulate,
    DTypeName,
    HeadDim,
    KernelFile,
    KernelSettings,
    Settings,
    TakesFiles,
    parse_settings,
)

if TYPE_CHECKING:
    from warploom.ir.program import Program
    from warploom.kernels.ladder import Rung

app = typer.Typer(help="The generated code of a kernel.", no_args_is_help=True, cls=TakesFiles)


What = Annotated[str, typer.Option(metavar="cuda|program|config", help="What to print.")]


@app.callback()
def _show() -> None:
    """The generated code of a kernel: nothing is compiled or run."""


@app.command("attention")
@explains_errors
def attention(
    rung: Annotated[str, typer.Option(help="A rung's number or name.")] = "1",
    what: What = "cuda",
    set_: Settings = None,
    head_dim: HeadDim = 128,
    dtype: DTypeName = "bf16",
) -> None:
    """Print a rung of attention: CUDA C++, Program or flags.

    \b
    Examples:
      warploom show attention --rung 2
      warploom show attention --rung best --what config
    """
    from warploom.cli.ladder import attention_rungs
    from warploom.inspect.subjects import attention_program

    _, (chosen,) = attention_rungs([rung], set_, 256, 1, head_dim, dtype)
    _print(chosen, what, attention_program)


@app.command("gemm")
@explains_errors
def gemm(
    rung: Annotated[str, typer.Option(help="A rung's number or name.")] = "01b",
    what: What = "cuda",
    set_: Settings = None,
    accumulate: Accumulate = None,
) -> None:
    """Print a rung of matrix products: CUDA C++, Program or flags.

    \b
    Examples:
      warploom show gemm --rung 02
      warploom show gemm --rung best32 --set BM=64 --what config
    """
    from warploom.cli.ladder import gemm_rungs
    from warploom.inspect.subjects import gemm_program

    _, (chosen,) = gemm_rungs([rung], set_, accumulate, (1, 1, 1))
    _print(chosen, what, gemm_program)


@app.command("file")
@explains_errors
def file(
    target: KernelFile,
    what: Annotated[str, typer.Option(metavar="cuda|program", help="What to print.")] = "cuda",
    set_: KernelSettings = None,
) -> None:
    """Print the CUDA C++ of a kernel of yours, or its Program. The word ``file`` may be left out.

    \b
    Examples:
      warploom show my_kernels.py:row_max
      warploom show my_kernels.py:row_max --what program --set tile=64
    """
    from warploom.bench.checking import configuration_of, one_kernel, traced_kernel

    if what not in ("cuda", "program"):
        raise typer.BadParameter(f"--what is cuda or program of a kernel of yours, not {what!r}")
    kernel = one_kernel(target, runnable=False)
    _print_code(traced_kernel(kernel, configuration_of(kernel, parse_settings(set_))), what)


def _print(rung: Rung[Any], what: str, program_of: Callable[[Any], Program]) -> None:
    """The rung's CUDA, Program or flags. Raises typer.BadParameter for another word."""
    if what not in ("cuda", "program", "config"):
        raise typer.BadParameter(f"--what is cuda, program or config, not {what!r}")
    if what == "config":
        typer.echo(f"{rung.key} · {rung.name}: {rung.changes}\n{rung.config}\n")
        typer.echo(_flags(rung.config))
        return
    _print_code(program_of(rung.config), what)


def _print_code(program: Program, what: str) -> None:
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
