"""Run kernels of a user's file on the emulator, with the launch that the kernel's example gives."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from warploom.checking.coverage import Uncovered, uncovered
from warploom.core.errors import ProblemError, UnsupportedDeviceError, WarploomError, located
from warploom.cuda.device import nvrtc_version
from warploom.emulate import Emulation, Finding, TensorMapArgument, emulate
from warploom.ir.program import Program
from warploom.ir.statements import NOWHERE, SourceLine
from warploom.kernels.settings import flag_value
from warploom.lang import KernelFunction, Launch
from warploom.ops.backends import compiled

T = TypeVar("T")

_SHOWN = 3
"""Wrong elements that are shown."""


@dataclass(frozen=True)
class ExampleResult:
    """One array that was expected: an element's largest absolute error (NaN counts as infinite), and the tolerance.

    Of ``count`` elements ``wrong`` are beyond it, ``nans`` of them NaN; ``first`` has the indices of the first few,
    what came out and what was expected. ``pattern`` says where they lie, if that is no more than a part of an axis,
    or that the array is transposed.
    """

    name: str
    error: float
    tolerance: float
    ok: bool
    count: int = 0
    wrong: int = 0
    nans: int = 0
    first: tuple[tuple[tuple[int, ...], float, float], ...] = ()
    pattern: str = ""


@dataclass(frozen=True)
class Checked:
    """The outcome of checking a kernel: its only run, or the first failing one of several ``orders``.

    ``uncovered`` is what none of the runs exercised. ``accepted`` are findings that a baseline knows, which are no
    longer among those of the emulation; ``strict`` counts what is for review as an error.
    """

    name: str
    program: Program
    emulation: Emulation
    results: tuple[ExampleResult, ...]
    orders: int = 1
    uncovered: tuple[Uncovered, ...] = ()
    accepted: tuple[Finding, ...] = ()
    strict: bool = False

    @property
    def ok(self) -> bool:
        """No errors among the findings, and every result within its tolerance."""
        errors = any(self.strict or finding.grade == "error" for finding in self.emulation.findings)
        return not errors and all(result.ok for result in self.results)


def kernels_of(target: str, *, runnable: bool = True) -> list[KernelFunction]:
    """The kernels of ``FILE.py`` that have an example (all, if not ``runnable``), or the one of ``FILE.py:NAME``.

    Raises ProblemError for a file that is not there or fails, a name that is no kernel, or a kernel without an example.
    """
    path, name = split_target(target)
    module = _load(path)
    found = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, KernelFunction) and Path(value.function.__code__.co_filename) == path
    }
    if not found:
        raise ProblemError(f"{path} defines no kernel: decorate a function with @warploom.lang.kernel(threads=…)")
    if name is not None and name not in found:
        raise ProblemError(f"{path} has no kernel {name!r}; it has {', '.join(found)}")
    if not runnable:
        return [found[name]] if name is not None else list(found.values())
    chosen = [found[name]] if name is not None else [f for f in found.values() if f.example_launch is not None]
    if not chosen or any(f.example_launch is None for f in chosen):
        kernel = name or next(iter(found))
        raise ProblemError(
            f"{kernel} does not say how to run it: add a function decorated with @{kernel}.example that takes a NumPy "
            "random generator and returns warploom.lang.Launch(grid, arguments, expect={...})"
        )
    return chosen


def without_example(target: str) -> list[str]:
    """The names of the kernels of ``FILE.py`` that do not say how to run them; none for ``FILE.py:NAME``."""
    return (
        []
        if split_target(target)[1]
        else [f.name for f in kernels_of(target, runnable=False) if f.example_launch is None]
    )


def one_kernel(target: str, *, runnable: bool = True) -> KernelFunction:
    """The one kernel that ``FILE.py`` or ``FILE.py:NAME`` names. Raises ProblemError if the file has several."""
    found = kernels_of(target, runnable=runnable)
    if len(found) > 1:
        names = ", ".join(f.name for f in found)
        raise ProblemError(f"{target} has several kernels: choose one by {target}:{found[0].name}, of {names}")
    return found[0]


def configuration_of(function: KernelFunction, settings: Mapping[str, str]) -> dict[str, Any]:
    """Trace-time parameters of a kernel, set by text. Raises WarploomError for one that it does not have."""
    with located(function.where):
        function.check_configuration(settings)
        return {name: flag_value(name, text, function.settings.get(name)) for name, text in settings.items()}


def traced_kernel(function: KernelFunction, configuration: Mapping[str, Any] | None = None) -> Program:
    """The Program of a user's kernel; other trace-time parameters have their defaults. Raises WarploomError."""
    return of_the_user(f"{function.name} cannot be traced", lambda: function.trace(**configuration or {}))


