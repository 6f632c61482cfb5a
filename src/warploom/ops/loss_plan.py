"""What a cross-entropy of a product's rows runs, forward and backward: plans, and the launches of a call in order.

The backward pass walks blocks of rows and, of each, chunks of the columns. A chunk's logits are multiplied again and
leave the kernel as the loss's derivatives by them, in the inputs' type; two products make of these the chunk's part of
w's gradient and of x's. x's gradient is summed over the chunks in f32 and rounded once; w's is summed over the blocks
of rows in its own type, so it is rounded once for each block. Everything between the kernels fits
:data:`WORKSPACE_BYTES`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from warploom.core.dtypes import DType, f32
from warploom.core.targets import Target
from warploom.interop.arrays import ArrayView
from warploom.kernels.matmul.choice import choose
from warploom.kernels.matmul.cost import seconds
from warploom.kernels.matmul.features import Epilogue, Extra
from warploom.kernels.matmul.problem import MatmulConfig, MatmulProblem, Matrix, aligned_elements
from warploom.kernels.matmul_reduce.loss import (
    LogitGradient,
    Loss,
    SoftCap,
    columns_call,
    gradient_call,
    losses_call,
    table_words,
)
from warploom.kernels.source import KernelCall
from warploom.ops.reduce import ReducePlan
from warploom.ops.steps import Step, Steps

WORKSPACE_BYTES = 60 << 20
"""The most memory between the kernels of a backward pass, as long as a block of rows and a chunk fit at all."""
BLOCK = 128
"""Blocks of rows and chunks of columns are multiples of it."""
LEAST_ROWS = 2048
"""Rows below which blocks are not worth a look, where larger ones fit: each block rounds w's gradient once more."""
LEAST_CHUNK = 1024
"""Columns below which a chunk's products are too small; more blocks of rows come first."""
_FLOPS_PER_ROW = 100


def summed(x: Any, before: Any) -> Any:
    """The epilogue that adds a product to what was there."""
    return x + before


@dataclass(frozen=True)
class LossPlan:
    """A forward pass: the rows' log-sum-exps, with label smoothing the sums of their logits, and the losses."""

    lse: ReducePlan
    loss: Loss

    @cached_property
    def sums(self) -> ReducePlan | None:
        """The second pass over the logits that label smoothing takes."""
        return replace(self.lse, problem=replace(self.lse.problem, op="sum")) if self.loss.label_smoothing else None

    @property
    def workspace_bytes(self) -> int:
        """Memory beyond inputs and results."""
        return self.lse.workspace_bytes + (4 * self.lse.problem.product.m if self.sums is not None else 0)

    def steps(self, arrays: dict[str, ArrayView], target_words: int) -> Steps:
        """The launches, of arrays x, w, bias (if any), target, lse and loss; a target has so many 32-bit words."""
        p, x, w = self.lse.problem.product, arrays["x"], arrays["w"]
        own, size = {"a": x, "b": w}, (p.m, p.n, p.k)
        found = [_renamed(step) for step in self.lse.steps(own, "lse").steps]
        if self.sums is not None:
            found += [_renamed(step, sums=p.m) for step in self.sums.steps(own, "sums").steps]
        strides = x.strides[0], w.strides[0]
        losses = losses_call(size, strides, p.dtype, target_words, self.loss, bias=p.epilogue.bias)
        found.append(Step(losses, 2 * p.m * p.k))
        return Steps(tuple(found))


def _renamed(step: Step, **more: int) -> Step:
    """The step on x and w, with more words of workspace."""
    call, offsets = step.call, {"x": step.offsets["a"], **step.offsets}
    names = tuple({"a": "x", "b": "w"}.get(name, name) for name in call.arrays)
    return replace(step, call=replace(call, arrays=names, workspace={**call.workspace, **more}), offsets=offsets)


