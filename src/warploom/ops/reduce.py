"""``matmul_reduce``: row reductions of products that are never written.

The rows of a large problem are taken in blocks, so that the states of a block's tiles fit :data:`WORKSPACE_BYTES`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, Never, TypedDict, Unpack, overload

import numpy as np

from warploom.core.dtypes import f32
from warploom.core.errors import ProblemError
from warploom.interop.arrays import Device
from warploom.interop.tracing import traced
from warploom.kernels.matmul.choice import choose_for_rows
from warploom.kernels.matmul.problem import MatmulConfig, MatmulProblem
from warploom.kernels.matmul_reduce.problem import ReduceProblem
from warploom.kernels.matmul_reduce.states import OPS, ReduceOp
from warploom.kernels.settings import violations_of
from warploom.kernels.source import KernelCall
from warploom.ops.arrays import MATRIX, ArrayArgument, ResultArray
from warploom.ops.backends import Processor
from warploom.ops.calls import Caller, Computation
from warploom.ops.declare import Arguments, Array, Views, flag
from warploom.ops.matmul import Bias, check_factor, matmul_config, multiplication
from warploom.ops.steps import Plan, Steps

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from warploom.core.targets import Target

Op = Literal["max", "sum", "logsumexp"]
Left = Annotated[Any, ArrayArgument("m k", memory=MATRIX)]
Right = Annotated[Any, ArrayArgument("k n", memory=MATRIX, hint="for x·wᵀ pass w.T")]
Reduced = Annotated[Any, ResultArray("out", "m", "f32"), ResultArray("index", "m", "s32", when="return_index")]
WORKSPACE_BYTES = 1 << 25
"""Memory for the states of one block of rows; a block has at least :data:`LEAST_ROWS` rows, whatever that takes."""
LEAST_ROWS = 256
_MERGE_FLOPS = 100  # for each state


@dataclass(frozen=True)
class ReducePlan(Plan):
    """A call of :func:`matmul_reduce`: two kernels, and a workspace of one state per row and tile column."""

    problem: ReduceProblem
    config: MatmulConfig
    result: str = "out"
    """The name of the array that receives the values."""

    @property
    def tiles(self) -> int:
        """Tiles along N."""
        return self.problem.product.tiling(self.config).cols

    @property
    def row_bytes(self) -> int:
        """Memory for the states of one row."""
        return 4 * len(self.problem.states) * self.tiles

    @property
    def block_rows(self) -> int:
        """Rows that are taken at a time: all of them, or as many as :data:`WORKSPACE_BYTES` are enough for."""
        fitting = WORKSPACE_BYTES // self.row_bytes // LEAST_ROWS * LEAST_ROWS
        return min(self.problem.product.m, max(LEAST_ROWS, fitting))

    @cached_property
    def calls(self) -> tuple[KernelCall, KernelCall]:
        """The kernel of the product and its tiles' reductions, and the one that merges them, of a block of rows."""
        return self._block(self.block_rows)

    def _block(self, rows: int) -> tuple[KernelCall, KernelCall]:
        problem = replace(self.problem, product=replace(self.problem.product, m=rows))
        return problem.calls(self.config, self.multiprocessors)

    def __str__(self) -> str:
        return f"{self.problem.op}: {super().__str__()}"

    @cached_property
    def steps(self) -> Steps:
        """The launches, block after block of rows."""
        p, result, found = self.problem.product, self.result, list[KernelCall]()
        of_row = {"a": (p.a.stride if p.a.k_contiguous else 1) * p.dtype.bytes, "index": 4, result: 4}
        for start in range(0, p.m, self.block_rows):
            rows = min(self.block_rows, p.m - start)
            offsets = {name: start * distance for name, distance in of_row.items()}
            reduce, merge = self._block(rows)
            merge = replace(merge, arrays=tuple(result if name == "out" else name for name in merge.arrays))
            found.append(replace(reduce, flops=2 * rows * p.n * p.k, offsets=offsets))
            found.append(replace(merge, flops=_MERGE_FLOPS * rows * self.tiles, offsets=offsets))
        return Steps(tuple(found))


class ReduceOptions(TypedDict, total=False):
    """The options of :func:`matmul_reduce` beside ``op`` and ``return_index``, and its bias."""

    scale: float
    bias: Any
    config: MatmulConfig | str | None


@overload
def matmul_reduce(
    a: Array, b: Any, op: Op = "max", *, return_index: Literal[False] = False, **options: Unpack[ReduceOptions]
) -> Array: ...


@overload
def matmul_reduce(
    a: Array, b: Any, op: Op = "max", *, return_index: Literal[True], **options: Unpack[ReduceOptions]
) -> tuple[Array, Array]: ...


