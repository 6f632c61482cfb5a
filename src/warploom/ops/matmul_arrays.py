"""From arrays to a matrix product: shapes, types, layouts and alignment."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from warploom.core.arguments import MOST_STRIDE
from warploom.core.dtypes import F32_MAX, DType, bf16, dtype_of, f16, f32
from warploom.core.errors import ProblemError, shown
from warploom.core.identity import arrays_seen, function_key
from warploom.interop.arrays import ArrayView, require_dtype, same_device
from warploom.interop.copies import compact
from warploom.interop.overlap import overlaps_itself, same_elements, share_memory
from warploom.interop.refusals import reads_tensors
from warploom.kernels.matmul.choice import KINDS
from warploom.kernels.matmul.features import MOST_EXTRAS, Epilogue, EpilogueFunction, Extra
from warploom.kernels.matmul.problem import MatmulConfig, MatmulProblem, Matrix
from warploom.kernels.settings import read, refuse
from warploom.ops.matmul_batches import Batches, Offsets

READ_ONLY = "out is read-only: pass an array that can be written"


@dataclass(frozen=True)
class Inputs:
    """Described and checked arrays (a, b, bias, extras …) and the problem they are.

    ``offsets``: bytes to add to (a, b, out, extras) for each launch; ``copied``: some array had to be copied first.
    """

    views: tuple[ArrayView, ...]
    shape: tuple[int, ...]
    problem: MatmulProblem
    offsets: tuple[Offsets, ...]
    copied: bool
    reread: Callable[[Sequence[ArrayView], ArrayView], Inputs]


def read_inputs(
    views: Sequence[ArrayView],
    out: ArrayView | None,
    has_bias: bool,
    function: EpilogueFunction | None,
    out_dtype: Any,
    accumulate: Any,
    alpha: float,
    copy: Callable[[ArrayView], ArrayView] = compact,
) -> Inputs:
    """Check the arrays (a, b, the bias if there is one, extras). Raises ProblemError with the first thing wrong.

    ``copy`` makes those plain that no kernel reads in place; with ``as_if_compact`` the result is good for a plan.
    """
    a, b, *others = views
    extras = others[1:] if has_bias else others
    dtypes = result_types(a, b, out, out_dtype, accumulate, alpha)
    shape = checked_shape(views, has_bias, function)
    kept = [readable(a, copy), readable(b, copy)] + [x if x.contiguous else copy(x) for x in others]
    target = _result_layout(shape, out, a, dtypes[0])
    if out is not None:
        refuse_overlap(views, out, has_bias)
    batches = Batches.of(kept, shape, target[1])
    own = tuple(_extra(x, shape) for x in extras)
    _check_batches(own, batches)
    epilogue = Epilogue(alpha != 1.0, has_bias, own, function, function_key(function))
    problem = replace(_problem(kept, batches, shape, target, dtypes, epilogue), alpha=alpha)

    def reread(again: Sequence[ArrayView], result: ArrayView) -> Inputs:
        return read_inputs(again, result, has_bias, function, dtypes[0], dtypes[1], alpha)

    copied = any(x is not y for x, y in zip(kept, views, strict=True))
    sizes = (a.dtype.bytes, b.dtype.bytes, dtypes[0].bytes, a.dtype.bytes)
    offsets = tuple(tuple(o * size for o, size in zip(group, sizes, strict=True)) for group in batches.offsets)
    return Inputs(tuple(kept), shape, problem, offsets, copied, reread)  # type: ignore[arg-type]


# -- checks
def checked_shape(
    views: Sequence[ArrayView], has_bias: bool, function: EpilogueFunction | None = None
) -> tuple[int, ...]:
    """The result's shape, by shapes, types and devices alone. Raises ProblemError with the first thing wrong."""
    a, b, *others = views
    shape = _result_shape(a, b)
    extras = others[1:] if has_bias else others
    _check_others(others, has_bias, extras, function, shape, a.dtype, batched=math.prod(b.shape[:-2]) > 1)
    same_device(views, ["a", "b", *["bias"] * has_bias, *["an extra matrix"] * len(extras)])
    return shape


def matmul_config(config: Any, dtype: DType, accumulate: Any = "f32") -> MatmulConfig | None:
    """The configuration asked for: None, one of a matmul kernel, or its notation. Raises ConfigError for others.

    A notation that names no ``dtype`` or ``accumulate`` takes the call's, which are checked elsewhere.
    """
    try:
        types = {"dtype": dtype, "accumulate": dtype_of(accumulate)}
    except ValueError:
        types = {"dtype": dtype}
    return read(config, KINDS, **types)


