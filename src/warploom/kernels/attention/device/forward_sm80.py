# pyright: reportInvalidTypeForm=false
"""Attention forward for ``cp.async`` and ``mma.sync`` (sm_80 and newer): each warp copies and owns query rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from warploom.core.dtypes import f32, u16, u32
from warploom.kernels.attention.forward_sm80 import ForwardSm80
from warploom.kernels.attention.problem import PLAIN, AttentionFeatures
from warploom.lang import Global, GlobalPointer, Kernel, SharedTile, Strided, StridedPointer, Traced, kernel
from warploom.lang.values import Number
from warploom.tile.copies import CopyRing, RowCopy, Rows
from warploom.tile.epilogue import store_pairs, store_row_values
from warploom.tile.mask import Mask, Visible
from warploom.tile.pipeline import operand_tile
from warploom.tile.product import MmaSync, zero
from warploom.tile.softmax import OnlineSoftmax


@kernel(threads=lambda config, **_: config.threads, drop_unused=True)
def attention_sm80(
    k: Kernel,
    q: Strided[u16, 2],
    key: Strided[u16, 2],
    value: Strided[u16, 2],
    out: Strided[u16, 2],
    lse: Global[f32],
    sinks: Global[f32],
    q_len: u32,
    kv_len: u32,
    *,
    config: ForwardSm80,
    features: AttentionFeatures = PLAIN,
    row_strides: tuple[int, int, int, int],
) -> None:
    """O = softmax(scale · Q·Kᵀ)·V for one block of query rows; grid (query blocks, heads, batches).

    Strides of batches and heads; those between positions of Q, K, V and O are known while tracing. ``lse`` is
    (batch, heads, q_len), ``sinks`` (heads,).
    """
    head, batch = k.cta_y, k.cta_z
    kv_head = head // features.group if features.group > 1 else head
    # Under a causal mask later query blocks have more keys: start with them, so that the last wave is short.
    row = (k.grid_x - 1 - k.cta_x if features.window[1] is not None else k.cta_x) * config.tile_m

    def plane(of: StridedPointer, number: int, rows: Traced | None) -> Rows:
        start = of.at(batch, kv_head if number in (1, 2) else head)
        return Rows(start, row_strides[number], rows, config.head_dim if number < 2 else config.value_dim)

    q_rows, kv_rows = q_len if features.ragged_q else None, kv_len if features.ragged_kv else None
    attend(
        k,
        config,
        features,
        QueryRows(
            row,
            (q_len, kv_len),
            lambda: plane(q, 0, q_rows),
            lambda: plane(key, 1, kv_rows),
            lambda: plane(value, 2, kv_rows),
            lambda: plane(out, 3, q_rows),
            lambda: lse + k.mul_wide(batch * k.special("nctaid.y") + head, q_len),
            lambda: sinks.load(head),
        ),
    )


@dataclass(frozen=True)
class QueryRows:
    """What a CTA computes: the query rows from ``row`` on, of sequences of ``lengths``, and where their arrays lie.

    ``lse`` is of row 0. Addresses are formed where they are used.
    """

    row: Number
    lengths: tuple[Traced, Traced]
    q: Callable[[], Rows]
    key: Callable[[], Rows]
    value: Callable[[], Rows]
    out: Callable[[], Rows]
    lse: Callable[[], GlobalPointer]
    sink: Callable[[], Traced]
    may_lack_keys: bool = False


def attend(k: Kernel, config: ForwardSm80, features: AttentionFeatures, at: QueryRows) -> None:
    """O, and log-sum-exps, of one block of query rows, by all threads of the CTA."""
    c, f, d = config, features, config.head_dim
    row = at.row
    warp_row = k.warp * c.warp_rows
    q_tile = operand_tile(k, c.dtype, c.tile_m, c.query_cols, name="Q")
    k_tile = operand_tile(k, c.dtype, c.tile_n, d, name="K", stages=c.stages)
    v_tile = operand_tile(k, c.dtype, c.tile_n, c.value_dim, name="V", stages=c.stages)
    RowCopy(k, q_tile, at.q(), c.threads).load((row, 0))
    k.commit_group()
    ring = CopyRing(k, (k_tile, at.key()), (v_tile, at.value()), threads=c.threads)

    visible = Visible(f.window, f.ragged_kv)
    mask = Mask(k, visible, (c.tile_m, c.tile_n), row, at.lengths, may_lack_keys=at.may_lack_keys)
    cores = MmaSync(k, c.dtype, ahead=True)
    s = cores.accumulator(c.warp_rows, c.tile_n, "s")
    o = cores.accumulator(c.warp_rows, -(-c.value_dim // 16) * 16, "o")
    scores = cores.product(s, q_tile, k_tile, warp=(k.warp, 0), depth=d)
    product = cores.product(o, s, v_tile, transposed_b=True)
    softmax = OnlineSoftmax(k, s, o, f.softmax_scale(d), c.dtype, cap=f.softcap, lse=f.lse, sinks=f.sinks)
    softmax.begin()
    zero(o)

    def block(step: Traced, keys: SharedTile, values: SharedTile) -> None:
        scores.start(q_tile, keys, zero=True)
        softmax.step(lambda: mask.apply(s, mask.block(step), row=warp_row))
        product.start(cores.left(s), values)

    ring.each(mask.blocks, lambda step: 2 * [(mask.block(step) * c.tile_n, 0)], block)

    softmax.keep()
    logs = softmax.finish(at.sink() if f.sinks else None)
    k.syncwarp()  # every lane has read its Q
    store_pairs(k, q_tile, o, warp_row)
    k.syncthreads()
    RowCopy(k, q_tile, at.out(), c.threads).store((row, 0))
    if logs:
        store_row_values(k, at.lse(), logs, s, row + warp_row, at.lengths[0])
