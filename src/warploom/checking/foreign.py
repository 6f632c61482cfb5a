"""``check_ptx``, ``check_cuda`` and ``check_triton``: kernels that others wrote, on the emulator under all checks.

CUDA C++ is compiled by NVRTC, and Triton compiles its kernels, without a GPU; what is run is their PTX.
"""

from __future__ import annotations

import importlib
import operator
import os
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from warploom.core.arguments import check_names, grid_of
from warploom.core.dtypes import DType, bf16, dtype_of, f16, f32, f64, s8, s32, s64, u8, u32, u64
from warploom.core.errors import ProblemError, UnsupportedDeviceError, shown
from warploom.interop.arrays import as_numpy, describe

if TYPE_CHECKING:
    from warploom.emulate import Emulation, Finding
    from warploom.emulate.findings.traffic import Traffic
    from warploom.ir.program import Program
    from warploom.ptx.program import Argument
    from warploom.ptx.syntax import Function, Module, Variable

_ALWAYS = "TRITON_ALWAYS_COMPILE"
_CUDA_NAMES = {f16: "__half", bf16: "__nv_bfloat16"}
_TOLD = 3  # findings that the repr of a result shows
_ALIGNMENT = 256  # of what a GPU's allocators return; Triton compiles for arguments that are multiples of 16


# -- PTX
@dataclass(frozen=True)
class CheckedPtx:
    """The findings of a run of PTX; outputs are in the arrays. ``program`` can be printed, and launched as CUDA."""

    program: Program
    emulation: Emulation

    def __repr__(self) -> str:
        count = len(self.findings)
        told = [f"  {str(finding).splitlines()[0]}" for finding in self.findings[:_TOLD]]
        if count > _TOLD:
            told.append(f"  and {count - _TOLD} more")
        counted = f"{count or 'no'} finding{'' if count == 1 else 's'}"
        return "\n".join([f"<CheckedPtx {self.program.name}: {counted}>", *told])

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
        """The text that the kernel printed (``printf``)."""
        return self.emulation.printed

    def raise_if_found(self) -> CheckedPtx:
        """Raise EmulationError with every finding, if there is an error among them; else return self."""
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
    kernel_ = ptx_kernel(ptx, kernel, names=names, file=file)
    return kernel_.run(ForeignLaunch(grid, block, arguments, shared_bytes, cluster, seed))


@dataclass(frozen=True)
class ForeignLaunch:
    """The launch of a foreign kernel, as the caller of ``check_ptx`` or ``check_cuda`` describes it."""

    grid: int | Sequence[int]
    block: int | Sequence[int]
    arguments: Sequence[Any] | Mapping[str, Any]
    shared_bytes: int = 0
    cluster: int | Sequence[int] | None = None
    seed: int | None = None


@dataclass(frozen=True)
class PreparedLaunch:
    """A Program, its grid and its arguments, behind which come the ``variables`` of the kernel's ``source``."""

    program: Program
    grid: tuple[int, int, int]
    arguments: list[Any]
    variables: dict[str, Any]
    source: Hashable
    seed: int | None

    def run(self) -> CheckedPtx:
        """Run it with all checks."""
        from warploom.emulate import emulate

        given = [*self.arguments, *self.variables.values()]
        return CheckedPtx(self.program, emulate(self.program, self.grid, given, seed=self.seed))


RUNNER: ContextVar[Callable[[PreparedLaunch], Any]] = ContextVar("runner", default=PreparedLaunch.run)
"""The function that takes each prepared launch: it runs the launch, or a sequence queues it."""


