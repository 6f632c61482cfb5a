"""Packed launches: what the driver is handed, whose stream and device it is, and that refusals are heard."""

from __future__ import annotations

import ctypes
import gc
import importlib
import types
from contextlib import contextmanager

import pytest

from warploom.core.dtypes import u32
from warploom.cuda import packed as packed_module
from warploom.cuda.launch import scalar
from warploom.cuda.packed import PackedLaunch

core = pytest.importorskip("cuda.core")


class Driver:
    """Notes what is queued: arguments are read when the launch is queued, as the driver does."""

    CUfunction = staticmethod(lambda handle: ("function", handle))

    def __getattr__(self, name):
        if not name.startswith("CUlaunch"):
            raise AttributeError(name)
        return getattr(importlib.import_module("cuda.bindings.driver"), name)

    def __init__(self, *, device=0, status=0) -> None:
        self.device, self.status, self.launches = device, status, []

    @staticmethod
    def CUstream(handle):  # noqa: N802 - the driver's name
        return importlib.import_module("cuda.bindings.driver").CUstream(handle)

    def cuCtxGetDevice(self):  # noqa: N802
        return 0, self.device

    def cuGetErrorString(self, status):  # noqa: N802
        return 0, b"a reason"

    def cuLaunchKernelEx(self, config, function, parameters, extra):  # noqa: N802
        places = (ctypes.c_void_p * 3).from_address(parameters)
        kinds = ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32
        values = [kind.from_address(place or 0).value for kind, place in zip(kinds, places, strict=True)]
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        self.launches.append((int(config.hStream), grid, config.sharedMemBytes, function, values, self.device))
        return (self.status,)


class Kernel:
    """What a packed launch needs of a loaded kernel."""

    def __init__(self, driver) -> None:
        self.driver, self.device = driver, 0
        self.kernel = types.SimpleNamespace(handle=77)
        self.plain: list[tuple[object, ...]] = []

    def check_arguments(self, arguments) -> None:
        assert len(arguments) == 3

    def launch(self, stream, config, arguments) -> None:
        self.plain.append((stream, config, arguments))


def prepared(driver) -> tuple[PackedLaunch, Kernel]:
    kernel = Kernel(driver)
    config = core.LaunchConfig(grid=(2, 3, 4), block=(64, 1, 1), shmem_size=1000)
    return PackedLaunch(kernel, config), kernel  # type: ignore[arg-type]


def test_each_launch_hands_over_its_own_arguments():
    driver = Driver()
    call, _ = prepared(driver)
    sets = [call.pack((2**40 + i, i, scalar(u32, 7 * i))) for i in range(50)]
    gc.collect(1)
    for i in (3, 49, 0, 3):
        call.queue(i, sets[i])
    expected = [(i, (2, 3, 4), 1000, ("function", 77), [2**40 + i, i, 7 * i], 0) for i in (3, 49, 0, 3)]
    assert driver.launches == expected


def test_a_launch_overlaps_where_it_is_asked_to():
    seen = []
    driver = Driver()
    launched = lambda config, *_: seen.append([x.id.name for x in config.attrs[: config.numAttrs]]) or (0,)  # noqa: E731
    vars(driver)["cuLaunchKernelEx"] = launched
    call, _ = prepared(driver)
    packed = call.pack((1, 2, scalar(u32, 3)))
    call.queue(0, packed)
    call.overlap()
    call.queue(0, packed)
    assert seen == [[], ["CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"]]


def test_more_streams_than_are_kept():
    driver = Driver()
    call, _ = prepared(driver)
    arguments = call.pack((1, 2, scalar(u32, 3)))
    for stream in [*range(1, 200), 1]:
        call.queue(stream, arguments)
    assert [launch[0] for launch in driver.launches] == [*range(1, 200), 1]


def test_another_device_is_made_current_for_the_launch(monkeypatch):
    driver = Driver(device=1)

    @contextmanager
    def current(device):
        driver.device, before = device, driver.device
        yield
        driver.device = before

    monkeypatch.setattr(packed_module, "current_context", current)
    call, _ = prepared(driver)
    call.queue(5, call.pack((1, 2, scalar(u32, 3))))
    assert driver.launches[0][-1] == 0
    assert driver.device == 1


def test_a_refusal_is_heard():
    call, _ = prepared(Driver(status=719))
    with pytest.raises(RuntimeError, match="a reason"):
        call.queue(5, call.pack((1, 2, scalar(u32, 3))))


def test_without_the_packing_of_cuda_core_launches_take_its_way(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(packed_module, "_packing", lambda: None)
    call, kernel = prepared(driver)
    arguments = (1, 2, scalar(u32, 3))
    call.queue(5, call.pack(arguments))
    assert driver.launches == []
    assert [(stream, given) for stream, _, given in kernel.plain] == [(5, arguments)]


def test_maps_of_the_driver_stand_beside_those_of_cuda_core(monkeypatch):
    class Map:
        def __init__(self, value: int) -> None:
            self._value = ctypes.c_uint64(value)
            self.address = ctypes.addressof(self._value)

    monkeypatch.setattr(packed_module, "DriverMap", Map)
    descriptors = importlib.import_module("cuda.core._tensor_map").TensorMapDescriptor
    driver = Driver()
    call, _ = prepared(driver)
    call.queue(5, call.pack((descriptors.__new__(descriptors), Map(2**50), scalar(u32, 3))))
    assert driver.launches[0][-2] == [0, 2**50, 3]
