"""Limits and arguments are checked before the driver sees them; what it is handed, whose stream and device it is."""
# ruff: noqa: N802 - the names of the driver

import ctypes
import gc
from typing import Any

import pytest

from warploom.core.dtypes import bf16, f16, f32, pred, s32, u32, u64
from warploom.core.errors import ConfigError, ProblemError, UnsupportedDeviceError
from warploom.core.targets import target
from warploom.cuda import device, tensor_maps
from warploom.cuda import launch as launch_module
from warploom.cuda.cubin import CubinParameter, Resources
from warploom.cuda.launch import LoadedKernel, launch_problems, load, scalar
from warploom.cuda.store import CompiledKernel
from warploom.layout.tensor_map import TensorMapSpec


def compiled(*, registers=64, static_shared=0, parameters=(8,), cluster=(1, 1, 1)) -> CompiledKernel:
    taken = tuple(CubinParameter(0, size) for size in parameters)
    needs = Resources(registers, 0, static_shared, 1, taken, 0, 0, cluster)
    return CompiledKernel("kernel", "sm_80", b"", "", needs, False, 0.0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"shared": 163 * 1024}, None),
        ({"shared": 163 * 1024 + 1}, "sm_80 has 166912"),
        ({"shared": 100 * 1024, "arch": "sm_89"}, "sm_89 has 101376"),
        ({"kernel": compiled(static_shared=4096), "shared": 160 * 1024}, "167936 bytes of shared memory"),
        ({"grid": (2**31 - 1, 65535, 65535), "block": (32, 8, 4)}, None),
        ({"grid": (1, 65536, 1)}, "grid"),
        ({"grid": (0, 1, 1)}, "grid"),
        ({"kernel": compiled(registers=32), "block": (32, 32, 2)}, "2048 threads"),
        ({"block": (1, 1, 65)}, "block"),
        ({"kernel": compiled(registers=128), "block": (512, 1, 1)}, None),
        ({"kernel": compiled(registers=129), "block": (512, 1, 1)}, "129 registers each"),  # granted in units
        (
            {"kernel": compiled(cluster=(2, 1, 1)), "grid": (3, 1, 1)},
            "(3, 1, 1) is not a multiple of the cluster (2, 1, 1)",
        ),
    ],
)
def test_each_limit_has_its_words(options, says):
    use = {"kernel": compiled(), "arch": "sm_80", "grid": (1, 1, 1), "block": (128, 1, 1), "shared": 0} | options
    found = launch_problems(use["kernel"], target(use["arch"]), use["grid"], use["block"], use["shared"])
    assert len(found) == (says is not None)
    assert all(says in reason for reason in found)


def test_scalars():
    assert isinstance(scalar(u32, 7), ctypes.c_uint32)
    for dtype, value in ((f32, 0.5), (s32, -1), (u64, 2**63), (pred, True)):
        assert scalar(dtype, value).value == value
    for dtype, value in ((u32, -1), (u32, 2**32), (s32, 2**31), (u32, 1.5)):
        with pytest.raises(ProblemError, match="does not fit"):
            scalar(dtype, value)
    with pytest.raises(ProblemError, match="f16 is not"):
        scalar(f16, 1.0)


@pytest.mark.skipif(device.has_gpu(), reason="there is a GPU")
def test_loading_without_a_gpu_says_so():
    with pytest.raises(UnsupportedDeviceError):
        load(compiled(), 0)


