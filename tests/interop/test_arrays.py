"""Arrays are described in place and made in their own kind."""

import gc
import sys
import types

import ml_dtypes
import numpy as np
import pytest

from warploom.core.dtypes import bf16, f16, f32, s32, u8
from warploom.core.errors import ProblemError
from warploom.interop import arrays, dlpack
from warploom.interop.arrays import ArrayView, as_bytes, as_numpy, describe, empty, memory_span, same_device


class Exporter:
    """An array of an unknown framework: only DLPack, before and since version 1.0."""

    def __init__(self, array: np.ndarray, *, versioned: bool = False) -> None:
        self.array = array
        self.versioned = versioned

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        if not self.versioned and "max_version" in options:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(**options)


def test_numpy_is_seen_with_strides_in_elements():
    array = np.arange(24, dtype=np.float16).reshape(2, 3, 4)[:, ::2, ::-1]
    view = describe(array)
    assert view.shape == (2, 2, 4)
    assert view.strides == (12, 8, -1)
    assert (view.dtype, view.device, view.kind, view.readonly) == (f16, ("cpu", 0), "numpy", False)
    assert view.pointer == array.ctypes.data
    assert describe(view) is view


def test_bfloat16_and_read_only_numpy():
    array = np.zeros((4, 8), ml_dtypes.bfloat16)
    array.flags.writeable = False
    view = describe(array)
    assert view.dtype is bf16
    assert view.readonly
    assert not as_bytes(view).flags.writeable


@pytest.mark.parametrize(
    ("array", "says"), [([1.0, 2.0], "not an array"), (None, "not an array"), (np.ma.zeros(3), "masked")]
)
def test_what_is_no_array_is_refused(array, says):
    with pytest.raises(ProblemError, match=says):
        describe(array)


@pytest.mark.parametrize(
    ("array", "name", "size"),
    [
        (np.zeros(3, np.complex64), "complex64", 8),
        (np.zeros(3, ">f2"), ">f2", 2),
        (np.zeros(3, "U4"), "<U4", 16),
        (np.zeros(3, ml_dtypes.float8_e4m3fn), "float8_e4m3fn", 1),
        (Exporter(np.zeros(3, np.complex128)), "complex128", 16),
    ],
)
def test_elements_of_other_types_keep_their_name(array, name, size):
    """For the operation that refuses them to say what it takes."""
    view = describe(array)
    assert (view.dtype.name, view.dtype.bytes, view.dtype.kind) == (name, size, "foreign")
    assert view.dtype is describe(array).dtype


def test_strides_between_elements_are_refused():
    packed = np.zeros(8, np.dtype([("tag", "u1"), ("value", "<f2")]))
    with pytest.raises(ProblemError, match="whole elements"):
        describe(packed["value"])


@pytest.mark.parametrize("versioned", [False, True])
def test_any_dlpack_object(versioned):
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    view = describe(Exporter(array, versioned=versioned))
    assert (view.pointer, view.shape, view.strides) == (array.ctypes.data, (4, 3), (1, 4))
    assert (view.dtype, view.kind, view.device) == (f32, "dlpack", ("cpu", 0))
    np.testing.assert_array_equal(as_numpy(view), array)


def test_dlpack_says_what_may_not_be_written():
    array = np.zeros(4, np.float32)
    array.flags.writeable = False
    view = describe(Exporter(array, versioned=True))
    assert view.readonly
    assert not describe(Exporter(array.copy(), versioned=True)).readonly


@pytest.mark.parametrize("versioned", [False, True])
def test_a_dlpack_array_begins_behind_its_memory_by_an_offset(versioned):
    """Producers such as JAX may give the allocation, and say in ``byte_offset`` where the array begins in it."""

    class Further(Exporter):
        def __dlpack__(self, **options):
            capsule = super().__dlpack__(**options)
            tensor, _ = dlpack._tensor_of(capsule)
            tensor.data, tensor.byte_offset = tensor.data - 64, 64
            return capsule

    array = np.arange(12, dtype=np.float32)
    view = describe(Further(array, versioned=versioned))
    assert view.pointer == array.ctypes.data
    np.testing.assert_array_equal(as_numpy(view), array)


