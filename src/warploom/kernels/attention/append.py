"""New keys and values into a cache, with rotary embedding on the way: what is asked, and the launch."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.core.arguments import fields
from warploom.core.arguments import strides as strides_of
from warploom.core.dtypes import DType
from warploom.core.errors import ProblemError
from warploom.kernels.source import KernelCall, KernelSource
from warploom.tile.order import page_table

THREADS = 128
CHUNK = 8
"""Elements that a thread moves: 16 bytes."""
MOST_BATCH = 65535
MOST_ROWS = 2**28

Strides = tuple[int, int, int]
MOVED = {
    "k": "key_given",
    "k_cache": "key_kept",
    "k_scale": "key_scale",
    "v": "value_given",
    "v_cache": "value_kept",
    "v_scale": "value_scale",
    "q": "q_given",
    "q_out": "q_kept",
}
"""Arrays by the kernel's names, in its order."""


@dataclass(frozen=True)
class AppendForm:
    """What a kernel is traced for. ``page_size``: 0 without pages. ``rotary``: elements of a head that are turned.

    ``interleaved``: neighbours are turned together, not the elements a half of ``rotary`` apart. ``table``: the type of
    cosines and sines. ``queries``: queries are turned too. ``fp8``: the cache is ``e4m3``, with ``scaled`` times a
    scale of each sequence and key head.
    """

    head_dim: int
    dtype: DType
    page_size: int
    rotary: int = 0
    interleaved: bool = False
    table: DType | None = None
    queries: bool = False
    fp8: bool = False
    scaled: bool = False


@dataclass(frozen=True)
class AppendProblem:
    """``tokens`` new keys of each sequence, ``q_len`` queries (0: none), and cosines for ``positions`` positions."""

    form: AppendForm
    batch: int
    kv_heads: int
    tokens: int
    capacity: int
    pages: int = 0
    table_pages: int = 0
    heads: int = 0
    q_len: int = 0
    positions: int = 0

    def call(self, strides: dict[str, tuple[int, ...]], table_row: int) -> KernelCall:
        """The launch on arrays with ``strides``: (batch or page, head, token) of those of MOVED, and of scales
        (batch, head). Those of an fp8 cache count pairs.

        Raises ProblemError for more than a launch takes.
        """
        rows = max(self.tokens * self.kv_heads, self.q_len * self.heads)
        if self.batch > MOST_BATCH or rows >= MOST_ROWS:
            raise ProblemError(f"{self.batch} sequences with {rows} rows: append fewer at once")
        source = KernelSource.of(
            f"warploom.kernels.attention.device.append:append_to_cache{'_sm90' if self.form.fp8 else ''}",
            f"append_to_cache_{self.form.head_dim}",
            form=self.form,
        )
        scalars = {
            **fields("new", tokens=self.tokens, heads=self.kv_heads),
            "capacity": self.capacity,
            **fields("queries", tokens=self.q_len, heads=self.heads),
            "angles_positions": self.positions,
            **page_table(table_row, self.table_pages, self.pages),
            **strides_of(**{MOVED[name]: of for name, of in strides.items()}),
        }
        arrays = [*(name for name in MOVED if name in strides), "lengths"]
        arrays += ["table"] if self.form.page_size else []
        arrays += ["cos", "sin"] if self.form.rotary else []
        grid = -(-rows * (self.form.head_dim // CHUNK) // THREADS), 3 if self.form.queries else 2, self.batch
        return KernelCall(source, grid, scalars, (), tuple(arrays))
