"""Arrays of any framework in, arrays of the same kind out, without copying and without importing a framework.

A framework is only touched through an array it made: whoever passes a torch tensor has imported torch. Descriptions are
made on every call, so the frequent kinds have short paths (torch and NumPy); everything else goes through DLPack.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from operator import call
from typing import Any, NamedTuple

import numpy as np

from warploom.core.arguments import MOST_STRIDE
from warploom.core.dtypes import DTYPES, DType, foreign_dtype
from warploom.core.errors import ProblemError
from warploom.interop import dlpack
from warploom.interop.refusals import refuse_derivatives, without_memory
from warploom.interop.torch_internals import cuda_allocator, stream_handles, tangents_are_on

Device = tuple[str, int]
Form = tuple[Sequence[int], DType]
"""The shape and the type of an array."""
CPU: Device = ("cpu", 0)

#: Kinds whose results must be complete before they are handed back: JAX runs on streams of its own and takes an array
#: it is given as ready, so the caller of a kernel waits for its stream first.
SYNCHRONOUS_KINDS = frozenset({"jax"})


class ArrayView(NamedTuple):
    """An array as a kernel sees it.

    ``pointer`` is the address of element (0, …, 0); ``shape`` and ``strides`` count elements; ``device`` is ("cpu", 0)
    or ("cuda", index); ``kind`` is "torch", "numpy", "cupy", "jax" or "dlpack"; ``owner`` keeps the memory alive.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    device: Device
    kind: str
    owner: Any
    readonly: bool = False

    @property
    def array(self) -> Any:
        """The framework's array."""
        return self.owner[0] if isinstance(self.owner, tuple) else self.owner

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return 0 in self.shape
            expected *= size
        return True


_new = tuple.__new__  # half the cost of calling the NamedTuple


def describe(array: Any) -> ArrayView:
    """The :class:`ArrayView` of a torch tensor, NumPy, CuPy or JAX array, or of anything with ``__dlpack__``.

    Raises ProblemError for anything else, for a tensor whose gradient is wanted, and for arrays without memory of their
    own (sparse, traced or sharded ones). Elements of any type are described: who reads them says which it takes.
    """
    reader = _readers.get(array.__class__)
    if reader is None:
        reader = _readers[array.__class__] = _reader_for(array)
    return reader(array)


def describe_all(given: Mapping[str, Any], public: Mapping[str, str] | None = None) -> dict[str, ArrayView]:
    """:func:`describe` of arrays by their names, which errors begin with, or with those that ``public`` has instead."""
    views: dict[str, ArrayView] = {}
    name = ""
    try:
        for name, array in given.items():
            views[name] = describe(array)
    except ProblemError as error:
        error.args = (f"{(public or {}).get(name, name)}: {error}",)
        raise
    return views


def describe_new(array: Any) -> ArrayView:
    """:func:`describe` of an array that :func:`empty` has just made: row-major, and ours to write.

    JAX calls every array read-only, and torch's ``empty_like`` keeps what strides say of dimensions of one element.
    """
    view = describe(array)
    return view._replace(readonly=False, strides=dlpack.row_major_strides(tuple(view.shape)))


def address(array: Any) -> int:
    """Where an array's first element lies: the ``pointer`` of :func:`describe`, at less cost for torch tensors."""
    data_ptr = getattr(array, "data_ptr", None)
    return data_ptr() if data_ptr is not None else describe(array).pointer


def kind_of(array: Any) -> str:
    """The framework of ``array``: "torch", "numpy", "cupy", "jax", or "dlpack" for others that speak the protocol."""
    for base in type(array).__mro__:
        root = base.__module__.partition(".")[0]
        if root in ("torch", "numpy", "cupy"):
            return root
        if root in ("jax", "jaxlib"):
            return "jax"
    return "dlpack"


