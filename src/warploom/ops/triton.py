"""``check_triton``: a Triton kernel compiled without a GPU and run on the emulator under all checks."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from warploom.core.arguments import check_names, grid_of
from warploom.core.errors import ProblemError, UnsupportedDeviceError, shown
from warploom.interop.arrays import as_numpy, describe
from warploom.ops.ptx import CheckedPtx, check_ptx

_ALWAYS = "TRITON_ALWAYS_COMPILE"
_ALIGNMENT = 256  # of what a GPU's allocators return; Triton compiles for arguments that are multiples of 16


def check_triton(
    kernel: Any,
    grid: int | Sequence[int] | Callable[[Mapping[str, Any]], Sequence[int]],
    arguments: Sequence[Any] | Mapping[str, Any],
    *,
    target: str = "sm_80",
    seed: int | None = None,
    **meta: Any,
) -> CheckedPtx:
    """Compile a Triton kernel for ``target`` and run it on the CPU with all checks; no GPU is needed.

    ``kernel`` is a ``@triton.jit`` function; of an autotuned one the first configuration counts, unless ``meta`` says
    otherwise. ``grid`` is what stands in brackets at a launch, ``arguments`` and ``meta`` what stands in parentheses:
    arrays of NumPy or of torch on the CPU, which are changed in place, Triton's ``TensorDescriptor`` of such arrays
    (for sm_90), numbers, and constants and options such as ``BLOCK=64, num_warps=4`` by name. ``target`` is an
    architecture, ``sm_80`` or ``sm_90``. With ``seed`` the warps run in an adversarial order.

    Findings name the lines of the kernel's Python source. Raises UnsupportedDeviceError without Triton, ProblemError
    for arguments that do not fit, PtxError for an instruction that cannot be run, and what Triton raises.
    """
    function, meta = _configured(kernel, arguments, meta)
    given = _by_name(function, arguments, meta)
    compiled = _compile(function, given, meta, target)
    signature = {name: kind for name, kind in compiled.src.signature.items() if kind != "constexpr"}
    metadata = compiled.metadata
    boxes = iter(getattr(metadata, "tensordesc_meta", None) or ())
    passed = [x for name, kind in signature.items() for x in _passed(name, kind, given.get(name), boxes)]
    where = grid({**given, **meta}) if callable(grid) else grid
    text: str = compiled.asm["ptx"]
    passed += [("global scratch memory", _scratch(metadata, "global_scratch_size", grid_of(where)))]
    passed = [*passed, ("profiling scratch memory", 0)][: _parameters(text, metadata.name)]
    return check_ptx(
        text,
        where,
        _threads(text, metadata),
        [x for _, x in passed],
        kernel=metadata.name,
        shared_bytes=metadata.shared,
        names=[name for name, _ in passed],
        file=f"{metadata.name}.ptx",
        seed=seed,
    )


# -- what is compiled ------------------------------------------------------------------------------------------------


def _configured(kernel: Any, arguments: Any, meta: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The function under autotuners and heuristics, and the constants and options that these choose."""
    while not hasattr(kernel, "warmup") or hasattr(kernel, "configs") or hasattr(kernel, "values"):
        if hasattr(kernel, "configs"):
            meta = {**(kernel.configs[0].all_kwargs() if kernel.configs else {}), **meta}
        elif hasattr(kernel, "values"):
            names = getattr(kernel, "arg_names", [])
            known = {**_positional(names, arguments), **meta}
            meta = {**{name: choose(known) for name, choose in kernel.values.items()}, **meta}
        if not hasattr(kernel, "fn"):
            raise ProblemError(f"a Triton kernel is a function decorated with @triton.jit, not {shown(kernel)}")
        kernel = kernel.fn
    return kernel, meta


def _positional(names: Sequence[str], arguments: Any) -> dict[str, Any]:
    return dict(arguments) if isinstance(arguments, Mapping) else dict(zip(names, arguments, strict=False))


