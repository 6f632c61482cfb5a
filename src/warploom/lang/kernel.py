"""Kernels: Python functions that are traced once per configuration into a Program."""

from __future__ import annotations

import difflib
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from traceback import walk_tb
from types import FunctionType
from typing import Any, NoReturn, cast
from weakref import WeakValueDictionary

from warploom.core import above
from warploom.core.errors import ProblemError, TraceError, WarploomError, located, shown
from warploom.core.identity import Versioned
from warploom.ir.program import Parameter, Program
from warploom.ir.simplify import simplify
from warploom.ir.statements import SourceLine, operands_of, walk
from warploom.ir.verify import verify
from warploom.lang.builder import Builder
from warploom.lang.hopper import Kernel
from warploom.lang.parameters import Parameters, hints_of, used_parameters
from warploom.lang.source import name_at, refuse_uncalled_from
from warploom.lang.values import Traced

Cluster = int | tuple[int, ...]
Grid = int | Sequence[int] | Callable[..., int | Sequence[int]]
"""CTAs along x, y and z, or a function of the trace-time parameters that it names."""


@dataclass(frozen=True)
class Launch:
    """One run of a kernel: grid (CTAs along x, y, z), arguments in parameter order, and the results it must give.

    ``expect`` maps a parameter's name to (expected array, absolute tolerance per element).
    """

    grid: int | tuple[int, ...]
    arguments: Sequence[Any]
    expect: Mapping[str, tuple[Any, float]] = field(default_factory=dict[str, tuple[Any, float]])


WITH_OUTPUTS: WeakValueDictionary[str, KernelFunction] = WeakValueDictionary()
"""Kernels that declare their outputs, by their keys."""


