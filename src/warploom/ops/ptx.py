"""``check_ptx``: a kernel that others wrote, as PTX, on the emulator under all checks."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from warploom.core.arguments import check_names
from warploom.core.dtypes import DType, dtype_of, f32, f64, s32, s64, u8, u32, u64
from warploom.core.errors import ProblemError, shown
from warploom.interop.arrays import as_numpy, describe

if TYPE_CHECKING:
    from warploom.emulate import Emulation, Finding
    from warploom.emulate.findings.traffic import Traffic
    from warploom.ir.program import Program
    from warploom.ptx.program import Argument
    from warploom.ptx.syntax import Function, Variable


@dataclass(frozen=True)
class CheckedPtx:
    """What a run of PTX showed. ``program`` can be printed, shown as CUDA and launched; outputs are in the arrays."""

    program: Program
    emulation: Emulation

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The defects, with the author's line and the PTX line of each."""
        return self.emulation.findings

    @property
    def traffic(self) -> Traffic:
        """Wavefronts of shared memory, sectors of global memory, by line."""
        return self.emulation.traffic

    @property
    def printed(self) -> str:
        """What the kernel printed (``printf``)."""
        return self.emulation.printed

    def raise_if_found(self) -> CheckedPtx:
        """Raise EmulationError with every finding, if there is any; else return self."""
        self.emulation.raise_if_found()
        return self


