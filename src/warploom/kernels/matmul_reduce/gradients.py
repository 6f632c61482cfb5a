"""The gradients of a loss, or of a log-sum-exp, of a product's rows, in launches that never hold all logits.

There are two ways to them. :class:`LossGradients`, a backward pass, walks blocks of rows and, of each, chunks of the
columns. A chunk's logits are multiplied again and leave the kernel as the loss's derivatives by them, in the inputs'
type; two products make of these the chunk's part of w's gradient and of x's. x's gradient is summed over the chunks in
f32 and rounded once; w's is summed over the blocks of rows in its own type, so it is rounded once for each block.

:class:`FormedGradients` spares the second product of x and w: the forward pass stores a block of rows, all columns, as
exponentials beside their parts' largest logits, and makes derivatives of them once the rows' log-sum-exps are known.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from warploom.core.dtypes import DType, f32
from warploom.core.targets import Target
from warploom.kernels.matmul.choice import choose, choose_for_rows
from warploom.kernels.matmul.cost import seconds
from warploom.kernels.matmul.features import Epilogue, Extra
from warploom.kernels.matmul.problem import MatmulConfig, MatmulProblem, Matrix, aligned_elements
from warploom.kernels.matmul_reduce.loss import (
    LogitGradient,
    Loss,
    Reduction,
    columns_call,
    count_call,
    gradient_call,
    logits_call,
    table_words,
)
from warploom.kernels.matmul_reduce.problem import ExponentialsProblem
from warploom.kernels.matmul_reduce.states import STATES
from warploom.kernels.source import KernelCall, workspace_of

SMALL_WORKSPACE_MIB = 64
"""The most between those of other gradients by rows, as long as a block of rows and a chunk fit at all."""
SPARE_BYTES = 4 << 20
"""Of a backward pass's memory what its other arrays take."""
BLOCK = 128
"""Blocks of rows and chunks of columns are multiples of it."""
LEAST_ROWS = 2048
"""Rows below which blocks are not worth a look, where larger ones fit: each block rounds w's gradient once more."""
LEAST_CHUNK = 1024
"""Columns below which a chunk's products are too small; more blocks of rows come first."""
_FLOPS_PER_ROW = 100
_GRADIENTS_NAMES = {"a": "x", "b": "w"}
"""A loss's arrays as its gradients name them."""


def summed(x: Any, before: Any) -> Any:
    """The epilogue that adds a product to what was there."""
    return x + before


