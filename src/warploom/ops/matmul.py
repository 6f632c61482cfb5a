"""``matmul`` and ``plan_matmul``: matrix products on arrays of any framework.

From arrays to a problem: their layouts and alignment, epilogues, and which batches one launch can take.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, Unpack, overload

import numpy as np

from warploom.core.dtypes import F32_MAX, DType, dtype_of, f16, f32
from warploom.core.errors import ProblemError, TraceError, shown
from warploom.core.identity import arrays_seen, function_key
from warploom.interop.arrays import ArrayView
from warploom.interop.dlpack import row_major_strides
from warploom.interop.refusals import reads_tensors
from warploom.interop.tracing import traced
from warploom.kernels.matmul.choice import KINDS, choose
from warploom.kernels.matmul.features import MOST_EXTRAS, Epilogue, EpilogueFunction, Extra
from warploom.kernels.matmul.problem import MOST_GRID_ROWS, MatmulConfig, MatmulProblem, Matrix
from warploom.kernels.settings import read, refuse
from warploom.ops.arrays import FEW, MATRIX, RESULT, ArrayArgument, ResultArray
from warploom.ops.backends import Processor
from warploom.ops.calls import Caller, Computation
from warploom.ops.declare import Arguments, Array, ElementType, Out, Views, extra_matrices
from warploom.ops.steps import Plan, Step, Steps
from warploom.ops.tuned import tuned

if TYPE_CHECKING:
    from numpy.typing import NDArray


Left = Annotated[Any, ArrayArgument("... m k", memory=MATRIX, hint="add a dimension to a vector")]
Right = Annotated[Any, ArrayArgument("... k n", memory=MATRIX, hint="for x·wᵀ pass w.T")]
Bias = Annotated[Any, ArrayArgument("n", memory=FEW)]
Extras = Annotated[Sequence[Any], ArrayArgument(types="T f32", memory=FEW, many=True)]
Product = Annotated[Any, ArrayArgument("... m n", "f16 bf16 f32", RESULT, written=True, over="extras")]
NewProduct = Annotated[Any, ResultArray("out", "... m n", "a", typed="out_dtype")]


# -- batches
Offsets = tuple[int, int, int, int]
"""Bytes, of (a, b, the result, the extra matrices)."""


@dataclass(frozen=True)
class Batches:
    """Leading dimensions as one launch sees them: ``count`` batches at the strides of (a, b, out, extras).

    ``offsets`` (elements): where each launch begins. ``folded``: the batches are more rows of A instead
    (b is one matrix, and rows follow each other evenly).
    """

    count: int
    strides: tuple[int, int, int, int]
    offsets: tuple[Offsets, ...]
    folded: bool = False

    @classmethod
    def of(cls, views: Sequence[ArrayView], shape: tuple[int, ...], out: tuple[int, ...]) -> Batches:
        """The batches of arrays (a, b, …) whose product has a shape and goes to strides ``out``."""
        a, b = views[:2]
        lead, rows, cols = shape[:-2], shape[-2], shape[-1]
        of_extra = tuple(math.prod(shape[i + 1 :]) for i in range(len(lead)))
        dims = [
            (size, (sa, sb, so, se))
            for size, sa, sb, so, se in zip(
                lead, _lead_strides(a, lead), _lead_strides(b, lead), out[:-2], of_extra, strict=True
            )
            if size != 1
        ]
        merged: list[tuple[int, tuple[int, int, int, int]]] = []
        for size, strides in dims:
            if merged and merged[-1][1] == tuple(size * s for s in strides):
                merged[-1] = (merged[-1][0] * size, strides)
            else:
                merged.append((size, strides))
        if not merged:
            return cls(1, (0, 0, 0, 0), ((0, 0, 0, 0),))
        count, strides = merged[-1]
        as_rows = (rows * a.strides[-2], 0, rows * out[-2], rows * cols)
        folded = rows > 0 and (rows == 1 or strides == as_rows) and strides[1] == 0 and _is_row_major(a)
        if rows == 1:
            folded = folded and strides[3] == cols
        outer = merged[:-1]
        if not folded and count > MOST_GRID_ROWS:
            outer, count, strides = merged, 1, (0, 0, 0, 0)
        return cls(count, strides, _offsets(outer), folded)


def _offsets(dims: Sequence[tuple[int, tuple[int, int, int, int]]]) -> tuple[Offsets, ...]:
    """Element offsets of every combination of the outer dimensions."""
    found: list[Offsets] = [(0, 0, 0, 0)]
    for size, strides in dims:
        found = [
            (o[0] + i * strides[0], o[1] + i * strides[1], o[2] + i * strides[2], o[3] + i * strides[3])
            for o in found
            for i in range(size)
        ]
    return tuple(found)


def _lead_strides(view: ArrayView, lead: tuple[int, ...]) -> tuple[int, ...]:
    """Strides along the result's leading dimensions; 0 where the array has one matrix for all."""
    own, strides = view.shape[:-2], view.strides[:-2]
    missing = len(lead) - len(own)
    return (0,) * missing + tuple(0 if size == 1 else s for size, s in zip(own, strides, strict=True))


