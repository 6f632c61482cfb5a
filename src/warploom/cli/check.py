"""``warploom check``: a user's own kernels on the emulator, under all checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warploom.cli.errors import explains_errors
from warploom.cli.options import KernelSettings, parse_settings
from warploom.cli.output import console, excerpt, note, write_json

if TYPE_CHECKING:
    from warploom.checking.kernel_file import Checked, ExampleResult
    from warploom.core.errors import WarploomError
    from warploom.lang import KernelFunction

_UNCOVERED = 5  # lines of a kernel that are told to be unexercised


@explains_errors
def check(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py[:KERNEL]|FILE.ptx|FILE.cu", help="Kernels, one of them, or a kernel as PTX or CUDA C++."
        ),
    ],
    launch: Annotated[
        str | None,
        typer.Option("--launch", metavar="FILE.json", help="Grid, block and arguments of a kernel in PTX or CUDA C++."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Draw other inputs, and run the warps in an adversarial order.")
    ] = None,
    set_: KernelSettings = None,
    json: Annotated[
        bool, typer.Option("--json", help="Write the findings, or the error, as JSON to standard output.")
    ] = False,
) -> None:
    """Run kernels on the emulator with all checks.

    They find races, missing waits, uninitialised data, accesses out of bounds and deadlocks, and name what the example
    leaves unexercised: stages that are filled once, loops that run once, branches never taken, masks that hide nothing.

    Each runs in lock-step, and on other inputs in adversarial orders (with --seed in that one alone). Lines with bank
    conflicts or accesses that are not coalesced are shown. Where NVRTC is installed, kernels in Python are compiled.

    A kernel says how to run it with ``@KERNEL.example``: a function of a NumPy generator that returns a
    ``warploom.lang.Launch(grid, arguments, expect)``. PTX of any compiler, and CUDA C++, is run as a JSON file says: an
    object with grid, block and arguments, and perhaps shared_bytes, kernel and (for CUDA C++) target. Arguments are
    numbers, and arrays such as {"dtype": "f32", "shape": [1024], "fill": "random"} or {"file": "x.npy", "expect":
    "y.npy", "tolerance": 1e-5}. Exit code 1 if there is an error or a wrong result. What is for review (a compiler
    relies on what GPUs do, and PTX does not promise) leaves it 0.

    \b
    Examples:
      warploom check my_kernels.py
      warploom check my_kernels.py:row_max --seed 7
      warploom check kernel.ptx --launch launch.json
      warploom check kernel.cu --launch launch.json
    """
    from warploom.core.errors import WarploomError

    checked: list[Checked] = []
    ended: WarploomError | None = None
    try:
        checked.extend(_checked(file, launch, seed, set_))
    except WarploomError as error:
        ended = error
    if json:
        write_json({"kernels": [_as_json(one) for one in checked]} | _ended_json(ended), "-")
    else:
        for one in checked:
            _show(one, compiles=launch is None)
    if ended is not None:
        raise ended
    if launch is None and not json:
        _name_unchecked(file)
    if not all(one.ok for one in checked):
        raise typer.Exit(1)


def _checked(file: str, launch: str | None, seed: int | None, set_: list[str] | None) -> Iterator[Checked]:
    """Check one kernel after the other. Raises WarploomError for one that cannot run."""
    from warploom.checking.kernel_file import in_orders, kernels_of
    from warploom.checking.launch_file import SUFFIXES, check_file
    from warploom.core.errors import ProblemError

    if not file.endswith(SUFFIXES):
        if launch is not None:
            raise ProblemError(f"{file} says itself how its kernels run (@KERNEL.example): leave out --launch")
        yield from (_in_orders(function, seed, set_) for function in kernels_of(file))
        return
    if launch is None:
        raise ProblemError(f"{file} does not say how it is run: add --launch FILE.json (see warploom check --help)")
    yield in_orders(partial(check_file, file, launch), seed)


def _in_orders(function: KernelFunction, seed: int | None, set_: list[str] | None) -> Checked:
    from warploom.checking.kernel_file import check_kernel, configuration_of, in_orders, traced_kernel

    configuration = configuration_of(function, parse_settings(set_))
    program = traced_kernel(function, configuration)
    return in_orders(lambda order: check_kernel(function, order, configuration, program), seed)


def _ended_json(error: WarploomError | None) -> dict[str, Any]:
    from warploom.checking.report import error_json

    return {} if error is None else {"error": error_json(error)}


def _as_json(one: Checked) -> dict[str, Any]:
    from warploom.checking.report import finding_json, uncovered_json, wavefronts_json

    return {
        "kernel": one.name,
        "ok": one.ok,
        "findings": [finding_json(f) for f in one.emulation.findings],
        "printed": one.emulation.printed,
        "results": [dataclasses.asdict(result) for result in one.results],
        "wavefronts": wavefronts_json(one.emulation),
        "uncovered": uncovered_json(one.uncovered),
    }


def _name_unchecked(file: str) -> None:
    from warploom.checking.kernel_file import without_example

    if names := without_example(file):
        note(f"not checked, for want of an example (@{names[0]}.example): {', '.join(names)}")


def _show(one: Checked, compiles: bool) -> None:
    from warploom.checking.kernel_file import code_size

    out = console()
    out.print(one.emulation.printed, end="", markup=False, highlight=False)
    for finding in one.emulation.findings:
        relies = f"For review: {finding.relies_on} " if finding.relies_on else ""
        text = f"{one.name}: {finding.kind}: {finding.message} ({finding.place}). {relies}{finding.consequences}"
        out.print(fill(text, out.width, subsequent_indent="  ", break_on_hyphens=False), markup=False)
        for where in dict.fromkeys(filter(None, (finding.where, finding.other))):
            out.print(excerpt(where), markup=False)
    for result in one.results:
        verdict, error = "right" if result.ok else "WRONG", "NaN" if result.nans else f"{result.error:.3g}"
        text = f"{result.name} is {verdict}, error {error} (tolerance {result.tolerance:g})"
        out.print(f"{one.name}: {text}", markup=False)
        for line in wrong_elements(result):
            out.print(f"  {line}", markup=False)
    conflicts = {n: w for n, w in one.emulation.traffic.shared.items() if w.conflicts}
    for name, w in conflicts.items():
        out.print(f"{one.name}: {name} takes {w.actual} wavefronts, {w.ideal} without bank conflicts", markup=False)
        for (where, of), here in one.emulation.traffic.lines.items():
            if of == name and here.conflicts:
                out.print(f"  {where}: {here.actual}, {here.ideal} without", markup=False)
    scattered = {k: s for k, s in one.emulation.traffic.global_lines.items() if s.sectors > s.ideal}
    for (where, of), here in scattered.items():
        text = f"{of} moves {here.sectors} sectors of 32 bytes, {here.ideal} if lanes were neighbours in memory"
        out.print(f"{one.name}: {where}: {text}", markup=False)
    if one.ok:
        code = code_size(one.program) if compiles else ""
        shown = "" if one.results else " (nothing was expected of the outputs: give expect to Launch)"
        orders = f" in {one.orders} orders" if one.orders > 1 else ""
        found = "no errors" if one.emulation.findings else "no findings"
        out.print(f"{one.name}: {found}{orders}{shown}{'; ' if code else ''}{code}", markup=False)
        for missed in one.uncovered[:_UNCOVERED]:
            text = f"{one.name}: not exercised: {missed.where.stack}: {missed}"
            out.print(fill(text, out.width, subsequent_indent="  ", break_on_hyphens=False), markup=False)
        if len(one.uncovered) > _UNCOVERED:
            more = len(one.uncovered) - _UNCOVERED
            out.print(f"{one.name}: not exercised: {more} more, which --json lists", markup=False)


def wrong_elements(result: ExampleResult) -> Iterator[str]:
    """Yield the number of wrong elements and the first of them; nothing if the result is right."""
    if result.ok:
        return
    nans = f", {result.nans} of them NaN" if result.nans else ""
    yield f"{result.wrong} of {result.count} elements are wrong{nans}; the first:"
    for index, got, expected in result.first:
        yield f"{result.name}[{', '.join(map(str, index))}] is {got:.6g}, expected {expected:.6g}"
