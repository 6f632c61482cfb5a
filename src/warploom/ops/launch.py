"""``launch``: a kernel of the user's own, on arrays of any framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from warploom.core.arguments import grid_of, scalar_value
from warploom.core.errors import ConfigError, ProblemError, WarploomError, shown
from warploom.core.once import once
from warploom.core.targets import target
from warploom.interop.arrays import (
    SYNCHRONOUS_KINDS,
    ArrayView,
    as_numpy,
    bytes_at,
    current_stream,
    describe,
    memory_span,
    same_device,
)
from warploom.interop.refusals import refuse_watched
from warploom.interop.tracing import traced
from warploom.ops.backends import compiled, emulated, gpu_present, gpu_target, warn_of_emulator
from warploom.ops.tuned import configuration_found

if TYPE_CHECKING:
    from warploom.core.dtypes import DType
    from warploom.cuda.buffers import DeviceCopy
    from warploom.cuda.launch import ConfiguredLaunch
    from warploom.ir.program import Parameter, Program
    from warploom.lang import KernelFunction

Grid = tuple[int, int, int]


@traced
def launch(
    kernel: KernelFunction | Program,
    grid: int | Sequence[int],
    arguments: Sequence[Any] | Mapping[str, Any],
    **configuration: Any,
) -> None:
    """Run a kernel of your own on arrays, which it changes in place.

    ``kernel`` is a function decorated with ``@warploom.lang.kernel``, traced with the keyword-only ``configuration``
    (once for each that is hashable, and again where a global or attribute that the function names is another), or a
    Program. ``grid`` counts CTAs along x, y and z: integers of any kind, or a function of trace-time parameters that
    gives them. A kernel that declares what to ``tune`` runs as ``warploom tune`` has found it fastest on this GPU,
    unless some of that is given.

    ``arguments`` follow the parameters of the Program, by position or by name: arrays for pointers, numbers for
    scalars, which must lie within the range of their types, ``(array, TensorMapSpec)`` pairs for tensor maps. A pointer
    is the array's first element, and nothing is copied to make rows contiguous: for ``x[::2]`` the kernel is handed x,
    and must step by 2 (the emulator finds accesses between the elements). A ``Strided`` parameter takes the strides
    from the array. Elements are of the pointer's type, or
    bits of its size: unsigned integers fit every pointer, and every array a pointer to them; signed ones fit integers.

    Arrays of torch, CuPy and JAX on a GPU are used where they lie: the kernel is queued on the caller's current stream,
    and nothing is waited for. JAX's arrays are immutable, so a kernel may only read them. NumPy arrays (and other CPU
    arrays) are copied to the GPU and back where there is one; else the kernel runs on the emulator with all its checks,
    which says so.

    Under ``torch.compile`` a launch of a kernel that declares its outputs (``@kernel(outputs=["y"])``) is one operator,
    if its arguments are tensors and numbers and its configuration is made of numbers and text; others break the graph
    and run as they are.

    Raises ProblemError for arguments that do not fit, ConfigError for a launch that the GPU does not take,
    EmulationError if the emulator finds a defect, and what tracing raises.
    """
    program, grid = _settled(kernel, grid, configuration)
    given, views = _described(program, arguments)
    arrays = [view for view in views if view is not None]
    _check_outputs(kernel, program)
    names = [p.name for p in program.parameters if p.kind != "scalar"]
    on = same_device(arrays, names) if arrays else ("cpu", 0)
    written = _written(program)
    for name, view in zip(names, arrays, strict=True):
        if view.readonly and name in written:
            raise ProblemError(
                f"{program.name} writes to {name}, which is read-only: pass an array that may be written"
            )
    if on[0] == "cuda":
        kind = arrays[0].kind
        queue = _ready(program, grid, given, [None if v is None else v.pointer for v in views], on[1])
        stream = current_stream(kind, on[1])
        queue(stream)
        if kind in SYNCHRONOUS_KINDS:
            from warploom.cuda.launch import synchronize

            synchronize(stream, on[1])
    elif gpu_present():
        copies = _copied(program, grid, given, views)
        copies.queue(0)
        copies.download()
    else:
        _emulate(program, grid, given, views)


@dataclass(frozen=True)
class CopiedLaunch:
    """A launch on copies of CPU arrays on GPU 0: ``queue(stream)`` runs it, as often as one likes."""

    queue: Callable[[Any], None]
    written: tuple[DeviceCopy, ...]

    def download(self) -> None:
        """Copy what the kernel writes back to the CPU arrays; waits for the kernel."""
        for copy in self.written:
            copy.download()


def copied_launch(program: Program, grid: int | Sequence[int], arguments: Sequence[Any]) -> CopiedLaunch:
    """A launch with CPU arrays, ready to run on GPU 0. Raises what :func:`launch` raises."""
    given, views = _described(program, arguments)
    return _copied(program, grid_of(grid), given, views)


def _described(
    program: Program, arguments: Sequence[Any] | Mapping[str, Any]
) -> tuple[list[Any], list[ArrayView | None]]:
    """The arguments in the order of the parameters, scalars checked, and the arrays among them."""
    from warploom.ir.program import in_order

    given = [
        scalar_value(p.name, p.dtype, _plain(p.name, x)) if p.kind == "scalar" else x
        for p, x in zip(program.parameters, in_order(program, arguments, _layout), strict=True)
    ]
    return given, [None if p.kind == "scalar" else _view(p, x) for p, x in zip(program.parameters, given, strict=True)]


def _plain(name: str, value: Any) -> Any:
    """A number that carries no derivative and no trace. Raises ProblemError for others."""
    if value.__class__ not in (int, float, bool):
        refuse_watched(name, value)
    return value


def _settled(kernel: KernelFunction | Program, grid: Any, given: Mapping[str, Any]) -> tuple[Program, Grid]:
    """The Program and its grid, with what ``warploom tune`` found where none of a kernel's ``tune`` is given."""
    from warploom.ir.program import Program

    program = _program(kernel, given)
    if isinstance(kernel, Program):
        return program, grid_of(grid)
    found: Mapping[str, Any] = {}
    if kernel.tune and not kernel.tune.keys() & given.keys() and gpu_present():
        found = kernel.choice(configuration_found(program, 0))
        program = _program(kernel, {**given, **found})
    return program, grid_of(kernel.grid_of(grid, given, found))