@dataclass(frozen=True)
class LossGradients:
    """The launches of a backward pass: gradients ``wanted`` of x, w and bias, by a loss or log-sum-exp of rows.

    ``product`` is alpha · x·wᵀ + bias, ``loss`` None for a log-sum-exp alone; of the gradients by the losses, or by
    their ``reduction``, and by the log-sum-exps some are ``given``. ``blocks``: rows and columns that are taken at a
    time, by default as many as fit ``most_bytes``.
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
    reduction: Reduction = "none"
    most_bytes: int = (SMALL_WORKSPACE_MIB << 20) - SPARE_BYTES

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
        if self.bytes_of(rows, p.n) <= self.most_bytes:
            return p.n
        most = self.most_bytes // (p.dtype.bytes * rows) // BLOCK * BLOCK
        while most > 0 and self.bytes_of(rows, most) > self.most_bytes:
            most -= BLOCK
        return most

    def bytes_of(self, rows: int, cols: int) -> int:
        """Memory for blocks of such a size."""
        p, chunks = self.product, -(-self.product.n // max(cols, 1))
        sums = 4 * rows * p.k if self.wanted[0] and chunks > 1 else 0
        sums += 4 * p.n if self.wanted[2] and rows < p.m else 0
        return rows * _line(cols) * p.dtype.bytes + sums + self._values_bytes(rows, chunks)

    def _values_bytes(self, rows: int, chunks: int) -> int:
        """Memory for numbers of a block's rows."""
        return 4 * table_words(rows, chunks)

    def _seconds(self, taken: tuple[int, int]) -> float:
        p, (rows, cols) = self.product, taken
        logits, problems = self._logits(rows, cols, cols), list[MatmulProblem]()
        if self.wanted[1]:
            problems.append(self._of_w(rows, cols, cols, add=rows < p.m))
        if self.wanted[0]:
            problems.append(self._of_x(rows, cols, cols, add=cols < p.n, last=cols == p.n))
        configured = [(logits, self._of_logits(logits)), *((x, self._configured(x)) for x in problems)]
        one = sum(seconds(problem, config, self.target) for problem, config in configured)  # type: ignore[arg-type]
        return one * (p.m / rows) * (p.n / cols)

    # -- the products
    def _configured(self, problem: MatmulProblem) -> MatmulConfig:
        return self.config or choose(problem, self.target, whole=True)[0]

    def _of_logits(self, problem: MatmulProblem) -> MatmulConfig:
        """The configuration of the product that makes a chunk's logits."""
        return self._configured(problem)

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
    @cached_property
    def calls(self) -> tuple[KernelCall, ...]:
        """The launches, of arrays x, w, bias, target, lse, loss_gradient, lse_gradient, dx, dw and dbias."""
        return tuple(self._calls())

    def _calls(self) -> Iterator[KernelCall]:
        p, (block, chunk) = self.product, self.taken
        x_step, w_step = (p.dtype.bytes * (x.stride if x.k_contiguous else 1) for x in (p.a, p.b))
        of_rows = ("lse", "loss_gradient", "lse_gradient") if self.reduction == "none" else ("lse", "lse_gradient")
        for first_row in range(0, p.m, block):
            rows = min(block, p.m - first_row)
            at_rows = dict.fromkeys(of_rows, 4 * first_row)
            at_rows |= {"x": x_step * first_row, "dx": p.dtype.bytes * p.k * first_row}
            at_rows["target"] = 4 * self.target_words * first_row
            yield from self._of_rows(rows, chunk, at_rows)
            for first in range(0, p.n, chunk):
                cols, last = min(chunk, p.n - first), first + chunk >= p.n
                at = at_rows | {"w": w_step * first, "dw": p.dtype.bytes * p.k * first, "bias": p.dtype.bytes * first}
                at |= {"table": 4 * table_words(rows, first // chunk), "dbias": at["bias"], "bias_sums": 4 * first}
                yield from self._derivatives(rows, cols, chunk, at)
                if self.wanted[2]:
                    sums = self._columns(rows, cols, chunk, first=first_row == 0, last=first_row + rows >= p.m)
                    yield replace(sums, flops=rows * cols, offsets=at)
                if self.wanted[1]:
                    of_w = self._of_w(rows, cols, chunk, add=first_row > 0)
                    yield self._of(of_w, at, a="derivatives", b="x", out="dw", extra0="dw")
                if self.wanted[0]:
                    of_x = self._of_x(rows, cols, chunk, add=first > 0, last=last)
                    yield self._of(of_x, at, a="derivatives", b="w", out="dx" if last else "sums", extra0="sums")

    def _of_rows(self, rows: int, chunk: int, at: Mapping[str, int]) -> Iterator[KernelCall]:
        """Yield the launches that turn the logits of a block of rows into derivatives."""
        call = gradient_call(
            rows,
            self.product.n,
            chunk,
            target_words=self.target_words,
            loss=self.loss or Loss(),
            given=self.given,
            reduction=self.reduction,
        )
        yield replace(call, flops=_FLOPS_PER_ROW * rows, offsets=at)

    def _derivatives(self, rows: int, cols: int, chunk: int, at: Mapping[str, int]) -> Iterator[KernelCall]:
        """The derivatives by a chunk's logits."""
        yield self._of(self._logits(rows, cols, chunk), at, a="x", b="w", out="derivatives", row_values="table")

    def _of(self, problem: MatmulProblem, at: Mapping[str, int], **names: str) -> KernelCall:
        """The launch of a product; the same is planned once."""
        key = problem, tuple(names.values())
        if key not in self._known:
            self._known[key] = self._call(problem, names)
        return replace(self._known[key], flops=problem.flops, offsets=at)

    @cached_property
    def _known(self) -> dict[Hashable, KernelCall]:
        return {}

    def _columns(self, rows: int, cols: int, chunk: int, *, first: bool, last: bool) -> KernelCall:
        """A block's part of the bias's gradient."""
        call = columns_call(rows, cols, _line(chunk), self.product.dtype, first=first, last=last)
        return replace(call, workspace={"bias_sums": self.product.n}) if "bias_sums" in call.arrays else call

    def _call(self, problem: MatmulProblem, names: Mapping[str, str]) -> KernelCall:
        """The one kernel of a product, its arrays renamed."""
        (call,) = self._configured(problem).calls(problem, self.multiprocessors)
        return self._renamed(call, names)

    def _renamed(self, call: KernelCall, names: Mapping[str, str]) -> KernelCall:
        """A kernel with other names for its arrays, and the memory between kernels that it is the first to use."""
        arrays = tuple(names.get(name, name) for name in call.arrays)
        workspace = {name: words for name, words in self._workspace.items() if name in arrays}
        return replace(call, arrays=arrays, workspace={**call.workspace, **workspace})

    @cached_property
    def _workspace(self) -> dict[str, int]:
        """Words of the memory between the kernels, the row values aside."""
        p, (rows, cols) = self.product, self.taken
        derivatives = -(-rows * _line(cols) * p.dtype.bytes // 4)
        return {"derivatives": derivatives, "sums": rows * p.k} if cols < p.n else {"derivatives": derivatives}


@dataclass(frozen=True)
class FormedGradients(LossGradients):
    """A loss and its gradients in one pass, of the sum or mean of a product's rows: for the gradient 1 of the loss.

    ``after`` are the launches of the loss alone that follow on its log-sum-exps.
    """

    after: tuple[KernelCall, ...] = ()

    @cached_property
    def taken(self) -> tuple[int, int]:
        """(rows of a block, all columns), the quickest by the cost model of those that fit."""
        return self.blocks or super().taken

    def _most_columns(self, rows: int) -> int:
        return self.product.n if self.bytes_of(rows, self.product.n) <= self.most_bytes else 0

    def _values_bytes(self, rows: int, chunks: int) -> int:
        problem = ExponentialsProblem(self._logits(rows, self.product.n, self.product.n))
        states = len(STATES) * rows * problem.parts(self._of_logits(problem.product))
        return 4 * (states + sum(workspace_of(self.after).values()))

    def _of_logits(self, problem: MatmulProblem) -> MatmulConfig:
        return self.config or choose_for_rows(problem, self.target, exponentials=True)[0]

    def _logits(self, rows: int, cols: int, chunk: int) -> MatmulProblem:
        """A block's logits, of which exponentials are stored."""
        p, epilogue = self.product, Epilogue(bias=self.product.epilogue.bias)
        return self._product((rows, cols, p.k), p.a, p.b, _line(chunk), p.dtype, epilogue)

    def _calls(self) -> Iterator[KernelCall]:
        loss, m = self.loss or Loss(), self.product.m
        if self.reduction == "mean":
            yield replace(count_call(m, self.target_words, loss.ignore_index), flops=m)
        yield from super()._calls()
        for call in self.after:
            offsets = {_GRADIENTS_NAMES.get(name, name): x for name, x in call.offsets.items()}
            yield replace(self._renamed(call, _GRADIENTS_NAMES), offsets=offsets)

    def _of_rows(self, rows: int, chunk: int, at: Mapping[str, int]) -> Iterator[KernelCall]:
        return iter(())

    def _derivatives(self, rows: int, cols: int, chunk: int, at: Mapping[str, int]) -> Iterator[KernelCall]:
        p = self.product
        problem = ExponentialsProblem(self._logits(rows, cols, chunk))
        config = self._of_logits(problem.product)
        product, merge = self._blocks(problem, config)
        product = self._renamed(product, {"a": "x", "b": "w", "out": "derivatives"})
        yield replace(product, flops=problem.product.flops, offsets=at)
        yield replace(merge, flops=_FLOPS_PER_ROW * rows * problem.parts(config), offsets=at)
        derivatives = logits_call(
            rows,
            cols,
            _line(chunk),
            problem.part(config),
            dtype=p.dtype,
            target_words=self.target_words,
            loss=self.loss or Loss(),
            mean=self.reduction == "mean",
        )
        yield replace(derivatives, flops=10 * rows * cols, offsets=at)

    def _blocks(self, problem: ExponentialsProblem, config: MatmulConfig) -> tuple[KernelCall, KernelCall]:
        """The kernels of a block's exponentials; blocks of one size share them."""
        if problem not in self._known_blocks:
            self._known_blocks[problem] = problem.calls(config, self.multiprocessors)
        return self._known_blocks[problem]

    @cached_property
    def _known_blocks(self) -> dict[ExponentialsProblem, tuple[KernelCall, KernelCall]]:
        return {}


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
