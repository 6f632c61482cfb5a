# pyright: reportInvalidTypeForm=false
"""Attention forward for ``cp.async`` and ``mma.sync`` (sm_80 and newer): each warp copies and owns query rows."""

from __future__ import annotations

from warploom.core.dtypes import f32, u16, u32
from warploom.kernels.attention.device.scores import HeadArrays
from warploom.kernels.attention.device.tiles import Side, Tensor, tile_of
from warploom.kernels.attention.forward_sm80 import ForwardSm80
from warploom.kernels.attention.problem import PLAIN, AttentionFeatures
from warploom.lang import Global, Kernel, SharedTile, Strided, Traced, kernel
from warploom.lang.values import Number
from warploom.tile.copies import CopyRing, RowCopy, Rows
from warploom.tile.epilogue import store_pairs, store_row_values
from warploom.tile.mask import Mask
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
    options: HeadArrays,
    tiles: Global[u32],
    q_len: u32,
    kv_len: u32,
    total_q: u32,
    *,
    config: ForwardSm80,
    features: AttentionFeatures = PLAIN,
    row_strides: tuple[int, int, int, int],
    listed: bool = False,
) -> None:
    """O = softmax(scale · Q·Kᵀ)·V for one block of query rows; grid (query blocks, heads, batches).

    Strides of batches and heads; those between positions of Q, K, V and O are known while tracing. ``lse`` is
    (batch, heads, q_len). Of packed sequences the blocks are ``listed`` in ``tiles``, with a CTA for each that there
    may be; strides are those of heads alone, and ``lse`` is (heads, total_q).
    """
    c, f, d = config, features, config.head_dim
    arrays = [Tensor.of(*x, packed=listed) for x in zip((q, key, value, out), row_strides, strict=True)]
    with tile_of(k, f, (q_len, kv_len), tiles if listed else None) as at:
        kv_head = at.head // f.group if f.group > 1 else at.head

        def plane(of: Tensor, side: Side, head: Traced, cols: int) -> Rows:
            start = of.array.at(side.outer, head)
            return Rows(start, of.row, side.rows, cols)

        row: Number = 0
        if not listed:
            # Under a causal mask later query blocks have more keys: start with them, so that the last wave is short.
            row = (k.grid_x - 1 - k.cta_x if f.right is not None else k.cta_x) * c.tile_m
        warp_row = k.warp * c.warp_rows
        q_tile = operand_tile(k, c.dtype, c.tile_m, c.query_cols, name="Q")
        k_tile = operand_tile(k, c.dtype, c.tile_n, d, name="K", stages=c.stages)
        v_tile = operand_tile(k, c.dtype, c.tile_n, c.value_dim, name="V", stages=c.stages)
        RowCopy(k, q_tile, plane(arrays[0], at.queries, at.head, d), c.threads).load((row, 0))
        k.commit_group()
        fed = (k_tile, plane(arrays[1], at.keys, kv_head, d)), (v_tile, plane(arrays[2], at.keys, kv_head, c.value_dim))
        ring = CopyRing(k, *fed, threads=c.threads)

        mask = Mask(k, f.mask, (c.tile_m, c.tile_n), row, at.lengths, may_lack_keys=listed)
        cores = MmaSync(k, c.dtype, ahead=True)
        s = cores.accumulator(c.warp_rows, c.tile_n, "s")
        o = cores.accumulator(c.warp_rows, -(-c.value_dim // 16) * 16, "o")
        scores = cores.product(s, q_tile, k_tile, warp=(k.warp, 0), depth=d)
        product = cores.product(o, s, v_tile, transposed_b=True)
        change = options.scores(f, at.head).change
        softmax = OnlineSoftmax(k, s, o, f.softmax_scale(d), c.dtype, change=change, lse=f.lse, sink=bool(f.sink))
        softmax.begin()
        zero(o)

        def block(step: Traced, keys: SharedTile, values: SharedTile) -> None:
            scores.start(q_tile, keys, zero=True)
            softmax.step(lambda: mask.apply(s, mask.block(step), row=warp_row))
            product.start(cores.left(s), values)

        ring.each(mask.blocks, lambda step: 2 * [(mask.block(step) * c.tile_n, 0)], block)

        softmax.keep()
        logs = softmax.finish(options.sink(f, at.head))
        k.syncwarp()  # every lane has read its Q
        store_pairs(k, q_tile, o, warp_row)
        k.syncthreads()
        RowCopy(k, q_tile, plane(arrays[3], at.queries, at.head, c.value_dim), c.threads).store((row, 0))
        if logs:
            store_row_values(k, at.vector(lse, total_q), logs, s, row + warp_row, at.lengths[0])