def example_of(
    function: KernelFunction, program: Program, seed: int | None = None, configuration: Mapping[str, Any] | None = None
) -> Launch:
    """Return the launch of a kernel's example, which gets a generator and the trace-time parameters that it names."""
    example = function.example_launch
    if example is None:
        raise ProblemError(f"{function.name} has no example: decorate a function with @{function.name}.example")
    with located(SourceLine.of(example)):
        return _launch_of(function, example, program, seed, configuration or {})


def _launch_of(
    function: KernelFunction,
    example: Callable[..., Launch],
    program: Program,
    seed: int | None,
    configuration: Mapping[str, Any],
) -> Launch:
    takes = inspect.signature(example).parameters
    values = {**function.settings, **configuration}
    settings = {name: values[name] for name in takes if values.get(name, takes[name].empty) is not takes[name].empty}
    rng = np.random.default_rng(seed or 0)
    launch = of_the_user(f"the example of {function.name} fails", lambda: example(rng, **settings))
    if not isinstance(launch, Launch):
        raise ProblemError(
            f"the example of {function.name} returns {type(launch).__name__}, not a warploom.lang.Launch"
        )
    names = [p.name for p in program.parameters]
    unknown = [name for name in launch.expect if name not in names]
    if unknown:
        raise ProblemError(
            f"the example of {function.name} expects {unknown[0]!r}, which is none of {', '.join(names)}"
        )
    for name, wanted in launch.expect.items():
        if not isinstance(wanted, tuple) or len(wanted) != 2:
            raise ProblemError(
                f"the example of {function.name} expects {name} without a tolerance: write "
                f"expect={{{name!r}: (array, tolerance)}}, 0 where every bit counts"
            )
    return launch


def results_of(program: Program, launch: Launch) -> tuple[ExampleResult, ...]:
    """Compare the launch's arrays after a run with the example's expected results."""
    arrays = dict(zip((p.name for p in program.parameters), launch.arguments, strict=False))
    return tuple(compared(name, _array(arrays[name]), *wanted) for name, wanted in launch.expect.items())


def check_kernel(
    function: KernelFunction,
    seed: int | None = None,
    configuration: Mapping[str, Any] | None = None,
    program: Program | None = None,
) -> Checked:
    """Trace, run with all checks, and compare what the example expects; ``program`` is what was traced already.

    Raises WarploomError for what cannot run.
    """
    program = program or traced_kernel(function, configuration)
    launch = example_of(function, program, seed, configuration)
    with located(SourceLine.of(function.example_launch) if function.example_launch is not None else function.where):
        emulation = emulate(program, launch.grid, launch.arguments, seed=seed)
        missed = tuple(uncovered(program, emulation, launch))
        return Checked(function.name, program, emulation, results_of(program, launch), uncovered=missed)


ORDERS = (None, 1, 2, 3)
"""Lock-step, and adversarial orders; the last holds a group of four warps back."""


def in_orders(run: Callable[[int | None], Checked], seed: int | None = None) -> Checked:
    """Call ``run`` with ``seed``, or without a seed in several orders until one fails."""
    if seed is not None:
        return run(seed)
    checked = run(None)
    for orders, order in enumerate(ORDERS[1:], 2):
        if not checked.ok:
            break
        again = run(order)
        missed = {(x.kind, x.where) for x in again.uncovered}
        both = tuple([x for x in checked.uncovered if (x.kind, x.where) in missed])
        known = {(x.kind, x.where, x.other): x for x in (*again.accepted, *checked.accepted)}
        accepted = tuple(known.values())
        checked = replace(checked if again.ok else again, orders=orders, uncovered=both, accepted=accepted)
    return checked


def code_size(program: Program) -> str:
    """Describe the compiled code for the oldest architecture that runs the kernel; empty where NVRTC is missing."""
    try:
        nvrtc_version()
    except UnsupportedDeviceError:
        return ""
    needs = compiled(program, program.requires).resources
    spills = f", {needs.spill_bytes} bytes spilled" if needs.spill_bytes else ""
    return f"{needs.registers} registers on {program.requires}{spills}"


def _array(argument: Any) -> Any:
    """The array of an argument; with a tensor map it is a pair, or a TensorMapArgument."""
    if isinstance(argument, TensorMapArgument):
        return argument.array
    return argument[0] if isinstance(argument, tuple) else argument