def same_device(views: Sequence[ArrayView], names: Sequence[str] = ()) -> Device:
    """The device all ``views`` lie on. Raises ProblemError that lists them (by ``names``) where they differ."""
    first = views[0].device
    for view in views:
        if view.device != first:
            labels = names or [f"argument {i}" for i in range(len(views))]
            where = ", ".join(f"{label} on {_device_name(v.device)}" for label, v in zip(labels, views, strict=False))
            raise ProblemError(f"all arrays must be on one device, but {where}: move them to the same one")
    return first


def memory_span(view: ArrayView) -> tuple[int, int]:
    """(lowest address, number of bytes) of the memory that the elements of ``view`` lie in, gaps included."""
    if 0 in view.shape:
        return view.pointer, 0
    reach = [(size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True)]
    below = sum(r for r in reach if r < 0)
    above = sum(r for r in reach if r > 0)
    return view.pointer + below * view.dtype.bytes, (above - below + 1) * view.dtype.bytes


def as_bytes(view: ArrayView) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The memory of :func:`memory_span` as a one-dimensional uint8 array, zero-copy, read-only if ``view`` is.

    The result keeps the array alive. Raises ProblemError for GPU memory.
    """
    if view.device[0] != "cpu":
        raise ProblemError(f"the emulator reads memory of the CPU, this array is on {_device_name(view.device)}")
    memory = bytes_at(*memory_span(view), view.owner)
    memory.flags.writeable = not view.readonly
    return memory


def bytes_at(first: int, size: int, owner: Any = None) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of this process from an address on; what ``owner`` does not keep alive, the caller does."""
    if size == 0:
        return np.empty(0, np.uint8)
    raw: Any = (ctypes.c_uint8 * size).from_address(first)
    raw.owner = owner  # lives as long as NumPy holds this buffer
    return np.frombuffer(raw, np.uint8)


def as_numpy(view: ArrayView) -> np.ndarray[Any, Any]:
    """The array as NumPy sees it (bfloat16 through ml_dtypes), zero-copy. Raises ProblemError for GPU memory."""
    if view.kind == "numpy":
        return view.owner
    memory = as_bytes(view)
    if memory.size == 0:
        return np.empty(view.shape, view.dtype.numpy)
    offset = view.pointer - memory_span(view)[0]
    strides = tuple(stride * view.dtype.bytes for stride in view.strides)
    array = np.ndarray(view.shape, view.dtype.numpy, buffer=memory.data, offset=offset, strides=strides)
    array.flags.writeable = not view.readonly
    return array


def empty(kind: str, shape: Sequence[int], dtype: DType, device: Device) -> Any:
    """A new row-major array of a framework; its contents are whatever the memory held.

    JAX arrays are immutable to their users: write to one only before it is handed out, and wait for the kernel first
    (:data:`SYNCHRONOUS_KINDS`). CuPy has bfloat16 since 14.0. For "dlpack", an object of an unknown framework, the
    result is of the framework at hand that can hold it: NumPy on the CPU, else torch, CuPy or JAX.
    """
    if kind == "torch":
        torch = sys.modules["torch"]
        return torch.empty(tuple(shape), dtype=torch_type(dtype), device=_torch_device(device))
    if kind == "numpy" or (kind == "dlpack" and device[0] == "cpu"):
        return np.empty(tuple(shape), dtype.numpy)
    if kind == "cupy":
        return _empty_cupy(tuple(shape), dtype, device)
    if kind == "jax":
        return _empty_jax(tuple(shape), dtype, device)
    for framework in ("torch", "cupy", "jax"):
        if framework in sys.modules:
            return empty(framework, shape, dtype, device)
    raise ProblemError("a result on the GPU needs torch, CuPy or JAX to hold it: import one of them, or pass an output")


