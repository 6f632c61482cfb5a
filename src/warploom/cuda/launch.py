"""Load a compiled kernel on a device and launch it, on the caller's stream.

What a call needs beyond pointers is made once: the kernel is loaded and its shared-memory limit raised when it is
first used on a device; a launch's limits are checked, and its configuration and arguments kept as the driver takes
them. Queueing it then allocates nothing, waits for nothing and may be captured into a CUDA graph.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

from warploom.core.arguments import GRID_LIMITS
from warploom.core.dtypes import DType
from warploom.core.errors import ConfigError, ProblemError
from warploom.core.targets import Target, target
from warploom.cuda.device import check, require_driver, target_of
from warploom.cuda.store import CompiledKernel

Grid = int | tuple[int, ...]
Packed = tuple[int, Any]
"""Where the driver's list of a launch's arguments lies, and what keeps it and them in memory."""
Queueable = tuple[Callable[[], tuple[Any, ...]], Any]
"""What asks the driver for launches on a stream and returns its status, and what it needs kept in memory."""
Room = Callable[[bool], tuple[int, Any]]
"""Memory for what lies between launches, new or (True) such as stays the stream's: its address, and what keeps it."""

_THREADS_PER_BLOCK = 1024
_BLOCK_LIMITS = (1024, 1024, 64)
_SHARED_WITHOUT_OPT_IN = 48 * 1024  # what a block may have before the kernel's limit is raised
_STREAMS_KEPT = 64

_CTYPES: dict[str, Any] = {
    "pred": ctypes.c_bool,
    "u8": ctypes.c_uint8,
    "s8": ctypes.c_int8,
    "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32,
    "s32": ctypes.c_int32,
    "u64": ctypes.c_uint64,
    "s64": ctypes.c_int64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}


def scalar(dtype: DType, value: float) -> Any:
    """``value`` as a kernel argument of register type ``dtype``; make it once per plan, not per call.

    Raises ProblemError where an integer does not fit the type.
    """
    kind = _CTYPES.get(dtype.name)
    if kind is None:
        raise ProblemError(f"{dtype} is not a type of kernel parameters; use one of {', '.join(_CTYPES)}")
    if not dtype.is_integer:
        return kind(value)
    argument = kind(int(value))
    if argument.value != value:
        raise ProblemError(f"{value} does not fit a kernel parameter of type {dtype}")
    return argument


class LoadedKernel:
    """A kernel in the memory of one device. Made by :func:`load`; safe to use from several threads."""

    def __init__(self, compiled: CompiledKernel, device: int) -> None:
        self.compiled = compiled
        self.device = device
        self.target = _check_runs_on(compiled, device)
        self.driver = driver = require_driver()
        self._lock = threading.Lock()
        self._shared_limit = _SHARED_WITHOUT_OPT_IN - compiled.resources.static_shared_bytes
        with current_context(device):
            # The code stays loaded for the life of the process: nothing unloads a driver's library.
            library = check(driver, driver.cuLibraryLoadData(compiled.cubin, [], [], 0, [], [], 0))
            self.kernel = check(driver, driver.cuLibraryGetKernel(library, compiled.name.encode()))
            # Loads the code into this context now: lazy loading inside a graph capture would break the capture.
            check(driver, driver.cuKernelGetFunction(self.kernel))

    def configure(
        self, grid: Grid, block: Grid, *, shared_bytes: int = 0, overlaps: bool = False, at_once: bool = False
    ) -> ConfiguredLaunch:
        """The launch of ``grid`` blocks of ``block`` threads; ``grid`` counts blocks, also of clusters.

        ``shared_bytes`` is the dynamic shared memory per block. Where it ``overlaps``, it begins before the launch
        before it in the stream ends: the kernel waits for that itself. ``at_once``: blocks may wait for each other, so
        the driver starts all of them, or refuses. Raises ConfigError that lists every limit of the target the launch
        breaks.
        """
        blocks, threads = _triple(grid), _triple(block)
        reasons = launch_problems(self.compiled, self.target, blocks, threads, shared_bytes)
        if reasons:
            raise ConfigError(f"kernel {self.compiled.name!r} cannot be launched: " + "; ".join(reasons))
        self._allow_shared(shared_bytes)
        return ConfiguredLaunch(self, (blocks, threads), shared_bytes, overlaps=overlaps, at_once=at_once)

    def _allow_shared(self, shared_bytes: int) -> None:
        """Raise the kernel's dynamic shared-memory limit to ``shared_bytes``."""
        with self._lock:
            if shared_bytes <= self._shared_limit:
                return
            driver = self.driver
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            device = check(driver, driver.cuDeviceGet(self.device))
            check(driver, driver.cuKernelSetAttribute(attribute, shared_bytes, self.kernel, device))
            self._shared_limit = shared_bytes


