"""Load a compiled kernel on a device and launch it, on the caller's stream.

What a call needs beyond pointers is made once: the kernel is loaded and its shared-memory limit raised when it is
first used on a device, launch configurations are validated and kept. A launch then allocates nothing, waits for nothing
and may be captured into a CUDA graph.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from warploom.core.arguments import GRID_LIMITS
from warploom.core.dtypes import DType
from warploom.core.errors import ConfigError, ProblemError
from warploom.core.targets import Target, target
from warploom.cuda.device import check, cuda_core, require_driver, target_of
from warploom.cuda.store import CompiledKernel

Grid = int | tuple[int, ...]

_THREADS_PER_BLOCK = 1024
_BLOCK_LIMITS = (1024, 1024, 64)
_SHARED_WITHOUT_OPT_IN = 48 * 1024  # what a block may have before the kernel's limit is raised
_CONFIGS_KEPT = 256
_STREAMS_KEPT = 1024

_CTYPES: dict[str, Any] = {
    "pred": ctypes.c_bool, "u8": ctypes.c_uint8, "s8": ctypes.c_int8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32,
    "s32": ctypes.c_int32, "u64": ctypes.c_uint64, "s64": ctypes.c_int64, "f32": ctypes.c_float, "f64": ctypes.c_double,
}  # fmt: skip


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
        driver = require_driver()
        self.compiled = compiled
        self.device = device
        self.target = _check_runs_on(compiled, device)
        self.driver = driver
        core = cuda_core()
        self._launch = core.launch
        self._launch_config = core.LaunchConfig
        self._configs: dict[Any, Any] = {}
        self._arguments_checked = False
        self._primary = _primary_context(device)
        self._lock = threading.Lock()
        self._shared_limit = _SHARED_WITHOUT_OPT_IN - compiled.resources.static_shared_bytes
        with _Current(driver, self._primary):
            # Kept alive: the kernel's handle belongs to the library that this object owns.
            self._object = core.ObjectCode.from_cubin(compiled.cubin, name=compiled.name)
            self.kernel = self._object.get_kernel(compiled.name)
            # Loads the code into this context now: lazy loading inside a graph capture would break the capture.
            check(driver, driver.cuKernelGetFunction(self.kernel.handle))

    def configure(
        self,
        grid: Grid,
        block: Grid,
        *,
        shared_bytes: int = 0,
        cluster: Grid | None = None,
        cooperative: bool = False,
    ) -> Any:
        """The launch configuration for ``grid`` blocks of ``block`` threads.

        ``shared_bytes`` is the dynamic shared memory per block. ``grid`` counts blocks, also of a kernel compiled for
        clusters and with ``cluster``, which makes clusters of one that is not. Equal calls return the same object.
        Raises ConfigError that lists every limit of the target the configuration breaks.
        """
        key = (grid, block, shared_bytes, cluster, cooperative)
        config = self._configs.get(key)
        if config is None:
            config = self._new_config(_triple(grid), _triple(block), shared_bytes, cluster, cooperative)
            if len(self._configs) >= _CONFIGS_KEPT:
                self._configs.clear()
            self._configs[key] = config
        return config

    def launch(self, stream: Any, config: Any, arguments: Sequence[Any]) -> None:
        """Queue the kernel on ``stream`` with ``arguments`` in the order of its parameters.

        ``stream`` is a stream's integer handle (0: the legacy default stream) or any object with ``__cuda_stream__``.
        An argument is an address as int, a :func:`scalar`, or a tensor map descriptor. The device is made current for
        the launch where it is not, and the caller's restored. Raises ProblemError where the arguments do not fit the
        kernel's parameters (checked on the first launch), RuntimeError with the driver's reason where it refuses.
        """
        self.check_arguments(arguments)
        if stream.__class__ is not int:
            stream = stream.__cuda_stream__()[1]
        stream = _streams.get(stream) or _stream(stream)
        status, current = self.driver.cuCtxGetDevice()
        if int(status) == 0 and int(current) == self.device:
            self._launch(stream, config, self.kernel, *arguments)
            return
        with _Current(self.driver, self._primary):
            self._launch(stream, config, self.kernel, *arguments)

    def occupancy(self, block: int, shared_bytes: int = 0) -> int:
        """Blocks of ``block`` threads with ``shared_bytes`` of dynamic shared memory that fit one multiprocessor."""
        self._allow_shared(shared_bytes)
        with _Current(self.driver, self._primary):
            return int(self.kernel.occupancy.max_active_blocks_per_multiprocessor(block, shared_bytes))

    def _new_config(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        cluster: Grid | None,
        cooperative: bool,
    ) -> Any:
        reasons = launch_problems(self.compiled, self.target, grid, block, shared_bytes)
        blocks = grid
        if cluster is not None:
            size = _triple(cluster)
            reasons += _cluster_problems(grid, size)
            made_for = self.compiled.resources.cluster
            if made_for not in ((1, 1, 1), size):
                reasons.append(f"it was compiled for clusters of {made_for}, not of {size}: leave cluster out")
            blocks = tuple(g // c for g, c in zip(grid, size, strict=True))
        if reasons:
            raise ConfigError(f"kernel {self.compiled.name!r} cannot be launched: " + "; ".join(reasons))
        self._allow_shared(shared_bytes)
        with _Current(self.driver, self._primary):
            return self._launch_config(
                grid=blocks, block=block, cluster=cluster, shmem_size=shared_bytes, is_cooperative=cooperative
            )

    def _allow_shared(self, shared_bytes: int) -> None:
        """Raise the kernel's dynamic shared-memory limit to ``shared_bytes`` (cuda.core has no setter for it)."""
        with self._lock:
            if shared_bytes <= self._shared_limit:
                return
            driver = self.driver
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            device = check(driver, driver.cuDeviceGet(self.device))
            status = driver.cuKernelSetAttribute(attribute, shared_bytes, self.kernel.handle, device)
            check(driver, (*status, None))
            self._shared_limit = shared_bytes

    def check_arguments(self, arguments: Sequence[Any]) -> None:
        """Raise ProblemError where the arguments do not fit the kernel's parameters; looks at the first ones only."""
        if self._arguments_checked:
            return
        parameters = self.compiled.resources.parameters
        if len(arguments) != len(parameters):
            raise ProblemError(f"kernel {self.compiled.name!r} takes {len(parameters)} arguments, not {len(arguments)}")
        for index, (argument, parameter) in enumerate(zip(arguments, parameters, strict=True)):
            size = _argument_bytes(argument)
            if size != parameter.size:
                raise ProblemError(
                    f"argument {index} of kernel {self.compiled.name!r} has {size} bytes, its parameter "
                    f"{parameter.size}: pass addresses as int and numbers through warploom.cuda.launch.scalar"
                )
        self._arguments_checked = True


