"""The pytest fixture ``warploom_check``: a test that runs a kernel through it fails with what the emulator finds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from warploom.checking.baseline import Baseline
    from warploom.checking.foreign import CheckedPtx
    from warploom.checking.kernel_file import Checked
    from warploom.checking.suite import How
    from warploom.lang import KernelFunction


@dataclass
class _Found:
    """The findings of a test run: issues in the form of the JSON report, accepted findings, (file, kernel) pairs."""

    issues: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    accepted: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    kernels: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])


_FOUND = pytest.StashKey[_Found]()
_HOW = pytest.StashKey["How"]()
_BASELINE = pytest.StashKey["Baseline"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that ``warploom check`` has, too."""
    group = parser.getgroup("warploom", "kernels checked by the fixture warploom_check")
    group.addoption("--warploom-strict", action="store_true", help="What is for review is an error, too.")
    group.addoption("--warploom-baseline", metavar="FILE", help="Findings that are accepted: no failures.")
    group.addoption("--warploom-write-baseline", action="store_true", help="Accept all findings of this run.")
    group.addoption("--warploom-sarif", metavar="FILE", help="Write the findings as SARIF 2.1.0.")


@pytest.fixture
def warploom_check(request: pytest.FixtureRequest) -> KernelChecks:
    """Kernels of Triton, of CUDA C++, as PTX and of warploom, checked: an error among the findings fails the test.

    ``def test_softmax(warploom_check): warploom_check.triton(softmax_kernel, (8,), [y, x, n], BLOCK=1024)``
    """
    node: pytest.Item = request.node
    return KernelChecks(str(node.path), _how(node.config), node.stash.setdefault(_FOUND, _Found()))


@dataclass(frozen=True)
class KernelChecks:
    """The fixture ``warploom_check``: a method for each kind of kernel, with the arguments of its ``check_…`` function.

    Each returns what the function returns, and raises EmulationError with the findings if there is an error.
    """

    _file: str
    _how: How = field(repr=False)
    _found: _Found = field(repr=False)

    def triton(self, kernel: Any, grid: Any, arguments: Any, **options: Any) -> CheckedPtx:
        """Check a Triton kernel: :func:`warploom.check_triton`."""
        from warploom.checking.foreign import check_triton

        __tracebackhide__ = True
        return self._foreign(check_triton(kernel, grid, arguments, **options))

    def cuda(self, source: str | Path, name: str, grid: Any, block: Any, arguments: Any, **options: Any) -> CheckedPtx:
        """Check a kernel of CUDA C++, of a text or of a file: :func:`warploom.check_cuda`."""
        from warploom.checking.foreign import check_cuda

        __tracebackhide__ = True
        if isinstance(source, Path):
            source, options = source.read_text(encoding="utf-8"), {"file": str(source), **options}
        return self._foreign(check_cuda(source, name, grid, block, arguments, **options))

    def ptx(self, ptx: str | Path, grid: Any, block: Any, arguments: Any, **options: Any) -> CheckedPtx:
        """Check a kernel as PTX, of a text or of a file: :func:`warploom.check_ptx`."""
        from warploom.checking.foreign import check_ptx

        __tracebackhide__ = True
        if isinstance(ptx, Path):
            ptx, options = ptx.read_text(encoding="utf-8"), {"file": str(ptx), **options}
        return self._foreign(check_ptx(ptx, grid, block, arguments, **options))

    def kernel(self, function: KernelFunction) -> Checked:
        """Check a kernel of warploom by its example, in several orders, as ``warploom check`` does."""
        from warploom.checking.suite import check_function
        from warploom.core.errors import ProblemError, shown
        from warploom.lang import KernelFunction

        __tracebackhide__ = True
        if not isinstance(function, KernelFunction):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ProblemError(f"a kernel is a function decorated with @kernel(threads=…), not {shown(function)}")
        checked = check_function(self._file, function, self._how)
        self._judge(checked)
        return checked

    def _foreign(self, found: CheckedPtx) -> CheckedPtx:
        from warploom.checking.kernel_file import Checked

        __tracebackhide__ = True
        once = Checked(found.program.name, found.program, found.emulation, ())
        self._judge(self._how.judged(once, self._file))
        return found

    def _judge(self, checked: Checked) -> None:
        """Note the outcome for the reports. Raises EmulationError for an error or a wrong result."""
        from warploom.checking.baseline import identity_of, relative
        from warploom.checking.formats import issues_of
        from warploom.checking.suite import CheckOutcome
        from warploom.core.errors import EmulationError

        __tracebackhide__ = True
        issues = [x for x in issues_of(CheckOutcome(self._file, checked.name, checked=checked)) if x.level != "note"]
        self._found.issues += [asdict(issue) for issue in issues]
        self._found.accepted += [vars(identity_of(x, self._file, checked.name)) for x in checked.accepted]
        self._found.kernels.append((relative(self._file), checked.name))
        if not checked.ok:
            raise EmulationError(_text(checked), checked.emulation.findings)


