"""The kernels of one call in order: on the emulator, on copies of host arrays, or again and again on a GPU.

Arrays go by the names of :class:`~warploom.kernels.source.KernelCall`; what lies between the kernels is memory of the
call's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from warploom.core.dtypes import f32
from warploom.core.targets import Target
from warploom.interop.arrays import (
    SYNCHRONOUS_KINDS,
    ArrayView,
    Device,
    address,
    as_numpy,
    current_stream,
    describe,
    empty,
    makers,
)
from warploom.kernels.settings import refuse, violations_of
from warploom.kernels.source import Grid, KernelCall, workspace_of
from warploom.ops.arrays import as_elements
from warploom.ops.backends import (
    GpuCall,
    Processor,
    compile_together,
    emulated_seconds,
    queue_on,
    repeated,
    run_on_emulator,
    wait_for,
    warn_of_emulator,
    zeroing,
)

if TYPE_CHECKING:
    from warploom.cuda.launch import Queueable, Room
    from warploom.ir.program import Program

Config = TypeVar("Config")
_ADDRESSES_KEPT = 1024  # sets of them, of a prepared call
_SHORT_FLOPS = 1 << 25
"""Work, in a pass over some 30 MB, that the GPU has done before the host asks for the next launches."""
_ALIGNED_WORDS = 64  # 256 bytes: as an allocation of its own would begin
_LASTING_WORDS = 4 << 20
"""32-bit words between launches, 16 MiB, up to which launches are joined: a stream keeps that memory."""
_PER_THREAD = 2  # the handle of a stream that each thread has for itself
_lasting: dict[tuple[str, int, int], tuple[Any, int]] = {}
"""The memory that streams keep, and its words, by the framework that it is from, GPU and stream."""


class Launches:
    """The launches of a call, planned."""

    @cached_property
    def calls(self) -> tuple[KernelCall, ...]:
        """The kernels and their launches in order."""
        raise NotImplementedError

    @cached_property
    def steps(self) -> Steps:
        """The launches, ready to run."""
        return Steps(self.calls)

    @property
    def workspace_bytes(self) -> int:
        """Memory that a call takes beside its arrays."""
        return 4 * self.steps.words


@dataclass(frozen=True)
class Plan(Launches):
    """The kernels that a call would run: nothing has been compiled or launched yet."""

    problem: Any
    config: Any
    reason: str
    target: str
    device: str
    multiprocessors: int

    @classmethod
    def of(
        cls,
        problem: Any,
        device: Device,
        config: Any,
        choose: Callable[[Processor], tuple[Config, str]],
        *,
        violations: Callable[[Any, Any, Target], list[str]] = violations_of,
        requires: str | None = None,
        **own: Any,
    ) -> Self:
        """The plan with the configuration asked for, or else the one to ``choose``, where arrays on a device run.

        ``requires``: the architecture that the problem needs. Raises ConfigError for a configuration asked for that
        does not fit, by its ``violations`` for the problem on a target.
        """
        on = Processor.of(device, requires=requires if config is None else config.requires)
        if config is None:
            found, reason = choose(on)
        else:
            refuse(f"{config} does not fit", violations(config, problem, on.target))
            found, reason = config, "asked for by the caller"
        return cls(problem, found, reason, on.target.name, str(on), on.multiprocessors, **own)

    @cached_property
    def calls(self) -> tuple[KernelCall, ...]:
        """The kernels and their launches in order."""
        return self.config.calls(self.problem, self.multiprocessors)

    @property
    def grid(self) -> Grid:
        """CTAs of :attr:`program` along x, y and z."""
        return self.calls[0].grid

    @property
    def program(self) -> Program:
        """The traced kernel, of several the first."""
        return self.calls[0].source.program

    @cached_property
    def cuda(self) -> str:
        """The CUDA C++ that would be compiled."""
        from warploom.cuda.printer import print_cuda

        return "\n".join(print_cuda(call.source.program) for call in self.calls)

    def __str__(self) -> str:
        return f"{self.config}\n  on {self.device} ({self.target}), grid {self.grid}: {self.reason}"


@dataclass(frozen=True)
class StridedPlan(Plan):
    """The plan of launches that depend on the strides of arrays."""

    strides: Any

    @cached_property
    def calls(self) -> tuple[KernelCall, ...]:
        """The kernels and their launches in order; the one with the most arrays does the work."""
        found = self.config.calls(self.problem, self.strides, self.multiprocessors)
        most = max(found, key=lambda call: len(call.arrays))
        return tuple(replace(x, flops=self.problem.flops) if x is most else x for x in found)

    def __str__(self) -> str:
        kernels = ", ".join(f"{call.source.name} {call.grid}" for call in self.calls)
        more = f"\n  {kernels}; workspace {self.workspace_bytes / 2**20:.1f} MiB"
        return super().__str__() + more * (len(self.calls) > 1)


@dataclass(frozen=True)
class Steps:
    """The launches of a call, in order."""

    calls: tuple[KernelCall, ...]

    @cached_property
    def workspace(self) -> dict[str, int]:
        """Words of memory between the kernels, by name."""
        return workspace_of(self.calls)

    @property
    def words(self) -> int:
        """32-bit words of all of it, each part aligned."""
        return sum(map(_aligned, self.workspace.values()))

    def emulate(self, arrays: Mapping[str, ArrayView]) -> None:
        """Run on the CPU with all checks, saying so once and how long all takes.

        Raises EmulationError for the first kernel with defects.
        """
        seconds = sum(emulated_seconds(x.source.program, x.grid, x.flops) for x in self.calls)
        warn_of_emulator(self.calls[0].source.name, f", which takes about {seconds:.1f} s")
        own = {name: np.full(words, np.nan, np.float32).view(np.uint32) for name, words in self.workspace.items()}
        for call in self.calls:
            if call.zeroed:
                own[call.zeroed][:] = 0
            kinds = [x.dtype for x in call.maps]
            kinds += [p.dtype for p in call.source.program.parameters if p.kind == "pointer"]
            known = [
                describe(own[name].view(kind.numpy)) if name in own else as_elements(arrays[name], kind)
                for name, kind in zip(call.arrays, kinds, strict=True)
            ]
            views = [_moved(x, call.offsets.get(name, 0)) for name, x in zip(call.arrays, known, strict=True)]
            run_on_emulator(call.source.program, call.grid, views, call.scalars, call.maps)

    def run_from_host(
        self, hosts: Mapping[str, np.ndarray[Any, Any]], results: Sequence[str], *, filled: bool = False
    ) -> None:
        """Copy C-contiguous arrays to GPU 0, run, and copy the results back; ``filled``: some of them may stay."""
        from warploom.cuda.buffers import DeviceCopy

        copies = {name: DeviceCopy(x, 0, copy=filled or name not in results) for name, x in hosts.items()}
        prepared = self.prepare(tuple(hosts), 0)
        memory = DeviceCopy(np.empty(prepared.words, np.float32), 0, copy=False)
        prepared.queue(prepared.queueable((0, *[x.pointer for x in copies.values()]), lambda _: (memory.pointer, None)))
        for name in results:
            copies[name].download()

    def prepare(self, names: Sequence[str], device: int) -> Prepared:
        """Compile (or take from the cache) and load the kernels for arrays that come in the order of ``names``."""
        *offsets, words = accumulate(map(_aligned, self.workspace.values()), initial=0)
        starts = dict(zip(self.workspace, offsets, strict=True))
        number = {name: i for i, name in enumerate((*names, *starts))}
        calls = {call.kernel: call for call in self.calls}  # some are launched several times
        if len(calls) > 1:
            compile_together(calls.values(), device)
        kernels = {key: GpuCall.of(call, device) for key, call in calls.items()}
        loaded = [
            Loaded(
                kernels[call.kernel],
                tuple((number[name], call.offsets.get(name, 0)) for name in call.arrays),
                (starts[zeroed], call.workspace[zeroed]) if (zeroed := call.zeroed) else None,
            )
            for call in self.calls
        ]
        # A graph begins when what is before it has ended: the GPU loses 3 us where the first launch would not wait.
        waits = not self.calls[0].overlaps or sum(x.flops for x in self.calls) < _SHORT_FLOPS
        joined = len(loaded) > 1 and waits and words <= _LASTING_WORDS
        return Prepared(tuple(loaded), tuple(4 * start for start in offsets), words, device, joined)


def run_anew(
    steps: Callable[[dict[str, ArrayView]], Steps],
    arrays: dict[str, ArrayView],
    results: Sequence[str],
    *,
    filled: bool = False,
) -> Prepared | None:
    """Run for the first time what ``steps`` launches on ``arrays``, by the kernels' names; ``results`` are among them.

    Arrays on a GPU are used in place: what repeated calls need is returned. Those of the CPU travel to a GPU as
    row-major ones, or are emulated. ``filled``: parts of the results may stay as they are.
    """
    first = next(iter(arrays.values()))
    if first.device[0] == "cuda":
        prepared = steps(arrays).prepare(tuple(arrays), first.device[1])
        prepared.run(tuple([view.pointer for view in arrays.values()]), first.kind)
        return prepared
    if Processor.of(first.device).gpu is None:
        steps(arrays).emulate(arrays)
        return None
    hosts = {name: np.ascontiguousarray(as_numpy(view)) for name, view in arrays.items()}
    steps({name: describe(host) for name, host in hosts.items()}).run_from_host(hosts, results, filled=filled)
    for name in results:
        as_numpy(arrays[name])[...] = hosts[name]
    return None


def _aligned(words: int) -> int:
    return -(-words // _ALIGNED_WORDS) * _ALIGNED_WORDS


@dataclass(frozen=True)
class Loaded:
    """A launch: its kernel, the number of each array with a byte offset, and (first, count) of words to set to 0."""

    call: GpuCall
    arrays: tuple[tuple[int, int], ...]
    zeroed: tuple[int, int] | None = None


@dataclass(frozen=True)
class Prepared:
    """The launches of repeated calls on a GPU. Arrays are counted: those of the call, then parts of its workspace."""

    launches: tuple[Loaded, ...]
    parts: tuple[int, ...]
    """Where the parts of the workspace begin, in bytes."""
    words: int
    device: int
    joined: bool = False
    """Whether the launches may be one for the driver."""
    order: tuple[int, ...] | None = None
    """Which arrays of a call these are, where they are not all in order."""
    known: dict[tuple[int, ...], Queueable] = field(default_factory=dict[tuple[int, ...], "Queueable"])
    """The launches by stream and addresses of the arrays."""
    rooms: dict[tuple[str, int, int], Room] = field(default_factory=dict[tuple[str, int, int], "Room"])
    """The memory between them by the framework that it is from, GPU and stream."""

    @cached_property
    def queue(self) -> Callable[[Queueable], tuple[Any, ...]]:
        """A function that queues launches that are :meth:`queueable`."""
        return queue_on(self.device)

    def run(self, pointers: Sequence[int], kind: str) -> None:
        """Queue the launches on the current stream of the framework ``kind``."""
        stream = current_stream(kind, self.device)
        kept = self.queue(self.queueable((stream, *pointers), self.room(kind, stream)))
        if kind in SYNCHRONOUS_KINDS:
            wait_for(stream, self.device)
        del kept

    def room(self, kind: str, stream: int) -> Room:
        """The memory between launches on a stream, made by a framework: nothing where they need none."""
        place = kind, self.device, stream
        found = self.rooms.get(place)
        if found is None:
            found = self.rooms[place] = self._room(place) if self.words else lambda _: (0, None)
        return found

    def _room(self, place: tuple[str, int, int]) -> Room:
        kind, where = place[0], ("cuda", self.device)
        make = makers(kind, [((self.words,), f32)], where)

        def room(lasting: bool) -> tuple[int, Any]:
            if not lasting:
                (made,) = make()
                return address(made), made
            kept, words = _lasting.get(place, (None, 0))
            if words < self.words:
                words = 1 << (self.words - 1).bit_length()
                kept = empty(kind, (words,), f32, where)
                _lasting[place] = kept, words
            return address(kept), kept

        return room

    def queueable(self, key: tuple[int, ...], room: Room) -> Queueable:
        """The launches on a stream, on arrays at addresses, with memory between them from ``room``."""
        found = self.known.get(key)
        if found is not None:
            return found
        if len(self.known) >= _ADDRESSES_KEPT:
            self.known.clear()
        stream, *pointers = key
        if self.order is not None:
            pointers = [pointers[i] for i in self.order]

        def on(stream: int, memory: int) -> list[Queueable]:
            places = [*pointers, *[memory + start for start in self.parts]]
            queued: list[Queueable] = []
            for one in self.launches:
                if one.zeroed is not None:
                    first, count = one.zeroed
                    queued.append(zeroing(memory + 4 * first, count, stream))
                queued.append(one.call.queueable(stream, tuple([places[i] + offset for i, offset in one.arrays])))
            return queued

        one = len(self.launches) == 1 and not self.words
        joined = self.joined and stream != _PER_THREAD
        found = on(stream, 0)[0] if one else repeated(on, stream, room, joined=joined)
        self.known[key] = found
        return found


def _moved(view: ArrayView, offset: int) -> ArrayView:
    """The array from ``offset`` bytes on, flattened to what lies behind it."""
    if offset == 0:
        return view
    whole = as_numpy(view)
    reach = sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True)) + 1
    elements = offset // view.dtype.bytes
    flat = np.lib.stride_tricks.as_strided(whole, (reach,), (view.dtype.bytes,))
    return describe(flat[elements:])