def _by_name(function: Any, arguments: Any, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names of the function's parameters. Raises ProblemError for missing and unknown ones."""
    names: list[str] = list(function.arg_names)
    if not isinstance(arguments, Mapping) and len(arguments) > len(names):
        raise ProblemError(f"{function.__name__} takes {len(names)} arguments, not {len(arguments)}")
    given = _positional(names, arguments)
    unknown = sorted(set(given) - set(names))
    defaults = {p.name for p in function.params if p.has_default}
    missing = [name for name in names if name not in given and name not in meta and name not in defaults]
    check_names(function.__name__, missing, unknown)
    return given


class _Target:
    """Stands for a GPU that is not there, while Triton compiles for it."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        """The architecture."""
        return self.target

    def get_current_device(self) -> str:
        """What compiled kernels are kept by, apart from those of any real device."""
        return f"checked for {self.target.arch}"

    def get_current_stream(self, _: Any = None) -> int:
        """The default stream."""
        return 0


class _Element(str):
    """The name of an array's type, with the size that tensor descriptors ask for."""

    itemsize: int
    is_floating_point = True


class _Pointer:
    """An array as Triton sees it: the type of its elements, and how well it is aligned on a GPU."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        root: Any = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        first = int(array.__array_interface__["data"][0]) - int(root.__array_interface__["data"][0])
        self.array, self.dtype, self.place = array, _Element(array.dtype.name), _ALIGNMENT + first % _ALIGNMENT
        self.dtype.itemsize = array.dtype.itemsize

    def data_ptr(self) -> int:
        """An address with the array's alignment."""
        return self.place


def _compile(function: Any, given: dict[str, Any], meta: Mapping[str, Any], target: str) -> Any:
    """The compiled kernel; arrays among ``given`` become what Triton and the emulator take."""
    try:
        triton: Any = importlib.import_module("triton")
        compiler: Any = importlib.import_module("triton.backends.compiler")
    except ImportError as error:
        raise UnsupportedDeviceError("check_triton needs Triton: pip install triton") from error
    number = re.fullmatch(r"sm_(\d+)a?", target)
    if number is None:
        raise ProblemError(f"a target is an architecture such as sm_80 or sm_90, not {shown(target)}")
    for name, x in given.items():
        if hasattr(x, "block_shape"):
            descriptor: Any = importlib.import_module("triton.tools.tensor_descriptor")
            base = _Pointer(as_numpy(describe(x.base)))
            given[name] = descriptor.TensorDescriptor(base, list(x.shape), list(x.strides), list(x.block_shape))
        elif not isinstance(x, int | float | str | type(None)) and hasattr(x, "shape") and x.shape != ():
            given[name] = _Pointer(as_numpy(describe(x)))
    with _in_place_of_gpu(triton.runtime.driver, _Target(compiler.GPUTarget("cuda", int(number[1]), 32))):
        return function.warmup(grid=(1,), **given, **meta)


@contextmanager
def _in_place_of_gpu(driver: Any, stand_in: _Target) -> Iterator[None]:
    """Triton compiles for the stand-in, and anew: what it keeps on disk may name the lines of a file that has moved."""
    before, always = getattr(driver, "_active", None), os.environ.get(_ALWAYS)
    driver.set_active(stand_in)
    os.environ[_ALWAYS] = "1"
    try:
        yield
    finally:
        if always is None:
            del os.environ[_ALWAYS]
        else:
            os.environ[_ALWAYS] = always
        if before is None:
            driver.reset_active() if getattr(driver, "_default", None) is not None else setattr(driver, "_active", None)
        else:
            driver.set_active(before)


# -- what is run -----------------------------------------------------------------------------------------------------


def _passed(name: str, kind: Any, x: Any, boxes: Iterator[Mapping[str, Any]]) -> list[tuple[str, Any]]:
    """An argument as PTX takes it: with a tensor map go its shape and strides. ``boxes`` say how Triton tiled it."""
    if not hasattr(x, "block_shape"):
        return [(name, _unwrapped(name, kind, x))]
    box = next(boxes, None)
    if box is None:
        raise ProblemError(f"argument {name} is a tensor descriptor, which kernels take from sm_90 on: set target")

    from warploom.layout.tensor_map import TensorMapSpec

    array, size = x.base.array, x.base.array.dtype.itemsize
    spec = TensorMapSpec(
        describe(array).dtype,
        tuple(x.shape)[::-1],
        tuple(s * size for s in x.strides[:-1])[::-1],
        tuple(box["block_size"])[::-1],
        (0, 32, 64, 128)[box["swizzle"]],
    )
    sizes = [(f"{name}.shape[{i}]", n) for i, n in enumerate(x.shape)]
    return [(name, (array, spec)), *sizes, *((f"{name}.strides[{i}]", n) for i, n in enumerate(x.strides))]


def _unwrapped(name: str, kind: Any, x: Any) -> Any:
    """An array or a number as PTX takes it."""
    if isinstance(x, _Pointer):
        return x.array
    if isinstance(kind, str) and kind.startswith("*") and x is None:
        return 0
    if not isinstance(x, int | float | np.number):
        raise ProblemError(f"argument {name} is {shown(x)}: arrays and numbers are supported")
    return float(x) if str(kind).startswith("fp") else int(x)


def _scratch(metadata: Any, name: str, grid: tuple[int, int, int]) -> Any:
    size = getattr(metadata, name, 0) or 0
    return np.zeros(size * grid[0] * grid[1] * grid[2], np.uint8) if size else 0


def _parameters(ptx: str, name: str) -> int:
    """How many parameters the kernel has: versions of Triton differ in the pointers that they add."""
    head = ptx[ptx.index(f".entry {name}(") :]
    return head[: head.index(")")].count(".param")


def _threads(ptx: str, metadata: Any) -> int:
    """The threads of a CTA; warp-specialised kernels have more than ``num_warps`` says."""
    found = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", ptx)
    return int(found[1]) if found else 32 * metadata.num_warps
