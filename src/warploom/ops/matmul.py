"""``matmul`` and ``plan_matmul``: matrix products on arrays of any framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Unpack, overload

import numpy as np

from warploom.core.errors import ProblemError
from warploom.interop.arrays import ArrayView, empty
from warploom.interop.copies import as_if_compact, compact
from warploom.interop.tracing import traced
from warploom.kernels.matmul.choice import KINDS, choose
from warploom.kernels.matmul.features import EpilogueFunction
from warploom.kernels.matmul.problem import MatmulConfig, MatmulProblem
from warploom.kernels.source import KernelCall
from warploom.ops.calls import Caller, Computation, Views
from warploom.ops.declare import ArrayArgument, ElementType, Output, Tensor
from warploom.ops.matmul_arrays import READ_ONLY, Inputs, Offsets, matmul_config, read_inputs, refuse_overlap
from warploom.ops.options import extra_matrices, refuse_unhashable
from warploom.ops.processors import Processor, decided
from warploom.ops.steps import Plan, Step, Steps
from warploom.ops.tuned import tuned

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from warploom.ops.signatures import Array, MatmulOptions, Out


@overload
def matmul(a: Array, b: Any, *, out: None = None, **options: Unpack[MatmulOptions]) -> Array: ...


@overload
def matmul(a: np.ndarray[Any, Any], b: Any, *, out: None = None, **options: Unpack[MatmulOptions]) -> NDArray[Any]: ...


@overload
def matmul(a: Any, b: Any, *, out: Out, **options: Unpack[MatmulOptions]) -> Out: ...


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    out_dtype: ElementType = None,
    accumulate: ElementType = "f32",
    bias: Tensor = None,
    epilogue: EpilogueFunction | None = None,
    extras: Annotated[Sequence[Any], ArrayArgument(many=True)] = (),
    alpha: float = 1.0,
    out: Output = None,
    config: MatmulConfig | str | None = None,
) -> Any:
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


def _work(views: Views, asked: dict[str, Any], config: Any, copy: Callable[[ArrayView], ArrayView]) -> Computation:
    accumulate, out = asked["accumulate"], views.get("out")
    chosen = matmul_config(config, views["a"].dtype, accumulate)
    named = {name: asked[name] for name in ("out_dtype", "accumulate", "epilogue")}
    refuse_unhashable({**named, "config": chosen})
    inputs = _read(views, asked, copy)
    first, form = inputs.views[0], (inputs.shape, inputs.problem.out_dtype)
    new = {"out": form} if out is None else {}
    made = None
    if 0 in inputs.shape:
        if chosen is not None:
            _plan(inputs, chosen)  # refuses what does not fit
        made = [empty(first.kind, *form, first.device) for _ in new]
    arrays = dict(zip(("a", "b", *inputs.problem.combined), inputs.views, strict=True))

    def steps(lying: Views) -> Steps:
        read = [lying[name] for name in arrays]
        same = all(x is y for x, y in zip(read, inputs.views, strict=True))
        again = inputs if same else inputs.reread(read, lying["out"])
        return _plan(again, chosen).steps(again.offsets)

    written = () if out is None else ("out",)
    return Computation(arrays if out is None else {**arrays, "out": out}, new, steps, arrays, written, made=made)


def _read(views: Views, asked: Mapping[str, Any], copy: Callable[[ArrayView], ArrayView] = compact) -> Inputs:
    read = [x for name, x in views.items() if name != "out"]
    return read_inputs(
        read,
        views.get("out"),
        "bias" in views,
        asked["epilogue"],
        asked["out_dtype"],
        asked["accumulate"],
        asked["alpha"],
        copy,
    )


@dataclass(frozen=True)
class MatmulPlan(Plan):
    """What a call of :func:`matmul` would run: nothing has been compiled or launched yet."""

    problem: MatmulProblem
    config: MatmulConfig
    multiprocessors: int

    @cached_property
    def calls(self) -> tuple[KernelCall, ...]:
        """The kernels and their launches: of a split K a second one adds the parts."""
        return self.config.calls(self.problem, self.multiprocessors)

    def steps(self, groups: Iterable[Offsets] = ((0, 0, 0, 0),)) -> Steps:
        """The launches, for each group of batches."""
        found: list[Step] = []
        for of_a, of_b, of_out, of_extra in groups:
            offsets = {"a": of_a, "b": of_b, "out": of_out, "extra0": of_extra, "extra1": of_extra}
            found += [Step(call, self.problem.flops if "a" in call.arrays else 0, offsets) for call in self.calls]
        return Steps(tuple(found))


@traced
def plan_matmul(
    a: Any,
    b: Any,
    *,
    out_dtype: Any = None,
    accumulate: Any = "f32",
    bias: Any = None,
    epilogue: EpilogueFunction | None = None,
    extras: Sequence[Any] = (),
    alpha: float = 1.0,
    out: Any = None,
    config: MatmulConfig | str | None = None,
) -> MatmulPlan:
    """What :func:`matmul` would run with these arguments: configuration, reason, Program, CUDA. Runs nothing."""
    arrays = a, b, bias, out, *extra_matrices(extras)
    views, asked = matmul_call.planned(arrays, (out_dtype, accumulate, epilogue, alpha))
    inputs = _read(views, asked, as_if_compact)
    return _plan(inputs, matmul_config(config, inputs.problem.dtype, accumulate))


def _plan(inputs: Inputs, config: MatmulConfig | None) -> MatmulPlan:
    problem = inputs.problem

    def choice(on: Processor) -> tuple[MatmulConfig, str]:
        return tuned(problem, on.target, on.gpu, KINDS) or choose(problem, on.target)

    chosen, reason, on = decided(problem, inputs.views[0].device, config, choice)
    return MatmulPlan(problem, chosen, reason, on.target.name, str(on), on.multiprocessors)


def _refuse_out(views: Mapping[str, ArrayView]) -> None:
    """Raises ProblemError for an ``out`` that the result cannot be written to."""
    if "out" not in views:
        return
    if views["out"].readonly:
        raise ProblemError(READ_ONLY)
    refuse_overlap([x for name, x in views.items() if name != "out"], views["out"], "bias" in views)


matmul_call = Caller(matmul, _work, refuse=_refuse_out, recorded=True)