@dataclass(frozen=True)
class ForeignKernel:
    """A kernel of PTX, read once for any number of launches.

    ``names`` call its parameters; ``pointed`` are the number types that the first of them point to, None where that is
    not known. Kernels from the same ``source`` have their variables in common.
    """

    module: Module
    function: Function
    names: Sequence[str]
    pointed: Sequence[DType | None] = ()
    source: Hashable = None
    _programs: dict[Any, Program] = field(default_factory=dict[Any, Any], repr=False)

    def run(self, launch: ForeignLaunch) -> CheckedPtx:
        """Run the kernel with all checks. Raises ProblemError for arguments that do not fit."""
        given, kinds = _arguments(self, launch.arguments)
        program = self._program(launch, kinds)
        variables = {p.name: _initial(self.module.variables[p.name]) for p in program.parameters[len(given) :]}
        prepared = PreparedLaunch(program, grid_of(launch.grid), given, variables, self.source, launch.seed)
        return RUNNER.get()(prepared)

    def _program(self, launch: ForeignLaunch, kinds: list[Argument]) -> Program:
        from warploom.ptx.program import to_program

        shared_bytes = launch.shared_bytes
        if isinstance(shared_bytes, bool) or not isinstance(shared_bytes, int) or shared_bytes < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ProblemError(f"shared_bytes counts bytes of dynamic shared memory, not {shown(shared_bytes)}")
        block = _sizes("a block", "threads", launch.block)
        cluster = None if launch.cluster is None else _sizes("a cluster", "CTAs", launch.cluster)
        key = block, cluster, shared_bytes, tuple(kinds)
        if key not in self._programs:
            self._programs[key] = to_program(
                self.module, self.function, block=block, arguments=kinds, shared_bytes=shared_bytes, cluster=cluster
            )
        return self._programs[key]


def ptx_kernel(ptx: str, kernel: str | None, *, names: Sequence[str] | None, file: str) -> ForeignKernel:
    """The kernel of a PTX text, with the arguments of :func:`check_ptx`."""
    from warploom.ptx.mangled import pointed_types, readable_name
    from warploom.ptx.parser import parse
    from warploom.ptx.program import entry_of

    _check_text("check_ptx", "PTX", ptx, ".ptx")
    module = parse(ptx, file)
    function = entry_of(module, kernel)
    name = readable_name(function.name)
    if name != function.name:
        names = names or [f"argument_{i}" for i in range(len(function.parameters))]
    known = [p.name for p in function.parameters] if names is None else names
    pointed = pointed_types(function.name)
    return ForeignKernel(module, replace(function, name=name.rpartition("::")[2]), known, pointed, ptx)


def _check_text(called: str, what: str, given: Any, suffix: str) -> None:
    """Raises ProblemError for a path in the place of a text."""
    if isinstance(given, str) and not ("\n" not in given.strip() and given.strip().endswith(suffix)):
        return
    raise ProblemError(f"{called} takes the text of {what}, not {shown(given)}: of a file, Path(file).read_text()")


def _sizes(what: str, unit: str, given: int | Sequence[int]) -> tuple[int, int, int]:
    try:
        sizes = [operator.index(given)] if not isinstance(given, Sequence) else [operator.index(n) for n in given]
    except TypeError:
        sizes = []
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
        raise ProblemError(f"{what} is one to three positive counts of {unit}, not {shown(given)}")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _arguments(kernel: ForeignKernel, arguments: Sequence[Any] | Mapping[str, Any]) -> tuple[list[Any], list[Argument]]:
    """The arguments as the emulator takes them, and what they are."""
    from warploom.ptx.program import Argument

    called, parameters, known = kernel.function.name, kernel.function.parameters, list(kernel.names)
    if not isinstance(arguments, Mapping | Sequence) or isinstance(arguments, str):
        raise ProblemError(f"{called}: arguments are a list, or an object by name, not {shown(arguments)}")
    if len(known) != len(parameters):
        raise ProblemError(f"{called} has {len(parameters)} parameters, but names are {known}")
    if isinstance(arguments, Mapping):
        check_names(called, [n for n in known if n not in arguments], sorted(set(arguments) - set(known)))
        arguments = [arguments[name] for name in known]
    if len(arguments) != len(parameters):
        raise ProblemError(f"{called} takes {len(parameters)} arguments ({', '.join(known)}), not {len(arguments)}")
    values: list[Any] = []
    kinds: list[Argument] = []
    declared = [*kernel.pointed, *[None] * len(parameters)]
    for parameter, name, x, pointed in zip(parameters, known, arguments, declared, strict=False):
        if isinstance(x, tuple):  # an array and what its tensor map says
            values.append((as_numpy(describe(x[0])), *x[1:]))
            kinds.append(Argument("tensor_map", u64, name))
        elif isinstance(x, list):
            members = [_value(member, None, name) for member in cast("list[Any]", x)]
            values += [value for value, _ in members]
            kinds.append(Argument("scalar", u8, name, tuple(kind for _, kind in members)))
        else:
            value, kind = _value(x, parameter, name)
            values.append(value)
            kinds.append(replace(kind, name=name))
        if pointed is not None:
            _check_elements(kinds[-1], values[-1], pointed)
    return values, kinds


