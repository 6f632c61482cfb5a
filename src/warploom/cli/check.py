"""``warploom check``: a user's own kernels on the emulator, under all checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warploom.cli.errors import explained, explains_errors, outlives_its_reader, settings
from warploom.cli.options import KernelSettings, grouped, parse_settings
from warploom.cli.output import console, note, progress_bar, write_json, write_text

if TYPE_CHECKING:
    from warploom.checking.baseline import Baseline
    from warploom.checking.kernel_file import Checked
    from warploom.checking.suite import CheckOutcome
    from warploom.core.errors import WarploomError

_SCATTERED = (
    "let lanes beside each other load elements beside each other, or bring the rows through shared memory",
    "let lanes beside each other store elements beside each other: a fragment goes through a shared tile first",
)
"""How to load and to store what lanes should find beside each other."""
_UNCOVERED = 5  # lines of a kernel that are told to be unexercised


@dataclass(frozen=True)
class RunOptions:
    """The options of a run: launches, inputs, order, parameters and processes."""

    launch: Annotated[
        str | None,
        typer.Option("--launch", metavar="FILE.json", help="The launches of one .cu or .ptx, if not beside it."),
    ] = None
    seed: Annotated[
        int | None, typer.Option(min=0, help="Draw other inputs, and run the warps in an adversarial order.")
    ] = None
    set_: KernelSettings = None
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Files checked side by side; default: one a core.")
    ] = None


@dataclass(frozen=True)
class ReportOptions:
    """The options of the report: its files and formats, and which findings count as errors."""

    json: Annotated[bool, typer.Option("--json", help="Write findings and errors as JSON to standard output.")] = False
    sarif: Annotated[
        str | None, typer.Option("--sarif", metavar="FILE", help="Also write SARIF 2.1.0, for code scanning.")
    ] = None
    junit: Annotated[
        str | None, typer.Option("--junit", metavar="FILE", help="Also write JUnit's XML: a test for each kernel.")
    ] = None
    github: Annotated[
        bool, typer.Option("--github", help="Also annotate lines on GitHub, from a step of a workflow.")
    ] = False
    strict: Annotated[bool, typer.Option("--strict", help="What is for review is an error, too.")] = False
    baseline: Annotated[
        str | None, typer.Option("--baseline", metavar="FILE", help="Findings that are accepted: no errors.")
    ] = None
    write_baseline: Annotated[
        bool, typer.Option("--write-baseline", help="Accept all findings of this run: write them to --baseline.")
    ] = False
    timeline: Annotated[
        str | None, typer.Option("--timeline", metavar="FILE.json", help="Write the run for Perfetto or Chrome.")
    ] = None
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE.html", help="Write a page: the source beside what was found.")
    ] = None


@explains_errors
@grouped
def check(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE.py[:KERNEL]|FILE.cu|FILE.ptx|FOLDER|'**/*.cu'...",
            help="Kernels in Python (or one of them), in CUDA C++, as PTX; folders and patterns of such files.",
        ),
    ],
    run: RunOptions,
    report: ReportOptions,
) -> None:
    """Run kernels on the emulator with all checks.

    They find races, missing waits, uninitialised data, accesses out of bounds and deadlocks, and name what the example
    leaves unexercised: stages that are filled once, loops that run once, branches never taken, masks that hide nothing.

    Each runs in lock-step, and on other inputs in adversarial orders (with --seed in that one alone). Lines with bank
    conflicts or accesses that are not coalesced are shown. Where NVRTC is installed, kernels in Python are compiled.

    A kernel in Python says how to run it with ``@KERNEL.example``: a function of a NumPy generator that returns a
    ``warploom.lang.Launch(grid, arguments, expect)``. NAME.launch.json beside NAME.cu or NAME.ptx says how its kernels
    run: an object with kernel, grid, block and arguments, or a list of several.

    Exit code 0: nothing is wrong. 1: an error or a wrong result; what is for review (a compiler relies on what GPUs do,
    and PTX does not promise) leaves it 0 unless --strict, and so does what a baseline has. 2: something could not be
    checked; all else was, and is reported.

    \b
    Examples:
      warploom check my_kernels.py
      warploom check my_kernels.py:row_max --seed 7
      warploom check kernels/ generated.ptx --jobs 2
      warploom check kernel.cu --launch launch.json
      warploom check kernels/ --baseline accepted.json --sarif findings.sarif --junit kernels.xml
      warploom check my_kernels.py:row_max --timeline run.json --html run.html
    """
    from warploom.checking.baseline import Accepted
    from warploom.checking.suite import How, check_all, targets_of

    targets = targets_of(files, run.launch)
    baseline = _baseline(report)
    accepted = Accepted(baseline.entries if baseline is not None else (), report.write_baseline)
    how = How(run.seed, parse_settings(run.set_), accepted, report.strict, bool(report.timeline or report.html))
    outcomes: list[CheckOutcome] = []
    with progress_bar() as progress:
        for number, found in enumerate(check_all(targets, how, run.jobs), 1):
            progress(f"{number} of {len(targets)} files", number / len(targets))
            outcomes += found
            if not report.json:
                with outlives_its_reader():
                    _show_file(found, named=len(targets) > 1)
    if report.json:
        with outlives_its_reader():
            write_json(_as_json(outcomes), "-")
    elif len(targets) > 1:
        note(_summary(outcomes))
    if baseline is not None:
        _settle(baseline, outcomes, report.write_baseline)
    code = max((outcome.exit_code for outcome in outcomes), default=0)
    _write_reports(outcomes, report, code)
    if code:
        raise typer.Exit(code)


def _baseline(report: ReportOptions) -> Baseline | None:
    from warploom.checking.baseline import Baseline

    if report.baseline is None:
        if report.write_baseline:
            raise typer.BadParameter("--write-baseline writes to the file that --baseline FILE names")
        return None
    return Baseline(Path(report.baseline), may_be_missing=report.write_baseline)


def _settle(baseline: Baseline, outcomes: Sequence[CheckOutcome], write: bool) -> None:
    """Write the baseline anew, or tell which of its entries no longer occur."""
    from warploom.checking.baseline import identity_of, relative

    checked = [(one.file, one.checked) for one in outcomes if one.checked is not None]
    seen = {identity_of(finding, file, one.name) for file, one in checked for finding in one.accepted}
    files = {relative(one.file) for one in outcomes} - {relative(one.file) for one in outcomes if one.error is not None}
    for line in baseline.settled(seen, lambda entry: entry.file in files, write):
        note(line)


def _write_reports(outcomes: Sequence[CheckOutcome], report: ReportOptions, code: int) -> None:
    from warploom.checking import formats

    if report.sarif is not None:
        issues = [issue for one in outcomes for issue in formats.issues_of(one)]
        write_json(formats.sarif(issues, formats.errors_of(outcomes), code), report.sarif)
    if report.junit is not None:
        write_text(formats.junit(outcomes), report.junit)
    if report.github:
        for line in formats.github_annotations(outcomes):
            note(line)
    checked = [(one.kernel, one.checked) for one in outcomes if one.checked is not None]
    if report.timeline is not None:
        from warploom.checking.timeline import trace_of

        write_json(trace_of(checked), report.timeline)
    if report.html is not None:
        from warploom.checking.page import page

        write_text(page(", ".join(dict.fromkeys(one.file for one in outcomes)), checked), report.html)


def _as_json(outcomes: Sequence[CheckOutcome]) -> dict[str, Any]:
    return {
        "kernels": [_checked_json(one, one.checked) for one in outcomes if one.checked is not None],
        "errors": [_error_json(one, one.error) for one in outcomes if one.error is not None],
        "skipped": [{"file": x.file, "kernel": x.kernel, "reason": x.skipped} for x in outcomes if x.skipped],
    }


def _error_json(one: CheckOutcome, error: WarploomError) -> dict[str, Any]:
    from warploom.checking.report import error_json

    found = error_json(error)
    return found | {"file": found["file"] or one.file, "kernel": one.kernel}


def _checked_json(one: CheckOutcome, checked: Checked) -> dict[str, Any]:
    from warploom.checking.report import finding_json, uncovered_json, wavefronts_json

    return {
        "file": one.file,
        "kernel": one.kernel,
        "ok": checked.ok,
        "seconds": one.seconds,
        "findings": [finding_json(f) for f in checked.emulation.findings],
        "accepted": [finding_json(f) for f in checked.accepted],
        "printed": checked.emulation.printed,
        "results": [dataclasses.asdict(result) for result in checked.results],
        "wavefronts": wavefronts_json(checked.emulation),
        "uncovered": uncovered_json(checked.uncovered),
    }


def _summary(outcomes: Sequence[CheckOutcome]) -> str:
    checked = [one.checked for one in outcomes if one.checked is not None]
    wrong = sum(not one.ok for one in checked)
    counts = {
        "checked": len(checked),
        "with errors": wrong,
        "that could not be checked": sum(one.error is not None for one in outcomes),
        "skipped": sum(bool(one.skipped) for one in outcomes),
    }
    told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f"kernels of {len({one.file for one in outcomes})} files: {told or 'none'}"


def _show_file(outcomes: Sequence[CheckOutcome], named: bool) -> None:
    """Print a file's outcomes: findings to standard output, errors and remarks to standard error."""
    if named and outcomes:
        console().print(f"{outcomes[0].file}:", markup=False, soft_wrap=True)
    for one in outcomes:
        if one.checked is not None:
            _show(one.kernel, one.checked, one.compiles)
        if one.error is not None:
            if settings.debug:
                raise one.error
            where = "" if f"{Path(one.file).stem}." in str(one.error) else f"{one.file}: "
            note(f"error: {where}{explained(one.error)}")
    skipped: dict[str, list[str]] = {}
    for one in outcomes:
        if one.skipped:
            skipped.setdefault(one.skipped, []).append(one.kernel or one.file)
    for reason, names in skipped.items():
        note(f"not checked, {reason}: {', '.join(names)}")