def test_dlpack_on_a_foreign_device_is_refused():
    class OnMetal(Exporter):
        def __dlpack_device__(self):
            return (8, 0)

    with pytest.raises(ProblemError, match="device type 8"):
        describe(OnMetal(np.zeros(3)))


def test_dlpack_gpu_array_is_asked_for_the_legacy_stream():
    asked = []

    class OnGpu(Exporter):
        def __dlpack_device__(self):
            return (2, 3)

        def __dlpack__(self, **options):
            asked.append(options.pop("stream"))
            return super().__dlpack__(**options)

    view = describe(OnGpu(np.zeros(4, np.int32), versioned=True))
    assert view.device == ("cuda", 3)
    assert view.dtype is s32
    assert asked == [1]
    with pytest.raises(ProblemError, match="GPU 3"):
        as_bytes(view)


def test_cupy_is_read_by_its_own_attributes():
    array = np.zeros((3, 5), np.float16)
    members = {
        "__module__": "cupy",
        "shape": array.shape,
        "strides": array.strides,
        "dtype": array.dtype,
        "data": types.SimpleNamespace(ptr=4096),
        "device": types.SimpleNamespace(id=1),
    }
    view = describe(type("ndarray", (), members)())
    assert (view.pointer, view.strides, view.device, view.kind) == (4096, (5, 1), ("cuda", 1), "cupy")


def test_memory_span_counts_negative_strides_and_gaps():
    base = np.arange(40, dtype=np.float16).reshape(5, 8)
    part = base[::-2, 2:4]
    address, size = memory_span(describe(part))
    assert address == base.ctypes.data + 2 * 2
    assert size == (4 * 8 + 2) * 2
    assert memory_span(describe(base[:0]))[1] == 0


def test_bytes_are_zero_copy_and_keep_the_array_alive():
    array = np.arange(8, dtype=np.float32)
    memory = as_bytes(describe(array))
    memory[:4] = np.frombuffer(np.float32(9.0).tobytes(), np.uint8)
    assert array[0] == 9.0
    expected = array.tobytes()
    del array
    gc.collect(1)
    assert memory.tobytes() == expected
    assert memory.dtype == np.uint8


def test_contiguity():
    assert describe(np.zeros((2, 3))).contiguous
    assert describe(np.zeros((2, 3))[:, :1]).contiguous is False
    assert describe(np.zeros((1, 3, 1))[:, :, :]).contiguous
    assert not describe(np.zeros((2, 3)).T).contiguous
    assert describe(np.zeros((0, 3)).T).contiguous


def test_devices_must_agree():
    here = describe(np.zeros(2))
    there = here._replace(device=("cuda", 1))
    assert same_device([here, here]) == ("cpu", 0)
    with pytest.raises(ProblemError, match=r"q on the CPU, k on GPU 1"):
        same_device([here, there], ["q", "k"])


def test_numpy_results():
    out = empty("numpy", (2, 3), bf16, ("cpu", 0))
    assert out.shape == (2, 3)
    assert out.dtype == ml_dtypes.bfloat16
    assert empty("dlpack", (2,), u8, ("cpu", 0)).dtype == np.uint8


def test_a_gpu_result_for_an_unknown_framework_needs_one(monkeypatch):
    for name in ("torch", "cupy", "jax"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ProblemError, match="import one of them"):
        empty("dlpack", (2,), f16, ("cuda", 0))


def test_numpy_has_the_default_stream():
    assert arrays.current_stream("numpy", 0) == 0
    assert arrays.current_stream("jax", 0) == 0


def test_views_are_plain_tuples():
    assert ArrayView._fields[:4] == ("pointer", "shape", "strides", "dtype")