def makers(kind: str, forms: Iterable[Form], device: Device, value: float | None = None) -> Callable[[], list[Any]]:
    """A function that makes :func:`empty` arrays of these forms, or with every element ``value``, again and again."""
    wanted = [(tuple(shape), dtype) for shape, dtype in forms]

    def anywhere() -> list[Any]:
        if value is not None:
            return [filled(kind, *form, device, value) for form in wanted]
        return [empty(kind, *form, device) for form in wanted]

    allocator = cuda_allocator() if kind == "torch" and device[0] == "cuda" and value is None else None
    if allocator is None:
        return anywhere
    (raw, current), index = allocator, device[1]
    made = tuple([partial(raw, shape, dlpack.row_major_strides(shape), torch_type(dtype)) for shape, dtype in wanted])
    return lambda: list(map(call, made)) if current() == index else anywhere()


def filled(kind: str, shape: Sequence[int], dtype: DType, device: Device, value: float) -> Any:
    """A new row-major array of a framework with every element ``value``."""
    if kind == "jax":
        like = empty(kind, (1,) * len(tuple(shape)), dtype, device)
        with sys.modules["jax"].ensure_compile_time_eval():
            return sys.modules["jax"].numpy.full_like(like, value, shape=tuple(shape))
    array = empty(kind, shape, dtype, device)
    if hasattr(array, "fill_"):
        return array.fill_(value)
    array.fill(value)
    return array


def current_stream(kind: str, device: int) -> int:
    """The handle of the stream the caller's framework works on, on GPU ``device``; 0 is the legacy default stream.

    Frameworks without a notion of a current stream (JAX, DLPack, NumPy) get the legacy default stream; their arrays are
    made ready on it when they are described.
    """
    return stream_reader(kind, device)()


def stream_reader(kind: str, device: int) -> Callable[[], int]:
    """A function that tells :func:`current_stream`, again and again."""
    if kind == "torch" and "torch" in sys.modules:
        return partial(stream_handles(), device)
    if kind == "cupy" and "cupy" in sys.modules:
        return lambda: _cupy_stream(device)
    return lambda: 0


def _cupy_stream(device: int) -> int:
    cupy: Any = sys.modules["cupy"]
    with cupy.cuda.Device(device):
        return int(cupy.cuda.get_current_stream().ptr)


def _device_name(device: Device) -> str:
    return "the CPU" if device[0] == "cpu" else f"GPU {device[1]}"


# --- readers: one per kind, chosen once per Python type --------------------------------------------------------------


def _reader_for(array: Any) -> Callable[[Any], ArrayView]:
    kind = kind_of(array)
    if kind == "torch" and hasattr(array, "data_ptr"):
        return _read_torch
    if isinstance(array, np.ma.MaskedArray):
        raise ProblemError("masked arrays are not supported: fill the masked elements first")
    if isinstance(array, np.ndarray):
        return _read_numpy
    if kind == "cupy" and hasattr(array, "data"):
        return _read_cupy
    if kind == "jax":
        return _read_jax
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return lambda x: _through_dlpack(x, "dlpack")
    raise ProblemError(
        f"{type(array).__name__} is not an array warploom can read: pass a torch tensor, a NumPy, CuPy or JAX array, "
        "or an object with __dlpack__"
    )


_readers: dict[type, Callable[[Any], ArrayView]] = {ArrayView: lambda view: view}
_OURS = {
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "int8": "s8",
    "uint8": "u8",
    "uint16": "u16",
    "int16": "s16",
    "int32": "s32",
    "uint32": "u32",
    "int64": "s64",
    "uint64": "u64",
    "bool": "pred",
}


_TORCHS = {ours: name for name, ours in _OURS.items()}


@cache
def torch_element_type(dtype: Any) -> DType:
    """The type of the elements of torch's ``dtype``."""
    name = str(dtype).rpartition(".")[2]
    return DTYPES[_OURS[name]] if name in _OURS else foreign_dtype(name, dtype.itemsize)


@cache
def torch_type(dtype: DType) -> Any:
    """Torch's type of elements. Raises ProblemError where it has none."""
    found = getattr(sys.modules["torch"], _TORCHS.get(dtype.name, ""), None)
    if found is None:
        raise ProblemError(f"this torch has no type for {dtype}")
    return found