class ConfiguredLaunch:
    """A kernel on one device with one grid: arguments are packed once, and queued any number of times.

    Made by :meth:`LoadedKernel.configure`; safe to use from several threads.
    """

    def __init__(
        self, kernel: LoadedKernel, extents: tuple[Any, Any], shared_bytes: int, *, overlaps: bool, at_once: bool
    ) -> None:
        self._compiled = kernel.compiled
        self._device, self._driver = kernel.device, kernel.driver
        self._launch, self._queue = kernel.driver.cuLaunchKernelEx, queue_on(kernel.device)
        self._extents, self._shared_bytes = extents, shared_bytes
        self._overlaps, self._at_once = overlaps, at_once
        self._function = kernel.driver.CUfunction(int(kernel.kernel))  # the driver takes a CUkernel for one
        self._on_streams: dict[int, Any] = {}
        self._checked = False

    def pack(self, arguments: Sequence[Any]) -> Packed:
        """The arguments in the order of the kernel's parameters, for :meth:`queue`.

        Each is an address as int, a :func:`scalar`, or a tensor map. Raises ProblemError where they do not fit the
        parameters (looks at the first ones only).
        """
        values = [ctypes.c_uint64(x) if isinstance(x, int) else x for x in arguments]
        if not self._checked:
            _check_arguments(self._compiled, values)
            self._checked = True
        places = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        return ctypes.addressof(places), (places, values)

    def queue(self, stream: int, packed: Packed) -> None:
        """Queue the kernel on the stream with this handle (0: the legacy default stream), as :func:`queue_on` does."""
        self._queue(self.queueable(stream, packed))

    def queueable(self, stream: int, packed: Packed) -> Queueable:
        """The launch on a stream with :meth:`pack`-ed arguments, for :func:`queue_on`."""
        config = self._on_streams.get(stream) or self._on_stream(stream)
        return partial(self._launch, config, self._function, packed[0], 0), packed

    def resident(self) -> int:
        """Blocks of this launch that fit a multiprocessor at a time."""
        threads, ask = math.prod(self._extents[1]), self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
        with current_context(self._device):
            return int(check(self._driver, ask(self._function, threads, self._shared_bytes)))

    def _on_stream(self, stream: int) -> Any:
        """The driver's form of the launch on a stream."""
        driver = self._driver
        made = driver.CUlaunchConfig()
        (made.gridDimX, made.gridDimY, made.gridDimZ), (made.blockDimX, made.blockDimY, made.blockDimZ) = self._extents
        made.sharedMemBytes, made.hStream = self._shared_bytes, driver.CUstream(stream)
        attributes: list[Any] = []
        if self._overlaps:  # CUDA C++ Programming Guide, "Programmatic Dependent Launch"
            attributes.append(driver.CUlaunchAttribute())
            attributes[-1].id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attributes[-1].value.programmaticStreamSerializationAllowed = 1
        if self._at_once:  # CUDA Driver API, "cuLaunchCooperativeKernel"
            attributes.append(driver.CUlaunchAttribute())
            attributes[-1].id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attributes[-1].value.cooperative = 1
        if attributes:
            made.attrs, made.numAttrs = attributes, len(attributes)
        if len(self._on_streams) >= _STREAMS_KEPT:
            self._on_streams.clear()
        self._on_streams[stream] = made
        return made


def _check_arguments(compiled: CompiledKernel, arguments: Sequence[Any]) -> None:
    """Raises ProblemError where the arguments do not fit the kernel's parameters."""
    parameters = compiled.resources.parameters
    if len(arguments) != len(parameters):
        raise ProblemError(f"kernel {compiled.name!r} takes {len(parameters)} arguments, not {len(arguments)}")
    for index, (argument, parameter) in enumerate(zip(arguments, parameters, strict=True)):
        size = ctypes.sizeof(argument)
        if size != parameter.size:
            raise ProblemError(
                f"argument {index} of kernel {compiled.name!r} has {size} bytes, its parameter "
                f"{parameter.size}: pass addresses as int and numbers through warploom.cuda.launch.scalar"
            )


class _Current:
    """Makes a context current for a ``with`` block and restores the caller's."""

    __slots__ = ("_context", "_driver")

    def __init__(self, driver: Any, context: Any) -> None:
        self._driver = driver
        self._context = context

    def __enter__(self) -> None:
        check(self._driver, self._driver.cuCtxPushCurrent(self._context))

    def __exit__(self, *_: object) -> None:
        self._driver.cuCtxPopCurrent()