@dataclass(frozen=True)
class GradientPlan:
    """A backward pass: of x, w and the bias the gradients ``wanted``, by a loss or log-sum-exp of a product's rows.

    ``product`` is alpha · x·wᵀ + bias, ``loss`` None for a log-sum-exp alone; of the gradients by the losses and by the
    log-sum-exps some are ``given``. ``blocks``: rows and columns that are taken at a time, by default as many as fit.
    """

    product: MatmulProblem
    loss: Loss | None
    target_words: int
    given: tuple[bool, bool]
    wanted: tuple[bool, bool, bool]
    target: Target
    multiprocessors: int
    config: MatmulConfig | None = None
    blocks: tuple[int, int] | None = None

    # -- what is taken at a time
    @cached_property
    def taken(self) -> tuple[int, int]:
        """(rows of a block, columns of a chunk), the quickest by the cost model of those that fit."""
        if self.blocks is not None:
            return self.blocks
        p, found = self.product, list[tuple[int, int]]()
        sizes = dict.fromkeys(min(p.m, _multiple(-(-p.m // count))) for count in range(1, -(-p.m // BLOCK) + 1))
        for rows in sizes:
            if found and rows < LEAST_ROWS:
                break
            most = self._most_columns(rows)
            found += [(rows, cols) for cols in _chunks(p.n, most) if cols >= min(p.n, LEAST_CHUNK)]
        return min(found, key=self._seconds) if found else (min(p.m, BLOCK), min(p.n, BLOCK))

    def _most_columns(self, rows: int) -> int:
        p = self.product
        if self.bytes_of(rows, p.n) <= WORKSPACE_BYTES:
            return p.n
        most = WORKSPACE_BYTES // (p.dtype.bytes * rows) // BLOCK * BLOCK
        while most > 0 and self.bytes_of(rows, most) > WORKSPACE_BYTES:
            most -= BLOCK
        return most

    def bytes_of(self, rows: int, cols: int) -> int:
        """Memory for blocks of such a size."""
        p, chunks = self.product, -(-self.product.n // max(cols, 1))
        sums = 4 * rows * p.k if self.wanted[0] and chunks > 1 else 0
        sums += 4 * p.n if self.wanted[2] and rows < p.m else 0
        return rows * _line(cols) * p.dtype.bytes + sums + 4 * table_words(rows, chunks)

    @property
    def workspace_bytes(self) -> int:
        """Memory beyond inputs and gradients."""
        return self.bytes_of(*self.taken)

    def _seconds(self, taken: tuple[int, int]) -> float:
        p, (rows, cols) = self.product, taken
        problems = [self._logits(rows, cols, cols)]
        if self.wanted[1]:
            problems.append(self._of_w(rows, cols, cols, add=rows < p.m))
        if self.wanted[0]:
            problems.append(self._of_x(rows, cols, cols, add=cols < p.n, last=cols == p.n))
        one = sum(seconds(problem, self._configured(problem), self.target) for problem in problems)  # type: ignore[arg-type]
        return one * (p.m / rows) * (p.n / cols)

    # -- the products
    def _configured(self, problem: MatmulProblem) -> MatmulConfig:
        return self.config or choose(problem, self.target, whole=True)[0]

    def _product(
        self, size: tuple[int, int, int], a: Matrix, b: Matrix, line: int, out_dtype: DType, epilogue: Epilogue
    ) -> MatmulProblem:
        p, (m, n, k) = self.product, size
        out = Matrix(True, line, 0, aligned_elements(line, n % 8))
        scaled = replace(epilogue, scaled=p.alpha != 1.0)
        return MatmulProblem(m, n, k, p.dtype, f32, out_dtype, a, b, out, 1, scaled, not (n | line) & 1, p.alpha)

    def _logits(self, rows: int, cols: int, chunk: int) -> MatmulProblem:
        """A chunk's logits, as the derivatives by them."""
        p, loss = self.product, self.loss or Loss()
        smooth = loss.label_smoothing if self.given[0] else 0.0
        hot = 1.0 - smooth if self.given[0] else 0.0
        function = LogitGradient(loss.softcap, hot, smooth / p.n)
        epilogue = Epilogue(bias=p.epilogue.bias, function=function, key=function, row_values=True)
        return self._product((rows, cols, p.k), p.a, p.b, _line(chunk), p.dtype, epilogue)

    def _of_w(self, rows: int, cols: int, chunk: int, *, add: bool) -> MatmulProblem:
        """A chunk's part of w's gradient: the derivatives transposed, times x; ``add`` to what is there."""
        p = self.product
        derivatives = Matrix(False, _line(chunk), 0, 8)
        x = replace(p.a, k_contiguous=not p.a.k_contiguous)
        epilogue = Epilogue(extras=(Extra(),), function=summed, key=summed) if add else Epilogue()
        return self._product((cols, p.k, rows), derivatives, x, p.k, p.dtype, epilogue)

    def _of_x(self, rows: int, cols: int, chunk: int, *, add: bool, last: bool) -> MatmulProblem:
        """A chunk's part of x's gradient: the derivatives times w, in f32 until the ``last`` one."""
        p = self.product
        w = replace(p.b, k_contiguous=not p.b.k_contiguous)
        epilogue = Epilogue(extras=(Extra(wide=True),), function=summed, key=summed) if add else Epilogue()
        derivatives = Matrix(True, _line(chunk), 0, 8)
        return self._product((rows, p.k, cols), derivatives, w, p.k, p.dtype if last else f32, epilogue)

    # -- the launches
    def steps(self) -> Steps:
        """The launches, of arrays x, w, bias, target, lse, loss_gradient, lse_gradient, dx, dw and dbias."""
        return Steps(tuple(self._steps()))

    def _steps(self) -> Iterator[Step]:
        p, (block, chunk) = self.product, self.taken
        x_step, w_step = (p.dtype.bytes * (x.stride if x.k_contiguous else 1) for x in (p.a, p.b))
        known: dict[Hashable, KernelCall] = {}

        def step(problem: MatmulProblem, offsets: Mapping[str, int], **names: str) -> Step:
            key = problem, tuple(names.values())
            if key not in known:
                known[key] = self._call(problem, names)
            return Step(known[key], problem.flops, offsets)

        for first_row in range(0, p.m, block):
            rows = min(block, p.m - first_row)
            at_rows = dict.fromkeys(("lse", "loss_gradient", "lse_gradient"), 4 * first_row)
            at_rows |= {"x": x_step * first_row, "dx": p.dtype.bytes * p.k * first_row}
            at_rows["target"] = 4 * self.target_words * first_row
            table = gradient_call(
                rows, p.n, chunk, target_words=self.target_words, loss=self.loss or Loss(), given=self.given
            )
            yield Step(table, _FLOPS_PER_ROW * rows, at_rows)
            for first in range(0, p.n, chunk):
                cols, last = min(chunk, p.n - first), first + chunk >= p.n
                at = at_rows | {"w": w_step * first, "dw": p.dtype.bytes * p.k * first, "bias": p.dtype.bytes * first}
                at |= {"table": 4 * table_words(rows, first // chunk), "dbias": at["bias"], "bias_sums": 4 * first}
                logits = self._logits(rows, cols, chunk)
                yield step(logits, at, a="x", b="w", out="derivatives", row_values="table")
                if self.wanted[2]:
                    sums = self._columns(rows, cols, chunk, first=first_row == 0, last=first_row + rows >= p.m)
                    yield Step(sums, rows * cols, at)
                if self.wanted[1]:
                    of_w = self._of_w(rows, cols, chunk, add=first_row > 0)
                    yield step(of_w, at, a="derivatives", b="x", out="dw", extra0="dw")
                if self.wanted[0]:
                    of_x = self._of_x(rows, cols, chunk, add=first > 0, last=last)
                    yield step(of_x, at, a="derivatives", b="w", out="dx" if last else "sums", extra0="sums")

    def _columns(self, rows: int, cols: int, chunk: int, *, first: bool, last: bool) -> KernelCall:
        """A block's part of the bias's gradient."""
        call = columns_call(rows, cols, _line(chunk), self.product.dtype, first=first, last=last)
        return replace(call, workspace={"bias_sums": self.product.n}) if "bias_sums" in call.arrays else call

    def _call(self, problem: MatmulProblem, names: Mapping[str, str]) -> KernelCall:
        """The one kernel of a product, its arrays renamed."""
        (call,) = self._configured(problem).calls(problem, self.multiprocessors)
        arrays = tuple(names.get(name, name) for name in call.arrays)
        workspace = {name: words for name, words in self._workspace.items() if name in arrays}
        return replace(call, arrays=arrays, workspace=workspace)

    @cached_property
    def _workspace(self) -> dict[str, int]:
        """Words of the memory between the kernels, the row values aside."""
        p, (rows, cols) = self.product, self.taken
        derivatives = -(-rows * _line(cols) * p.dtype.bytes // 4)
        return {"derivatives": derivatives, "sums": rows * p.k} if cols < p.n else {"derivatives": derivatives}


def _multiple(extent: int) -> int:
    return -(-extent // BLOCK) * BLOCK


def _line(cols: int) -> int:
    """Elements between rows of a chunk's derivatives: aligned to 16 bytes."""
    return -(-cols // 8) * 8


def _chunks(n: int, most: int) -> list[int]:
    """Sizes of chunks worth a look: all columns, or multiples of :data:`BLOCK` from ``most`` down to two thirds."""
    if most >= n:
        return [n]
    least = 2 * most // 3
    return [x for x in range(most, least, -max(BLOCK, (most - least) // 16 // BLOCK * BLOCK)) if x > 0]


def forward_product(product: MatmulProblem, loss: Loss) -> MatmulProblem:
    """The product whose rows a loss reduces: with its soft cap."""
    if loss.softcap is None:
        return product
    function = SoftCap(loss.softcap)
    return replace(product, epilogue=replace(product.epilogue, function=function, key=function))