class Driver:
    """``cuda.bindings.driver`` of a machine with two GPUs, which notes what is queued.

    Arguments are read when a launch is queued, as the driver does: the parameters of :data:`KERNEL`.
    """

    def __init__(self, *, device=0, status=0) -> None:
        self.real = pytest.importorskip("cuda.bindings.driver")
        self.contexts, self.status, self.launches, self.limits, self.encoded = [device], status, [], [], 0
        self.calls = {
            "cuGetErrorString": lambda status: (0, b"a reason"),
            "cuDeviceGet": lambda index: (0, index),
            "cuDevicePrimaryCtxRetain": lambda index: (0, index),
            "cuCtxGetDevice": lambda: (0, self.contexts[-1]),
            "cuCtxGetCurrent": lambda: (0, self.contexts[-1]),
            "cuCtxPushCurrent": lambda context: (self.contexts.append(context) or 0,),
            "cuCtxPopCurrent": lambda: (0, self.contexts.pop()),
            "cuLibraryLoadData": lambda code, *_: (0, code),
            "cuLibraryGetKernel": lambda library, name: (0, 77),
            "cuKernelGetFunction": lambda kernel: (0, self.contexts[-1]),
            "cuKernelSetAttribute": lambda attribute, *of: (self.limits.append((attribute.name, of[0], of[2])) or 0,),
        }

    def __getattr__(self, name):
        return self.calls.get(name) or getattr(self.real, name)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function, threads, shared_bytes):
        assert self.contexts[-1] == 0  # of the kernel's GPU
        return 0, min(2048 // threads, (160 << 10) // max(1, shared_bytes))

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        places = (ctypes.c_void_p * 3).from_address(parameters)
        kinds = ctypes.c_uint64, ctypes.c_uint8 * 128, ctypes.c_uint32
        pointer, box, number = (kind.from_address(at or 0) for kind, at in zip(kinds, places, strict=True))
        grid, block = (tuple(getattr(config, f"{x}Dim{axis}") for axis in "XYZ") for x in ("grid", "block"))
        attributes = [x.id.name for x in config.attrs[: config.numAttrs]]
        shape = grid, block, config.sharedMemBytes, attributes
        given = pointer.value, bytes(box), number.value
        self.launches.append((int(config.hStream), int(function), shape, given, self.contexts[-1]))
        return (self.status,)

    def cuTensorMapEncodeTiled(self, kind, rank, address, shape, strides, box, steps, interleave, swizzle, l2, fill):
        self.encoded += 1
        if address % 16:
            return self.real.CUresult.CUDA_ERROR_INVALID_VALUE, None
        made = self.real.CUtensorMap()
        numbers = [int(n) for n in (address, *shape, *strides, *box, *steps)]
        assert (kind.name, rank) == ("CU_TENSOR_MAP_DATA_TYPE_BFLOAT16", 2)
        assert swizzle.name == "CU_TENSOR_MAP_SWIZZLE_128B"
        made.opaque = [self.real.cuuint64_t(n) for n in numbers] + [self.real.cuuint64_t(0)] * (16 - len(numbers))
        return self.real.CUresult.CUDA_SUCCESS, made

    def cuTensorMapReplaceAddress(self, made, address):
        if address % 16 or self.status:
            return (self.real.CUresult.CUDA_ERROR_INVALID_VALUE,)
        made.opaque = [self.real.cuuint64_t(address), *made.opaque[1:]]
        return (self.real.CUresult.CUDA_SUCCESS,)


KERNEL = compiled(parameters=(8, 128, 4))
BOX = TensorMapSpec(bf16, (256, 100), (512,), (64, 8), 128)


@pytest.fixture
def driven(monkeypatch):
    """Has a driver stand for the machine's."""

    def drive(driver: Driver) -> LoadedKernel:
        monkeypatch.setattr(tensor_maps, "require_driver", lambda: driver)
        monkeypatch.setattr(tensor_maps, "_first", {})
        monkeypatch.setattr(launch_module, "require_driver", lambda: driver)
        monkeypatch.setattr(launch_module, "target_of", lambda _: target("sm_80"))
        return LoadedKernel(KERNEL, 0)

    launch_module._primary_context.cache_clear()
    yield drive
    launch_module._primary_context.cache_clear()


def test_a_launch_knows_how_many_of_its_blocks_a_multiprocessor_holds(driven):
    kernel = driven(Driver(device=1))
    assert [kernel.configure(4, 256, shared_bytes=n).resident() for n in (0, 40 << 10)] == [8, 4]


def box_at(address: int) -> bytes:
    """What the driver of these tests makes of :data:`BOX`."""
    return b"".join(n.to_bytes(8, "little") for n in (address, 256, 100, 512, 64, 8, 1, 1, *[0] * 8))


def arguments(i: int) -> tuple[Any, ...]:
    return 2**40 + i, tensor_maps.encode(16 * i, BOX, 0), scalar(u32, 7 * i)


def test_each_launch_hands_over_its_own_arguments(driven):
    driver = Driver()
    launch = driven(driver).configure((2, 3, 4), 64, shared_bytes=1000)
    sets = [launch.pack(arguments(i)) for i in range(50)]
    gc.collect(1)
    for i in (3, 49, 0, 3):
        launch.queue(i, sets[i])
    shape = (2, 3, 4), (64, 1, 1), 1000, []
    expected = [(i, 77, shape, (2**40 + i, box_at(16 * i), 7 * i), 0) for i in (3, 49, 0, 3)]
    assert driver.launches == expected
    assert driver.limits == []


@pytest.mark.parametrize(
    ("how", "attribute"), [("overlaps", "PROGRAMMATIC_STREAM_SERIALIZATION"), ("at_once", "COOPERATIVE")]
)
def test_a_launch_has_the_attribute_it_is_asked_for(driven, how, attribute):
    driver = Driver()
    kernel = driven(driver)
    for asked in (False, True):
        launch = kernel.configure(1, 32, **{how: asked})
        launch.queue(0, launch.pack(arguments(1)))
    seen = [shape[-1] for _, _, shape, _, _ in driver.launches]
    assert seen == [[], [f"CU_LAUNCH_ATTRIBUTE_{attribute}"]]


def test_the_limit_of_shared_memory_is_raised_as_far_as_asked(driven):
    driver = Driver()
    kernel = driven(driver)
    for size in (48, 100, 60, 160):
        kernel.configure(1, 32, shared_bytes=size * 1024)
    name = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
    assert driver.limits == [(name, size * 1024, 0) for size in (100, 160)]


def test_more_streams_than_are_kept(driven):
    driver = Driver()
    launch = driven(driver).configure(1, 32)
    packed = launch.pack(arguments(1))
    for stream in [*range(1, 200), 1]:
        launch.queue(stream, packed)
    assert [stream for stream, *_ in driver.launches] == [*range(1, 200), 1]


def test_another_device_is_made_current_for_the_launch(driven):
    driver = Driver(device=1)
    launch = driven(driver).configure((1, 2), 32)
    launch.queue(5, launch.pack(arguments(1)))
    assert driver.launches[0][-1] == 0
    assert driver.launches[0][2][0] == (1, 2, 1)
    assert driver.contexts == [1]


def test_a_refusal_is_heard(driven):
    launch = driven(Driver(status=719)).configure(1, 32)
    with pytest.raises(RuntimeError, match="a reason"):
        launch.queue(5, launch.pack(arguments(1)))


class Graphs(Driver):
    """A driver that makes graphs of launches, and notes what is asked of it."""

    def __init__(self, refusing: str = "") -> None:
        super().__init__()
        self.asked, self.capturing, self.mode = [], False, "before"
        for name, found in (("cuStreamCreate", 99), ("cuStreamEndCapture", "graph"), ("cuGraphInstantiate", "made")):
            self.calls[name] = lambda *given, name=name, found=found: self.note(name, found, given[0])
        for name in ("cuStreamBeginCapture", "cuGraphDestroy", "cuGraphExecDestroy", "cuGraphLaunch"):
            self.calls[name] = lambda *given, name=name: self.note(name, None, given[0])[:1]
        self.calls["cuStreamIsCapturing"] = lambda _: (0, int(self.capturing))
        self.refusing = refusing

    def note(self, name, found, of):
        self.asked.append((name, of))
        return int(name == self.refusing), found

    def cuThreadExchangeStreamCaptureMode(self, mode):
        self.mode, before = mode, self.mode
        return 0, before


@pytest.fixture
def repeated(driven):
    """Makes launches of numbers on stream 5 that a driver notes, as one."""

    def make(driver: Graphs) -> launch_module.Repeated:
        driven(driver)
        launch_module._stream_for_graphs.cache_clear()

        def on(stream, memory):
            return [(lambda i=i: (driver.asked.append((stream, memory, i)) or 0,), None) for i in range(3)]

        def room(lasting):
            return (1000, "lasts") if lasting else (100, "new")

        return launch_module.Repeated(on, 5, room)

    yield make
    launch_module._stream_for_graphs.cache_clear()


ONE_BY_ONE = [(5, 100, 0), (5, 100, 1), (5, 100, 2)]
"""What is asked for launches one after another, with new memory."""


def test_launches_that_are_repeated_become_a_graph(repeated):
    launches = repeated(driver := Graphs())
    assert [launches.queue() for _ in range(launch_module._REPEATED)] == [(0, "new")] * launch_module._REPEATED
    assert driver.asked == ONE_BY_ONE * launch_module._REPEATED
    driver.asked.clear()
    driver.capturing = True
    launches.queue()  # into the caller's graph
    assert driver.asked == ONE_BY_ONE
    driver.asked.clear()
    driver.capturing = False
    assert [launches.queue(), launches.queue()] == [(0,), (0,)]
    names = [name for name, *_ in driver.asked if isinstance(name, str)]
    made = ["cuStreamCreate", "cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiate", "cuGraphDestroy"]
    assert names == [*made, "cuGraphLaunch", "cuGraphLaunch"]
    assert [x for x in driver.asked if x[0] == 99] == [(99, 1000, 0), (99, 1000, 1), (99, 1000, 2)]
    assert driver.mode == "before"
    del launches
    gc.collect()
    assert driver.asked[-1] == ("cuGraphExecDestroy", "made")


def test_there_are_so_many_graphs_and_no_more(repeated, monkeypatch):
    gc.collect()
    monkeypatch.setattr(launch_module, "_GRAPHS_KEPT", 2)
    all_of_them = [repeated(driver := Graphs())]
    all_of_them += [repeated(driver) for _ in range(2)]

    def count(name):
        return [asked for asked, *_ in driver.asked].count(name)

    assert all(repeated.queue()[0] == 0 for repeated in all_of_them for _ in range(launch_module._REPEATED + 1))
    assert (count("cuGraphInstantiate"), count("cuGraphExecDestroy")) == (3, 1)
    driver.asked.clear()
    assert all(repeated.queue()[0] == 0 for repeated in all_of_them)
    assert driver.asked == [*ONE_BY_ONE, ("cuGraphLaunch", "made"), ("cuGraphLaunch", "made")]
    del all_of_them[1:]
    gc.collect()
    for _ in range(launch_module._REPEATED):
        all_of_them[0].queue()
    assert (count("cuGraphInstantiate"), count("cuGraphExecDestroy")) == (1, 2)


@pytest.mark.parametrize("step", ["cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiate"])
def test_a_driver_that_makes_no_graph_is_asked_once(repeated, step):
    launches = repeated(driver := Graphs(step))
    for _ in range(launch_module._REPEATED + 3):
        assert launches.queue() == (0, "new")
    assert [x for x in driver.asked if x[0] == 5] == ONE_BY_ONE * (launch_module._REPEATED + 3)
    assert [name for name, *_ in driver.asked].count("cuStreamBeginCapture") == 1
    assert driver.mode == "before"


def test_what_does_not_fit(driven):
    kernel = driven(Driver())
    with pytest.raises(ProblemError, match="takes 3 arguments, not 2"):
        kernel.configure(1, 32).pack((0, 0))
    with pytest.raises(ProblemError, match=r"argument 1 .* has 8 bytes, its parameter 128"):
        kernel.configure(1, 32).pack((0, 0, 0))
    with pytest.raises(ConfigError, match="one to three dimensions"):
        kernel.configure((1, 2, 3, 4), 32)


def test_what_the_tma_does_not_take(driven):
    driven(Driver())
    with pytest.raises(ConfigError, match="CUDA_ERROR_INVALID_VALUE"):
        tensor_maps.encode(8, BOX, 0)
    with pytest.raises(ConfigError, match="moves no pred"):
        tensor_maps.encode(0, TensorMapSpec(pred, (256, 100), (256,), (64, 8), 128), 0)


@pytest.mark.parametrize(("status", "encoded"), [(0, 2), (1, 4)], ids=["replaced", "refused"])
def test_a_map_of_another_array_differs_in_its_address(driven, status, encoded):
    driven(driver := Driver(status=status))
    maps = [bytes(tensor_maps.encode(address, BOX, gpu)) for address, gpu in ((32, 0), (64, 0), (96, 0), (32, 1))]
    assert [int.from_bytes(x[:8], "little") for x in maps] == [32, 64, 96, 32]
    assert len({x[8:] for x in maps}) == 1
    assert driver.encoded == encoded
    with pytest.raises(ConfigError, match="CUDA_ERROR_INVALID_VALUE"):
        tensor_maps.encode(8, BOX, 0)