@dataclass(eq=False)
class KernelFunction:
    """A kernel before tracing. :meth:`trace` gives the Program of one configuration."""

    function: Callable[..., None]
    name: str
    threads: int | Callable[..., int]
    min_ctas: int = 1
    opt_level: int = 3
    requires: str = "sm_80"
    share: bool = True
    drop_unused: bool = False
    cluster: Cluster | Callable[..., Cluster] = 1
    outputs: tuple[str, ...] = ()
    tune: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, Sequence[Any]])
    example_launch: Callable[..., Launch] | None = None

    def __post_init__(self) -> None:
        takes = inspect.signature(self.function).parameters.values()
        self.settings: dict[str, Any] = {p.name: p.default for p in takes if p.kind is p.KEYWORD_ONLY}
        """The trace-time parameters and their defaults (``inspect.Parameter.empty``: none)."""
        self.takes_any = any(p.kind is p.VAR_KEYWORD for p in takes)
        for name, values in self.tune.items():
            if name not in self.settings or self.settings[name] not in values:
                raise TraceError(
                    f"{self.name}: tune maps trace-time parameters (keyword-only, after *) to the values to try, the "
                    f"parameter's default among them; not {name} to {shown(values)}"
                )
        declared = self._parameters(Kernel())[0] if self.outputs else []
        self.names = [p.name for p in declared if p.stride_of is None]
        """The names of the launch's arguments, if outputs are declared."""
        if unknown := [name for name in self.outputs if name not in self.names]:
            raise TraceError(
                f"{self.name} has no parameter {unknown[0]!r}, which outputs names; it has {', '.join(self.names)}"
            )
        self.where = SourceLine.of(self.function)
        """The line of the definition: that of its decorator."""
        self.sees = Versioned(self.function, self.threads, self.cluster)
        """Tells whether a trace would see other values than the one before."""
        self.key = f"{self.function.__module__}.{self.function.__qualname__}"
        """The name of a kernel with declared outputs in graphs of PyTorch."""
        if self.outputs:
            while self.key in WITH_OUTPUTS:  # defined again, as in a notebook
                self.key += "'"
            WITH_OUTPUTS[self.key] = self

    def trace(self, name: str | None = None, /, **configuration: Any) -> Program:
        """Run the function once with traced arguments and the given keyword-only configuration.

        ``name`` is the Program's, if not the kernel's own. Raises TraceError for a configuration that the kernel does
        not have and for what its words refuse, VerifyError and LayoutError.
        """
        with located(self.where):
            return self._traced(name, configuration)

    def _traced(self, name: str | None, configuration: Mapping[str, Any]) -> Program:
        self.check_configuration(configuration)
        cluster = self._cluster(self._of_configuration(self.cluster, configuration))
        count: Any = self._of_configuration(self.threads, configuration)
        if not isinstance(count, int):
            raise TraceError(f"{self.name}: threads is an int or a function of the configuration, not {shown(count)}")
        k = Kernel(share=self.share, cluster=cluster, threads=count)
        parameters, arguments = self._parameters(k)
        refuse_uncalled_from(self.function)
        try:
            returned: object = self.function(k, *arguments, **configuration)
        except WarploomError as error:  # of words, layouts and instructions, which know no lines
            error.at(k.line_of(error))
            raise
        except (TypeError, LookupError, AttributeError, ValueError) as error:
            if (explained := explain(error, k)) is None:
                raise  # of the author's own code
            raise TraceError(explained).at(k.line_of(error)) from error
        if returned is not None:  # of a generator or coroutine nothing has run
            raise TraceError(
                f"{self.name} returns {shown(returned)}: a kernel returns nothing, its results are what it stores"
            )
        body = simplify(k.finished_body(), lambda where: name_at(where.file, where.line))
        if self.drop_unused:
            used = {x for statement in walk(body) for x in operands_of(statement)}
            parameters = used_parameters(parameters, lambda p: p.value in used)
        program = Program(
            name=name or self.name,
            parameters=tuple(parameters),
            threads=count,
            body=body,
            shared=tuple(k.regions),
            shared_bytes=k.shared_bytes,
            min_ctas=self.min_ctas,
            opt_level=self.opt_level,
            requires=self.requires,
            cluster=cluster,
            where=self.where,
        )
        verify(program)
        return program

    def choices(self) -> list[dict[str, Any]]:
        """Every combination of the values that ``tune`` declares."""
        return [dict(zip(self.tune, chosen, strict=True)) for chosen in itertools.product(*self.tune.values())]

    def choice(self, text: str) -> dict[str, Any]:
        """The one of :meth:`choices` with this text (:func:`configuration_text`); empty if there is none."""
        return next((one for one in self.choices() if configuration_text(one) == text), dict[str, Any]())

    def grid_of(self, grid: Grid, given: Mapping[str, Any], tuned: Mapping[str, Any]) -> int | Sequence[int]:
        """The grid of a launch with given trace-time parameters and others that were found by tuning.

        Raises ProblemError for a grid in numbers where ``tune`` chooses a parameter that the example takes, because
        its launch depends on it.
        """
        if callable(grid):
            return self._of_configuration(grid, {**given, **tuned})
        takes = () if self.example_launch is None else inspect.signature(self.example_launch).parameters
        if chosen := [name for name in self.tune if name in takes and name not in given]:
            raise ProblemError(
                f"{self.name} chooses {', '.join(chosen)} by tuning, and its launch depends on it, as its example "
                f"says: give the grid as a function (lambda {', '.join(chosen)}: …), or the value ({chosen[0]}=…)"
            )
        return grid

    def check_configuration(self, names: Collection[str]) -> None:
        """Raises TraceError for trace-time parameters that the kernel does not have, or that are missing."""
        has = f"it has {', '.join(self.settings) or 'none: they are keyword-only, after *'}"
        for name in names:
            if name not in self.settings and not self.takes_any:
                raise TraceError(f"{name!r} is no trace-time parameter of {self.name}; {has}")
        empty = inspect.Parameter.empty
        missing = ", ".join(name for name, value in self.settings.items() if value is empty and name not in names)
        if missing:
            raise TraceError(f"give a value to each trace-time parameter of {self.name} without defaults: {missing}")

    def _of_configuration(self, given: Any, configuration: Mapping[str, Any]) -> Any:
        """``given`` itself, or its value as a function of those trace-time parameters that it names."""
        if not callable(given):
            return given
        takes = inspect.signature(given).parameters
        values = self.settings | dict(configuration)
        if not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
            values = {name: value for name, value in values.items() if name in takes}
        return given(**{name: value for name, value in values.items() if value is not inspect.Parameter.empty})

    def _cluster(self, extent: Cluster) -> tuple[int, int, int]:
        sizes: tuple[Any, ...] = (extent,) if isinstance(extent, int) else tuple(extent)
        if not 1 <= len(sizes) <= 3 or not all(isinstance(n, int) and n >= 1 for n in sizes):
            raise TraceError(f"{self.name}: a cluster is one to three positive counts of CTAs, not {extent}")
        x, y, z = (*sizes, 1, 1)[:3]
        return x, y, z

    def launch(self, grid: Grid, *arguments: Any, **configuration: Any) -> None:
        """Run the kernel on a grid of CTAs, as :func:`warploom.launch` does: on arrays, which it changes in place.

        The arrays are those of torch, CuPy, JAX or NumPy; without a GPU the emulator runs it, with a warning.
        ``configuration`` are its trace-time parameters; a grid that depends on some is a function of them. Raises what
        :func:`warploom.launch` raises.
        """
        above.launch(self, grid, arguments, **configuration)

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        """``kernel[grid](x, y, n)`` is ``kernel.launch(grid, x, y, n)``."""
        return partial(self.launch, grid)

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """A kernel is called on a grid: raises TraceError that says how."""
        raise TraceError(
            f"a kernel is traced, not called: {self.name}[grid](x, y, …), or {self.name}.launch(grid, x, y, …), runs "
            f"it on arrays; {self.name}.trace(…) gives its Program, for warploom.emulate.emulate(program, grid, …)"
        )

    def _parameters(self, k: Kernel) -> tuple[list[Parameter], list[Any]]:
        hints = hints_of(self.function, self.name)
        found, arguments = Parameters(k, self.name), list[Any]()
        positional = [p for p in inspect.signature(self.function).parameters.values() if p.kind != p.KEYWORD_ONLY][1:]
        for p in positional:
            if p.default is not p.empty:
                raise TraceError(
                    f"parameter {p.name!r} of {self.name} has the default {shown(p.default)}, but a launch gives every "
                    "argument: leave it out, or make it trace-time configuration (keyword-only, after *)"
                )
            arguments.append(found.argument(p.name, hints.get(p.name)))
        return found.all, arguments

    def example(self, function: Callable[..., Launch]) -> Callable[..., Launch]:
        """Decorator: a function of a NumPy random generator that returns a :class:`Launch`, for ``warploom check``."""
        self.example_launch = function
        return function


