"""Running one Program where the arrays are: a compiled kernel on the caller's stream, or the emulator.

Kernels are kept on disk by what they are traced from, so that a later process need not trace, print or compile them
again: under everything that decides what comes out of a :class:`~warploom.kernels.source.KernelSource`, which is the
sources of this package, the function, its arguments, the architecture and the compiler. Nothing of a trace is imported
where that is found.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from warploom.core import IMPORTED_NS
from warploom.core.dtypes import u32
from warploom.core.errors import EmulationError, EmulationWarning, warn_caller
from warploom.core.identity import UnstableError, stable_text
from warploom.core.once import once
from warploom.core.targets import GPUS, Target, target
from warploom.interop.arrays import SYNCHRONOUS_KINDS, ArrayView, Device, as_numpy, current_stream
from warploom.kernels.source import KernelCall, KernelSource, MappedArray

if TYPE_CHECKING:
    from warploom.cuda.launch import ConfiguredLaunch, Queueable, Room
    from warploom.cuda.store import CompiledKernel
    from warploom.emulate import Emulation
    from warploom.ir.program import Program

Grid = tuple[int, int, int]


def gpu_present() -> bool:
    """Whether a kernel could run on a GPU of this machine."""
    from warploom.cuda.device import has_gpu

    return has_gpu()


def multiprocessors(device: int) -> int:
    """Streaming multiprocessors of GPU ``device``."""
    from warploom.cuda.device import gpus

    return gpus()[device].multiprocessors


def gpu_target(device: int) -> Target:
    """The architecture of GPU ``device``."""
    from warploom.cuda.device import target_of

    return target_of(device)


def gpu_name(device: int) -> str:
    """The name of GPU ``device`` as its driver gives it: what tuned configurations are kept by."""
    from warploom.cuda.device import gpus

    return gpus()[device].name


EMULATED_TARGET = "sm_80"
"""The architecture a plan is made for where there is no GPU; a ``wgmma`` configuration asked for is emulated too."""
EMULATED_MULTIPROCESSORS = 2
"""CTAs of an emulated persistent kernel, at most: each then has several tiles."""


@dataclass(frozen=True)
class Processor:
    """A GPU by its number, or the emulator (None); the architecture to make kernels for, and how many SMs it has."""

    gpu: int | None
    target: Target
    multiprocessors: int

    @classmethod
    def of(cls, device: Device, *, requires: str | None = None) -> Processor:
        """Where arrays on a device are worked on; ``requires``: the architecture that a given configuration needs.

        Within :func:`planned_for` that is a GPU of the architecture named there, which need not be at hand.
        """
        if (planned := _PLANNED_FOR.get()) is not None:
            return planned
        if device[0] != "cuda" and not gpu_present():
            return cls(None, target(requires or EMULATED_TARGET), EMULATED_MULTIPROCESSORS)
        number = device[1] if device[0] == "cuda" else 0
        return cls(number, gpu_target(number), multiprocessors(number))

    def __str__(self) -> str:
        return "the emulator" if self.gpu is None else f"GPU {self.gpu}"


_PLANNED_FOR: ContextVar[Processor | None] = ContextVar("planned_for", default=None)


@contextmanager
def planned_for(arch: str) -> Generator[Processor]:
    """Plans made within are those of a GPU of an architecture. Raises ConfigError for an unknown one."""
    found = target(arch)
    count = next((gpu.multiprocessors for gpu in GPUS.values() if gpu.arch == found.name), EMULATED_MULTIPROCESSORS)
    planned = Processor(None, found, count)
    token = _PLANNED_FOR.set(planned)
    try:
        yield planned
    finally:
        _PLANNED_FOR.reset(token)


# -- kernels on disk
def origin(source: KernelSource) -> str | None:
    """A text that determines the Program of a source in any process; None where there is none.

    There is none for kernels and configurations of other packages, for arguments that only this process knows (an
    epilogue that sees an object of the user's), and where the sources of the package are not at hand or have changed
    since they were imported.
    """
    sources = sources_digest()
    if sources is None or not _as_imported() or not source.function.startswith(f"{_PACKAGE.name}."):
        return None
    try:
        return "\0".join((sources, _PYTHON, stable_text(source)))
    except UnstableError:
        return None


@dataclass(frozen=True)
class Signature:
    """The facts of a Program that a launch needs. Arrays (pointers and tensor maps) come first among its parameters."""

    threads: int
    shared_bytes: int
    arrays: tuple[str, ...]
    scalars: tuple[str, ...]

    @classmethod
    def of(cls, program: Program) -> Signature:
        """The signature of a traced kernel."""
        arrays = tuple(p.name for p in program.parameters if p.kind != "scalar")
        scalars = tuple(p.name for p in program.parameters if p.kind == "scalar")
        return cls(program.threads, program.shared_bytes, arrays, scalars)

    @classmethod
    def read(cls, facts: Any) -> Signature:
        """The signature that :func:`dataclasses.asdict` made JSON of. Raises ValueError for anything else."""
        match facts:
            case {"threads": int(threads), "shared_bytes": int(shared), "arrays": [*arrays], "scalars": [*scalars]}:
                if all(isinstance(name, str) for name in (*arrays, *scalars)):
                    return cls(threads, shared, tuple(arrays), tuple(scalars))
        raise ValueError(f"no signature of a kernel: {facts!r:.200}")


_PACKAGE = Path(__file__).resolve().parent.parent
SOURCES = ("core", "layout", "isa", "ir", "lang", "tile", "kernels", "cuda", "ops")
"""The packages that decide what a kernel is and how it is launched."""
_PYTHON = f"{sys.implementation.cache_tag} numpy {np.__version__}"


def _source_files() -> Iterator[os.DirEntry[str]]:
    """Every file of those packages, in the order of their names."""
    folders = [str(_PACKAGE / name) for name in reversed(SOURCES)]
    while folders:
        with os.scandir(folders.pop()) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        folders += [e.path for e in entries if e.is_dir() and e.name != "__pycache__"]
        yield from (e for e in entries if e.is_file())


def _as_imported() -> bool:
    """Whether the sources are those that run here: none has changed since this process imported the first (1 ms)."""
    try:
        return all(_changed_ns(entry) < IMPORTED_NS for entry in _source_files())
    except OSError:  # the package does not lie in plain files
        return False


def _changed_ns(entry: os.DirEntry[str]) -> int:
    at = entry.stat()
    # A file's time of change cannot be set back, as that of its contents can; Windows keeps that of its creation there.
    return at.st_mtime_ns if os.name == "nt" else at.st_ctime_ns


@lru_cache(maxsize=1)
def sources_digest() -> str | None:
    """A hash of the sources' contents (3 ms), None where they cannot be read."""
    total = hashlib.sha256()
    try:
        for entry in _source_files():
            with open(entry.path, "rb", buffering=0) as file:
                content = file.read()
            total.update(f"{entry.path[len(str(_PACKAGE)) :]} {len(content)}\n".encode())
            total.update(content)
    except OSError:
        return None
    return total.hexdigest()


# -- kernels on a GPU
@once(maxsize=512)
def compiled(program: Program, arch: str) -> CompiledKernel:
    """The Program as a cubin for an architecture; NVRTC's result is kept on disk.

    Raises VerifyError for an architecture that the Program does not run on, ConfigError for an unknown one.
    """
    from warploom.cuda.compile import compile_source
    from warploom.cuda.names import entry_name
    from warploom.cuda.printer import print_cuda
    from warploom.ir.verify import verify_target

    verify_target(program, target(arch))
    # Without comments, so that a moved line of Python source is no other kernel.
    source = print_cuda(program, comments=False)
    return compile_source(
        source, entry_name(program.name), arch=arch, opt_level=program.opt_level, max_registers=program.max_registers
    )


@once(maxsize=512)
def built(source: KernelSource, arch: str) -> tuple[CompiledKernel, Signature]:
    """The kernel of a source for an architecture; nothing is traced if any process has made it before."""
    from warploom.cuda.compile import find_traced, keep_traced

    key = origin(source)
    found = find_traced(key, arch, Signature.read) if key is not None else None
    if found is not None:
        return found
    program = source.program
    kernel, signature = compiled(program, arch), Signature.of(program)
    if key is not None and key == origin(source):  # no file was edited while its code was being imported
        keep_traced(key, kernel, asdict(signature))
    return kernel, signature


def built_together(sources: Iterable[KernelSource], arch: str) -> dict[KernelSource, tuple[CompiledKernel, Signature]]:
    """:func:`built` for several sources, side by side: NVRTC lets other threads run while it compiles."""
    from concurrent.futures import ThreadPoolExecutor

    from warploom.cuda.compile import available_cores

    wanted = list(dict.fromkeys(sources))
    with ThreadPoolExecutor(available_cores(), thread_name_prefix="warploom-compile") as pool:
        return dict(zip(wanted, pool.map(lambda source: built(source, arch), wanted), strict=True))


def compile_together(calls: Iterable[KernelCall], device: int) -> None:
    """Have the kernels of several launches on a GPU compiled side by side, where none has made them before."""
    built_together((call.source for call in calls), gpu_target(device).name)


def scalar_arguments(program: Program, scalars: Mapping[str, int]) -> list[int]:
    """The values of the Program's scalar parameters, in order."""
    return [scalars[p.name] for p in program.parameters if p.kind == "scalar"]


@dataclass(frozen=True)
class GpuCall:
    """A kernel loaded on one GPU with a fixed grid and fixed scalars: a launch takes arrays, pointers first.

    The kernel reaches the first arrays through the TMA if they are ``mapped``. Arguments are packed, with the tensor
    maps of those arrays, once per set of addresses and stream.
    """

    queued: ConfiguredLaunch
    scalars: tuple[Any, ...]
    device: int
    mapped: tuple[MappedArray, ...] = ()
    known: dict[tuple[int, ...], Queueable] = field(default_factory=dict[tuple[int, ...], "Queueable"])
    """Launches by stream and addresses."""
    arrays: tuple[str, ...] = ()
    """Names of the arrays, in order."""
    maps: dict[tuple[int, int], Any] = field(default_factory=dict[tuple[int, int], Any])
    """Tensor maps by (position, address): other arguments with the same weights need no new map for them."""

    @classmethod
    def of(cls, call: KernelCall, device: int) -> GpuCall:
        """A configuration's call, on one GPU."""
        how = {"overlaps": call.overlaps, "at_once": call.at_once}
        return cls.prepare(call.source, call.grid, call.scalars, device, call.maps, **how)

    @classmethod
    def prepare(
        cls,
        kernel: KernelSource | Program,
        grid: Grid,
        scalars: Mapping[str, int],
        device: int,
        mapped: Sequence[MappedArray] = (),
        **how: bool,
    ) -> GpuCall:
        """Compile (or take from the cache), load, and check the launch against the GPU's limits.

        A Program is printed to be found in the cache, a source is not even traced. ``mapped``: how the first arrays
        look to the TMA. ``how``: as :meth:`LoadedKernel.configure <warploom.cuda.launch.LoadedKernel.configure>` says.
        """
        from warploom.cuda.launch import load, scalar

        arch = gpu_target(device).name
        if isinstance(kernel, KernelSource):
            code, needs = built(kernel, arch)
        else:
            code, needs = compiled(kernel, arch), Signature.of(kernel)
        queued = load(code, device).configure(grid, needs.threads, shared_bytes=needs.shared_bytes, **how)
        values = tuple(scalar(u32, scalars[name]) for name in needs.scalars)
        return cls(queued, values, device, tuple(mapped), arrays=needs.arrays)

    def launch(self, arrays: Sequence[ArrayView], kind: str) -> None:
        """Queue the kernel on the caller's current stream; ``arrays`` in the order of its parameters."""
        self.launch_again(tuple(x.pointer for x in arrays), kind)

    def launch_again(self, pointers: tuple[int, ...], kind: str) -> None:
        """Queue the kernel on the current stream of framework ``kind``, on arrays at these addresses."""
        stream = current_stream(kind, self.device)
        queue_on(self.device)(self.queueable(stream, pointers))
        if kind in SYNCHRONOUS_KINDS:
            wait_for(stream, self.device)

    def queueable(self, stream: int, pointers: tuple[int, ...]) -> Queueable:
        """The launch on a stream on arrays at these addresses, in the order of the kernel's parameters."""
        found = self.known.get((stream, *pointers))
        if found is None:
            if len(self.known) >= _LAUNCHES_KEPT:
                self.known.clear()
            if len(self.maps) >= _MAPS_KEPT:
                self.maps.clear()
            maps = [self._map(i, pointer) for i, pointer in enumerate(pointers[: len(self.mapped)])]
            packed = self.queued.pack((*maps, *pointers[len(maps) :], *self.scalars))
            found = self.known[stream, *pointers] = self.queued.queueable(stream, packed)
        return found

    def _map(self, position: int, pointer: int) -> Any:
        """The tensor map of the array at a position and address."""
        found = self.maps.get((position, pointer))
        if found is None:
            from warploom.cuda.tensor_maps import encode

            found = self.maps[position, pointer] = encode(pointer, self.mapped[position].spec, self.device)
        return found


def wait_for(stream: int, device: int) -> None:
    """Wait for a stream of a GPU, whose arrays are handed to a framework that takes them as ready."""
    from warploom.cuda.launch import synchronize

    synchronize(stream, device)


def zeroing(address: int, words: int, stream: int) -> Queueable:
    """A launch on a stream that sets so many 32-bit words of GPU memory to 0."""
    from warploom.cuda import launch

    return launch.zeroing(address, words, stream)


def repeated(on: Callable[[int, int], Sequence[Queueable]], stream: int, room: Room, *, joined: bool) -> Queueable:
    """Launches on a stream as one; ``on`` gives them on a stream, with memory of their own at an address."""
    from warploom.cuda.launch import Repeated

    return Repeated(on, stream, room, joined=joined).queue, None


def queue_on(device: int) -> Callable[[Queueable], tuple[Any, ...]]:
    """A function that queues launches on a GPU, and returns what keeps memory of their own."""
    from warploom.cuda import launch

    return launch.queue_on(device)


_LAUNCHES_KEPT = 1024  # of a kernel of a prepared call
_MAPS_KEPT = 8192  # tensor maps per prepared call: addresses meet again in other sets


SECONDS_PER_FLOP = 6e-10
SECONDS_PER_WARP_OP = 8e-7
"""Of each warp of the grid, for each operation in the kernel's text: what small products of many tiles consist of."""
EMULATION_OVERHEAD = 0.3


def emulated_seconds(program: Program, grid: Grid, flops: int) -> float:
    """About how long the emulator takes, mostly within a factor of 3: few large tiles and many tiny ones alike."""
    warps = math.prod(grid) * program.warps
    operations = sum(1 for _ in program.ops())
    return EMULATION_OVERHEAD + flops * SECONDS_PER_FLOP + warps * operations * SECONDS_PER_WARP_OP


def emulator_arguments(
    program: Program,
    views: Sequence[ArrayView] | Mapping[str, ArrayView],
    scalars: Mapping[str, int],
    mapped: Sequence[MappedArray] = (),
) -> dict[str, Any]:
    """The arguments of :func:`warploom.emulate.emulate` by name: arrays, the first with their tensor maps, and numbers.

    ``views`` are in the order of the Program's parameters, or by their names. ``mapped``: how the first of them look to
    the TMA, each from its first element on.
    """
    listed = [views[p.name] for p in program.parameters if p.name in views] if isinstance(views, Mapping) else views
    arrays: list[Any] = [as_numpy(view) for view in listed]
    for i, x in enumerate(mapped):
        strides = tuple(x.dtype.bytes * stride for stride in x.strides)
        arrays[i] = np.lib.stride_tricks.as_strided(arrays[i], x.shape, strides), x.spec
    names = [p.name for p in program.parameters]
    return dict(zip(names, [*arrays, *scalar_arguments(program, scalars)], strict=True))


def run_on_emulator(
    program: Program,
    grid: Grid,
    views: Sequence[ArrayView] | Mapping[str, ArrayView],
    scalars: Mapping[str, int],
    mapped: Sequence[MappedArray] = (),
) -> Emulation:
    """Run on the CPU with all checks. Raises EmulationError if it finds a defect."""
    return emulated(program, grid, emulator_arguments(program, views, scalars, mapped))


def warn_of_emulator(name: str, more: str = "") -> None:
    """Say at the caller's line that a kernel, or the first of several, runs in place of a GPU, and ``more`` of it."""
    warn_caller(f"no GPU: {name} runs on the emulator with all checks{more}", EmulationWarning)


def emulated(program: Program, grid: Grid, arguments: Sequence[Any] | Mapping[str, Any]) -> Emulation:
    """Run in place of a GPU. Raises EmulationError if it finds a defect; what is for review is none."""
    from warploom.emulate import emulate

    emulation = emulate(program, grid, arguments)
    print(emulation.printed, end="")
    if any(finding.grade == "error" for finding in emulation.findings):
        listed = "\n".join(str(f) for f in emulation.findings[:8])
        raise EmulationError(f"{program.name} has defects:\n{listed}", tuple(emulation.findings))
    return emulation