@lru_cache(maxsize=64)
def _primary_context(device: int) -> Any:
    """The primary context of a device: the one the frameworks use. Retained for the life of the process."""
    driver = require_driver()
    return check(driver, driver.cuDevicePrimaryCtxRetain(check(driver, driver.cuDeviceGet(device))))


def current_context(device: int) -> _Current:
    """A ``with`` block in which GPU ``device`` is current; the caller's context comes back after it."""
    return _Current(require_driver(), _primary_context(device))


def on_device(driver: Any, device: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the driver with GPU ``device`` current and restore the caller's context."""
    status, current = driver.cuCtxGetDevice()
    if status == 0 and int(current) == device:
        return function(*arguments)
    with current_context(device):
        return function(*arguments)


_loaded: dict[tuple[bytes, str, int], LoadedKernel] = {}
_load_lock = threading.Lock()


def load(compiled: CompiledKernel, device: int) -> LoadedKernel:
    """``compiled`` on GPU ``device``; the same kernel is loaded once per device.

    Raises UnsupportedDeviceError without a usable driver or GPU, ConfigError where the code is for another
    architecture.
    """
    key = (compiled.cubin, compiled.name, device)
    with _load_lock:
        if key not in _loaded:
            _loaded[key] = LoadedKernel(compiled, device)
        return _loaded[key]


def launch_problems(
    compiled: CompiledKernel, limits: Target, grid: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int
) -> list[str]:
    """Why ``compiled`` cannot run so on a GPU with ``limits``: one text per broken limit, empty where it can."""
    reasons: list[str] = []
    needs = compiled.resources
    threads = block[0] * block[1] * block[2]
    if min(grid) < 1 or any(g > most for g, most in zip(grid, GRID_LIMITS, strict=True)):
        reasons.append(f"the grid {grid} must lie between 1 and {GRID_LIMITS}")
    if min(block) < 1 or any(b > most for b, most in zip(block, _BLOCK_LIMITS, strict=True)):
        reasons.append(f"the block {block} must lie between 1 and {_BLOCK_LIMITS}")
    if threads > _THREADS_PER_BLOCK:
        reasons.append(f"a block has {threads} threads, {limits.name} allows {_THREADS_PER_BLOCK}")
    if any(g % c for g, c in zip(grid, needs.cluster, strict=True)):
        reasons.append(f"the grid {grid} is not a multiple of the cluster {needs.cluster}")
    shared = needs.static_shared_bytes + shared_bytes
    if shared > limits.shared_per_block:
        reasons.append(
            f"it needs {shared} bytes of shared memory per block, {limits.name} has {limits.shared_per_block}: "
            "choose smaller tiles or fewer stages"
        )
    # Registers are handed out per warp in units of 256.
    registers = -(-needs.registers * 32 // 256) * 256 * -(-threads // 32)
    if registers > limits.registers_per_sm:
        reasons.append(
            f"{threads} threads with {needs.registers} registers each need more than the {limits.registers_per_sm} "
            f"registers of a multiprocessor: use fewer warps or cap the registers"
        )
    return reasons


def synchronize(stream: int, device: int) -> None:
    """Wait until everything queued on ``stream`` (an integer handle) of GPU ``device`` has run.

    Raises RuntimeError with the driver's reason if a kernel failed.
    """
    driver = require_driver()
    check(driver, on_device(driver, device, driver.cuStreamSynchronize, driver.CUstream(stream)))


def zeroing(address: int, words: int, stream: int) -> Queueable:
    """A write of zeros to so many 32-bit words from an address on, on the stream of this handle: :func:`queue_on`."""
    return partial(require_driver().cuMemsetD32Async, address, 0, words, stream), None


class Repeated:
    """Launches that follow each other on a stream, on arrays that stay, with memory of their own between them.

    Once they were repeated often, those that are ``joined`` are one for the driver: a CUDA graph of their own, which
    costs the host less than two launches, however many they are, and the GPU no more. Its memory stays the stream's.
    While the stream is captured they are launches, because a graph takes no graph in, and their memory is new, because
    what captured them may run beside the stream. ``on`` gives them on a stream, with memory at an address.
    """

    def __init__(
        self, on: Callable[[int, int], Sequence[Queueable]], stream: int, room: Room, *, joined: bool = True
    ) -> None:
        self._on, self._stream, self._room = on, stream, room
        self._driver = driver = require_driver()
        self._captured = partial(driver.cuStreamIsCapturing, stream)
        self._left = _REPEATED if joined else sys.maxsize
        self._graph: Callable[[], tuple[Any, ...]] | None = None
        self._kept: Any = None

    def queue(self) -> tuple[Any, ...]:
        """Ask the driver for the launches and return its status, and behind it what keeps new memory."""
        if self._left > 0:
            self._left -= 1
        elif self._captured() == _NOT_CAPTURED:
            graph = self._graph or self._made()
            if graph is not None:
                return graph()
        memory, kept = self._room(False)
        for queue, _ in self._on(self._stream, memory):
            result = queue()
            if result[0] != 0:
                return result
        return 0, kept

    def _made(self) -> Callable[[], tuple[Any, ...]] | None:
        """The launch of the graph; None where the driver makes none, which is not tried again. The oldest may go."""
        driver = self._driver
        stream = _stream_for_graphs(int(check(driver, driver.cuCtxGetCurrent())))
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        with _graph_lock:
            mode = check(driver, driver.cuThreadExchangeStreamCaptureMode(relaxed))  # other threads may capture, too
            try:
                memory, kept = self._room(True)
                wanted = self._on(stream, memory)
                check(driver, driver.cuStreamBeginCapture(stream, relaxed))
                refused = any(queue()[0] for queue, _ in wanted)
                graph = check(driver, driver.cuStreamEndCapture(stream))
                made = None if refused else check(driver, driver.cuGraphInstantiate(graph, 0))
                check(driver, driver.cuGraphDestroy(graph))
                if made is not None:
                    self._keep(made, kept)
            except RuntimeError:
                made = None
            finally:
                check(driver, driver.cuThreadExchangeStreamCaptureMode(mode))
        if made is None:
            self._left = sys.maxsize
        return self._graph

    def _keep(self, made: Any, memory: Any) -> None:
        """Keep a graph and its memory as long as it is launched, in the place of the oldest where there are many."""
        launch = self._graph = partial(self._driver.cuGraphLaunch, made, self._stream)
        self._kept = memory
        weakref.finalize(launch, self._driver.cuGraphExecDestroy, made).atexit = False
        _graphs[:] = [*[x for x in _graphs if x() is not None], weakref.ref(self)]
        oldest = _graphs.pop(0)() if len(_graphs) > _GRAPHS_KEPT else None
        if oldest is not None:
            oldest._graph, oldest._kept, oldest._left = None, None, _REPEATED


_REPEATED = 16
"""Repetitions after which a graph is made: that takes as long as some ten of them."""
_NOT_CAPTURED = (0, 0)  # the status of the call, and that of the stream
_GRAPHS_KEPT = 256
"""Graphs of this process: each takes some 110 KiB of a GPU's memory."""
_graph_lock, _graphs = threading.Lock(), list["weakref.ref[Repeated]"]()


@lru_cache(maxsize=64)
def _stream_for_graphs(_context: int) -> int:
    """A stream of the current context, the caller's, that is captured to make graphs and runs nothing."""
    driver = require_driver()
    return int(check(driver, driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))


def queue_on(device: int) -> Callable[[Queueable], tuple[Any, ...]]:
    """Return a function that queues launches on a GPU, which may be captured into a CUDA graph.

    It makes the GPU current where it is not, and restores the caller's. It raises RuntimeError with the driver's reason
    where a launch is refused. It returns what keeps memory that the launches have of their own.
    """
    driver = require_driver()
    ask = driver.cuCtxGetDevice

    def queue(wanted: Queueable) -> tuple[Any, ...]:
        status, current = ask()
        if status == 0 and int(current) == device:
            result = wanted[0]()
        else:
            with current_context(device):
                result = wanted[0]()
        if result[0] != 0:
            check(driver, result)
        return result

    return queue


def _check_runs_on(compiled: CompiledKernel, device: int) -> Target:
    here, made_for = target_of(device), target(compiled.arch)
    same_major = here.compute_capability[0] == made_for.compute_capability[0]
    runs = (
        here.compute_capability == made_for.compute_capability
        if made_for.name.endswith("a")
        else same_major and here.compute_capability >= made_for.compute_capability
    )
    if not runs:
        raise ConfigError(
            f"kernel {compiled.name!r} is compiled for {compiled.arch}, which GPU {device} ({here.name}) cannot run: "
            f"compile it for {here.name}"
        )
    return here


def _triple(extent: Grid) -> tuple[int, int, int]:
    sizes = (extent,) if isinstance(extent, int) else tuple(extent)
    if not 1 <= len(sizes) <= 3:
        raise ConfigError(f"a grid, block or cluster has one to three dimensions, not {sizes}")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z