def _is_row_major(view: ArrayView) -> bool:
    return view.strides[-1] == 1 or view.shape[-1] == 1


# -- configurations and epilogues
def matmul_config(config: Any, dtype: DType, accumulate: Any = "f32") -> MatmulConfig | None:
    """The configuration asked for: None, one of a matmul kernel, or its notation. Raises ConfigError for others.

    A notation that names no ``dtype`` or ``accumulate`` takes the call's, which are checked elsewhere.
    """
    try:
        types = {"dtype": dtype, "accumulate": dtype_of(accumulate)}
    except ValueError:
        types = {"dtype": dtype}
    return read(config, KINDS, **types)


def checked_config(config: Any, dtype: DType, accumulate: Any = "f32") -> MatmulConfig | None:
    """:func:`matmul_config`. Raises ConfigError for a ``config`` that is not valid on any GPU and for any layout."""
    found = matmul_config(config, dtype, accumulate)
    if found is not None:
        refuse(f"{found} does not fit", found.check())
    return found


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
    signature = None
    with suppress(TypeError, ValueError):  # of some builtins there is none
        signature = inspect.signature(function)
    try:
        if signature is not None:
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
    trace = partial(_trace, function, 1 + extras)
    if found or reads_tensors(trace):
        raise ProblemError(
            f"the epilogue reads {found[0] if found else 'a tensor'}, whose elements a kernel would keep as they are "
            "now, without a gradient: pass it in extras, as (1, n) or (m, 1), or one number of it as a keyword default"
        )
    if isinstance(function, BuiltinFunctionType | type | np.ufunc):  # what fails in the author's own lines says where
        try:
            trace()
        except (TypeError, ValueError) as error:
            if isinstance(error, TraceError):
                raise
            raise ProblemError(
                f"the epilogue {function.__name__} does not compute with numbers that are traced: {error}"
            ) from None


def _trace(function: Any, arguments: int) -> None:
    """Call an epilogue with traced numbers, for nothing but what it reads."""
    from warploom.lang.arithmetic import Arithmetic
    from warploom.lang.values import Traced

    k = Arithmetic()
    function(*[Traced(k, k.new_value(f32)) for _ in range(arguments)])


# -- problem
@dataclass(frozen=True)
class Multiplication:
    """The problem of a product, and bytes to add to (a, b, out, extras) for each launch."""

    problem: MatmulProblem
    offsets: tuple[Offsets, ...]


def result_types(dtype: DType, out: ArrayView | None, options: Mapping[str, Any]) -> tuple[DType, DType]:
    """(type of the result, of the sums) of matrices of a type.

    Raises ProblemError for types or a factor that no kernel takes.
    """
    out_dtype, accumulate, alpha = (options[name] for name in ("out_dtype", "accumulate", "alpha"))
    result, sums = dtype if out is None else out.dtype, _named_type(accumulate)
    if out_dtype is not None:
        result = _named_type(out_dtype)
        if result is None or result.name not in ("f16", "bf16", "f32"):
            raise ProblemError(f"out_dtype is f16, bf16 or f32, not {shown(out_dtype)}")
    if sums not in (f16, f32) or (sums is f16 and dtype is not f16):
        raise ProblemError(f"accumulate is 'f32', or 'f16' for float16 inputs; not {shown(accumulate)} for {dtype}")
    if out is not None and out.dtype is not result:
        raise ProblemError(f"out is {out.dtype}, out_dtype {result}: leave one away")
    check_factor(alpha)
    return result, sums