def check_ptx(
    ptx: str,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    arguments: Sequence[Any] | Mapping[str, Any],
    *,
    kernel: str | None = None,
    shared_bytes: int = 0,
    cluster: int | Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    file: str = "kernel.ptx",
    seed: int | None = None,
) -> CheckedPtx:
    """Run a PTX kernel of any compiler on the CPU, and say what is wrong with it.

    ``grid`` counts CTAs, ``block`` threads, along x, y and z; ``shared_bytes`` of dynamic shared memory; ``cluster``
    the CTAs of a cluster where the launch gives them (None: what the kernel was compiled for). ``kernel`` names the
    entry of a file with several. ``arguments`` follow its parameters, by position or by name: arrays of NumPy or on
    torch's CPU for pointers, which are changed in place, numbers for scalars, an (array, TensorMapSpec) pair for a
    tensor map, for a structure a list of its members (with NumPy's types, unless they are f32 or s32). ``names`` call
    the parameters otherwise than the PTX does, ``file`` says where the text comes from: for messages. With ``seed`` the
    warps run in an adversarial order.

    Findings are what :func:`warploom.emulate.emulate` finds. Raises PtxError, with its line, for a form that cannot be
    run, ProblemError for arguments that do not fit.
    """
    from warploom.core.arguments import grid_of
    from warploom.emulate import emulate
    from warploom.ptx.parser import parse
    from warploom.ptx.program import entry_of, to_program

    if not isinstance(ptx, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ProblemError(f"check_ptx takes the text of PTX, not {shown(ptx)}: of a file, Path(file).read_text()")
    if isinstance(shared_bytes, bool) or not isinstance(shared_bytes, int) or shared_bytes < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ProblemError(f"shared_bytes counts bytes of dynamic shared memory, not {shown(shared_bytes)}")
    module = parse(ptx, file)
    function = entry_of(module, kernel)
    given, kinds = _arguments(function, arguments, names)
    program = to_program(
        module,
        function,
        block=_sizes("a block", "threads", block),
        arguments=kinds,
        shared_bytes=shared_bytes,
        cluster=None if cluster is None else _sizes("a cluster", "CTAs", cluster),
    )
    given += [_initial(module.variables[p.name]) for p in program.parameters[len(given) :]]
    return CheckedPtx(program, emulate(program, grid_of(grid), given, seed=seed))


def _sizes(what: str, unit: str, given: int | Sequence[int]) -> tuple[int, int, int]:
    try:
        sizes = [operator.index(given)] if not isinstance(given, Sequence) else [operator.index(n) for n in given]
    except TypeError:
        sizes = []
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
        raise ProblemError(f"{what} is one to three positive counts of {unit}, not {shown(given)}")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _arguments(
    function: Function, arguments: Sequence[Any] | Mapping[str, Any], names: Sequence[str] | None
) -> tuple[list[Any], list[Argument]]:
    """The arguments as the emulator takes them, and what they are."""
    from warploom.ptx.program import Argument

    parameters = function.parameters
    known = [p.name for p in parameters] if names is None else list(names)
    if not isinstance(arguments, Mapping | Sequence) or isinstance(arguments, str):
        raise ProblemError(f"{function.name}: arguments are a list, or an object by name, not {shown(arguments)}")
    if len(known) != len(parameters):
        raise ProblemError(f"{function.name} has {len(parameters)} parameters, but names are {known}")
    if isinstance(arguments, Mapping):
        check_names(function.name, [n for n in known if n not in arguments], sorted(set(arguments) - set(known)))
        arguments = [arguments[name] for name in known]
    if len(arguments) != len(parameters):
        raise ProblemError(
            f"{function.name} takes {len(parameters)} arguments ({', '.join(known)}), not {len(arguments)}"
        )
    values: list[Any] = []
    kinds: list[Argument] = []
    for parameter, name, x in zip(parameters, known, arguments, strict=True):
        if isinstance(x, tuple):  # an array and what its tensor map says
            values.append((as_numpy(describe(x[0])), *x[1:]))
            kinds.append(Argument("tensor_map", u64, name))
        elif isinstance(x, list):
            members = [_value(member, None) for member in cast("list[Any]", x)]
            values += [value for value, _ in members]
            kinds.append(Argument("scalar", u8, name, tuple(kind for _, kind in members)))
        else:
            value, kind = _value(x, parameter)
            values.append(value)
            kinds.append(replace(kind, name=name))
    return values, kinds


def _value(x: Any, parameter: Variable | None) -> tuple[Any, Argument]:
    """An array or a number as the emulator takes it; ``parameter`` tells its bits, NumPy does for members."""
    from warploom.ptx.program import Argument

    if parameter is None and isinstance(x, np.generic):
        return x.item(), Argument("scalar", dtype_of(x.dtype.name))
    if hasattr(x, "__array_interface__") and getattr(x, "shape", ()) == ():
        x = x.item()
    if isinstance(x, int | float | np.number):
        dtype = (f32 if isinstance(x, float) else s32) if parameter is None else _scalar(parameter, x)
        return x, Argument("scalar", dtype)
    if getattr(getattr(x, "dtype", None), "hasobject", False):
        raise ProblemError("an array of Python objects cannot be passed: give it one of NumPy's number types")
    view = describe(x)
    return as_numpy(view), Argument("pointer", view.dtype if view.dtype.kind != "pred" else u8)


def _initial(variable: Variable) -> Any:
    """A variable in global or constant memory as the launch finds it."""
    if variable.space == "const" and not variable.initial:
        raise ProblemError(
            f"{variable.name} in constant memory has no initial value: the host would write it (cudaMemcpyToSymbol), "
            "so give it one in the source"
        )
    try:
        memory = np.zeros(variable.bytes, np.uint8)
    except MemoryError:
        raise ProblemError(
            f"{variable.name} has {variable.bytes} bytes, more than this machine's memory holds"
        ) from None
    memory[: len(variable.initial)] = np.frombuffer(variable.initial, np.uint8)
    return memory


def _scalar(parameter: Variable, value: Any) -> DType:
    """The type of a number: PTX tells its bits alone, and often not whether they are a float's."""
    from warploom.ptx.syntax import TYPES
    from warploom.ptx.types import TYPE

    bits = TYPES[parameter.type]
    if isinstance(value, float | np.floating) and parameter.type[0] in "us":
        raise ProblemError(f"{parameter.name} is an integer (.{parameter.type}), not {value}")
    is_float = parameter.type in ("f32", "f64") or isinstance(value, float | np.floating)
    if is_float and bits in (32, 64):
        return f32 if bits == 32 else f64
    if value < 0 and bits in (32, 64):
        return s32 if bits == 32 else s64
    return {32: u32, 64: u64}.get(bits, TYPE.get(parameter.type, u32))
