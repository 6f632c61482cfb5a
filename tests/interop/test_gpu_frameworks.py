"""CuPy and JAX on a GPU: seen in place, results of their own kind that a kernel fills."""

import ml_dtypes
import numpy as np
import pytest

from warploom.core.dtypes import bf16, f16, f32, s32
from warploom.cuda import device
from warploom.cuda.compile import compile_source
from warploom.cuda.launch import load, scalar, synchronize
from warploom.interop.arrays import SYNCHRONOUS_KINDS, current_stream, describe, empty

pytestmark = pytest.mark.gpu
DOUBLE = """
extern "C" __global__ void doubled(float* out, const float* in, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = in[i] * 2.0f;
}
"""


def doubled(array):
    view = describe(array)
    out = empty(view.kind, view.shape, view.dtype, view.device)
    index = view.device[1]
    kernel = load(compile_source(DOUBLE, "doubled", arch=device.target_of(index).name), index)
    stream = current_stream(view.kind, index)
    size = int(np.prod(view.shape))
    arguments = (describe(out).pointer, view.pointer, scalar(s32, size))
    launch = kernel.configure(-(-size // 128), 128)
    launch.queue(stream, launch.pack(arguments))
    if view.kind in SYNCHRONOUS_KINDS:
        synchronize(stream, index)
    return out


def test_cupy():
    cupy = pytest.importorskip("cupy")
    array = cupy.arange(1000, dtype=cupy.float32)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        assert current_stream("cupy", 0) == stream.ptr
        array *= 3
        out = doubled(array)
        stream.synchronize()
    assert isinstance(out, cupy.ndarray)
    np.testing.assert_array_equal(out.get(), np.arange(1000, dtype=np.float32) * 6)
    view = describe(array.astype(cupy.float16).reshape(10, 100).T)
    assert (view.dtype, view.strides, view.device) == (f16, (1, 100), ("cuda", 0))


def test_cupy_bfloat16():
    cupy = pytest.importorskip("cupy", minversion="14")
    array = cupy.zeros((4, 8), ml_dtypes.bfloat16)
    assert describe(array).dtype is bf16
    view = describe(array)
    assert empty(view.kind, view.shape, view.dtype, view.device).dtype == ml_dtypes.bfloat16


def test_jax():
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    array = jax.numpy.arange(1000, dtype=jax.numpy.float32) * 3
    view = describe(array)
    assert (view.kind, view.dtype, view.device, view.readonly) == ("jax", f32, ("cuda", 0), True)
    out = doubled(array)
    assert isinstance(out, jax.Array)
    np.testing.assert_array_equal(np.asarray(out + 1), np.arange(1000, dtype=np.float32) * 6 + 1)
    half = describe(jax.numpy.zeros((4, 8), jax.numpy.bfloat16))
    assert (half.dtype, half.strides) == (bf16, (8, 1))
    assert empty(half.kind, half.shape, half.dtype, half.device).dtype == jax.numpy.bfloat16


def test_foreign_objects_come_back_as_tensors():
    torch = pytest.importorskip("torch")

    class Foreign:
        def __init__(self, tensor) -> None:
            self.tensor = tensor

        def __dlpack_device__(self):
            return self.tensor.__dlpack_device__()

        def __dlpack__(self, **options):
            return self.tensor.__dlpack__(**options)

    out = doubled(Foreign(torch.arange(100, dtype=torch.float32, device="cuda")))
    torch.cuda.synchronize()
    assert out.tolist() == [2.0 * i for i in range(100)]