def check_factor(alpha: float) -> None:
    """Raises ProblemError for a factor that is no float32."""
    if not abs(alpha) <= F32_MAX:
        raise ProblemError(f"alpha (or scale) must be a finite float32, not {alpha}")


def _named_type(what: Any) -> DType | None:
    """The type that ``what`` names; None if it names none."""
    try:
        return None if what is None else dtype_of(what)
    except ValueError:
        return None


def check_epilogue(given: Arguments) -> tuple[int, ...]:
    """The result's shape. Raises ProblemError for an epilogue and extra matrices that do not go with each other."""
    function, shape = given.options["epilogue"], given.binding.shape("... m n")
    extras = [x for name, x in given.views.items() if name.startswith("extra")]
    check_function(function, len(extras))
    check_count(extras)
    if extras and function is None:
        raise ProblemError("extras are arguments of an epilogue: pass epilogue=lambda x, y: …")
    for extra in extras:
        _extra(extra, shape, math.prod(given.views["b"].shape[:-2]) > 1)
    return shape


def _extra(view: ArrayView, shape: tuple[int, ...], batched: bool = False) -> Extra:
    """An extra matrix of a result of this shape, by its own. Raises ProblemError for a shape that does not fit."""
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


def multiplication(
    arrays: Views, out_dtype: DType, accumulate: DType, alpha: float = 1.0, function: EpilogueFunction | None = None
) -> Multiplication:
    """The problem of arrays a, b, bias, extra0 …, as kernels read them, and out, if there is one to write to.

    Raises ProblemError for what no kernel takes.
    """
    a, b, out = arrays["a"], arrays["b"], arrays.get("out")
    others = [x for name, x in arrays.items() if name == "bias" or name.startswith("extra")]
    batch = np.broadcast_shapes(tuple(a.shape[:-2]), tuple(b.shape[:-2]))
    shape = (*batch, a.shape[-2], b.shape[-1])
    target = (0, row_major_strides(shape)) if out is None else (out.pointer % 16, tuple(out.strides))
    batches = Batches.of([a, b], shape, target[1])
    extras = tuple([_extra(x, shape) for name, x in arrays.items() if name.startswith("extra")])
    _check_batches(extras, batches)
    epilogue = Epilogue(alpha != 1.0, "bias" in arrays, extras, function, function_key(function))
    problem = _problem((a, b, *others), batches, shape, target, (out_dtype, accumulate), epilogue)
    sizes = a.dtype.bytes, b.dtype.bytes, out_dtype.bytes, a.dtype.bytes
    offsets = [tuple([o * size for o, size in zip(group, sizes, strict=True)]) for group in batches.offsets]
    return Multiplication(replace(problem, alpha=alpha), tuple(offsets))  # type: ignore[arg-type]


def _chunk(address: int, *strides: int) -> int:
    """Elements (8, 4, 2, 1) that every line is aligned to, 16-bit elements, ``address`` in bytes."""
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


# -- plan
@dataclass(frozen=True)
class MatmulPlan(Plan):
    """The kernels that a call of :func:`matmul` would run: nothing has been compiled or launched yet.

    Of a split K a second kernel adds the parts. They run once for each of the ``offsets`` of groups of batches.
    """

    problem: MatmulProblem
    config: MatmulConfig
    offsets: tuple[Offsets, ...] = ((0, 0, 0, 0),)

    @cached_property
    def steps(self) -> Steps:
        """The launches, for each group of batches."""
        found: list[Step] = []
        for of_a, of_b, of_out, of_extra in self.offsets:
            offsets = {"a": of_a, "b": of_b, "out": of_out, "extra0": of_extra, "extra1": of_extra}
            found += [Step(call, self.problem.flops if "a" in call.arrays else 0, offsets) for call in self.calls]
        return Steps(tuple(found))


class MatmulOptions(TypedDict, total=False):
    """The options of :func:`matmul`, and its optional arrays but ``out``."""

    out_dtype: Any
    accumulate: Any
    bias: Any
    epilogue: EpilogueFunction | None
    extras: Sequence[Any]
    alpha: float
    config: MatmulConfig | str | None


@traced
def plan_matmul(a: Any, b: Any, *, out: Any = None, **options: Unpack[MatmulOptions]) -> MatmulPlan:
    """Plan a call of :func:`matmul`: its configuration and the reason for it, Program and CUDA. Runs nothing."""
    extras = extra_matrices(options.get("extras"))
    return matmul_call.computation({"a": a, "b": b, "out": out, **options, "extras": extras}).planned()