def _text(checked: Checked) -> str:
    """The findings, each with its lines, and the arrays that are wrong."""
    from warploom.checking.lines import excerpt
    from warploom.checking.report import wrong_elements

    lines = [f"{checked.name} is not right:"]
    for finding in checked.emulation.findings:
        lines += [str(finding), *map(excerpt, dict.fromkeys(filter(None, (finding.where, finding.other))))]
    for result in checked.results:
        lines += wrong_elements(result)
    return "\n".join(lines)


def _how(config: pytest.Config) -> How:
    """Read the options that say which findings are errors. Raises pytest.UsageError for a file that is no baseline."""
    if _HOW not in config.stash:
        from warploom.checking.baseline import Accepted
        from warploom.checking.suite import How

        baseline, write = _baseline(config), bool(config.getoption("--warploom-write-baseline"))
        accepted = Accepted(baseline.entries if baseline is not None else (), write)
        config.stash[_HOW] = How(accepted=accepted, strict=bool(config.getoption("--warploom-strict")))
    return config.stash[_HOW]


def _baseline(config: pytest.Config) -> Baseline | None:
    from warploom.checking.baseline import Baseline
    from warploom.core.errors import ProblemError

    file, write = config.getoption("--warploom-baseline"), bool(config.getoption("--warploom-write-baseline"))
    if file is None:
        if write:
            raise pytest.UsageError("--warploom-write-baseline writes to the file of --warploom-baseline FILE")
        return None
    if _BASELINE not in config.stash:
        try:
            config.stash[_BASELINE] = Baseline(config.rootpath / file, may_be_missing=write)
        except ProblemError as error:
            raise pytest.UsageError(str(error)) from error
    return config.stash[_BASELINE]


# -- reports, which pytest-xdist carries from its processes
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Attach what a test has found to its report; a test that passes has expected its errors."""
    outcome: Any = yield
    report: pytest.TestReport = outcome.get_result()
    if report.when == "call" and _FOUND in item.stash:
        found = asdict(item.stash[_FOUND])
        found["issues"] = [x for x in found["issues"] if report.failed or x["level"] != "error"]
        vars(report)["warploom"] = found


def pytest_configure(config: pytest.Config) -> None:
    """Gather what the reports of tests carry, in the process that shows them."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Reports(config), "warploom reports")


class _Reports:
    """Gathers the findings of all tests, and writes them at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._found = config, _Found()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = vars(report).get("warploom")
        if found is not None:
            self._found.issues += found["issues"]
            self._found.accepted += found["accepted"]
            self._found.kernels += [(file, kernel) for file, kernel in found["kernels"]]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        say: Callable[[str], None] = terminalreporter.write_line
        try:
            self._write(say)
        except OSError as error:
            raise pytest.UsageError(f"{error.filename}: {error.strerror}") from error

    def _write(self, say: Callable[[str], None]) -> None:
        baseline = _baseline(self._config)
        if baseline is not None:
            self._settle(baseline, say)
        if (file := self._config.getoption("--warploom-sarif")) is not None:
            from warploom.checking.formats import Issue, sarif

            log = sarif([Issue(**issue) for issue in self._found.issues])
            path: Path = self._config.rootpath / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(log, indent=2) + "\n", encoding="utf-8")
            say(f"written to {path}")

    def _settle(self, baseline: Baseline, say: Callable[[str], None]) -> None:
        from warploom.checking.baseline import Identity

        seen, checked = {Identity(**x) for x in self._found.accepted}, set(self._found.kernels)
        write = bool(self._config.getoption("--warploom-write-baseline"))
        for line in baseline.settled(seen, lambda x: (x.file, x.kernel) in checked, write):
            say(line)
