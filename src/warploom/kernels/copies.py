"""Copies of row-major tiles between global and shared memory, 16 bytes per thread and step."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.core.dtypes import u32, u64
from warploom.core.errors import ConfigError
from warploom.lang import GlobalPointer, Kernel, SharedTile
from warploom.lang.fragments import Addressing, TileAddresses
from warploom.lang.values import Number
from warploom.layout.linear import LinearMap
from warploom.layout.shared import copy_positions

CHUNK_BYTES = 16
SEGMENT_BYTES = 128
"""A row is copied in segments of one bank cycle: eight threads, 16 bytes each."""


@dataclass(frozen=True)
class CopyPlan:
    """Who copies what of a ``rows × cols`` tile of 16-bit elements.

    ``cooperative``: the CTA's threads walk the tile together (the seeds' kernel 8); else each warp copies its own
    contiguous ``rows / warps`` rows.
    """

    rows: int
    cols: int
    warps: int
    cooperative: bool

    @property
    def chunks(self) -> int:
        """Threads side by side on one row segment."""
        return min(SEGMENT_BYTES, self.cols * 2) // CHUNK_BYTES

    @property
    def rows_per_step(self) -> int:
        """Rows that one step of the copy covers (of the CTA, or of each warp)."""
        return (32 * self.warps if self.cooperative else 32) // self.chunks

    @property
    def own_rows(self) -> int:
        """Rows that the group of threads is responsible for."""
        return self.rows if self.cooperative else self.rows // self.warps

    @property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """Displacements (row, col) of every step, in elements, rows outermost."""
        columns = range(0, self.cols, self.chunks * 8)
        return tuple((row, col) for row in range(0, self.own_rows, self.rows_per_step) for col in columns)

    def threads(self) -> LinearMap:
        """The map from the copying thread (``lane``: its bits in the CTA or the warp) to its first (row, col)."""
        count = 32 * self.warps if self.cooperative else 32
        return copy_positions(count, self.chunks * 8, 8).rename({"thread": "lane"})

    def problems(self) -> list[str]:
        """Why the tile cannot be copied this way; empty if it can."""
        found: list[str] = []
        who = "CTA" if self.cooperative else "warp"
        if self.own_rows % self.rows_per_step:
            found.append(
                f"{self.own_rows} rows are no multiple of the {self.rows_per_step} rows a {who} copies per step"
            )
        if self.cols % (self.chunks * 8):
            found.append(f"{self.cols} columns are no multiple of a {self.chunks * CHUNK_BYTES}-byte row segment")
        return found


class TileCopy:
    """Copies tiles of one shape between a global matrix and a shared tile, by all threads of the CTA.

    ``row_stride`` is the global distance between rows in elements: a traced u32, or an int when it is known while
    tracing (offsets are immediates then).
    """

    def __init__(self, k: Kernel, tile: SharedTile, plan: CopyPlan, row_stride: Number, addressing: Addressing) -> None:
        problems = plan.problems()
        if problems:
            raise ConfigError("; ".join(problems))
        self._k, self._plan, self._stride = k, plan, row_stride
        who = k.thread if plan.cooperative else k.lane
        first_row: Number = 0 if plan.cooperative else k.warp * plan.own_rows
        lanes = plan.threads()
        at = lanes.apply(lane=who)
        self._row, self._col = at["row"] + first_row, at["col"]
        self._shared = TileAddresses(k, tile, lanes, who, first_row, addressing)

    def start(self, matrix: GlobalPointer) -> GlobalPointer:
        """This thread's first element of the tile whose first element is ``*matrix``."""
        return matrix + self._k.mul_wide(self._row, self._stride) + self._col

    def prepare(self) -> None:
        """Form the shared bases before a loop."""
        self._shared.prepare(self._plan.steps)

    def _source(self, start: GlobalPointer, row: int, col: int) -> GlobalPointer:
        if isinstance(self._stride, int):
            return start + (row * self._stride + col)
        if row == 0:
            return start + col
        offset = self._k.convert(self._k.operand(self._stride, u32) * (2 * row), u64)
        return start.bytes(offset) + col

    def load_async(self, start: GlobalPointer, stage: Number | None = None) -> None:
        """Issue ``cp.async`` for the whole tile; ``start`` is this thread's first element."""
        shared = self._shared if stage is None else self._shared.staged(stage)
        for row, col in self._plan.steps:
            self._k.cp_async(shared.address(row, col), self._source(start, row, col))

    def load_sync(self, start: GlobalPointer) -> None:
        """The same through registers: ``ld.global`` and ``st.shared`` of 16 bytes."""
        for row, col in self._plan.steps:
            words = self._source(start, row, col).load(count=4, dtype=u32)
            self._k.store("shared", self._shared.address(row, col), u32, words, "", "weak")

    def store(self, start: GlobalPointer, *, cache: str = "") -> None:
        """Copy the shared tile to global memory, 16 bytes per thread and step."""
        for row, col in self._plan.steps:
            words = self._k.load("shared", self._shared.address(row, col), u32, 4, "", "weak")
            self._source(start, row, col).store(words, cache=cache, dtype=u32)