def kernel(
    *undecorated: object,
    threads: int | Callable[..., int] = 32,
    min_ctas: int = 1,
    opt_level: int = 3,
    requires: str = "sm_80",
    share: bool = True,
    drop_unused: bool = False,
    cluster: Cluster | Callable[..., Cluster] = 1,
    outputs: Sequence[str] = (),
    tune: Mapping[str, Sequence[Any]] | None = None,
    name: str | None = None,
) -> Callable[[Callable[..., None]], KernelFunction]:
    """Decorator that makes a function a kernel.

    The function's first parameter is ``k`` (:class:`Kernel`); annotated positional parameters are the launch's
    arguments; keyword-only parameters are trace-time configuration. ``threads`` per CTA is a multiple of 32 or a
    function of the configuration, ``min_ctas`` the CTAs per SM asked of ptxas, ``opt_level`` ptxas's. ``drop_unused``
    leaves parameters out of the Program that a configuration does not use: each costs a launch about 0.3 µs.
    ``cluster`` (sm_90) are the CTAs along x, y and z that run together and reach each other's shared memory, at most 8
    in all, or a function of the configuration; the grid is a multiple of it. ``outputs`` names all parameters that the
    kernel writes to (of compound ones ``parameter_field``): a launch of it is then one operator under
    ``torch.compile``. ``tune`` maps trace-time parameters to the values that ``warploom tune FILE.py`` tries: launches
    that give none of these parameters take the fastest that it found on this GPU, else the defaults.
    """

    if undecorated:
        raise TraceError("@kernel takes arguments: write @kernel(threads=…) with the threads of a CTA")

    def wrap(function: Callable[..., None]) -> KernelFunction:
        return KernelFunction(
            function,
            name or function.__name__,
            threads,
            min_ctas,
            opt_level,
            requires,
            share,
            drop_unused,
            cluster,
            tuple(outputs),
            dict(tune or {}),
        )

    return wrap


