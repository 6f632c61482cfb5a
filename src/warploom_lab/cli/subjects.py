"""What a command looks at, as its words say: a rung of attention or of matmul, or a kernel of a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warploom.cli.options import is_kernel_file, parse_settings
from warploom_lab.cli.rungs import Accumulate, DTypeName, HeadDim, Settings

if TYPE_CHECKING:
    from warploom.ir.program import Program
    from warploom_lab.kernels.ladder import Rung

FIRST_RUNGS = {"attention": "1", "gemm": "01b"}
"""The families, and the rung of each without ``--rung``."""


@dataclass(frozen=True)
class Subject:
    """The command-line arguments that name one kernel: a rung or a kernel of a file."""

    what: Annotated[
        str, typer.Argument(metavar="attention|gemm|FILE", help="A rung's family, or a kernel: FILE.py[:KERNEL].")
    ]
    rung: Annotated[
        str | None,
        typer.Option(help="A rung's number or name; attention's h1, h2, … are wgmma's. Default: 1, and 01b of gemm."),
    ] = None
    settings: Settings = None
    head_dim: HeadDim = 128
    dtype: DTypeName = "bf16"
    accumulate: Accumulate = None

    @property
    def is_rung(self) -> bool:
        """Whether it is a rung of a ladder."""
        return self.what in FIRST_RUNGS

    @property
    def is_python(self) -> bool:
        """Whether it is a Python file of kernels, or one kernel of such a file."""
        return is_kernel_file(self.what)

    @property
    def of_rung(self) -> str:
        """The rung asked for, else the family's first."""
        return self.rung or FIRST_RUNGS.get(self.what, "")

    def chosen(self) -> Rung[Any]:
        """The rung with its flags. Raises ConfigError for flags that are not valid."""
        from warploom_lab.cli.ladder import attention_rungs, gemm_rungs

        if self.what == "gemm":
            _, (rung,) = gemm_rungs([self.of_rung], self.settings, self.accumulate, (1, 1, 1))
        else:
            _, (rung,) = attention_rungs([self.of_rung], self.settings, 256, 1, self.head_dim, self.dtype)
        return rung

    def program(self) -> Program:
        """Trace the kernel. Raises ConfigError, ProblemError."""
        if self.is_rung:
            from warploom_lab.inspect.subjects import attention_program, gemm_program

            return (gemm_program if self.what == "gemm" else attention_program)(self.chosen().config)
        from warploom.checking.kernel_file import configuration_of, one_kernel, traced_kernel

        kernel = one_kernel(self.what, runnable=False)
        return traced_kernel(kernel, configuration_of(kernel, parse_settings(self.settings)))