def _check_elements(argument: Argument, value: Any, declared: DType) -> None:
    """Raises ProblemError for what is no array of the numbers that a pointer is declared for.

    Integers fit those of their size, and unsigned ones, which are often a format's bits, any type of it; so do
    bytes. An unsigned pointer takes an array of smaller elements, several to a word. The number 0 is a null pointer.
    """
    found, pointer = argument.dtype, f"{argument.name} is {_CUDA_NAMES.get(declared, declared.cuda)} *"
    if argument.members:
        raise ProblemError(f"{pointer}: pass an array, not a list")
    if argument.kind == "scalar" and value != 0:
        raise ProblemError(f"{pointer}: pass an array, not {value} (0 is a null pointer)")
    if argument.kind != "pointer" or found is declared or found in (u8, s8):
        return
    if found.bits == declared.bits and (found.is_integer and declared.is_integer):
        return
    if found.bits == declared.bits and "unsigned" in (found.kind, declared.kind):
        return
    if found.bits < declared.bits and declared.kind == "unsigned":
        return
    wanted = declared.numpy.name
    cure = f"{argument.name}.astype({'ml_dtypes' if wanted == 'bfloat16' else 'np'}.{wanted})"
    raise ProblemError(f"{pointer}, the array is {found.numpy.name}: pass {cure}")


def _value(x: Any, parameter: Variable | None, name: str) -> tuple[Any, Argument]:
    """An array or a number as the emulator takes it; ``parameter`` tells its bits, NumPy does for members."""
    from warploom.ptx.program import Argument

    if parameter is None and isinstance(x, np.generic):
        return x.item(), Argument("scalar", dtype_of(x.dtype.name))
    if hasattr(x, "__array_interface__") and getattr(x, "shape", ()) == ():
        x = x.item()
    if isinstance(x, int | float | np.number):
        dtype = (f32 if isinstance(x, float) else s32) if parameter is None else _scalar(parameter, name, x)
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


def _scalar(parameter: Variable, name: str, value: Any) -> DType:
    """The type of a number: PTX tells its bits alone, and often not whether they are a float's."""
    from warploom.isa.form import REGISTER, TYPE_BITS

    bits = TYPE_BITS[parameter.type]
    if isinstance(value, float | np.floating) and parameter.type[0] in "us":
        raise ProblemError(f"{name} is an integer (.{parameter.type}), not {value}")
    is_float = parameter.type in ("f32", "f64") or isinstance(value, float | np.floating)
    if is_float and bits in (32, 64):
        return f32 if bits == 32 else f64
    if value < 0 and bits in (32, 64):
        return s32 if bits == 32 else s64
    return {32: u32, 64: u64}.get(bits, REGISTER.get(parameter.type, u32))


