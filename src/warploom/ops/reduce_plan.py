"""What a row reduction of a product runs: its plan, and the launches of a call in order.

The rows of a large problem are taken in blocks, so that the states of a block's tiles fit :data:`WORKSPACE_BYTES`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from warploom.interop.arrays import ArrayView
from warploom.kernels.matmul.problem import MatmulConfig
from warploom.kernels.matmul_reduce.problem import ReduceProblem
from warploom.kernels.source import KernelCall
from warploom.ops.steps import Plan, Step, Steps

WORKSPACE_BYTES = 1 << 25
"""Memory for the states of one block of rows; a block has at least :data:`LEAST_ROWS` rows, whatever that takes."""
LEAST_ROWS = 256
_MERGE_FLOPS = 100  # for each state


@dataclass(frozen=True)
class ReducePlan(Plan):
    """What a call of :func:`matmul_reduce` runs: two kernels, and a workspace of one state per row and tile column."""

    problem: ReduceProblem
    config: MatmulConfig
    multiprocessors: int

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

    @property
    def workspace_bytes(self) -> int:
        """Memory beyond inputs and results."""
        return self.row_bytes * self.block_rows

    @cached_property
    def calls(self) -> tuple[KernelCall, KernelCall]:
        """The kernel of the product and its tiles' reductions, and the one that merges them, of a block of rows."""
        return self._block(self.block_rows)

    def _block(self, rows: int) -> tuple[KernelCall, KernelCall]:
        problem = replace(self.problem, product=replace(self.problem.product, m=rows))
        return problem.calls(self.config, self.multiprocessors)

    def __str__(self) -> str:
        return f"{self.problem.op}: {super().__str__()}"

    def steps(self, arrays: dict[str, ArrayView], result: str = "out") -> Steps:
        """The launches, block after block of rows; ``arrays`` are those of the call by the kernels' names.

        ``result``: the name of the array that receives the values.
        """
        p, found = self.problem.product, list[Step]()
        of_row = {"a": arrays["a"].strides[0] * p.dtype.bytes, "index": 4, result: 4}
        for start in range(0, p.m, self.block_rows):
            rows = min(self.block_rows, p.m - start)
            offsets = {name: start * distance for name, distance in of_row.items()}
            reduce, merge = self._block(rows)
            merge = replace(merge, arrays=tuple(result if name == "out" else name for name in merge.arrays))
            found.append(Step(reduce, 2 * rows * p.n * p.k, offsets))
            found.append(Step(merge, _MERGE_FLOPS * rows * self.tiles, offsets))
        return Steps(tuple(found))