def _program(kernel: KernelFunction | Program, configuration: Mapping[str, Any]) -> Program:
    from warploom.ir.program import Program

    if isinstance(kernel, Program):
        if configuration:
            raise ProblemError(f"{kernel.name} is traced already: its configuration cannot be set again")
        return kernel
    trace: Callable[..., Program] | None = getattr(kernel, "trace", None)
    if trace is None:
        raise ProblemError(
            f"a kernel is a function decorated with @warploom.lang.kernel(threads=…), or the Program that its trace "
            f"gives; not {type(kernel).__name__}"
        )
    try:
        hash(settings := tuple(sorted(configuration.items())))
    except TypeError:  # a value that is no key, such as a list
        return trace(**configuration)
    return _traced(kernel, kernel.sees.version(), settings)


@once(maxsize=256)
def _traced(kernel: KernelFunction, _version: int, settings: tuple[tuple[str, Any], ...]) -> Program:
    return kernel.trace(**dict(settings))


def _check_outputs(kernel: KernelFunction | Program, program: Program) -> None:
    """Raises ProblemError for a kernel that writes to what it does not declare, if it declares anything."""
    outputs: tuple[str, ...] = getattr(kernel, "outputs", ())
    more = _written(program).difference(outputs)
    if outputs and more:
        raise ProblemError(
            f"{program.name} writes to {', '.join(sorted(more))}, which its outputs={list(outputs)} do not name"
        )


def _layout(parameter: Parameter, argument: Any) -> tuple[Sequence[int], Sequence[int]]:
    """(shape, strides in elements) of an array."""
    view = _view(parameter, argument)
    return view.shape, view.strides


def _view(parameter: Parameter, argument: Any) -> ArrayView:
    """The array of a pointer or a tensor map. Raises ProblemError if it is none, or of another type of elements."""
    dtype, array = parameter.dtype, argument
    if parameter.kind == "tensor_map":
        from warploom.layout.tensor_map import TensorMapSpec

        if not (isinstance(argument, tuple) and len(argument) == 2 and isinstance(argument[1], TensorMapSpec)):
            raise ProblemError(f"argument {parameter.name} is an (array, TensorMapSpec) pair, not {shown(argument)}")
        array, dtype = argument[0], argument[1].dtype
    try:
        view = describe(array)
    except WarploomError as error:
        error.args = (f"argument {parameter.name}: {error}",)
        raise
    if view.dtype is not dtype and not _same_bits(view.dtype, dtype):
        bits = f": pass unsigned integers of {dtype.bytes} bytes (a view) where its bits are meant"
        hint = bits if view.dtype.bytes == dtype.bytes else ""
        raise ProblemError(
            f"argument {parameter.name} has elements of type {view.dtype}; the kernel's are {dtype}{hint}"
        )
    return view


