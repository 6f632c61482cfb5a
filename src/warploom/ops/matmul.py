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
from itertools import product
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Annotated, Any, Never, TypedDict, Unpack, overload

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
from warploom.kernels.source import KernelCall
from warploom.ops.arrays import FEW, MATRIX, RESULT, ArrayArgument, ResultArray
from warploom.ops.backends import Processor
from warploom.ops.calls import Caller, Computation
from warploom.ops.declare import (
    Arguments,
    Array,
    ElementType,
    Out,
    Views,
    extra_matrices,
)
from warploom.ops.steps import Plan, Steps
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
Numbers = tuple[int, int, int, int]
"""One number for each of (a, b, the result, the extra matrices): strides or offsets."""


@dataclass(frozen=True)
class Batches:
    """A product as one launch sees it: ``rows`` of a result, and ``count`` of those, at strides in elements.

    ``offsets`` (elements): where each launch begins.
    """

    rows: int
    row_strides: Numbers
    count: int
    strides: Numbers
    offsets: tuple[Numbers, ...]

    @classmethod
    def of(cls, a: ArrayView, b: ArrayView, shape: tuple[int, ...], out: tuple[int, ...]) -> Batches:
        """The batches of a product that has a shape and goes to strides ``out``.

        Dimensions that lie as one do are one. So batches are more rows, where b is one matrix.
        """
        *lead, rows, cols = shape
        of_extra = [math.prod(shape[i + 1 :]) for i in range(len(lead))]
        of_each = zip(_lead_strides(a, lead), _lead_strides(b, lead), out[:-2], of_extra, strict=True)
        dims = list(zip(lead, of_each, strict=True))
        own = (a.strides[-2], 0, out[-2], cols)
        row_major = a.strides[-1] == 1 or a.shape[-1] == 1
        merged = _merged([*dims, (rows, own)] if row_major else dims)
        if row_major and merged and (rows != 1 or merged[-1][1][1::2] == (0, cols)):  # of one row strides say nothing
            rows, own = merged.pop()
        count, strides = merged.pop() if merged and merged[-1][0] <= MOST_GRID_ROWS else (1, (0, 0, 0, 0))
        offsets: list[Numbers] = []
        for place in product(*[range(size) for size, _ in merged]):
            steps = [[i * s for s in others] for i, (_, others) in zip(place, merged, strict=True)]
            a_step, b_step, out_step, extra_step = map(sum, zip((0, 0, 0, 0), *steps, strict=True))
            offsets.append((a_step, b_step, out_step, extra_step))
        return cls(rows, own, count, strides, tuple(offsets))


def _merged(dims: Sequence[tuple[int, Numbers]]) -> list[tuple[int, Numbers]]:
    """The dimensions, outermost first, without those of one element; those that lie as one do are one."""
    found: list[tuple[int, Numbers]] = []
    for size, strides in dims:
        if size == 1:
            continue
        outer = found.pop()[0] if found and found[-1][1] == tuple(size * s for s in strides) else 1
        found.append((outer * size, strides))
    return found