class _Current:
    """Makes a context current for a ``with`` block and restores the caller's."""

    __slots__ = ("_context", "_driver")

    def __init__(self, driver: Any, context: Any) -> None:
        self._driver = driver
        self._context = context

    def __enter__(self) -> None:
        check(self._driver, (*self._driver.cuCtxPushCurrent(self._context), None))

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
    compiled: CompiledKernel,
    limits: Target,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared_bytes: int,
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
    reasons += _cluster_problems(grid, needs.cluster)
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


def _cluster_problems(grid: tuple[int, int, int], cluster: tuple[int, int, int]) -> list[str]:
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        return [f"the grid {grid} is not a multiple of the cluster {cluster}"]
    return []


_streams: dict[int, Any] = {}


def _stream(handle: int) -> Any:
    """cuda.core's stream for a raw handle, kept: making one costs as much as a launch."""
    core = cuda_core()
    if len(_streams) >= _STREAMS_KEPT:
        _streams.clear()
    if handle in (0, 1):  # CU_STREAM_LEGACY
        made = core.LEGACY_DEFAULT_STREAM
    elif handle == 2:  # CU_STREAM_PER_THREAD
        made = core.PER_THREAD_DEFAULT_STREAM
    else:
        made = core.Stream.from_handle(handle)
    _streams[handle] = made
    return made


def synchronize(stream: int, device: int) -> None:
    """Wait until everything queued on ``stream`` (an integer handle) of GPU ``device`` has run.

    Raises RuntimeError with the driver's reason if a kernel failed.
    """
    driver = require_driver()
    with _Current(driver, _primary_context(device)):
        check(driver, (*driver.cuStreamSynchronize(driver.CUstream(stream)), None))


def zero(address: int, words: int, stream: int, device: int) -> None:
    """Queue on ``stream`` (an integer handle) of GPU ``device`` that so many 32-bit words from an address on become 0.

    It may be captured into a CUDA graph. Raises RuntimeError with the driver's reason if refused.
    """
    driver = require_driver()
    status, current = driver.cuCtxGetDevice()
    if int(status) == 0 and int(current) == device:
        result = driver.cuMemsetD32Async(address, 0, words, stream)
    else:
        with _Current(driver, _primary_context(device)):
            result = driver.cuMemsetD32Async(address, 0, words, stream)
    check(driver, (*result, None))


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


def _argument_bytes(argument: Any) -> int:
    if isinstance(argument, int):
        return 8
    if isinstance(argument, ctypes._SimpleCData):
        return ctypes.sizeof(argument)
    if type(argument).__name__ in ("TensorMapDescriptor", "DriverMap"):
        return 128
    return argument.nbytes if isinstance(argument, np.generic) else 0
