# pyright: reportInvalidTypeForm=false
"""The backward pass of packed sequences: the kernels of one length on listed tiles of keys and blocks of queries.

Blocks of query rows have slots, which the lists name: places for shift, delta and the sums of dQ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from warploom.core.dtypes import DType, f32, u16, u32
from warploom.kernels.attention.backward import RowGroups
from warploom.kernels.attention.backward_sm80 import BackwardSm80
from warploom.kernels.attention.backward_sm90 import CONSUMERS, KEYS, BackwardSm90
from warploom.kernels.attention.device import backward_sm90 as sm90
from warploom.kernels.attention.device.backward_rows import ROW_THREADS, RowPlaces, RowVectors, form
from warploom.kernels.attention.device.backward_sm80 import GradientArrays, KeyBlock, KeyGradients, round_sums
from warploom.kernels.attention.device.backward_sm90 import KeyTile, KeyTiles, visible
from warploom.kernels.attention.device.packed import write
from warploom.kernels.attention.packed import LISTING_WARPS
from warploom.kernels.attention.problem import AttentionFeatures
from warploom.lang import Global, Kernel, Strided, StridedPointer, TensorMap, Traced, kernel
from warploom.lang.values import Number
from warploom.tile import ragged
from warploom.tile.accumulation import PartSums
from warploom.tile.copies import Rows
from warploom.tile.mask import SeenBy
from warploom.tile.ragged import Piece, PieceList, RaggedBatch, RaggedTiles, Sequences, Slot, Slots, sequence_boxes
from warploom.tile.roles import WARPGROUP, threads_of
from warploom.tile.scheduler import Divisor, Persistent, Single


@kernel(threads=32 * LISTING_WARPS, drop_unused=True)
def list_gradient_tiles(
    k: Kernel,
    own: Sequences,
    others: Sequences,
    tiles: Global[u32],
    cleared: Global[u32],
    cleared_too: Global[u32],
    batch: RaggedBatch,
    most_slots: u32,
    *,
    tile: int,
    used: tuple[bool, bool],
    slots: tuple[int, bool],
    clears: tuple[int, ...],
) -> None:
    """The list of tiles of queries, or of keys, with ``slots`` as :class:`Slots` has them.

    ``clears``: words of a row of the gradients whose rows of no sequence become zero.
    """
    sides = own.cut(used[0]), others.cut(used[1])
    listed = RaggedTiles(k, *sides, batch, tile, False, Slots(*slots, most_slots))
    write(listed, tiles, zip((cleared, cleared_too), clears, strict=False))


@kernel(threads=ROW_THREADS, drop_unused=True)
def packed_backward_rows(
    k: Kernel,
    out: Strided[u16, 2],
    dout: Strided[u16, 2],
    vectors: RowVectors,
    blocks: Global[u32],
    total_q: u32,
    slots: u32,
    *,
    head_dim: int,
    dtype: DType,
    lse_gradient: bool,
    tile: tuple[int, int],
) -> None:
    """As :func:`.device.backward_rows.attention_backward_rows`; grid (blocks there may be, parts of one)."""
    groups, listed = RowGroups(head_dim), PieceList(k, blocks)
    with k.when(k.cta_x < listed.count, uniform=True):
        piece, slot = listed.at(k.cta_x), listed.slot(k.cta_x)
        lane, chunk = k.lane // groups.lanes, k.lane % groups.lanes
        first = k.cta_y * groups.rows + k.warp * groups.warp_rows
        rows = [first + (i * groups.side + lane) for i in range(groups.steps)]
        number = piece.head * slots + slot.first + slot.number

        place = RowPlaces(
            k.minimum(piece.queries.count, tile[0]),
            tile[0],
            lambda row: k.mul_wide(piece.head, total_q) + k.mul_wide(piece.queries.begin + row, 1),
            lambda row: k.mul_wide(number, tile[1]) + k.mul_wide(row, 1),
        )
        form(
            k,
            place,
            rows,
            lambda row: [x.at(piece.queries.begin + row, piece.head) + k.mul_wide(chunk, 8) for x in (out, dout)],
            vectors,
            (head_dim, dtype),
            lse_gradient=lse_gradient,
        )


@kernel(threads=lambda config, **_: config.threads, drop_unused=True)
def packed_backward_sm80(
    k: Kernel,
    arrays: GradientArrays,
    tiles: Global[u32],
    sums: PartSums,
    slots: u32,
    *,
    config: BackwardSm80,
    features: AttentionFeatures,
    row_strides: tuple[int, ...],
) -> None:
    """As :func:`.device.backward_sm80.attention_backward_sm80`; a CTA for each tile of keys there may be."""
    c, listed = config, PieceList(k, tiles)
    with k.when(k.cta_x < listed.count, uniform=True):
        piece, slot = listed.at(k.cta_x), listed.slot(k.cta_x)
        head, first, queries = piece.head, slot.number * c.keys, piece.keys
        keys = ragged.RowRange(piece.queries.begin - first, piece.queries.count + first)

        def keys_of(of: StridedPointer, cols: int) -> Rows:
            return Rows(of.at(keys.begin, head), of.strides[0], keys.count, cols)

        def queries_of(of: StridedPointer, cols: int) -> Rows:
            start = k.mul_wide(queries.begin, of.strides[0]) + k.mul_wide(head * features.group, of.strides[1])
            return Rows(of + start, of.strides[0], queries.count, cols, plane=of.strides[1])

        at = KeyBlock(
            slot.number,
            first,
            head,
            (queries.count, keys.count),
            keys_of,
            queries_of,
            lambda block, head: head * slots + slot.first + block,
        )
        known = zip(arrays.tensors, row_strides, strict=True)
        tensors = [replace(x, strides=(row, x.strides[1])) for x, row in known]
        KeyGradients(k, c, features, at, tensors, (arrays.shift, arrays.delta), sums).run()


@kernel(threads=lambda config, **_: config.threads, drop_unused=True)
def packed_backward_dq_sm80(
    k: Kernel,
    dq: Strided[u16, 1],
    total: Global[f32],
    blocks: Global[u32],
    slots: u32,
    *,
    config: BackwardSm80,
    features: AttentionFeatures,
    row_strides: tuple[int, ...],
) -> None:
    """As :func:`.device.backward_sm80.attention_backward_dq_sm80`; a CTA for each block there may be."""
    listed = PieceList(k, blocks)
    with k.when(k.cta_x < listed.count, uniform=True):
        piece, slot = listed.at(k.cta_x), listed.slot(k.cta_x)
        number = piece.head * slots + slot.first + slot.number
        start = dq + (k.mul_wide(piece.queries.begin, row_strides[0]) + dq.offset(piece.head))
        rows = Rows(start, row_strides[0], piece.queries.count, config.head_dim)
        lengths = piece.queries.count, piece.keys.count
        round_sums(k, config, features, total, number, (k.value(0, u32), lengths), rows)


# -- by wgmma and the TMA
@dataclass(frozen=True)
class PackedKeyTile(KeyTile):
    """A listed tile of keys."""

    piece: Piece | None = None
    slot: Slot | None = None
    slots: Traced | None = None
    """Of a head."""

    @classmethod
    def listed_as(
        cls, k: Kernel, config: BackwardSm90, features: AttentionFeatures, place: tuple[Piece, Slot], slots: Traced
    ) -> PackedKeyTile:
        """What a list says of a tile, with so many slots of a head."""
        tile, (piece, slot) = (config.tile_m, KEYS), place
        first, none = slot.number * KEYS, k.value(0, u32)
        lengths = piece.keys.count, piece.queries.count + first
        mask = SeenBy(k, visible(features), tile, first, lengths, rising=config.rising)
        of_head = Divisor.of(k, k.maximum(mask.blocks, 1)) if config.by_heads else None
        return cls(k, features, tile, slot.number, piece.head, none, none, lengths, mask, of_head, piece, slot, slots)

    @property
    def place(self) -> tuple[Number, ...]:
        """Where its K and V lie."""
        assert self.piece is not None
        first = self.number * KEYS
        return first, self.kv_head, self.piece.queries.begin - first, self.lengths[1]

    def rows(self, block: Traced, head: Traced) -> tuple[Number, ...]:
        """Where Q and dO of a block of query rows lie."""
        assert self.piece is not None
        return block * self.tile[0], head, self.piece.keys.begin, self.lengths[0]

    def values(self, block: Traced, head: Traced, vector: int) -> tuple[Traced, Traced]:
        """Where shift and delta of a block lie."""
        assert self.slot is not None
        return (self.slot.first + block) * vector, head

    def part(self, turn: Traced, me: Number) -> Traced:
        """The number of a consumer's part of a block of dQ."""
        assert self.slot is not None
        assert self.slots is not None
        block, head = self.at(turn)
        return (head * self.slots + self.slot.first + block) * CONSUMERS + me