def _lead_strides(view: ArrayView, lead: Sequence[int]) -> tuple[int, ...]:
    """Strides along the result's leading dimensions; 0 where the array has one matrix for all."""
    own, strides = view.shape[:-2], view.strides[:-2]
    missing = len(lead) - len(own)
    return (0,) * missing + tuple(0 if size == 1 else s for size, s in zip(own, strides, strict=True))


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
    offsets: tuple[Numbers, ...]


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
    if any((x.along != "both" and (several or batches.count > 1)) or (x.wide and several) for x in extras):
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
    others = {name: x for name, x in arrays.items() if name == "bias" or name.startswith("extra")}
    shape = (*np.broadcast_shapes(tuple(a.shape[:-2]), tuple(b.shape[:-2])), a.shape[-2], b.shape[-1])
    address, lying = (0, row_major_strides(shape)) if out is None else (_start(out) % 16, tuple(out.strides))
    batches = Batches.of(a, b, shape, lying)
    extras = tuple([_extra(x, shape) for name, x in others.items() if name != "bias"])
    _check_batches(extras, batches)

    def matrix(i: int, address: int, k_contiguous: bool, line: int, *more: int) -> Matrix:
        """One of a, b and the result; every line is aligned to so many (8, 4, 2, 1) elements of 16 bits."""
        stride = batches.strides[i]
        bits = address | 16
        for s in (line, stride, *more, *[group[i] for group in batches.offsets]):
            bits |= 2 * s
        return Matrix(k_contiguous, line, stride, (bits & -bits) // 2)

    rows, cols, depth = batches.rows, shape[-1], a.shape[-1]
    of_a = matrix(0, _start(a), *_lines(a, rows, batches.row_strides[0], depth, a.strides[-1]))
    of_b = matrix(1, _start(b), *_lines(b, cols, b.strides[-1], depth, b.strides[-2]))
    of_out = matrix(2, address, True, batches.row_strides[2] if rows > 1 else 0, cols % 8)
    odd = [cols, of_out.stride, of_out.batch, *[group[2] for group in batches.offsets]]
    pairs = not any(x & 1 for x in odd) and address % (8 if out_dtype is f32 else 4) == 0
    pairs = pairs and all(x.pointer % (2 * x.dtype.bytes) == 0 for x in others.values() if x.shape[-1] > 1)
    epilogue = Epilogue(alpha != 1.0, "bias" in arrays, extras, function, function_key(function))
    types = a.dtype, accumulate, out_dtype
    problem = MatmulProblem(
        rows, cols, depth, *types, of_a, of_b, of_out, batches.count, epilogue, pairs=pairs, alpha=alpha
    )
    sizes = a.dtype.bytes, b.dtype.bytes, out_dtype.bytes, a.dtype.bytes
    offsets = [tuple([o * size for o, size in zip(group, sizes, strict=True)]) for group in batches.offsets]
    return Multiplication(problem, tuple(offsets))  # type: ignore[arg-type]


def _start(view: ArrayView) -> int:
    """The address of the first element; 0 without elements, of which an address says nothing."""
    return 0 if 0 in view.shape else view.pointer


def _lines(view: ArrayView, outer: int, outer_stride: int, depth: int, k_stride: int) -> tuple[bool, int]:
    """(whether K is contiguous, the stride between lines): ``outer`` is the extent of M or N."""
    if 0 in view.shape:
        return True, 0
    if k_stride == 1 or depth <= 1:
        return True, outer_stride if outer > 1 else 0
    if outer_stride == 1 or outer <= 1:
        return False, k_stride
    raise ProblemError(f"strides {view.strides} of shape {view.shape} have no contiguous axis")


# -- plan
@dataclass(frozen=True)
class MatmulPlan(Plan):
    """The kernels that a call of :func:`matmul` would run: nothing has been compiled or launched yet.

    Of a split K a second kernel adds the parts. They run once for each of the ``offsets`` of groups of batches.
    """

    problem: MatmulProblem
    config: MatmulConfig
    offsets: tuple[Numbers, ...] = ((0, 0, 0, 0),)

    @cached_property
    def steps(self) -> Steps:
        """The launches, for each group of batches."""
        found: list[KernelCall] = []
        for of_a, of_b, of_out, of_extra in self.offsets:
            offsets = {"a": of_a, "b": of_b, "out": of_out, "extra0": of_extra, "extra1": of_extra}
            found += [replace(x, flops=self.problem.flops * ("a" in x.arrays), offsets=offsets) for x in self.calls]
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
    **unknown: Never,
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
    return matmul_call((a, b, bias, out, *extras), (out_dtype, accumulate, epilogue, alpha), config, False, unknown)


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

    return Computation(given, plan, nothing=0 in shape)


matmul_call = Caller(matmul, _work, recorded=True)
