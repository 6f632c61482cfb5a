# pyright: reportInvalidTypeForm=false
"""What every block of a backward pass reads of the query rows, in one pass over O and dO."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from warploom.core.dtypes import DType, f32, u16, u32, u64
from warploom.kernels.attention.backward_rows import ROW_THREADS, RowGroups
from warploom.lang import Compound, Global, GlobalPointer, Kernel, Mutable, Strided, Traced, kernel
from warploom.tile.ragged import PieceList
from warploom.tile.softmax import LOG2_E

CHUNK_WORDS = 4
"""32-bit words that a thread moves at once: 8 elements of a row."""


@kernel(threads=ROW_THREADS, drop_unused=True)
def attention_backward_rows(
    k: Kernel,
    out: Strided[u16, 3],
    dout: Strided[u16, 3],
    vectors: RowVectors,
    blocks: Global[u32],
    q_len: u32,
    padded: u32,
    total_q: u32,
    slots: u32,
    *,
    head_dim: int,
    dtype: DType,
    lse_gradient: bool,
    tile: tuple[int, int],
    listed: bool = False,
) -> None:
    """shift = -log2(e)·LSE and delta = rowsum(dO∘O) - dLSE; grid (groups of rows, heads, batches).

    ``lse`` and ``dlse`` are (batch, heads, q_len), shift and delta (batch, heads, tiles, ``tile[1]``) for tiles of
    ``tile[0]`` rows: ``padded`` rows, 0 beyond q_len, where rows of Q and dO are 0 too.

    Of packed sequences the tiles are ``listed`` in ``blocks``; grid (blocks there may be, parts of one). ``lse`` is
    (heads, total_q) then, shift and delta (heads, ``slots``, ``tile[1]``), and strides are those of rows and heads.
    """
    groups, elements = RowGroups(head_dim), (head_dim, dtype)
    if listed:
        pieces = PieceList(k, blocks)
        with k.when(k.cta_x < pieces.count, uniform=True):
            piece, slot = pieces.at(k.cta_x), pieces.slot(k.cta_x)
            begin, lane, chunk = piece.queries.begin, k.lane // groups.lanes, k.lane % groups.lanes
            first = k.cta_y * groups.rows + k.warp * groups.warp_rows
            rows = [first + (i * groups.side + lane) for i in range(groups.steps)]
            number = piece.head * slots + slot.first + slot.number
            place = RowPlaces(
                k.minimum(piece.queries.count, tile[0]),
                tile[0],
                lambda row: k.mul_wide(piece.head, total_q) + k.mul_wide(begin + row, 1),
                lambda row: k.mul_wide(number, tile[1]) + k.mul_wide(row, 1),
            )
            form(
                k,
                place,
                rows,
                lambda row: [x.at(begin + row, piece.head) + k.mul_wide(chunk, 8) for x in (out, dout)],
                vectors,
                elements,
                lse_gradient=lse_gradient,
            )
        return
    head, batch = k.cta_y, k.cta_z
    plane = batch * k.special("nctaid.y") + head
    lane, chunk = k.lane // groups.lanes, k.lane % groups.lanes
    rows = [(k.cta_x * groups.rows + k.warp * groups.warp_rows) + (i * groups.side + lane) for i in range(groups.steps)]
    form(
        k,
        RowPlaces(
            q_len,
            padded,
            lambda row: k.mul_wide(plane, q_len) + k.convert(row, u64),
            lambda row: k.mul_wide(plane, padded // tile[0] * tile[1]) + k.convert(slot_of(row, tile), u64),
        ),
        rows,
        lambda row: [x.at(batch, head, row) + k.mul_wide(chunk, 8) for x in (out, dout)],
        vectors,
        elements,
        lse_gradient=lse_gradient,
    )


class RowVectors(Compound):
    """A parameter: a number of each row: log-sum-exps and their gradient, and what is formed."""

    lse: Global[f32]
    dlse: Global[f32]
    shift: Global[f32]
    delta: Global[f32]


@dataclass(frozen=True)
class RowPlaces:
    """Rows that exist, and those that have a place; ``at`` and ``to``: of a row in lse and dlse, in shift and delta."""

    rows: Traced
    padded: Traced | int
    at: Callable[[Traced], Traced]
    to: Callable[[Traced], Traced]


def form(
    k: Kernel,
    place: RowPlaces,
    rows: list[Traced],
    lines: Callable[[Traced], Sequence[GlobalPointer]],
    vectors: RowVectors,
    elements: tuple[int, DType],
    *,
    lse_gradient: bool,
) -> None:
    """Shift and delta of the rows that a thread has a part of; ``lines`` are those of O and dO, ``elements`` theirs."""
    head_dim, dtype = elements
    groups, q_len, padded = RowGroups(head_dim), place.rows, place.padded
    chunk = k.lane % groups.lanes
    found: list[tuple[list[Mutable], list[Mutable]]] = []
    for row in rows:  # all loads before the first use
        found.append((k.registers(u32, CHUNK_WORDS, 0, "o"), k.registers(u32, CHUNK_WORDS, 0, "do")))
        with k.when((row < q_len) & (chunk < head_dim // 8)):
            for words, source in zip(found[-1], lines(row), strict=True):
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
                at = place.at(row)
                logarithm = vectors.lse.load(at)
                # a row that sees no key has no scores but -inf, and any finite shift makes them 0
                exponent.set(k.select(logarithm == -math.inf, k.value(0.0, f32), logarithm * -LOG2_E))
                change.set(total - vectors.dlse.load(at) if lse_gradient else total)
            to = place.to(row)
            vectors.shift.store(exponent, to)
            vectors.delta.store(change, to)


def slot_of(row: Traced, tile: tuple[int, int]) -> Traced:
    """The place of a row among those of its plane."""
    return row if tile[0] == tile[1] else row // tile[0] * tile[1] + row % tile[0]
