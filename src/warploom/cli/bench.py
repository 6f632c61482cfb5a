"""``warploom bench``: a kernel of yours, checked and timed on the GPU."""

from __future__ import annotations

from typing import Annotated

import typer

from warploom.cli.errors import explains_errors
from warploom.cli.options import JsonFile, KernelFile, KernelSettings, parse_settings
from warploom.cli.output import write_json


@explains_errors
def bench(
    target: KernelFile,
    set_: KernelSettings = None,
    rounds: Annotated[int, typer.Option(min=3, help="Samples.")] = 25,
    json: JsonFile = None,
) -> None:
    """Check and time a kernel of yours, launched by its example.

    Its launches rotate through copies of the arguments that exceed the L2. The rate counts each array's bytes once.

    \b
    Examples:
      warploom bench my_kernels.py:row_max
      warploom bench my_kernels.py:row_max --set tile=128 --json -
    """
    from warploom.checking.kernel_file import configuration_of, one_kernel
    from warploom.measure.kernel_file import bench_kernel

    kernel = one_kernel(target)
    timed = bench_kernel(kernel, configuration_of(kernel, parse_settings(set_)), rounds)
    if json != "-":
        typer.echo(f"{kernel.name}: {timed.text()}")
    if json is not None:
        write_json({"kernel": kernel.name, **timed.json()}, json)