def _show(name: str, one: Checked, compiles: bool) -> None:
    from warploom.checking.kernel_file import code_size
    from warploom.checking.lines import excerpt
    from warploom.checking.report import wrong_elements

    out = console()
    out.print(one.emulation.printed, end="", markup=False, highlight=False)
    for finding in one.emulation.findings:
        relies = f"For review: {finding.relies_on} " if finding.relies_on else ""
        text = f"{name}: {finding.kind}: {finding.message} ({finding.place}). {relies}{finding.consequences}"
        out.print(fill(text, out.width, subsequent_indent="  ", break_on_hyphens=False), markup=False)
        for where in dict.fromkeys(filter(None, (finding.where, finding.other))):
            out.print(excerpt(where), markup=False)
    for result in one.results:
        verdict, error = "right" if result.ok else "WRONG", "NaN" if result.nans else f"{result.error:.3g}"
        text = f"{result.name} is {verdict}, error {error} (tolerance {result.tolerance:g})"
        out.print(f"{name}: {text}", markup=False)
        for line in wrong_elements(result):
            out.print(f"  {line}", markup=False)
    conflicts = {n: w for n, w in one.emulation.traffic.shared.items() if w.conflicts}
    for access, w in conflicts.items():
        out.print(f"{name}: {access} takes {w.actual} wavefronts, {w.ideal} without bank conflicts", markup=False)
        for (where, of), here in one.emulation.traffic.lines.items():
            if of == access and here.conflicts:
                out.print(f"  {where}: {here.actual}, {here.ideal} without", markup=False)
    scattered = {k: s for k, s in one.emulation.traffic.global_lines.items() if s.sectors > s.ideal}
    for (where, of), here in scattered.items():
        text = f"{of} moves {here.sectors} sectors of 32 bytes, {here.ideal} if lanes were neighbours in memory: "
        text += _SCATTERED[of.startswith(("st", "red", "atom"))]
        out.print(f"{name}: {where}: {text}", markup=False)
    if one.ok:
        code = code_size(one.program) if compiles else ""
        shown = "" if one.results else " (nothing was expected of the outputs: give expect to Launch)"
        orders = f" in {one.orders} orders" if one.orders > 1 else ""
        found = "no errors" if one.emulation.findings else "no findings"
        found += f" beside {len(one.accepted)} accepted" if one.accepted else ""
        out.print(f"{name}: {found}{orders}{shown}{'; ' if code else ''}{code}", markup=False)
        for missed in one.uncovered[:_UNCOVERED]:
            text = f"{name}: not exercised: {missed.where.stack}: {missed}"
            out.print(fill(text, out.width, subsequent_indent="  ", break_on_hyphens=False), markup=False)
        if len(one.uncovered) > _UNCOVERED:
            more = len(one.uncovered) - _UNCOVERED
            out.print(f"{name}: not exercised: {more} more, which --json lists", markup=False)