@overload
def matmul_reduce(
    a: np.ndarray[Any, Any],
    b: Any,
    op: Op = "max",
    *,
    return_index: Literal[False] = False,
    **options: Unpack[ReduceOptions],
) -> NDArray[np.float32]: ...


@overload
def matmul_reduce(
    a: np.ndarray[Any, Any], b: Any, op: Op = "max", *, return_index: Literal[True], **options: Unpack[ReduceOptions]
) -> tuple[NDArray[np.float32], NDArray[np.int32]]: ...


def matmul_reduce(
    a: Left,
    b: Right,
    op: Op = "max",
    *,
    scale: float = 1.0,
    bias: Bias = None,
    return_index: bool = False,
    config: MatmulConfig | str | None = None,
    **unknown: Never,
) -> Reduced:
    """A reduction over the columns of ``scale · a·b + bias`` for every row, without writing the product.

    Shapes: a (m, k), b (k, n), bias (n,); result float32 (m,). dtypes: float16 or bfloat16, all the same. Any sizes
    with n ≥ 1, and any strides with one contiguous dimension (``matmul_reduce(queries, vectors.T)`` reads vectors as
    they lie). ``op``: "max", "sum", or "logsumexp" (natural). ``return_index`` (with "max") also returns the column of
    each row's maximum, int32 (m,), the first of equal ones: the nearest neighbour by inner product.

    NaN is no maximum: a row of nothing else has -inf, at column 0. "sum" and "logsumexp" propagate it. The log-sum-exp
    of a row with +inf is +inf, of -inf alone -inf, as in PyTorch.

    Equal calls give equal bits: column blocks are merged in order, without atomics. Beyond inputs and result it takes 4
    or 8 bytes for each row and column block, and at most 32 MiB: more rows are taken in blocks of at least 256.
    Arrays and devices as for :func:`warploom.matmul`.

    Under ``torch.compile`` a call is one operator, ``warploom::matmul_reduce`` (``matmul_argmax`` with the index).

    Raises ProblemError for arrays or an ``op`` it does not take, ConfigError for a ``config`` that does not fit.
    """
    return matmul_reduce_call((a, b, bias), (op, scale, return_index), config, False, unknown)


def reduction_named(op: Op, return_index: bool) -> ReduceOp:
    """The reduction that the arguments of :func:`matmul_reduce` ask for. Raises ProblemError if there is none."""
    if op not in ("max", "sum", "logsumexp"):
        raise ProblemError(f"op is 'max', 'sum' or 'logsumexp', not {op!r}")
    with_index = flag("return_index", return_index)
    if with_index and op != "max":
        raise ProblemError(f"return_index goes with op='max': {op} has no column")
    return "argmax" if with_index else op


@traced
def plan_matmul_reduce(a: Any, b: Any, op: ReduceOp = "max", **options: Unpack[ReduceOptions]) -> ReducePlan:
    """Plan a call of :func:`matmul_reduce` ("argmax" is "max" with its index). Runs nothing."""
    if op not in OPS:
        raise ProblemError(f"op is one of {', '.join(OPS)}, not {op!r}")
    asked = {"op": "max" if op == "argmax" else op, "return_index": op == "argmax"}
    return matmul_reduce_call.computation({"a": a, "b": b, **asked, **options}).planned()


def check_columns(given: Arguments) -> None:
    """Raises ProblemError for a product without columns, and for a factor that no kernel takes."""
    check_factor(given.options["scale"])
    if given.sizes["n"] == 0:
        raise ProblemError("b has no columns: there is nothing to reduce over")


def reduce_plan(product: MatmulProblem, op: ReduceOp, config: Any, device: Device, **own: Any) -> ReducePlan:
    """Plan the reduction of a product's rows. Raises ConfigError for a ``config`` that does not fit."""
    problem = ReduceProblem(product, op)

    def violations(asked: MatmulConfig, _: Any, target: Target) -> list[str]:
        return violations_of(asked, product, target) or problem.violations(asked)

    def choice(on: Processor) -> tuple[MatmulConfig, str]:
        return choose_for_rows(product, on.target, exponentials=op == "logsumexp")

    asked = matmul_config(config, product.dtype)
    return ReducePlan.of(problem, device, asked, choice, violations=violations, **own)


def _work(given: Arguments, config: Any) -> Computation:
    a, options = given.views["a"], given.options
    op = reduction_named(options["op"], options["return_index"])
    check_columns(given)

    def plan(arrays: Views) -> ReducePlan:
        own = {name: arrays[name] for name in given.views}
        return reduce_plan(multiplication(own, f32, f32, options["scale"]).problem, op, config, a.device)

    return Computation(given, plan, nothing=given.sizes["m"] == 0)


matmul_reduce_call = Caller(matmul_reduce, _work, recorded=True)
