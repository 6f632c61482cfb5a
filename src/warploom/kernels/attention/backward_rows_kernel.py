# pyright: reportInvalidTypeForm=false
"""What every block of the backward pass reads of the query rows, formed once in one pass over O and dO."""

from __future__ import annotations

import math

from warploom.core.dtypes import DType, f32, u16, u32, u64
from warploom.kernels.attention.backward import ROW_THREADS, RowGroups
from warploom.lang import Global, GlobalPointer, Kernel, Mutable, Traced, kernel
from warploom.tile.softmax import LOG2_E

CHUNK_WORDS = 4
"""32-bit words that a thread moves at once: 8 elements of a row."""


@kernel(threads=ROW_THREADS, drop_unused=True)
def attention_backward_rows(
    k: Kernel,
    out: Global[u16],
    dout: Global[u16],
    lse: Global[f32],
    dlse: Global[f32],
    shift: Global[f32],
    delta: Global[f32],
    out_batch: u32, out_head: u32, out_row: u32,
    dout_batch: u32, dout_head: u32, dout_row: u32,
    q_len: u32, padded: u32,
    *,
    head_dim: int,
    dtype: DType,
    lse_gradient: bool,
    tile: tuple[int, int],
) -> None:  # fmt: skip
    """shift = -log2(e)·LSE and delta = rowsum(dO∘O) - dLSE; grid (groups of rows, heads, batches).

    ``lse`` and ``dlse`` are (batch, heads, q_len), shift and delta (batch, heads, tiles, ``tile[1]``) for tiles of
    ``tile[0]`` rows: ``padded`` rows, 0 beyond q_len, where rows of Q and dO are 0 too.
    """
    groups = RowGroups(head_dim)
    head, batch = k.cta_y, k.cta_z
    plane = batch * k.special("nctaid.y") + head
    lane, chunk = k.lane // groups.lanes, k.lane % groups.lanes
    rows = [(k.cta_x * groups.rows + k.warp * groups.warp_rows) + (i * groups.side + lane) for i in range(groups.steps)]

    def line(of: GlobalPointer, strides: tuple[Traced, Traced, Traced], row: Traced) -> GlobalPointer:
        start = k.mul_wide(batch, strides[0]) + k.mul_wide(head, strides[1]) + k.mul_wide(row, strides[2])
        return of + start + k.mul_wide(chunk, 8)

    found: list[tuple[list[Mutable], list[Mutable]]] = []
    for row in rows:  # all loads before the first use
        found.append((k.registers(u32, CHUNK_WORDS, 0, "o"), k.registers(u32, CHUNK_WORDS, 0, "do")))
        with k.when((row < q_len) & (chunk < head_dim // 8)):
            for words, source in zip(
                found[-1], (line(out, (out_batch, out_head, out_row), row),
                            line(dout, (dout_batch, dout_head, dout_row), row)), strict=True,
            ):  # fmt: skip
                for word, loaded in zip(words, source.load(0, CHUNK_WORDS, dtype=u32), strict=True):
                    word.set(loaded)
    for row, (o, do) in zip(rows, found, strict=True):
        total = k.value(0.0, f32)
        for a, b in zip(o, do, strict=True):
            for x, y in zip(k.unpack(a, dtype), k.unpack(b, dtype), strict=True):
                total = k.fma(x, y, total)
        for bit in range(groups.lanes.bit_length() - 1):
            total = total + k.shfl_xor(total, 1 << bit)
        with k.when((chunk == 0) & (row < padded)):
            exponent, change = k.register(f32, 0.0, "exponent"), k.register(f32, 0.0, "delta")
            with k.when(row < q_len):
                at = k.mul_wide(plane, q_len) + k.convert(row, u64)
                (logarithm,) = lse.load(at)
                # a row that sees no key has no scores but -inf, and any finite shift makes them 0
                exponent.set(k.select(logarithm == -math.inf, k.value(0.0, f32), logarithm * -LOG2_E))
                change.set(total - dlse.load(at)[0] if lse_gradient else total)
            slot = row if tile[0] == tile[1] else row // tile[0] * tile[1] + row % tile[0]
            to = k.mul_wide(plane, padded // tile[0] * tile[1]) + k.convert(slot, u64)
            shift.store(exponent, to)
            delta.store(change, to)
