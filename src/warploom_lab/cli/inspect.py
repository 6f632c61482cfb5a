"""``warploom inspect``: what a kernel compiled to, counted by purpose, alone or against another."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warploom.cli.errors import explains_errors
from warploom.cli.options import JsonFile, grouped
from warploom.cli.output import console, write_json
from warploom_lab.cli.subjects import Subject

if TYPE_CHECKING:
    from warploom.core.targets import GpuRates
    from warploom_lab.inspect import SassReport
    from warploom_lab.inspect.estimate import Estimate


@dataclasses.dataclass(frozen=True)
class Wanted(Subject):
    """One thing to inspect, as the options say."""

    what: Annotated[
        str,
        typer.Argument(
            metavar="attention|gemm|FILE", help="A kernel, or a file: FILE.py[:KERNEL], a cubin or SASS text."
        ),
    ]
    arch: Annotated[
        str | None, typer.Option(help="Architecture to compile for: sm_80, sm_90a, …; default the oldest that can.")
    ] = None
    opt_level: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=3, help="ptxas's optimisation level; default the rung's own.")
    ] = None
    kernel: Annotated[str | None, typer.Option(help="Which kernel of a file that holds several.")] = None
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=1024, help="Threads per CTA of a file's kernel.")
    ] = None
    shared: Annotated[
        int | None, typer.Option(metavar="BYTES", min=0, help="Dynamic shared memory of a file's kernel.")
    ] = None
    estimate: Annotated[
        str | None,
        typer.Option(metavar="A100|H100|H200", help="Run the example, and say what bounds the kernel on this GPU."),
    ] = None
    source: Annotated[
        bool, typer.Option("--source", help="Print the SASS with whom it waits for, beside the Python.")
    ] = False

    def title(self, report: SassReport) -> str:
        """The title of a report: kernel, architecture and optimisation level."""
        arch = report.arch or "an unknown architecture"
        if arch == f"{self.arch}a":
            arch += f" ({self.arch} with all its instructions)"
        if not self.is_rung:
            return f"{self.what}: {report.name} for {arch}"
        level = "" if self.opt_level is None else f" -O{self.opt_level}"
        return " ".join([f"{self.what}, rung {self.of_rung} for {arch}{level}", *(self.settings or ())])

    def other(self, against: str) -> Wanted:
        """Return the kernel to compare with: this one with one thing changed, or another file."""
        levels = {f"O{level}": level for level in range(4)}
        is_file = Path(against.rpartition(":")[0] or against).is_file()
        if is_file or not (self.is_rung or self.is_python):
            return dataclasses.replace(self, what=against)
        if (level := levels.get(against.lstrip("-"))) is not None:
            return dataclasses.replace(self, opt_level=level)
        if against.startswith("sm_"):
            return dataclasses.replace(self, arch=against)
        if "=" in against:
            return dataclasses.replace(self, settings=[*(self.settings or ()), against])
        if self.is_python:
            raise typer.BadParameter(
                f"a kernel of a file stands --against a file, an architecture, O0 to O3 or NAME=VALUE, not {against!r}"
            )
        return dataclasses.replace(self, rung=against)

    def report(self) -> SassReport:
        """Compile or read it. Raises ConfigError, CompileError, UnsupportedDeviceError, OSError."""
        if not self.is_rung and not self.is_python:
            return self._of_file()
        from warploom_lab.inspect import inspect_program

        named = self.kernel and self.what.endswith(".py")
        program = (dataclasses.replace(self, what=f"{self.what}:{self.kernel}") if named else self).program()
        arch = self.arch or (self.gpu.arch if self.gpu else program.requires)
        return inspect_program(program, arch, self.opt_level, with_source=self.source)

    @property
    def gpu(self) -> GpuRates | None:
        """The GPU of ``--estimate``. Raises typer.BadParameter for another name."""
        from warploom.core.targets import GPUS

        if self.estimate is not None and self.estimate not in GPUS:
            raise typer.BadParameter(f"--estimate knows {', '.join(GPUS)}, not {self.estimate!r}")
        return GPUS[self.estimate] if self.estimate else None

    def estimated(self, gpu: GpuRates) -> Estimate:
        """Run the example of a file's kernel. Raises ConfigError for what has none, and what the run raises."""
        from warploom.checking.kernel_file import configuration_of, example_of, one_kernel, traced_kernel
        from warploom.cli.options import parse_settings
        from warploom.core.errors import ConfigError
        from warploom.emulate import emulate
        from warploom_lab.inspect.estimate import estimate

        if not self.is_python:
            raise ConfigError("--estimate counts what the example of a kernel does: give it FILE.py[:KERNEL]")
        function = one_kernel(f"{self.what}:{self.kernel}" if self.kernel else self.what)
        configuration = configuration_of(function, parse_settings(self.settings))
        program = traced_kernel(function, configuration)
        launch = example_of(function, program, None, configuration)
        return estimate(gpu, launch, emulate(program, launch.grid, launch.arguments))

    def _of_file(self) -> SassReport:
        from warploom.core.errors import ConfigError
        from warploom_lab.inspect.subjects import inspect_file

        path = Path(self.what)
        if not path.is_file():
            raise ConfigError(f"{self.what!r} is neither 'attention' nor 'gemm' nor a file; give a cubin, or SASS text")
        report = inspect_file(path, self.kernel)
        return dataclasses.replace(report, threads=self.threads, dynamic_shared_bytes=self.shared)