# -- CUDA C++
def check_cuda(
    source: str,
    name: str,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    arguments: Sequence[Any] | Mapping[str, Any],
    *,
    target: str = "sm_80",
    shared_bytes: int = 0,
    cluster: int | Sequence[int] | None = None,
    options: Sequence[str] = (),
    file: str = "kernel.cu",
    seed: int | None = None,
) -> CheckedPtx:
    """Compile CUDA C++ with NVRTC for ``target`` and run one kernel on the CPU with all checks; no GPU is needed.

    ``name`` is the kernel's, with its namespace and template arguments: ``"scan<float, 128>"``. ``grid`` counts CTAs
    (blocks), ``block`` threads, along x, y and z; ``shared_bytes`` of dynamic shared memory, ``cluster`` the CTAs
    of a cluster where the launch gives them. ``arguments`` are those of
    :func:`warploom.check_ptx`: arrays of NumPy or of torch on the CPU for pointers, which are changed in place,
    numbers, and what it says of structures and tensor maps; by name, they are called as in the source. ``options``
    are NVRTC's (``-I``, ``-D``, ``-std=c++20``); headers of CUDA and of CCCL are found where their wheels are
    installed. With ``seed`` the warps run in an adversarial order.

    Findings name the lines of the source as those of ``file``, of its headers by their paths. Raises
    UnsupportedDeviceError without NVRTC, CompileError with its log, ProblemError for arguments that do not fit,
    PtxError for an instruction that cannot be run.
    """
    kernel = cuda_kernel(source, name, target=target, options=options, file=file)
    return kernel.run(ForeignLaunch(grid, block, arguments, shared_bytes, cluster, seed))


