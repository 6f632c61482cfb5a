"""A GPU played by the emulator: memory by real addresses, and launches on what lies there."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from warploom.core.dtypes import DType, bf16, u32
from warploom.emulate import emulate
from warploom.interop import arrays
from warploom.interop.arrays import ArrayView, Form, describe, memory_span
from warploom.kernels.source import KernelSource
from warploom.ops import (
    attention_varlen,
    backends,
    calls,
    declare,
    steps,
)

Array = np.ndarray[Any, Any]


class EmulatedGpu:
    """An sm_80 with two multiprocessors. ``prepared``: the names of kernels, each as often as it was loaded."""

    def __init__(self) -> None:
        self.arrays: dict[int, tuple[int, Any]] = {}
        self.prepared: list[str] = []

    def keep(self, array: Any) -> int:
        """The address of an array, which lies in the GPU's memory from now on."""
        view = describe(array)
        start, size = memory_span(view)
        self.arrays[start] = start + size, array
        return view.pointer

    def empty(self, kind: str, shape: Sequence[int], dtype: DType, _device: Any = None) -> Any:
        """An array of NaN."""
        words = np.full(-(-int(np.prod(shape)) * dtype.bytes // 4), 0xFFFFFFFF, np.uint32)
        made = words.view(np.uint8)[: int(np.prod(shape)) * dtype.bytes].view(dtype.numpy).reshape(tuple(shape))
        self.keep(made)
        if kind != "torch":
            return made
        torch = sys.modules["torch"]
        return torch.from_numpy(made.view(np.uint16)).view(torch.bfloat16) if dtype is bf16 else torch.from_numpy(made)

    def filled(self, kind: str, shape: Sequence[int], dtype: DType, device: Any, value: float) -> Any:
        """An array of one number."""
        made = self.empty(kind, shape, dtype, device)
        made[...] = value
        return made

    def empty_like(self, view: ArrayView, shape: Sequence[int] | None = None, dtype: DType | None = None) -> Any:
        """:meth:`empty` of the shape and type of another, unless they are given."""
        return self.empty(view.kind, view.shape if shape is None else shape, dtype or view.dtype)

    def makers(
        self, kind: str, forms: Iterable[Form], device: Any, value: float | None = None
    ) -> Callable[[], list[Any]]:
        """What ``makers`` gives: arrays of NaN, or of one number."""
        wanted = list(forms)
        if value is not None:
            return lambda: [self.filled(kind, *form, device, value) for form in wanted]
        return lambda: [self.empty(kind, *form) for form in wanted]

    def at(self, pointer: int, dtype: DType) -> Array:
        """What lies from an address to the end of the array there."""
        end, _ = self.arrays[max(start for start in self.arrays if start <= pointer)]
        count = (end - pointer) // dtype.bytes
        assert count > 0, "no array lies here"
        memory = (ctypes.c_ubyte * (count * dtype.bytes)).from_address(pointer)
        return np.frombuffer(memoryview(memory), np.uint8).view(dtype.numpy)

    def prepare(
        self, source: KernelSource, grid: Any, scalars: Mapping[str, int], _device: int, mapped: Any = (), **_: Any
    ) -> EmulatedCall:
        """What ``GpuCall.prepare`` gives."""
        assert not mapped
        self.prepared.append(source.name)
        return EmulatedCall(self, source, grid, scalars)

    def zeroing(self, pointer: int, words: int, _stream: int) -> tuple[Callable[[], tuple[int]], None]:
        """What ``zeroing`` gives."""

        def zero() -> tuple[int]:
            self.at(pointer, u32)[:words] = 0
            return (0,)

        return zero, None

    def hold(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let NumPy's arrays claim to be in this memory."""

        def on_gpu(array: Any) -> ArrayView:
            self.keep(view := describe(array))
            return view._replace(device=("cuda", 0))

        def all_on_gpu(given: Mapping[str, Any], _: Any = None) -> dict[str, ArrayView]:
            return {name: on_gpu(array) for name, array in given.items()}

        monkeypatch.setattr(calls, "describe_all", all_on_gpu)
        compact = arrays._compact

        def copied(view: ArrayView, dtype: DType | None) -> Any:
            return on_gpu(compact(view._replace(device=("cpu", 0)), dtype))

        monkeypatch.setattr(arrays, "_compact", copied)
        monkeypatch.setattr(declare, "empty", self.empty)
        for module in (declare, attention_varlen):
            monkeypatch.setattr(module, "filled", self.filled)
        for module in (calls, steps):
            monkeypatch.setattr(module, "makers", self.makers)


class EmulatedCall:
    """A ``GpuCall`` whose launches are emulated under all checks."""

    device = 0
    launch = backends.GpuCall.launch

    def __init__(self, gpu: EmulatedGpu, source: KernelSource, grid: Any, scalars: Mapping[str, int]) -> None:
        self.gpu, self.program, self.grid = gpu, source.program, grid
        self.arrays = tuple(p.name for p in self.program.parameters if p.kind == "pointer")
        self.scalars = backends.scalar_arguments(self.program, scalars)

    def queueable(self, _stream: int, pointers: Sequence[int]) -> tuple[Callable[[], tuple[int]], None]:
        """What runs at once."""
        return partial(self.run, pointers), None

    def launch_again(self, pointers: Sequence[int], _kind: str) -> None:
        """Run at once."""
        self.run(pointers)

    def run(self, pointers: Sequence[int]) -> tuple[int]:
        """Emulate the kernel on what lies at addresses."""
        kinds = [p.dtype for p in self.program.parameters if p.kind == "pointer"]
        arrays = [self.gpu.at(pointer, kind) for pointer, kind in zip(pointers, kinds, strict=True)]
        names = [p.name for p in self.program.parameters]
        arguments = dict(zip(names, [*arrays, *self.scalars], strict=True))
        assert emulate(self.program, self.grid, arguments).findings == ()
        return (0,)


def queue_on(_device: int) -> Callable[[Any], tuple[Any, ...]]:
    """What ``queue_on`` gives: launches run at once."""
    return lambda wanted: wanted[0]()


def repeated(
    on: Callable[[int, int], Sequence[Any]], stream: int, room: Callable[[bool], tuple[int, Any]], **_: bool
) -> tuple[Callable[[], tuple[Any, ...]], None]:
    """What ``repeated`` gives: launches one by one, with new memory between them."""

    def queue() -> tuple[Any, ...]:
        memory, kept = room(False)
        for one, _ in on(stream, memory):
            one()
        return 0, kept

    return queue, None


class DeviceCopy:
    """What ``cuda.buffers.DeviceCopy`` is, in the memory of an :class:`EmulatedGpu`; ``copy=False`` leaves NaN."""

    gpu: EmulatedGpu

    def __init__(self, host: Array, _device: int, *, copy: bool = True) -> None:
        self.host = host
        self.copied = host.copy() if copy else self.gpu.empty_like(describe(host))
        self.pointer = self.gpu.keep(self.copied)

    def download(self) -> None:
        """Copy the contents back."""
        self.host[...] = self.gpu.at(self.pointer, describe(self.host).dtype).reshape(self.host.shape)