@explains_errors
@grouped
def inspect_command(
    wanted: Wanted,
    against: Annotated[
        str | None, typer.Option(metavar="RUNG|ARCH|O0…O3|FLAG=VALUE|FILE", help="Show what differs from this one.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Static figures of compiled code; no GPU is needed.

    NVRTC and nvdisasm are (the extra cu13 or cu12).

    Instructions are counted by what they are for, in the whole kernel and in one iteration of its main loop: the loop
    with most tensor instructions. Look first at "address & logic" and "register copies": they compete with the mma for
    issue slots. Many address registers for LDSM (ldmatrix) and LDGSTS (cp.async) mean that swizzled addresses are kept
    or recomputed one by one; a few, each used often with different immediate offsets, are what to aim for. Registers,
    shared memory or warps limit how many CTAs an SM holds; local memory is spilled registers.

    \b
    Examples:
      warploom inspect attention --rung 2
      warploom inspect attention --rung 2 --against 1
      warploom inspect attention --rung 2 --arch sm_90a --against sm_80
      warploom inspect attention --rung 2 --against O1
      warploom inspect attention --rung 8 --against swizzle=off
      warploom inspect attention --rung 2 --source
      warploom inspect gemm --rung 03 --against 02
      warploom inspect my_kernels.py:row_max --source
      warploom inspect my_kernels.py:row_max --estimate H200
      warploom inspect kernel.cubin --threads 128 --shared 49152 --against other.sass
    """
    from rich.markup import escape

    from warploom_lab.cli import inspect_tables

    report = wanted.report()
    if against is None:
        value, tables = report.to_dict(), inspect_tables.report_tables(report)
        if (gpu := wanted.gpu) is not None:
            found = wanted.estimated(gpu)
            value |= {"estimate": found.to_dict()}
            tables = [*tables, *inspect_tables.estimate_table(found)]
    else:
        value, tables = _compared(wanted.other(against), report)
    if json != "-":
        out = console()
        for text in (f"[bold]{escape(wanted.title(report))}[/bold]", *inspect_tables.headline(report), *tables):
            out.print(text)
        if wanted.source:
            for line in inspect_tables.source_lines(report):
                typer.echo(line)
    if json is not None:
        write_json(value, json)


def _compared(other: Wanted, report: SassReport) -> tuple[dict[str, Any], list[Any]]:
    """(value, tables) of ``report`` against another."""
    from rich.markup import escape

    from warploom_lab.cli import inspect_tables
    from warploom_lab.inspect import compare

    before = other.report()
    found = compare(before, report)
    value = {"before": before.to_dict(), "after": report.to_dict(), "differences": found.to_dict()}
    title = f"[bold]against {escape(other.title(before))}[/bold]"
    tables = [title, *inspect_tables.headline(before), *inspect_tables.comparison_tables(found)]
    if found.same_code and other.is_rung and other.opt_level is None:
        tables.append("--opt-level 1 compares them as they were written, before ptxas made them the same")
    return value, tables
