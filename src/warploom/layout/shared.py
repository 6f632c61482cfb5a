"""Row-major tiles in shared memory: stacks of power-of-two panels, swizzled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from warploom.core.dtypes import DType
from warploom.core.errors import LayoutError
from warploom.layout.formula import is_integer
from warploom.layout.linear import LinearMap, log2_exact
from warploom.layout.swizzle import BANK_CYCLE_BYTES, NO_SWIZZLE, Swizzle
from warploom.layout.tensor_map import TensorMapSpec
from warploom.layout.wgmma import MatrixDescriptor


@dataclass(frozen=True, slots=True)
class Panel:
    """Columns ``first_col … first_col + cols - 1`` of a tile, stored row-major from ``byte_offset``."""

    first_col: int
    cols: int
    byte_offset: int


@dataclass(frozen=True)
class SharedLayout:
    """Where element (row, col) of a ``rows × cols`` tile lies in shared memory, as a byte offset from its start.

    A tile is one or more panels, one after another, each row-major with a power-of-two number of columns; the swizzle
    acts on the offset within a panel. A power-of-two row is one panel unless ``panel_cols`` asks for narrower ones;
    any other width is split into panels of at most 128 bytes (96 columns of 2 bytes: 64 + 32). ``rows`` is any count:
    rows beyond the swizzle's period only add a stride. ``padding`` elements lie unused behind each row of a tile of one
    panel: the older way to move rows to other banks, which costs memory and is no linear map. Raises LayoutError for
    sizes that cannot be laid out.
    """

    rows: int
    cols: int
    element_bytes: int
    swizzle: Swizzle = NO_SWIZZLE
    panel_cols: int | None = None
    padding: int = 0

    def __post_init__(self) -> None:
        log2_exact(self.element_bytes, "the element in bytes")
        if self.rows < 1 or self.cols < 1:
            raise LayoutError(f"a shared tile needs rows and columns, not {self.rows}×{self.cols}")
        if self.panel_cols is not None:
            log2_exact(self.panel_cols, "the panel in columns")
        if self.padding and (self.padding < 0 or self.swizzle.bits or len(self.panels) > 1):
            raise LayoutError(
                f"padding of {self.padding} elements: a padded tile is one panel of a power-of-two width without a "
                "swizzle, and its padding is positive"
            )

    @cached_property
    def panels(self) -> tuple[Panel, ...]:
        """The panels, left to right."""
        width = self.panel_cols
        if width is None:
            is_power = self.cols & (self.cols - 1) == 0
            width = self.cols if is_power else max(1, BANK_CYCLE_BYTES // self.element_bytes)
        found: list[Panel] = []
        col = offset = 0
        while col < self.cols:
            width = min(width, 1 << ((self.cols - col).bit_length() - 1))
            found.append(Panel(col, width, offset))
            col += width
            offset = _round_up(offset + self._panel_bytes(width), self.swizzle.period)
        return tuple(found)

    @cached_property
    def bytes(self) -> int:
        """Size of the tile in bytes."""
        last = self.panels[-1]
        return last.byte_offset + self._panel_bytes(last.cols)

    def _panel_bytes(self, cols: int) -> int:
        # A swizzle that moves bits above the row (64-byte rows under <3,4,3>) permutes whole rows among each other, so
        # the last of them may land beyond rows × row bytes.
        moved = 1 << (self.swizzle.base + self.swizzle.bits) if self.swizzle.bits else 1
        size = self.rows * (cols + self.padding) * self.element_bytes
        return _round_up(size, moved) if moved > cols * self.element_bytes and self.rows > 1 else size

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next within the first (widest) panel."""
        return (self.panels[0].cols + self.padding) * self.element_bytes

    @property
    def alignment(self) -> int:
        """Alignment of the tile, in bytes, that makes the swizzle one of absolute addresses (TMA, wgmma) as well."""
        return max(16, self.swizzle.period)

    # -- what the TMA and ``wgmma`` need to know of it
    def tensor_map(
        self, dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...], *, rows: int | None = None
    ) -> TensorMapSpec:
        """The tensor map whose boxes fill a panel of this tile, or ``rows`` of its rows.

        ``shape`` and ``strides`` are the tensor's as :class:`TensorMapSpec` counts them: dimensions innermost first,
        strides in bytes of all but the first. The box covers the two innermost ones. Raises LayoutError for what the
        hardware does not take.
        """
        if dtype.bytes != self.element_bytes:
            raise LayoutError(f"the tile has elements of {self.element_bytes} bytes, the tensor of {dtype}")
        self._equal_panels("a tensor map's boxes need")
        box = (self.panels[0].cols, rows or self.rows, *(1,) * (len(shape) - 2))
        return TensorMapSpec(dtype, shape, strides, box[: len(shape)], self.row_bytes if self.swizzle.bits else 0)

    def matrix_descriptor(self, *, transposed: bool = False) -> MatrixDescriptor:
        """The constant part of the descriptor of a ``wgmma`` operand in this tile: rows of M or N, columns of K.

        ``transposed``: rows of K, columns of M or N. Raises LayoutError unless the rows are swizzled over their 128, 64
        or 32 bytes.
        """
        self._equal_panels("a wgmma operand needs")
        if self.row_bytes not in (32, 64, 128) or self.swizzle != Swizzle.for_row_bytes(self.row_bytes):
            raise LayoutError(
                "wgmma reads rows of 128, 64 or 32 bytes that are swizzled over their width, not "
                f"{self.row_bytes}-byte rows with {self.swizzle}: make the tile with "
                'swizzle="auto", and panel_cols for wider rows'
            )
        leading = self.panels[1].byte_offset if transposed and len(self.panels) > 1 else 0
        return MatrixDescriptor(self.row_bytes, stride=8 * self.row_bytes, leading=leading)

    def matrix_offset(self, row: int, col: int, *, transposed: bool = False) -> int:
        """Bytes from the tile's start to where the descriptor of the operand from element (row, col) on points.

        Rows are multiples of 8; columns of 16 elements of one ``wgmma``'s depth, or, ``transposed``, of a whole panel.
        """
        step = self.panels[0].cols if transposed else max(1, 32 // self.element_bytes)
        if row % 8 or col % step or not (0 <= row < self.rows and 0 <= col < self.cols):
            raise LayoutError(
                f"a wgmma operand starts at a row that is a multiple of 8 and a column that is one of {step} within "
                f"{self.rows}×{self.cols}, not at ({row}, {col})"
            )
        panel = self._panel_of(col)
        return panel.byte_offset + row * self.row_bytes + (col - panel.first_col) * self.element_bytes

    def matrix_start(self, outer: Any, *, transposed: bool = False) -> Any:
        """Bytes from the tile's start to row ``outer`` of an operand; transposed, to column ``outer``.

        ``outer`` is an int or a traced multiple of 8, transposed of a panel's columns. Of :meth:`matrix_offset` that is
        the part which may be known at run time alone.
        """
        if not transposed:
            return outer * self.row_bytes
        return outer * (self._panel_bytes(self.panels[0].cols) // self.panels[0].cols)

    def _equal_panels(self, what: str) -> None:
        if self.padding:
            raise LayoutError(f"{what} rows without padding")
        if any(p.cols != self.panels[0].cols for p in self.panels):
            widths = "+".join(str(p.cols) for p in self.panels)
            raise LayoutError(f"{what} panels of one width, not {widths}: choose panel_cols, or another width")

    def panel_layout(self, index: int) -> SharedLayout:
        """Panel ``index`` as a tile of its own; add its ``byte_offset``."""
        return self._panel_layouts[index]

    @cached_property
    def _panel_layouts(self) -> tuple[SharedLayout, ...]:
        made = {
            cols: SharedLayout(self.rows, cols, self.element_bytes, self.swizzle, padding=self.padding)
            for cols in {panel.cols for panel in self.panels}
        }
        return tuple(made[panel.cols] for panel in self.panels)

    @cached_property
    def map(self) -> LinearMap:
        """The map ``(row, col) → byte``, over the next power of two of ``rows``.

        Exists for one panel, and for equal panels whose stride is a power of two. Raises LayoutError otherwise: use
        :meth:`panel_layout`, or :meth:`offset` of padded rows.
        """
        if self.padding:
            raise LayoutError(f"rows of {self.cols} + {self.padding} elements are no linear map; use offset(row, col)")
        first = self.panels[0]
        row_bytes = self.row_bytes
        row_bits = (self.rows - 1).bit_length()
        col_bits = first.cols.bit_length() - 1
        byte_bits = row_bits + row_bytes.bit_length() - 1
        stored = self.swizzle.map(max(byte_bits, self.swizzle.base + self.swizzle.bits))
        rows = [stored.apply(byte=row_bytes << bit)["byte"] for bit in range(row_bits)]
        cols = [stored.apply(byte=self.element_bytes << bit)["byte"] for bit in range(col_bits)]
        size = 1 << byte_bits
        if len(self.panels) > 1:
            stride = self.panels[1].byte_offset
            even = all(p.cols == first.cols for p in self.panels)
            if not even or stride != size:
                raise LayoutError(
                    f"a tile of panels {'+'.join(str(p.cols) for p in self.panels)} × {self.rows} rows is not one "
                    "linear map; address each panel by panel_layout(index) and its byte_offset"
                )
            extra = (len(self.panels) - 1).bit_length()
            cols += [stride << bit for bit in range(extra)]
            size = stride << extra
        bases = {"row": [(byte,) for byte in rows], "col": [(byte,) for byte in cols]}
        return LinearMap(bases, {"byte": size})

    def _repr_svg_(self) -> str:
        """The picture that notebooks show: which chunk lies in which banks."""
        from warploom.layout.draw import draw_banks

        return draw_banks(self).svg()

    def offset(self, row: Any, col: Any) -> Any:
        """The byte offset of element (row, col): integers, integer arrays, or traced values.

        Traced columns need panels of one width; for others, address :meth:`panel_layout` with the column within it.
        """
        concrete = all(is_integer(value) or isinstance(value, np.ndarray) for value in (row, col))
        if len(self.panels) == 1:
            return self._within(row, col, self.cols)
        if is_integer(col):
            panel = self._panel_of(int(col))
            return self._within(row, int(col) - panel.first_col, panel.cols) + panel.byte_offset
        if concrete:
            return self._offset_of_arrays(np.asarray(row), np.asarray(col))
        first = self.panels[0]
        if any(panel.cols != first.cols for panel in self.panels):
            raise LayoutError(
                f"a tile of {self.cols} columns has panels of {'+'.join(str(p.cols) for p in self.panels)}, whose rows "
                "have different strides, and the column is not known while tracing: make the tile wider, by a power of "
                "two of columns (k.shared, the last ones unused), or give the column as a number"
            )
        index = col >> (first.cols.bit_length() - 1)
        return self._within(row, col & (first.cols - 1), first.cols) + index * self.panels[1].byte_offset

    def element_at(self, byte: int) -> tuple[int, int]:
        """The (row, col) of the element that holds a byte of the tile, counted from its start."""
        panel = next(p for p in reversed(self.panels) if p.byte_offset <= byte)
        row_bytes = (panel.cols + self.padding) * self.element_bytes
        row, inside = divmod(self.swizzle.apply(byte - panel.byte_offset), row_bytes)
        return row, panel.first_col + inside // self.element_bytes

    def _panel_of(self, col: int) -> Panel:
        for panel in self.panels:
            if panel.first_col <= col < panel.first_col + panel.cols:
                return panel
        raise LayoutError(f"column {col} is outside the tile's {self.cols}")

    def _within(self, row: Any, col: Any, cols: int) -> Any:
        row_bytes = (cols + self.padding) * self.element_bytes
        row_shift = row_bytes.bit_length() - 1
        col_shift = self.element_bytes.bit_length() - 1
        row_part = row * row_bytes if self.padding else row << row_shift if row_shift else row
        col_part = col << col_shift if col_shift else col
        # Constants go last, so that tracing keeps them as immediates, and nothing is added for a zero.
        first, second = (col_part, row_part) if is_integer(row) else (row_part, col_part)
        is_zero = is_integer(second) and second == 0
        return self.swizzle.apply(first if is_zero else first + second)

    def _offset_of_arrays(self, row: Any, col: Any) -> Any:
        row, col = np.broadcast_arrays(row.astype(np.int64), col.astype(np.int64))
        total = np.full(row.shape, -1, dtype=np.int64)
        for panel in self.panels:
            inside = (col >= panel.first_col) & (col < panel.first_col + panel.cols)
            total[inside] = self._within(row[inside], col[inside] - panel.first_col, panel.cols) + panel.byte_offset
        if (total < 0).any():
            raise LayoutError(f"a column is outside the tile's {self.cols}")
        return total


def copy_positions(threads: int, cols: int, elements_per_access: int) -> LinearMap:
    """The map ``thread → (row, col)`` of a cooperative row-major copy: neighbouring threads take neighbouring chunks.

    Each thread takes ``elements_per_access`` consecutive elements of rows of ``cols``; the threads together cover
    ``threads · elements_per_access / cols`` rows at a time. All three are powers of two, and one pass covers at least a
    row; LayoutError otherwise.
    """
    thread_bits = log2_exact(threads, "the number of threads")
    chunk_bits = log2_exact(elements_per_access, "the elements per access")
    col_bits = log2_exact(cols, "the number of columns")
    row_bits = thread_bits + chunk_bits - col_bits
    if row_bits < 0 or col_bits < chunk_bits:
        raise LayoutError(f"{threads} threads × {elements_per_access} elements do not cover whole rows of {cols}")
    bases = [(0, 1 << bit) for bit in range(chunk_bits, col_bits)] + [(1 << bit, 0) for bit in range(row_bits)]
    return LinearMap({"thread": bases}, {"row": 1 << row_bits, "col": cols})


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