def _same_bits(given: DType, taken: DType) -> bool:
    """Whether elements of one type stand for those of another: of one NumPy type, or bits or integers of one size."""
    if given.bytes != taken.bytes or given.kind == "foreign":
        return False
    kinds = {given.kind, taken.kind}
    return given.numpy == taken.numpy or bool(kinds & {"unsigned", "pred"}) or kinds == {"signed"}


@once(maxsize=512)
def _written(program: Program) -> frozenset[str]:
    """The parameters that the kernel may write through."""
    from warploom.emulate.launch.arguments import written_parameters

    found = written_parameters(program)
    return frozenset(p.name for p in program.parameters if p.kind != "scalar") if found is None else frozenset(found)


@once(maxsize=512)
def _configured(program: Program, grid: Grid, device: int) -> ConfiguredLaunch:
    """The launch of so many CTAs on a GPU. Raises ConfigError for one that it does not take."""
    from warploom.cuda.launch import load

    found, least = gpu_target(device), target(program.requires)
    specific = program.requires.endswith("a")
    if (found.name != program.requires) if specific else (found.compute_capability < least.compute_capability):
        raise ConfigError(f"{program.name} needs {program.requires}, GPU {device} is {found.name}")
    kernel = load(compiled(program, found.name), device)
    return kernel.configure(grid, program.threads, shared_bytes=program.shared_bytes)


def _ready(
    program: Program, grid: Grid, given: Sequence[Any], pointers: Sequence[int | None], device: int
) -> Callable[[Any], None]:
    """A function that queues the loaded kernel on a stream, with its arguments packed (arrays at ``pointers``)."""
    from warploom.cuda.launch import scalar

    made = _configured(program, grid, device)
    arguments: list[Any] = []
    for parameter, argument, pointer in zip(program.parameters, given, pointers, strict=True):
        if pointer is None:
            arguments.append(scalar(parameter.dtype, argument))
        elif parameter.kind == "tensor_map":
            from warploom.cuda.tensor_maps import encode

            arguments.append(encode(pointer, argument[1], device))
        else:
            arguments.append(pointer)
    packed = made.pack(arguments)
    return lambda stream: made.queue(stream, packed)


def _copied(program: Program, grid: Grid, given: Sequence[Any], views: Sequence[ArrayView | None]) -> CopiedLaunch:
    """A launch on GPU 0 with copies of CPU arrays. Arrays that overlap share a copy."""
    from warploom.cuda.buffers import DeviceCopy

    spans = sorted(memory_span(view) for view in views if view is not None)
    regions: list[tuple[int, int]] = []  # (first, behind the last) address
    for first, size in spans:
        if regions and first < regions[-1][1]:
            regions[-1] = regions[-1][0], max(regions[-1][1], first + size)
        else:
            regions.append((first, first + size))
    copies = {first: DeviceCopy(bytes_at(first, end - first), 0) for first, end in regions}
    pointers: list[int | None] = []
    back: dict[int, DeviceCopy] = {}
    written = _written(program)
    for parameter, view in zip(program.parameters, views, strict=True):
        if view is None:
            pointers.append(None)
            continue
        region = max(first for first in copies if first <= memory_span(view)[0])
        pointers.append(copies[region].pointer + view.pointer - region)
        if parameter.name in written:
            back[region] = copies[region]
    queue = _ready(program, grid, given, pointers, 0)

    def run(stream: Any, _alive: object = copies) -> None:
        queue(stream)

    return CopiedLaunch(run, tuple(back.values()))


def _emulate(program: Program, grid: Grid, given: Sequence[Any], views: Sequence[ArrayView | None]) -> None:
    warn_of_emulator(program.name)
    emulated(program, grid, _on_cpu(program, given, views))


def _on_cpu(program: Program, given: Sequence[Any], views: Sequence[ArrayView | None]) -> dict[str, Any]:
    """The arguments by name, as the emulator takes them."""
    arguments: dict[str, Any] = {}
    for parameter, argument, view in zip(program.parameters, given, views, strict=True):
        array: Any = argument if view is None else as_numpy(view)
        arguments[parameter.name] = (array, argument[1]) if parameter.kind == "tensor_map" else array
    return arguments


def emulator_launch(
    kernel: KernelFunction | Program,
    grid: int | Sequence[int],
    arguments: Sequence[Any] | Mapping[str, Any],
    configuration: Mapping[str, Any],
) -> tuple[Program, Grid, dict[str, Any]]:
    """The Program of a launch, its grid and its arguments as the emulator takes them. Raises as :func:`launch`."""
    program = _program(kernel, configuration)
    return program, grid_of(grid), _on_cpu(program, *_described(program, arguments))
