"""The producer of the sm_90a attention kernel: one thread that keeps the tiles coming."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.core.dtypes import u32
from warploom.kernels.attention.hopper_parts import Role, TilePlace
from warploom.kernels.specialised import WARPGROUP_ROWS
from warploom.lang import SharedTile, Traced
from warploom.lang.hopper import Mbarriers, Ring, TensorMapHandle
from warploom.lang.values import Number


@dataclass(frozen=True)
class Stream:
    """K or V on its way: the tiles, who waits for what, the ring's position, the source."""

    tile: SharedTile
    full: Mbarriers
    free: Mbarriers
    ring: Ring
    tensor_map: TensorMapHandle


class Producer(Role):
    """One thread that keeps the tiles coming."""

    def run(self) -> None:
        """Load Q of each tile, and its K and V blocks from the last to the first."""
        k, c = self._k, self._config
        with k.when(k.thread == 0):
            p, m = self._parts, self._maps
            self._keys = Stream(p.k, p.k_full, p.k_free, k.ring(c.stages, "k_load", phase=1), m.k)
            self._values = Stream(p.v, p.v_full, p.v_free, k.ring(c.stages, "v_load", phase=1), m.v)
            if c.flat:
                self._flat()
            else:
                self._single()

    def _single(self) -> None:
        k = self._k
        place = self.tile(0)
        self._load_q(place, 0)
        self._load(self._keys, self._block(place, place.count - 1), first=True)
        with k.loop(place.count, 1) as step:
            self._load_k(place, place.count - 1 - step)
            self._load_v(place, place.count - step)
        self._load(self._values, self._block(place, 0), last=True)

    def _flat(self) -> None:
        """The last V block of a tile comes after the first K block and the Q of the next one."""
        k, p = self._k, self._parts
        previous = [k.register(u32, 0, name) for name in ("last_first", "last_head", "last_batch")]

        def remaining_v(last: bool) -> None:
            first, head, batch = (x.get() for x in previous)
            self._load(self._values, (first, head, batch), last=last)

        count = self.tile_count()
        with k.loop(count) as turn:
            place = self.tile(turn)
            self._load_k(place, place.count - 1)
            buffer = turn & 1
            p.q_free.wait(((turn >> 1) & 1) ^ 1, buffer)
            self._load_q(place, buffer)
            with k.when(turn != 0):
                remaining_v(last=False)
            with k.loop(place.count, 1) as step:
                self._load_k(place, place.count - 1 - step)
                self._load_v(place, place.count - step)
            for kept, value in zip(previous, self._block(place, 0), strict=True):
                kept.set(value)
        with k.when(count != 0):
            remaining_v(last=True)

    def _load_q(self, place: TilePlace, buffer: Number) -> None:
        c, p = self._config, self._parts
        p.q_full.expect(c.consumers * p.q.layout.bytes, buffer)
        for consumer in range(c.consumers):
            row = place.q_block * c.tile_m + consumer * WARPGROUP_ROWS
            tile = p.q.stage(buffer * c.consumers + consumer)
            self._boxes(tile, self._maps.q, row, place.head, place.batch, p.q_full, buffer, first=True)

    def _load_k(self, place: TilePlace, index: Number) -> None:
        self._load(self._keys, self._block(place, index))

    def _load_v(self, place: TilePlace, index: Number) -> None:
        self._load(self._values, self._block(place, index))

    def _block(self, place: TilePlace, index: Number) -> tuple[Traced, Traced, Traced]:
        """(block, head, batch) of K and V."""
        group = self._features.group
        head = place.head // group if group > 1 else place.head
        return self._k.value(place.first + index, u32), head, place.batch

    def _load(
        self, stream: Stream, at: tuple[Traced, Traced, Traced], *, first: bool = False, last: bool = False
    ) -> None:
        """One block of K or V: (block, head, batch). ``first``, ``last``: of the CTA.

        The first finds its stage free, and the ring does not wrap behind it; behind the last it stays where it is.
        """
        block, head, batch = at
        ring, tile = stream.ring, stream.tile
        if not first:
            stream.free.wait(ring.phase, ring.stage)
        loaded = tile.layout.panels[: self._config.panels]
        stream.full.expect(sum(p.cols for p in loaded) * tile.layout.rows * tile.dtype.bytes, ring.stage)
        row = block * self._config.tile_n
        self._boxes(tile.stage(ring.stage), stream.tensor_map, row, head, batch, stream.full, ring.stage, first=False)
        if first:
            ring.stage.set(1)
        elif not last:
            ring.advance()

    def _boxes(
        self,
        tile: SharedTile,
        tensor_map: TensorMapHandle,
        row: Number,
        head: Traced,
        batch: Traced,
        full: Mbarriers,
        index: Number,
        *,
        first: bool,
    ) -> None:
        """One box per panel of 64 columns. ``first``: read once, so first to leave the L2 again."""
        for number, panel in enumerate(tile.layout.panels[: self._config.panels]):
            place = self._maps.place(number, row, head, batch)
            eviction = "first" if first else "last"
            self._k.tma_load(tile, tensor_map, place, full, index, offset=panel.byte_offset, eviction=eviction)