# -- the call
@overload
def matmul(a: Array, b: Any, *, out: None = None, **options: Unpack[MatmulOptions]) -> Array: ...


@overload
def matmul(a: np.ndarray[Any, Any], b: Any, *, out: None = None, **options: Unpack[MatmulOptions]) -> NDArray[Any]: ...


@overload
def matmul(a: Any, b: Any, *, out: Out, **options: Unpack[MatmulOptions]) -> Out: ...


def matmul(
    a: Left,
    b: Right,
    *,
    out_dtype: ElementType = None,
    accumulate: ElementType = "f32",
    bias: Bias = None,
    epilogue: EpilogueFunction | None = None,
    extras: Extras = (),
    alpha: float = 1.0,
    out: Product = None,
    config: MatmulConfig | str | None = None,
) -> NewProduct:
    """epilogue(alpha · a·b + bias), in one kernel.

    Shapes: a (…, m, k), b (…, k, n), result (…, m, n); leading dimensions broadcast as in NumPy. dtypes: float16 or
    bfloat16, both the same. Any m, n, k, zero included; each matrix row- or column-major with any leading stride (of
    both strides one is 1; others are copied first): ``matmul(x, w.T)`` reads w in place. On sm_90a matrices whose
    lines start at multiples of 16 bytes are multiplied by ``wgmma``; others by ``mma.sync``, which is slower, and most
    so where lines start at odd elements: pad K (or the leading stride) to a multiple of 8 where you can.
    ``plan_matmul`` says which and why; ``config`` asks for one, as an object or in its notation.

    ``out_dtype`` is the inputs' type by default, or float16, bfloat16, float32. ``accumulate`` "f32", or "f16" (float16
    inputs; faster where the hardware is, and the sum is rounded to 11 bits at every step of 16). ``bias``, (n,), of the
    inputs' type, is added to every row. ``epilogue`` is a Python function of the f32 sum that is compiled into the
    kernel (``warploom.lang.functions`` has relu, gelu, silu, maximum …); with ``extras``, one or two matrices of the
    inputs' type or float32, it takes their elements too: ``epilogue=lambda x, gate: silu(x) * gate``. They have the
    result's shape, or a value for each row, (m, 1), or each column, (1, n). Numbers that it reads are constants of the
    kernel, which another value traces anew: globals, closures, defaults, and attributes that it names itself. What
    methods and properties read is read once: pass it as keyword defaults. An epilogue that sees an array, or reads a
    tensor anywhere, is refused: arrays are extras.
    ``out`` receives the result: of that shape, row-major with any stride between rows. It shares no memory with a, b or
    bias; an extra matrix may be ``out`` itself.

    Small m·n with large k is cut along k (``split_k``), uneven counts of tiles too (``stream_k``); parts are added in a
    fixed order, so equal calls give equal bits. Arrays of torch, CuPy and JAX on a GPU are used where they lie, on the
    caller's stream; the result is of the same kind. NumPy arrays run on the GPU if there is one, else on the emulator.

    Under ``torch.compile`` a call is one operator, ``warploom::matmul``, with an ``epilogue`` too; one with ``out``
    breaks the graph instead.

    Raises ProblemError for arrays it does not take, ConfigError for a ``config`` that does not fit.
    """
    if extras.__class__ is not tuple:
        extras = extra_matrices(extras)
    return matmul_call((a, b, bias, out, *extras), (out_dtype, accumulate, epilogue, alpha), config)


def _work(given: Arguments, config: Any) -> Computation:
    a, out, options = given.views["a"], given.views.get("out"), given.options
    config = matmul_config(config, a.dtype, options["accumulate"])
    types, shape = result_types(a.dtype, out, options), check_epilogue(given)

    def plan(arrays: Views) -> MatmulPlan:
        product = multiplication(arrays, *types, options["alpha"], options["epilogue"])
        problem = product.problem

        def choice(on: Processor) -> tuple[MatmulConfig, str]:
            return tuned(problem, on.target, on.gpu, KINDS) or choose(problem, on.target)

        return MatmulPlan.of(problem, a.device, config, choice, offsets=product.offsets)

    return Computation(given, plan, empty=given.made if 0 in shape else None)


matmul_call = Caller(matmul, _work, recorded=True)