@kernel(threads=threads_of(CONSUMERS), requires="sm_90a", drop_unused=True)
def packed_backward_sm90(
    k: Kernel,
    maps: sm90.GradientMaps,
    tiles: Global[u32],
    sums: PartSums,
    slots: u32,
    *,
    config: BackwardSm90,
    features: AttentionFeatures,
) -> None:
    """As :func:`.device.backward_sm90.attention_backward_sm90`, on listed tiles of keys.

    The tensor maps of tensors are ragged ones, those of shift and delta of (heads, slots · places).
    """
    listed = PieceList(k, tiles)
    order = Persistent(k, listed.count) if config.persistent else Single(k, listed.count)

    def at(turn: Number) -> PackedKeyTile:
        number = order.item(turn)
        return PackedKeyTile.listed_as(k, config, features, (listed.at(number), listed.slot(number)), slots)

    sm90.differentiate(k, config, features, KeyTiles(k, order, at), maps.boxes(sequence_boxes), sums)


@kernel(threads=CONSUMERS * WARPGROUP, requires="sm_90a", drop_unused=True)
def packed_backward_dq_sm90(
    k: Kernel,
    dq_map: TensorMap,
    total: Global[f32],
    blocks: Global[u32],
    slots: u32,
    *,
    config: BackwardSm90,
    features: AttentionFeatures,
) -> None:
    """As :func:`.device.backward_sm90.attention_backward_dq_sm90`; a CTA for each block there may be."""
    listed = PieceList(k, blocks)
    with k.when(k.cta_x < listed.count, uniform=True):
        piece, slot = listed.at(k.cta_x), listed.slot(k.cta_x)
        number = (piece.head * slots + slot.first + slot.number) * CONSUMERS
        queries = piece.queries
        place = k.value(0, u32), (queries.count, piece.keys.count)
        to = sequence_boxes(dq_map), (0, piece.head, queries.begin, queries.count)
        sm90.round_sums(k, config, features, (total, number), place, to)