def cuda_kernel(source: str, name: str, *, target: str, options: Sequence[str], file: str) -> ForeignKernel:
    """Compile a kernel of CUDA C++, with the arguments of :func:`check_cuda`."""
    from warploom.cuda.ptx import header_options, ptx_of
    from warploom.cuda.signatures import CudaParameter, kernels_in, plain_name
    from warploom.ptx.mangled import pointed_types
    from warploom.ptx.parser import parse
    from warploom.ptx.program import entry_of

    _check_text("check_cuda", "CUDA C++", source, ".cu")
    for what, given in (("name", name), ("target", target)):
        if not isinstance(given, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ProblemError(f"check_cuda: the {what} is a text, not {shown(given)}")
    if isinstance(options, str):
        raise ProblemError(f"check_cuda: options are a list, [{options!r}]")
    found = ptx_of(source, file, target, [*options, *header_options()], kernel=name)
    module = parse(found.text, file)
    called = plain_name(name)
    function = replace(entry_of(module, found.entry), name=called)
    parameters = kernels_in(source).get(called, ())
    if len(parameters) != len(function.parameters):
        parameters = [CudaParameter(f"argument_{i}", None) for i in range(len(function.parameters))]
    pointed = pointed_types(found.entry) or [p.pointed for p in parameters]
    return ForeignKernel(module, function, [p.name for p in parameters], pointed, (source, target, *options))


# -- Triton
def check_triton(
    kernel: Any,
    grid: int | Sequence[int] | Callable[[Mapping[str, Any]], Sequence[int]],
    arguments: Sequence[Any] | Mapping[str, Any],
    *,
    target: str = "sm_80",
    seed: int | None = None,
    **meta: Any,
) -> CheckedPtx:
    """Compile a Triton kernel for ``target`` and run it on the CPU with all checks; no GPU is needed.

    ``kernel`` is a ``@triton.jit`` function; of an autotuned one the first configuration counts, unless ``meta`` says
    otherwise. ``grid`` is what stands in brackets at a launch, ``arguments`` and ``meta`` what stands in parentheses:
    arrays of NumPy or of torch on the CPU, which are changed in place, Triton's ``TensorDescriptor`` of such arrays
    (for sm_90), numbers, and constants and options such as ``BLOCK=64, num_warps=4`` by name. ``target`` is an
    architecture, ``sm_80`` or ``sm_90``. With ``seed`` the warps run in an adversarial order.

    Findings name the lines of the kernel's Python source. Raises UnsupportedDeviceError without Triton, ProblemError
    for arguments that do not fit, PtxError for an instruction that cannot be run, and what Triton raises.
    """
    function, meta = _configured(kernel, arguments, meta)
    given = _by_name(function, arguments, meta)
    given |= {p.name: meta[p.name] for p in function.params if p.name in meta and not p.is_constexpr}
    meta = {name: x for name, x in meta.items() if name not in given}
    compiled = _compile(function, given, meta, target)
    signature = {name: kind for name, kind in compiled.src.signature.items() if kind != "constexpr"}
    metadata = compiled.metadata
    boxes = iter(getattr(metadata, "tensordesc_meta", None) or ())
    passed = [x for name, kind in signature.items() for x in _passed(name, kind, given.get(name), boxes)]
    defaults = {p.name: p.default for p in function.params if p.has_default}
    where = grid({**defaults, **given, **meta}) if callable(grid) else grid
    text: str = compiled.asm["ptx"]
    passed += [("global scratch memory", _scratch(metadata, "global_scratch_size", grid_of(where)))]
    passed = [*passed, ("profiling scratch memory", 0)][: _parameters(text, metadata.name)]
    return check_ptx(
        text,
        where,
        _threads(text, metadata),
        [x for _, x in passed],
        kernel=metadata.name,
        shared_bytes=metadata.shared,
        names=[name for name, _ in passed],
        file=f"{metadata.name}.ptx",
        seed=seed,
    )


# -- what Triton compiles
def _configured(kernel: Any, arguments: Any, meta: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The function under autotuners and heuristics, and the constants and options that these choose."""
    while not hasattr(kernel, "params") or hasattr(kernel, "configs") or hasattr(kernel, "values"):
        if hasattr(kernel, "configs"):
            meta = {**(kernel.configs[0].all_kwargs() if kernel.configs else {}), **meta}
        elif hasattr(kernel, "values"):
            names = getattr(kernel, "arg_names", [])
            known = {**_positional(names, arguments), **meta}
            for name, choose in kernel.values.items():  # a choice may depend on those before it
                known[name] = meta[name] if name in meta else choose(known)
            meta = {**{name: known[name] for name in kernel.values}, **meta}
        if not hasattr(kernel, "fn"):
            raise ProblemError(f"a Triton kernel is a function decorated with @triton.jit, not {shown(kernel)}")
        kernel = kernel.fn
    return kernel, meta


def _positional(names: Sequence[str], arguments: Any) -> dict[str, Any]:
    return dict(arguments) if isinstance(arguments, Mapping) else dict(zip(names, arguments, strict=False))


def _by_name(function: Any, arguments: Any, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names of the function's parameters. Raises ProblemError for missing and unknown ones."""
    names: list[str] = list(function.arg_names)
    if not isinstance(arguments, Mapping) and len(arguments) > len(names):
        raise ProblemError(f"{function.__name__} takes {len(names)} arguments, not {len(arguments)}")
    given = _positional(names, arguments)
    unknown = sorted(set(given) - set(names))
    defaults = {p.name for p in function.params if p.has_default}
    missing = [name for name in names if name not in given and name not in meta and name not in defaults]
    check_names(function.__name__, missing, unknown)
    return given


class _Target:
    """Stands for a GPU that is not there, while Triton compiles for it."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        """The architecture to compile for."""
        return self.target

    def get_current_device(self) -> str:
        """The device that Triton keeps compiled kernels by: none that is real."""
        return f"checked for {self.target.arch}"

    def get_current_stream(self, _: Any = None) -> int:
        """The handle of the stream that Triton launches on: CUDA's default one."""
        return 0


class _TritonElement(str):
    """The name of an array's type, with the size that tensor descriptors ask for."""

    itemsize: int
    is_floating_point = True


class _Pointer:
    """An array as Triton sees it: the type of its elements, and how well it is aligned on a GPU."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        root: Any = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        first = int(array.__array_interface__["data"][0]) - int(root.__array_interface__["data"][0])
        self.array, self.dtype, self.place = array, _TritonElement(array.dtype.name), _ALIGNMENT + first % _ALIGNMENT
        self.dtype.itemsize = array.dtype.itemsize

    def data_ptr(self) -> int:
        """An address with the array's alignment."""
        return self.place


def _compile(function: Any, given: dict[str, Any], meta: Mapping[str, Any], target: str) -> Any:
    """The compiled kernel; arrays among ``given`` become what Triton and the emulator take."""
    try:
        triton: Any = importlib.import_module("triton")
        compiler: Any = importlib.import_module("triton.backends.compiler")
    except ImportError as error:
        raise UnsupportedDeviceError("check_triton needs Triton: pip install triton") from error
    number = re.fullmatch(r"sm_(\d+)a?", target)
    if number is None:
        raise ProblemError(f"a target is an architecture such as sm_80 or sm_90, not {shown(target)}")
    for name, x in given.items():
        if hasattr(x, "block_shape"):
            descriptor: Any = importlib.import_module("triton.tools.tensor_descriptor")
            base = _Pointer(as_numpy(describe(x.base)))
            given[name] = descriptor.TensorDescriptor(base, list(x.shape), list(x.strides), list(x.block_shape))
        elif hasattr(x, "data_ptr") or (hasattr(x, "shape") and x.shape != ()):
            given[name] = _Pointer(as_numpy(describe(x if len(x.shape) else x.reshape(1))))
    with _in_place_of_gpu(triton.runtime.driver, _Target(compiler.GPUTarget("cuda", int(number[1]), 32))):
        # by position as far as that goes: a parameter may be called like an option of Triton's, num_ctas
        names: list[str] = list(function.arg_names)
        first = [given[name] for name in takewhile(given.__contains__, names)]
        named = {name: x for name, x in given.items() if name not in names[: len(first)]}
        return function.warmup(*first, grid=(1,), **named, **meta)


@contextmanager
def _in_place_of_gpu(driver: Any, stand_in: _Target) -> Iterator[None]:
    """Triton compiles for the stand-in, and anew: what it keeps on disk may name the lines of a file that has moved."""
    before, always = getattr(driver, "_active", None), os.environ.get(_ALWAYS)
    driver.set_active(stand_in)
    os.environ[_ALWAYS] = "1"
    try:
        yield
    finally:
        if always is None:
            del os.environ[_ALWAYS]
        else:
            os.environ[_ALWAYS] = always
        if before is None:
            driver.reset_active() if getattr(driver, "_default", None) is not None else setattr(driver, "_active", None)
        else:
            driver.set_active(before)


# -- what is run of that
def _passed(name: str, kind: Any, x: Any, boxes: Iterator[Mapping[str, Any]]) -> list[tuple[str, Any]]:
    """An argument as PTX takes it: with a tensor map go its shape and strides. ``boxes`` say how Triton tiled it."""
    if not hasattr(x, "block_shape"):
        return [(name, _unwrapped(name, kind, x))]
    box = next(boxes, None)
    if box is None:
        raise ProblemError(f"argument {name} is a tensor descriptor, which kernels take from sm_90 on: set target")

    from warploom.layout.tensor_map import TensorMapSpec

    array, size = x.base.array, x.base.array.dtype.itemsize
    spec = TensorMapSpec(
        describe(array).dtype,
        tuple(x.shape)[::-1],
        tuple(s * size for s in x.strides[:-1])[::-1],
        tuple(box["block_size"])[::-1],
        (0, 32, 64, 128)[box["swizzle"]],
    )
    sizes = [(f"{name}.shape[{i}]", n) for i, n in enumerate(x.shape)]
    return [(name, (array, spec)), *sizes, *((f"{name}.strides[{i}]", n) for i, n in enumerate(x.strides))]


def _unwrapped(name: str, kind: Any, x: Any) -> Any:
    """An array or a number as PTX takes it."""
    if isinstance(x, _Pointer):
        return x.array
    if isinstance(kind, str) and kind.startswith("*") and x is None:
        return 0
    if not isinstance(x, int | float | np.number):
        raise ProblemError(f"argument {name} is {shown(x)}: arrays and numbers are supported")
    return float(x) if str(kind).startswith("fp") else int(x)


def _scratch(metadata: Any, name: str, grid: tuple[int, int, int]) -> Any:
    size = getattr(metadata, name, 0) or 0
    return np.zeros(size * grid[0] * grid[1] * grid[2], np.uint8) if size else 0


def _parameters(ptx: str, name: str) -> int:
    """The number of the kernel's parameters: versions of Triton differ in the pointers that they add."""
    head = ptx[ptx.index(f".entry {name}(") :]
    return head[: head.index(")")].count(".param")


def _threads(ptx: str, metadata: Any) -> int:
    """The threads of a CTA; warp-specialised kernels have more than ``num_warps`` says."""
    found = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", ptx)
    return int(found[1]) if found else 32 * metadata.num_warps