def configuration_text(configuration: Mapping[str, Any]) -> str:
    """``tile=64, stages=2``, or "as it is" for none."""
    return ", ".join(f"{name}={value}" for name, value in configuration.items()) or "as it is"


_PACKAGE = __name__.partition(".")[0]
_CALL = re.compile(r"(\w+)\.(\w+)\(\) (.*)", re.DOTALL)


def explain(error: Exception, k: Builder) -> str | None:
    """Explain a Python error that a word of this package raised or was called wrongly with; None for all others."""
    called = _CALL.match(str(error)) if isinstance(error, TypeError) else None
    if called is not None and (word := _word(called[1], called[2])) is not None:
        return f"{called[1] if called[2] == '__init__' else called[2]} {called[3]}; {_parameters(word)}"
    owner = cast("type[object]", type(getattr(error, "obj", None)))
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    inside = _is_ours(frames[-1].f_globals.get("__name__"))
    if isinstance(error, AttributeError) and _is_ours(owner.__module__) and not inside:
        return f"{owner.__name__} has no {error.name!r}{_near(owner, k, str(error.name))}"
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], Traced):
        return f"{error.args[0]!r} is a value of the running kernel, no key of a dict: k.select chooses between values"
    outer = [i for i, frame in enumerate(frames) if not _is_ours(frame.f_globals.get("__name__"))]
    if not inside or not outer:  # the author's own code, or a kernel of this package
        return None
    code = frames[outer[-1] + 1].f_code
    word = _word(code.co_qualname.rpartition(".")[0], code.co_name)
    hint = "" if word is None else f"; {_parameters(word)}"
    if isinstance(error, AttributeError) and error.name == "ir":
        instead = " (its address is tile.address(row, col))" if hasattr(error.obj, "address") else ""
        return f"{code.co_name} takes a value where a {type(error.obj).__name__} is given{instead}{hint}"
    return f"{code.co_name} does not take these arguments ({type(error).__name__}: {error}){hint}"


def _near(owner: type[object], k: Builder, name: str) -> str:
    """Words like a name that an object does not have: its own, or those of ``k``, which has what takes the object."""
    for kind, of in ((owner, ""), (type(k), "k.")):
        known = [word for word in dir(kind) if not word.startswith("_") and not hasattr(Builder, word)]
        if near := difflib.get_close_matches(name, known, 3):
            return f"; near it: {', '.join(of + word for word in near)}"
    return f"; help(warploom.lang.{owner.__name__}) shows what it has"


def _parameters(word: FunctionType) -> str:
    parameters = list(inspect.signature(word).parameters.values())[1:]
    return f"its parameters are {inspect.Signature([p.replace(annotation=p.empty) for p in parameters])}"


def _is_ours(module: object) -> bool:
    return str(module).startswith(f"{_PACKAGE}.")


def _word(owner: str, name: str) -> FunctionType | None:
    """The method ``owner.name`` of a class of this package: of several, that of the words that an author calls."""
    called = tuple(f"{_PACKAGE}.{part}" for part in ("lang", "tile"))
    ours = sorted(filter(_is_ours, sys.modules), key=lambda key: not key.startswith(called))
    for key in ours:
        kind = getattr(sys.modules[key], owner, None)
        if getattr(kind, "__module__", None) != key:
            continue  # imported there
        method = inspect.getattr_static(kind, name, None) if inspect.isclass(kind) else None
        if isinstance(method, FunctionType):
            return method
    return None
