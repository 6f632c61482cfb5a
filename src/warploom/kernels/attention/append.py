"""New keys and values into a cache, with rotary embedding on the way: what is asked, and the launch."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.core.arguments import fields, strides
from warploom.core.dtypes import DType
from warploom.core.errors import ProblemError
from warploom.kernels.attention.problem import ArrayStrides, AttentionProblem
from warploom.kernels.source import KernelCall, KernelSource
from warploom.tile.planning import page_table

THREADS = 128
CHUNK = 8
"""Elements that a thread moves: 16 bytes."""
MOST_BATCH = 65535
MOST_ROWS = 2**28

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
    """The form of an append that a kernel is traced for.

    ``page_size``: 0 without pages. ``rotary``: elements of a head that are turned. ``interleaved``: neighbours are
    turned together, not the elements a half of ``rotary`` apart. ``table``: the type of cosines and sines.
    ``queries``: queries are turned too. ``fp8``: the cache is ``e4m3``, with ``scaled`` times a scale of each sequence
    and key head.
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
    """``tokens`` new keys of each sequence of a problem on a cache; its ``queries`` are turned too, if there are any.

    ``rotary``, ``interleaved`` and ``table`` as of :class:`AppendForm`; there are cosines for ``positions`` positions.
    """

    cached: AttentionProblem
    tokens: int
    queries: bool = False
    rotary: int = 0
    interleaved: bool = False
    table: DType | None = None
    positions: int = 0

    @property
    def form(self) -> AppendForm:
        """The form that the kernel is traced for."""
        p, cache = self.cached, self.cached.cache
        turned = self.rotary, self.interleaved, self.table, self.queries
        return AppendForm(p.head_dim, p.dtype, cache.page_size, *turned, cache.fp8, cache.scaled)

    def call(self, operands: ArrayStrides) -> KernelCall:
        """The launch on arrays with strides (batch or page, head, token) of those of MOVED, (batch, head) of scales.

        Those of an fp8 cache count pairs. Raises ProblemError for more than a launch takes.
        """
        p, cache, form, lying = self.cached, self.cached.cache, self.form, operands.strides
        rows = max(self.tokens * p.kv_heads, p.q_len * p.heads)
        if p.batch > MOST_BATCH or rows >= MOST_ROWS:
            raise ProblemError(f"{p.batch} sequences with {rows} rows: append fewer at once")
        source = KernelSource.of(
            f"warploom.kernels.attention.device.append:append_to_cache{'_sm90' if cache.fp8 else ''}",
            f"append_to_cache_{p.head_dim}",
            form=form,
        )
        scalars = {
            **fields("new", tokens=self.tokens, heads=p.kv_heads),
            "capacity": p.kv_len,
            **fields("queries", tokens=p.q_len, heads=p.heads),
            "angles_positions": self.positions,
            **page_table(lying.get("table", (0,))[0], cache.table_pages, cache.pages),
            **strides(**{MOVED[name]: of for name, of in lying.items() if name in MOVED}),
        }
        arrays = [*(name for name in MOVED if name in lying), "lengths"]
        arrays += ["table"] if cache.page_size else []
        arrays += ["cos", "sin"] if self.rotary else []
        grid = -(-rows * (p.head_dim // CHUNK) // THREADS), 3 if self.queries else 2, p.batch
        return KernelCall(source, grid, scalars, (), tuple(arrays))
