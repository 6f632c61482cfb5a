"""``warploom doctor``: what this machine has, and what works without the missing parts."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from warploom.cli.errors import explains_errors
from warploom.cli.output import console, write_json

if TYPE_CHECKING:
    from warploom.cuda.device import DeviceReport


@explains_errors
def doctor(json: Annotated[bool, typer.Option("--json", help="The same as JSON on standard output.")] = False) -> None:
    """Show what is installed, and what works without the missing parts.

    It looks for a driver, a GPU, a compiler, a disassembler and a cache folder that can be written.

    \b
    Example:
      warploom doctor
    """
    from warploom.cuda.device import probe

    report = probe()
    if json:
        write_json(asdict(report) | {"works": abilities(report)}, "-")
        return
    from rich.table import Table

    table = Table(title="warploom doctor", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in _parts(report):
        table.add_row(name, value)
    out = console()
    out.print(table)
    for ability, answer in abilities(report).items():
        out.print(f"{'yes' if answer else ' no'}  {ability}", markup=False)
    for problem in report.problems:
        out.print(f"\n• {problem}", markup=False, soft_wrap=True)


def abilities(report: DeviceReport) -> dict[str, bool]:
    """Say for each ability of warploom whether this machine has what it takes."""
    return {
        "write kernels and run them on the emulator with all checks": True,
        "compile kernels and read registers and spills": report.nvrtc is not None,
        "disassemble to SASS": report.nvdisasm is not None,
        "run kernels on a GPU": report.nvrtc is not None and any(gpu.target for gpu in report.gpus),
        "keep compiled kernels between processes": report.cache_writable,
    }


def _parts(report: DeviceReport) -> list[tuple[str, str]]:
    rows = [
        ("NVIDIA driver", f"up to CUDA {report.driver}" if report.driver else "none"),
        *[
            (
                f"GPU {g.index}",
                f"{g.name}, compute capability {g.compute_capability[0]}.{g.compute_capability[1]}, "
                f"{g.memory_bytes / 2**30:.0f} GiB, compiles for {g.target or 'nothing here'}",
            )
            for g in report.gpus
        ],
        ("cuda.core", report.cuda_core or "none"),
        ("NVRTC (compiler)", report.nvrtc or "none"),
        ("nvdisasm", str(report.nvdisasm or "none")),
        (
            "cache",
            f"{report.cache_folder} ({report.cache_bytes / 2**20:.1f} MiB"
            f"{'' if report.cache_writable else ', not writable'})",
        ),
        *[(name, version or "none") for name, version in report.packages.items()],
    ]
    if not report.gpus:
        rows.insert(1, ("GPU", "none"))
    return rows