def checked_config(config: Any, dtype: DType, accumulate: Any = "f32") -> None:
    """Raises ConfigError for a ``config`` that is not valid on any GPU and for any layout."""
    found = matmul_config(config, dtype, accumulate)
    if found is not None:
        refuse(f"{found} does not fit", found.check())


def check_count(extras: Sequence[Any]) -> None:
    """Raises ProblemError for more extra matrices than an epilogue takes."""
    if len(extras) > MOST_EXTRAS:
        raise ProblemError(f"an epilogue takes at most {MOST_EXTRAS} extra matrices, not {len(extras)}")


def check_function(function: Any, extras: int) -> None:
    """Raises ProblemError if ``function`` cannot be called with a sum and so many elements of extra matrices.

    So it does if the function sees an array: whatever is read of it counts once, when the kernel is traced.
    """
    if function is None:
        return
    if not callable(function):
        raise ProblemError(
            f"epilogue is a function of the sum, such as warploom.lang.functions.relu, not {shown(function)}"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of some builtins there is none
        return
    try:
        signature.bind(*range(1 + extras))
    except TypeError as error:
        values = "the sum" if extras == 0 else f"the sum and one element of each of the {extras} extra matrices"
        name = getattr(function, "__name__", type(function).__name__)
        raise ProblemError(
            f"the epilogue is called with {values}, which {name}{signature} does not take ({error}): give it one "
            "positional parameter for each"
        ) from None
    kinds = {name: type(array).__name__ for name, array in arrays_seen(function).items()}
    found = [f"{name}, a {kind}" if name else f"a bound {kind}" for name, kind in kinds.items()]
    if found or reads_tensors(lambda: _trace(function, 1 + extras)):
        raise ProblemError(
            f"the epilogue reads {found[0] if found else 'a tensor'}, whose elements a kernel would keep as they are "
            "now, without a gradient: pass it in extras, as (1, n) or (m, 1), or one number of it as a keyword default"
        )


def _trace(function: Any, arguments: int) -> None:
    """Call an epilogue with traced numbers, for nothing but what it reads."""
    from warploom.lang.arithmetic import Arithmetic
    from warploom.lang.values import Traced

    k = Arithmetic()
    function(*[Traced(k, k.new_value(f32)) for _ in range(arguments)])


def _result_shape(a: ArrayView, b: ArrayView) -> tuple[int, ...]:
    for name, view in (("a", a), ("b", b)):
        if len(view.shape) < 2:
            raise ProblemError(f"{name} has shape {tuple(view.shape)}; matmul takes matrices: add a dimension")
    if a.shape[-1] != b.shape[-2]:
        raise ProblemError(
            f"a has {a.shape[-1]} columns and b has {b.shape[-2]} rows ({tuple(a.shape)} · {tuple(b.shape)}): they "
            "must be equal; for x·wᵀ pass w.T"
        )
    outer_a, outer_b = tuple(a.shape[:-2]), tuple(b.shape[:-2])
    rank = max(len(outer_a), len(outer_b))
    padded = [(1,) * (rank - len(x)) + x for x in (outer_a, outer_b)]
    if any(x != y and 1 not in (x, y) for x, y in zip(*padded, strict=True)):
        raise ProblemError(f"the leading dimensions {outer_a} of a and {outer_b} of b do not broadcast")
    batch = tuple(y if x == 1 else x for x, y in zip(*padded, strict=True))
    return (*batch, a.shape[-2], b.shape[-1])


def result_types(
    a: ArrayView, b: ArrayView, out: ArrayView | None, out_dtype: Any, accumulate: Any, alpha: float
) -> tuple[DType, DType]:
    """(type of the result, of the sums). Raises ProblemError for types or an ``alpha`` that no kernel takes."""
    for name, view in (("a", a), ("b", b)):
        require_dtype(view, name, (f16, bf16))
    if a.dtype is not b.dtype:
        raise ProblemError(f"a is {a.dtype} and b is {b.dtype}: convert them to one type")
    result, sums = a.dtype if out is None else out.dtype, _named_type(accumulate)
    if out_dtype is not None:
        result = _named_type(out_dtype)
    elif out is not None:
        require_dtype(out, "out", (f16, bf16, f32))
    if result not in (f16, bf16, f32):
        raise ProblemError(f"out_dtype is f16, bf16 or f32, not {shown(out_dtype)}")
    if sums not in (f16, f32) or (sums is f16 and a.dtype is not f16):
        raise ProblemError(f"accumulate is 'f32', or 'f16' for float16 inputs; not {shown(accumulate)} for {a.dtype}")
    if out is not None and out.dtype is not result:
        raise ProblemError(f"out is {out.dtype}, out_dtype {result}: leave one away")
    if not abs(alpha) <= F32_MAX:
        raise ProblemError(f"alpha (or scale) must be a finite float32, not {alpha}")
    return result, sums


def _named_type(what: Any) -> DType | None:
    """The type that ``what`` names; None if it names none."""
    try:
        return None if what is None else dtype_of(what)
    except ValueError:
        return None


def _check_others(
    others: Sequence[ArrayView],
    has_bias: bool,
    extras: Sequence[ArrayView],
    function: EpilogueFunction | None,
    shape: tuple[int, ...],
    dtype: DType,
    batched: bool,
) -> None:
    if has_bias and tuple(others[0].shape) != (shape[-1],):
        raise ProblemError(f"bias has shape {tuple(others[0].shape)}, the result {shape}: bias must be ({shape[-1]},)")
    check_function(function, len(extras))
    check_count(extras)
    if extras and function is None:
        raise ProblemError("extras are arguments of an epilogue: pass epilogue=lambda x, y: …")
    for view in others:
        if view.dtype is not dtype and not (view.dtype is f32 and any(view is extra for extra in extras)):
            found = view.dtype.array_name
            raise ProblemError(f"bias and extras must be {dtype} as a and b are (extras also f32), not {found}")
    for extra in extras:
        _extra(extra, shape, batched)


def _extra(view: ArrayView, shape: tuple[int, ...], batched: bool = False) -> Extra:
    """What an extra matrix has values for. Raises ProblemError for a shape that fits no result of this one."""
    own, wide = tuple(view.shape), view.dtype is f32
    if own == shape:
        return Extra(wide)
    if own == (*shape[:-1], 1):
        return Extra(wide, "rows")
    if len(own) >= 2 and own == (*(1,) * (len(own) - 1), shape[-1]):
        return Extra(wide, "cols")
    lines = f", {(*shape[:-1], 1)} for a value of each row, or {(1, shape[-1])} for a value of each column"
    raise ProblemError(
        f"an extra matrix has shape {own}, the result {shape}: give it that shape{'' if batched else lines}"
    )


def _check_batches(extras: Sequence[Extra], batches: Batches) -> None:
    """Raises ProblemError for extra matrices that the launches of a batch do not reach."""
    several = len(batches.offsets) > 1
    if any(
        (x.along != "both" and (several or (batches.count > 1 and not batches.folded))) or (x.wide and several)
        for x in extras
    ):
        raise ProblemError(
            "a batch of products takes extra matrices of the result's shape and the inputs' type alone: multiply the "
            "matrices one by one, or give all their values"
        )


def refuse_overlap(views: Sequence[ArrayView], out: ArrayView, has_bias: bool) -> None:
    """Raises ProblemError where the result would overwrite what is still to be read.

    An extra matrix may be ``out`` itself: its element is read before the result takes its place.
    """
    for i, view in enumerate(views):
        first_extra = 3 if has_bias else 2
        if share_memory(view, out) and not (i >= first_extra and same_elements(view, out)):
            name = ("a", "b", "bias")[i] if i < first_extra else f"extras[{i - first_extra}]"
            hint = ", or exactly that matrix" if i >= first_extra else ""
            raise ProblemError(
                f"out shares memory with {name}, which would be overwritten while it is read: pass another array{hint}"
            )


# -- layout
def readable(view: ArrayView, copy: Callable[[ArrayView], ArrayView] = compact) -> ArrayView:
    """The view, or a row-major copy where neither rows nor columns are contiguous or a stride cannot be expressed."""
    if 0 in view.shape:
        return view
    outer = [s for size, s in zip(view.shape, view.strides, strict=True) if size > 1]
    plain = view.strides[-1] == 1 or view.strides[-2] == 1 or view.shape[-1] == 1 or view.shape[-2] == 1
    return view if plain and all(0 <= s <= MOST_STRIDE for s in outer) else copy(view)


def _result_layout(
    shape: tuple[int, ...], out: ArrayView | None, a: ArrayView, dtype: DType
) -> tuple[int, tuple[int, ...]]:
    """(address modulo 16, strides) of the result: the caller's, or of a new row-major array."""
    if out is None:
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return 0, strides
    if tuple(out.shape) != shape:
        raise ProblemError(f"out has shape {tuple(out.shape)}, the result {shape}")
    if out.device != a.device:
        raise ProblemError(f"out is on {out.device}, a on {a.device}: they must be on one device")
    if out.readonly:
        raise ProblemError(READ_ONLY)
    if 0 in shape:  # of no elements the strides say nothing
        return out.pointer % 16, tuple(out.strides)
    outer = [s for size, s in zip(shape, out.strides, strict=True) if size > 1]
    if max(outer, default=0) > MOST_STRIDE:
        raise ProblemError(
            f"out has strides {out.strides}: {MOST_STRIDE + 1} elements or more are too far, pass another"
        )
    if (shape[-1] > 1 and out.strides[-1] != 1) or min(outer, default=1) <= 0:
        raise ProblemError(f"out has strides {out.strides}: it must be row-major with a contiguous last dimension")
    if overlaps_itself(out):
        raise ProblemError(f"out has strides {out.strides} for shape {shape}: some of its elements lie on each other")
    return out.pointer % 16, tuple(out.strides)


def _chunk(address: int, *strides: int) -> int:
    """Elements (8, 4, 2, 1) that every line is aligned to, 16-bit elements, ``address`` in bytes.

    Raises ProblemError for elements at odd addresses.
    """
    if address % 2:
        raise ProblemError("an array's 16-bit elements start at an odd address: copy it first")
    bits = address | 16
    for stride in strides:
        bits |= 2 * stride
    return (bits & -bits) // 2


def _problem(
    views: Sequence[ArrayView],
    batches: Batches,
    shape: tuple[int, ...],
    target: tuple[int, tuple[int, ...]],
    dtypes: tuple[DType, DType],
    epilogue: Epilogue,
) -> MatmulProblem:
    a, b, *others = views
    address, out = target
    count = batches.count
    rows, cols, depth = shape[-2], shape[-1], a.shape[-1]
    inner = (0, 0, 0, 0) if batches.folded else batches.strides
    row_stride = (batches.strides[0], batches.strides[2]) if batches.folded and rows == 1 else (a.strides[-2], out[-2])
    if batches.folded:
        rows, count = rows * count, 1
    steps = [[group[i] for group in batches.offsets] for i in range(4)]  # between launches
    a_k, a_line = _lines(a, rows, row_stride[0], 0)
    b_k, b_line = _lines(b, cols, b.strides[-1], 1)
    out_line = row_stride[1] if rows > 1 else 0
    pairs = cols % 2 == 0 and (address % (8 if dtypes[0] is f32 else 4)) == 0 and not (out_line | inner[2]) & 1
    pairs = (
        pairs
        and all(x.pointer % (2 * x.dtype.bytes) == 0 for x in others if x.shape[-1] > 1)
        and not any(o & 1 for o in steps[2])
    )
    return MatmulProblem(
        rows,
        cols,
        depth,
        a.dtype,
        dtypes[1],
        dtypes[0],
        Matrix(a_k, a_line, inner[0], _chunk(a.pointer, a_line, inner[0], *steps[0])),
        Matrix(b_k, b_line, inner[1], _chunk(b.pointer, b_line, inner[1], *steps[1])),
        Matrix(True, out_line, inner[2], _chunk(address, out_line, inner[2], cols % 8, *steps[2])),
        count,
        epilogue,
        pairs,
    )


def _lines(view: ArrayView, outer: int, outer_stride: int, k_dim: int) -> tuple[bool, int]:
    """(whether K is contiguous, the stride between lines): ``outer`` is the extent of M or N, ``k_dim`` 0 for A."""
    if 0 in view.shape:
        return True, 0
    k_stride = view.strides[-1] if k_dim == 0 else view.strides[-2]
    depth = view.shape[-1] if k_dim == 0 else view.shape[-2]
    if k_stride == 1 or (depth <= 1 and outer_stride != 1):
        return True, outer_stride if outer > 1 else 0
    if outer_stride == 1 or outer <= 1:
        return (False, k_stride) if depth > 1 else (True, outer_stride if outer > 1 else 0)
    raise ProblemError(f"strides {view.strides} of shape {view.shape} have no contiguous axis")