def _read_torch(tensor: Any) -> ArrayView:
    dtype = torch_element_type(tensor.dtype)
    if tensor.requires_grad or tangents_are_on():
        refuse_derivatives(tensor)
    copied = tensor.is_neg()
    if copied:
        tensor = tensor.resolve_neg()
    try:
        pointer, strides = tensor.data_ptr(), tensor.stride()
    except RuntimeError as error:
        raise without_memory(tensor, str(error)) from error
    if tensor.is_cuda:
        device = "cuda", tensor.get_device()
    elif tensor.device.type == "cpu":
        device = CPU
    else:
        raise ProblemError(f"torch tensors on {tensor.device} are not something warploom runs on; use cuda or cpu")
    if not pointer and tensor.numel():  # a kernel would read address 0
        raise without_memory(tensor)
    # What is written to a copy is lost: that counts as read-only.
    return _new(ArrayView, (pointer, tensor.shape, strides, dtype, device, "torch", tensor, copied))


_numpy_to_dtype: dict[np.dtype[Any], DType] = {t.numpy: t for t in DTYPES.values() if t.name != "tf32"}


def _read_strided(array: Any, pointer: int, device: Device, kind: str, readonly: bool) -> ArrayView:
    """Arrays of NumPy's making: byte strides and a NumPy dtype."""
    dtype = _numpy_to_dtype.get(array.dtype)
    if dtype is None:
        dtype = foreign_dtype(str(array.dtype), max(1, array.dtype.itemsize))
    size = dtype.bytes
    if any(stride % size for stride in array.strides):
        raise ProblemError(
            f"the strides {array.strides} (bytes) do not fall on whole elements of {size} bytes: copy it"
        )
    strides = tuple(stride // size for stride in array.strides)
    return ArrayView(pointer, array.shape, strides, dtype, device, kind, array, readonly)


def _read_numpy(array: Any) -> ArrayView:
    pointer, readonly = array.__array_interface__["data"]
    return _read_strided(array, pointer, CPU, "numpy", readonly)


def _read_cupy(array: Any) -> ArrayView:
    index = int(array.device.id)
    return _read_strided(array, int(array.data.ptr), ("cuda", index), "cupy", False)


def _read_jax(array: Any) -> ArrayView:
    if isinstance(array, sys.modules["jax"].core.Tracer):
        raise ProblemError(
            "inside jax.jit, grad, vmap and the like values are traced and have no memory yet: for attention call "
            "warploom.jax.attention; other functions outside, or through jax.pure_callback"
        )
    if array.is_deleted():
        raise ProblemError("this JAX array has been deleted, or donated to a computation: pass one that still exists")
    if len(array.devices()) != 1:
        raise ProblemError("a JAX array sharded over several devices cannot be passed to one kernel: gather it first")
    return _through_dlpack(array, "jax", readonly=True)


def _through_dlpack(array: Any, kind: str, *, readonly: bool = False) -> ArrayView:
    read = dlpack.read(array, lambda index: current_stream(kind, index))
    pointer, shape, strides, dtype, device, unwritable, capsule = read
    return ArrayView(pointer, shape, strides, dtype, device, kind, (array, capsule), readonly or unwritable)


# --- makers -----------------------------------------------------------------------------------------------------------


@cache
def _torch_device(device: Device) -> Any:
    torch: Any = sys.modules["torch"]
    return torch.device("cpu") if device == CPU else torch.device(*device)


def _empty_cupy(shape: tuple[int, ...], dtype: DType, device: Device) -> Any:
    cupy: Any = sys.modules["cupy"]
    with cupy.cuda.Device(device[1]):
        try:
            return cupy.empty(shape, dtype=dtype.numpy)
        except (TypeError, ValueError) as error:
            raise ProblemError(f"CuPy {cupy.__version__} cannot hold {dtype} (bfloat16 needs 14.0): {error}") from error


def _empty_jax(shape: tuple[int, ...], dtype: DType, device: Device) -> Any:
    jax: Any = sys.modules["jax"]
    platform = "cpu" if device[0] == "cpu" else "cuda"
    chosen = next((d for d in jax.devices(platform) if d.id == device[1] or platform == "cpu"), None)
    if chosen is None:
        raise ProblemError(f"JAX does not see {_device_name(device)}")
    with jax.ensure_compile_time_eval():  # inside jax.jit too, where arrays made outside it may be passed
        array = jax.numpy.empty(shape, dtype=dtype.numpy, device=chosen)
    if _numpy_to_dtype.get(np.dtype(array.dtype)) is not dtype:
        raise ProblemError(f"JAX gave {array.dtype} for {dtype}: set jax_enable_x64 for 64-bit types")
    return array.block_until_ready()


# --- row-major copies of arrays that no kernel reads in place, and what a plan takes in their place ------------------


def settled(view: ArrayView) -> ArrayView:
    """The view with row-major strides where a dimension has one element: its own say nothing, and may be anything.

    Where those are too far for a kernel, the next dimension's. Nor do any say something of an array without elements.
    """
    if 0 in view.shape:
        return view._replace(strides=dlpack.row_major_strides(tuple(view.shape)))
    if 1 not in view.shape:
        return view
    row_major = dlpack.row_major_strides(tuple(view.shape))
    if row_major == view.strides and row_major[0] <= MOST_STRIDE:
        return view
    found: list[int] = []  # the last first
    for size, own, plain in [*zip(view.shape, view.strides, row_major, strict=True)][::-1]:
        found.append(own if size != 1 else plain if plain <= MOST_STRIDE else found[-1])
    strides = tuple(found[::-1])
    return view if strides == tuple(view.strides) else view._replace(strides=strides)


def as_if_compact(view: ArrayView, dtype: DType | None = None) -> ArrayView:
    """The view that :func:`compact` gives, without a copy and without memory: for plans, which only look at it."""
    strides = dlpack.row_major_strides(tuple(view.shape))
    return view._replace(pointer=0, strides=strides, dtype=dtype or view.dtype, owner=None)


def compact(view: ArrayView, dtype: DType | None = None) -> ArrayView:
    """A row-major copy of the array, of its own kind and in its own type, or another.

    For kernels that need aligned or plain rows. Raises ProblemError where the memory of the CPU does not hold it; a
    framework's own error where a GPU's does not.
    """
    try:
        return describe(_compact(view, dtype))
    except (MemoryError, RuntimeError) as error:
        if view.device[0] != "cpu":
            raise
        size = math.prod(view.shape) * view.dtype.bytes / 2**30
        raise ProblemError(
            f"an array of shape {tuple(view.shape)} and strides {tuple(view.strides)} must be copied first, and the "
            f"copy of {size:.1f} GiB does not fit in memory: pass one with contiguous, aligned rows"
        ) from error


def _compact(view: ArrayView, dtype: DType | None) -> Any:
    owner, wanted = view.array, None if dtype is None else dtype.numpy
    if view.kind == "torch":
        kind = owner.dtype if dtype is None else torch_type(dtype)
        return owner.to(kind, copy=True, memory_format=sys.modules["torch"].contiguous_format)
    if view.kind == "cupy":
        return sys.modules["cupy"].array(owner, wanted, order="C")
    if view.kind == "jax":
        with sys.modules["jax"].ensure_compile_time_eval():
            return sys.modules["jax"].numpy.array(owner, wanted, copy=True)
    if view.device[0] == "cpu":
        return np.array(as_numpy(view), wanted, order="C")
    said = "aligned, row-major" if dtype is None else f"row-major {dtype.array_name}"
    raise ProblemError(f"kernels take a copy of this array, and its framework is unknown: pass an {said} one")