def compared(name: str, got: Any, expected: Any, tolerance: float) -> ExampleResult:
    """The largest error of an array. Raises ProblemError for another shape than what is expected."""
    with np.errstate(invalid="ignore"):  # a NaN may be a signalling one: bits that were no floats
        wanted = np.asarray(expected).astype(np.float64)
        found = np.asarray(got).astype(np.float64)
    if wanted.shape != found.shape:
        raise ProblemError(f"{name} has shape {found.shape}, the example expects {wanted.shape}")
    if not found.size:
        return ExampleResult(name, 0.0, tolerance, True)
    with np.errstate(invalid="ignore"):
        error = np.where(found == wanted, 0.0, np.abs(found - wanted))
    error = np.where(np.isnan(found) & np.isnan(wanted), 0.0, error)
    off = np.where(np.isnan(error), np.finfo(np.float64).max, error)
    largest = float(min(off.max(), np.finfo(np.float64).max))
    wrong = np.argwhere(off > tolerance)
    first = tuple((tuple(map(int, at)), float(found[tuple(at)]), float(wanted[tuple(at)])) for at in wrong[:_SHOWN])
    nans = int(np.isnan(found[off > tolerance]).sum())
    pattern = ", ".join(filter(None, (_part(axis, found.ndim, off > tolerance) for axis in range(found.ndim))))
    if len(wrong) and found.ndim == 2 and found.T.shape == wanted.shape and (abs(found.T - wanted) <= tolerance).all():
        pattern = "the transpose of what is expected"
    return ExampleResult(name, largest, tolerance, largest <= tolerance, found.size, len(wrong), nans, first, pattern)


def _part(axis: int, axes: int, wrong: Any) -> str:
    """The indices along an axis at which elements are wrong: a range, or the same ones of every power of two."""
    size = wrong.shape[axis]
    bad = wrong.any(axis=tuple(x for x in range(axes) if x != axis))
    where = np.flatnonzero(bad)
    if not 0 < len(where) < size:
        return ""
    what = f"{('row', 'column')[axis] if axes == 2 else 'index' if axes == 1 else f'index {axis}'}"
    if where[-1] - where[0] == len(where) - 1:
        return f"{what} {where[0]}" if len(where) == 1 else f"{what} {where[0]} to {where[-1]}"
    for period in (2**bits for bits in range(1, (size // 2).bit_length())):
        parts = bad[: size - size % period].reshape(-1, period)
        rest = np.flatnonzero(parts[0])
        if (parts == parts[0]).all() and rest[-1] - rest[0] == len(rest) - 1:
            span = f"{rest[0]}" if len(rest) == 1 else f"{rest[0]} to {rest[-1]}"
            return f"{what} {span} of every {period}"
    return ""


def split_target(target: str) -> tuple[Path, str | None]:
    """The file and the kernel's name, if there is one; a Windows drive's colon is none."""
    head, colon, tail = target.rpartition(":")
    file, name = (head, tail) if colon and tail.isidentifier() and head.endswith(".py") else (target, None)
    path = Path(file).resolve()
    if not path.is_file():
        raise ProblemError(f"there is no file {file}; write FILE.py or FILE.py:KERNEL")
    return path, name


def _load(path: Path) -> ModuleType:
    """The file as a module; its folder is importable, as when Python runs it."""
    name = f"_warploom_checked_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    loader = spec.loader if spec is not None else None
    if spec is None or loader is None:
        raise ProblemError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # get_type_hints looks the module up by its name
    sys.path.insert(0, str(path.parent))
    try:
        of_the_user(f"{path} cannot be imported", lambda: loader.exec_module(module))
    finally:
        sys.path.remove(str(path.parent))
    return module


def of_the_user(failure: str, run: Callable[[], T]) -> T:
    """Run the user's code: what it raises becomes one message that begins with its line."""
    try:
        return run()
    except WarploomError as error:
        error.at(_users_line(error))
        raise
    except (Exception, SystemExit) as error:  # a script that exits is no file of kernels
        where, said = _users_line(error), str(error)
        if isinstance(error, SyntaxError) and error.filename:
            where, said = SourceLine(error.filename, error.lineno or 0), error.msg
        raise ProblemError(f"{failure}: {type(error).__name__}: {said}").at(where) from error


_OTHERS = tuple({*sysconfig.get_paths().values(), str(Path(__file__).parents[1]), "<"})
"""Where files of Python, of installed packages and of warploom begin."""


def _users_line(error: BaseException) -> SourceLine:
    """The innermost line of the user's that an error came through."""
    frames = [x for x in traceback.extract_tb(error.__traceback__) if not x.filename.startswith(_OTHERS)]
    return SourceLine(frames[-1].filename, frames[-1].lineno or 0, frames[-1].name) if frames else NOWHERE
