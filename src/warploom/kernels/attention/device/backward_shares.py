# pyright: reportInvalidTypeForm=false
"""dK and dV where CTAs share the query heads of a key head: what each leaves in memory, and the kernel that sums it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from warploom.core.dtypes import f32, u32
from warploom.kernels.attention.problem import GradientDims
from warploom.lang import Fragment, Global, GlobalPointer, Kernel, TensorMap, Traced, kernel
from warploom.lang.values import Number
from warploom.tile.accumulation import WARPS, load_part, save_part
from warploom.tile.epilogue import await_sent, send_rows
from warploom.tile.pipeline import Boxes, operand_tile
from warploom.tile.planning import part_size
from warploom.tile.product import Wgmma, zero
from warploom.tile.ragged import PieceList, sequence_boxes
from warploom.tile.roles import WARPGROUP, WARPGROUP_ROWS


@dataclass(frozen=True)
class ShareSums:
    """dK and dV of shares in memory: 64 keys of a share after another, of each dK and then dV, as threads hold them."""

    k: Kernel
    shares: GlobalPointer
    config: GradientDims

    def save(self, sums: Fragment, number: Traced, *, value: bool) -> None:
        """A warpgroup's dK, or dV, of the 64 keys with this number."""
        save_part(self.k, self._part(number, value), sums)

    def add_to(self, sums: Fragment, number: Traced, *, value: bool) -> None:
        """Add what was saved to an accumulator, whose further columns stay as they are."""
        warp, registers = self.k.warp & (WARPS - 1), self._registers[value]
        saved = load_part(self.k, self._part(number, value), registers, warp=warp, warps=WARPS)
        for total, x in zip(sums.mutable[:registers], saved, strict=True):
            total.set(total.get() + x)

    @property
    def _registers(self) -> tuple[int, int]:
        """Accumulator registers of dK, and of dV."""
        return self.config.sum_cols // 2, self.config.value_sum_cols // 2

    def _part(self, number: Traced, value: bool) -> GlobalPointer:
        of_keys, of_values = (part_size(registers) for registers in self._registers)
        return self.shares + self.k.mul_wide(number, of_keys + of_values) + (of_keys if value else 0)


@kernel(threads=2 * WARPGROUP, requires="sm_90a", drop_unused=True)
def attention_backward_shares_sm90(
    k: Kernel,
    dk_map: TensorMap,
    dv_map: TensorMap,
    tiles: Global[u32],
    sums: Global[f32],
    *,
    config: GradientDims,
    shares: tuple[int, int],
    heads_inside: bool = True,
    listed: bool = False,
) -> None:
    """dK and dV from ``sums`` of (how many) ``shares`` for each tile (of so many keys), rounded; a CTA for 64 keys.

    A warpgroup has dK, the other one dV. Grid (64 keys, key heads, batches), or along x 64 keys of the ``tiles`` that a
    list has of the first shares: those of the others are behind them.
    """
    count, parts = shares[0], shares[1] // WARPGROUP_ROWS
    saved = ShareSums(k, sums, config)
    if not listed:
        first = (k.cta_z * k.special("nctaid.y") + k.cta_y) * count
        boxes = [Boxes.of_heads(to, heads_inside) for to in (dk_map, dv_map)]
        place = k.cta_x * WARPGROUP_ROWS, k.cta_y, k.cta_z
        _add_up(k, saved, count, lambda share: (first + share) * k.grid_x + k.cta_x, boxes, place)
        return
    pieces, first, part = PieceList(k, tiles), k.cta_x // parts * count, k.cta_x % parts
    with k.when(first < pieces.count, uniform=True):
        piece, row = pieces.at(first), pieces.slot(first).number * shares[1]
        place = row + part * WARPGROUP_ROWS, piece.head // count, piece.queries.begin - row, piece.queries.count + row
        boxes = [sequence_boxes(to) for to in (dk_map, dv_map)]
        _add_up(k, saved, count, lambda share: (first + share) * parts + part, boxes, place)


def _add_up(
    k: Kernel,
    saved: ShareSums,
    count: int,
    number: Callable[[Traced], Traced],
    boxes: list[Boxes],
    place: tuple[Number, ...],
) -> None:
    """The sums of ``count`` shares, each saved under its number, on their way to dK and dV."""
    config, cores = saved.config, Wgmma(k, saved.config.dtype)
    for me, (name, width) in enumerate((("dK", config.width), ("dV", config.value_width))):
        tile = operand_tile(k, config.dtype, WARPGROUP_ROWS, width, name=name, tight=True)
        sums = cores.accumulator(width, name)  # whole panels, zero beyond head_dim
        with k.when(k.warpgroup == me, uniform=True):
            zero(sums)
            with k.loop(count) as share:
                saved.add_to(sums, number(share), value=me == 1)
            send_rows(k, tile, sums, k.value(0, u32), boxes[me], place)
            await_sent(k)
