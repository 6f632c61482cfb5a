"""Torch tensors: the short path of every call."""

import gc

import ml_dtypes
import numpy as np
import pytest

from warploom.core.dtypes import bf16, f16, f32
from warploom.core.errors import ProblemError
from warploom.interop import arrays
from warploom.interop.arrays import as_bytes, as_numpy, current_stream, describe, empty, makers
from warploom.ops.matmul import matmul

torch = pytest.importorskip("torch")
FakeTensorMode = pytest.importorskip("torch._subclasses.fake_tensor").FakeTensorMode


def form_of(view):
    """What `empty` makes an array like another of."""
    return view.kind, view.shape, view.dtype, view.device


def test_a_tensor_is_seen_in_place():
    tensor = torch.arange(24, dtype=torch.float16).reshape(2, 3, 4).transpose(1, 2)[:, 1:]
    view = describe(tensor)
    assert view.pointer == tensor.data_ptr()
    assert view.shape == (2, 3, 3)
    assert view.strides == (12, 1, 4)
    assert (view.dtype, view.kind, view.device, view.owner) == (f16, "torch", ("cpu", 0), tensor)
    np.testing.assert_array_equal(as_numpy(view), tensor.numpy())


def test_bfloat16_is_zero_copy():
    tensor = torch.randn(4, 8).to(torch.bfloat16)
    array = as_numpy(describe(tensor))
    assert array.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(array.astype(np.float32), tensor.float().numpy())
    array[1, 2] = 3.0
    assert tensor[1, 2] == 3.0
    del tensor
    gc.collect(1)
    assert array[1, 2] == 3.0


def test_zero_strides_of_expand():
    view = describe(torch.ones(1, 4).expand(3, 4))
    assert view.strides == (0, 1)
    assert as_bytes(view).size == 16
    assert as_numpy(view).shape == (3, 4)


def test_empty_tensors():
    view = describe(torch.empty(0, 4, dtype=torch.bfloat16))
    assert as_numpy(view).shape == (0, 4)


def test_gradients_are_refused_unless_switched_off():
    tensor = torch.zeros(2, requires_grad=True)
    with pytest.raises(ProblemError, match="no_grad"):
        describe(tensor)
    with torch.no_grad():
        assert describe(tensor).shape == (2,)
    assert describe(tensor.detach()).shape == (2,)


def test_negated_views_are_resolved():
    tensor = torch.complex(torch.ones(2), torch.ones(2)).conj().imag
    assert tensor.is_neg()
    np.testing.assert_array_equal(as_numpy(describe(tensor)), [-1, -1])


@pytest.mark.parametrize(
    ("make", "says"),
    [(lambda: torch.zeros(2, 2).to_sparse(), "plain memory"), (lambda: torch.zeros(2, device="meta"), "meta")],
)
def test_tensors_without_a_use_are_refused(make, says):
    with pytest.raises(ProblemError, match=says):
        describe(make())


class Wrapped(torch.Tensor):
    """A tensor that stands for another, as those of torch.distributed do."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, *_):
        return NotImplemented


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_tensors_without_memory_are_refused():
    """Their address is 0, which a kernel would read."""
    with FakeTensorMode() as mode, pytest.raises(ProblemError, match=r"FakeTensor has no memory.*torch\.ops\.warploom"):
        describe(mode.from_tensor(torch.ones(2, 2)))
    with pytest.raises(ProblemError, match="Wrapped has no memory of its own"):
        describe(Wrapped(torch.ones(2, 2)))
    assert describe(torch.ones(0, 2)).shape == (0, 2)


def test_a_result_is_not_written_to_the_copy_of_a_negated_view():
    out = torch.complex(torch.ones(4, 1), torch.ones(4, 1)).conj().imag
    with pytest.raises(ProblemError, match="read-only"):
        matmul(torch.ones(4, 16).half(), torch.ones(16, 1).half(), out=out)


def test_results_are_tensors():
    view = describe(torch.zeros(2, 3, dtype=torch.bfloat16))
    out = empty(view.kind, (4, 5), view.dtype, view.device)
    assert isinstance(out, torch.Tensor)
    assert out.dtype is torch.bfloat16
    assert out.shape == (4, 5)
    assert empty("torch", (2,), bf16, ("cpu", 0)).device.type == "cpu"


def test_a_result_like_a_view_is_row_major():
    base = torch.zeros(2, 3, 4)
    for tensor in (base, base.transpose(0, 2), base[:, ::2], base.to(torch.bfloat16)):
        out = empty(*form_of(describe(tensor)))
        assert out.is_contiguous()
        assert (out.shape, out.dtype, out.requires_grad) == (tensor.shape, tensor.dtype, False)
        assert out.data_ptr() != tensor.data_ptr()


@pytest.mark.gpu
def test_tensors_and_streams_of_the_gpu():
    tensor = torch.zeros(4, 8, dtype=torch.bfloat16, device="cuda")
    view = describe(tensor)
    assert view.device == ("cuda", tensor.get_device())
    out = empty(*form_of(view))
    assert out.device == tensor.device
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert current_stream("torch", tensor.get_device()) == stream.cuda_stream


@pytest.mark.parametrize("current", [0, 1])
def test_results_on_the_current_gpu_are_allocated_as_compiled_code_does(current, monkeypatch):
    guards, raw = torch._C._dynamo.guards, []
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current, raising=False)
    monkeypatch.setattr(
        guards, "_empty_strided_cuda", lambda *a: raw.append(a) or guards._empty_strided_cpu(*a), raising=False
    )
    monkeypatch.setattr(arrays, "_torch_device", lambda device: torch.device("cpu"))
    (made,) = makers("torch", [((2, 5), f32)], ("cuda", 0))()
    assert (made.shape, made.stride(), made.dtype) == ((2, 5), (5, 1), torch.float32)
    assert len(raw) == (current == 0)
