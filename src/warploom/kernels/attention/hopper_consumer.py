"""The consumers of the sm_90a attention kernel: warpgroups that multiply, each for 64 query rows of a tile."""

from __future__ import annotations

from warploom.core.dtypes import u32
from warploom.kernels.attention.features import AttentionFeatures
from warploom.kernels.attention.hopper_again import scores_again
from warploom.kernels.attention.hopper_config import HopperConfig
from warploom.kernels.attention.hopper_parts import Maps, Parts, Role, Shape, TilePlace
from warploom.kernels.attention.hopper_probabilities import BlockProbabilities, Rescale
from warploom.kernels.attention.softmax import DeferredSoftmax
from warploom.kernels.descriptors import GROUP_BYTES, WgmmaOperand
from warploom.kernels.mapped import PANEL_BYTES, PANEL_COLS
from warploom.kernels.specialised import WARPGROUP, WARPGROUP_ROWS
from warploom.lang import GlobalPointer, Kernel, Mutable, Traced
from warploom.lang.fragments import TileAddresses
from warploom.lang.hopper import Mbarriers, Ring
from warploom.lang.values import Number
from warploom.layout.catalogue import mma_fragment, wgmma_accumulator, wgmma_operand
from warploom.layout.matrix_access import stmatrix_plan
from warploom.layout.reduction import reduction_plan
from warploom.layout.wgmma import MatrixDescriptor

A = mma_fragment("m16n8k16", "A")
OUTPUT_PIECE = mma_fragment("m16n8k16", "C", 16).tile(1, 2)
"""16×16 of a warp's packed output: what one ``stmatrix.x4`` stores."""


class Consumer(Role):
    """One warpgroup: 64 query rows of every tile."""

    def __init__(
        self,
        k: Kernel,
        config: HopperConfig,
        features: AttentionFeatures,
        shape: Shape,
        maps: Maps,
        parts: Parts,
        lse: GlobalPointer,
    ) -> None:
        super().__init__(k, config, features, shape, maps, parts)
        c = config
        self._lse = lse
        self._number = k.warpgroup - 1
        self._warp = k.warp & 3
        self._row = self._number * WARPGROUP_ROWS
        depth = -(-c.head_dim // 16)
        self._depth = depth
        self._scores = k.warpgroup_accumulator(c.tile_n, "s")
        self._output = k.warpgroup_accumulator(c.output_cols, "o")
        self._p = k.registers(u32, c.tile_n // 4, None, "p")
        self._q = k.registers(u32, 4 * depth, None, "q") if c.q_in_registers else []
        self._softmax = DeferredSoftmax(k, c, features, self._scores.layout, self._output, sum_column=c.sum_column)
        self._blocks = BlockProbabilities(k, features, self._softmax, self._scores, carries=c.carry_max)
        self._ring = k.ring(c.stages, "kv")
        self._hidden_ring: Ring | None = None
        if self._skips:  # set anew for every tile
            self._hidden_ring = Ring(k, c.stages, *(k.register(u32, None, f"hidden_{x}") for x in ("stage", "phase")))
        self._v_stage, self._v_phase = k.register(u32, None, "v_stage"), k.register(u32, None, "v_phase")
        along_depth = MatrixDescriptor(PANEL_BYTES, stride=GROUP_BYTES)
        across = MatrixDescriptor(PANEL_BYTES, stride=GROUP_BYTES, leading=c.tile_n * PANEL_BYTES)
        self._q_operand = WgmmaOperand(k, parts.q, along_depth)
        self._k_operand = WgmmaOperand(k, parts.k, along_depth)
        self._v_operand = WgmmaOperand(k, parts.v, across)
        self._q_reader = k.reader(parts.q, A, row=self._warp * 16)
        self._q_reader.prepare([(0, 16 * d) for d in range(depth)])
        store = stmatrix_plan(OUTPUT_PIECE, transposed=False)
        self._store_order = store.register_order
        self._store_to = TileAddresses(k, parts.q, store.address, k.lane, self._warp * 16, "strided")
        self._store_to.prepare([(0, 16 * d) for d in range(depth)])

    # -- the pipeline
    def run(self) -> None:
        """All tiles of this CTA."""
        k, c = self._k, self._config
        if c.pingpong:
            with k.when(self._number == c.consumers - 1, uniform=True):
                k.bar_arrive(1, 2 * WARPGROUP)  # the first turn is consumer 0's
        if c.flat:
            self._flat()
        else:
            self._single()
        if c.pingpong:
            with k.when(self._number == 0, uniform=True):
                k.bar_sync(1, 2 * WARPGROUP)  # takes the turn that is left over

    def _single(self) -> None:
        """One tile: the first block alone, then one step per block, then the last P·V."""
        k, c = self._k, self._config
        place = self._own_tile(0)
        self._first_block(place)
        with k.loop(place.count, 1) as step:
            if c.overlap:
                self._step(place, step)
            else:
                self._plain_step(place, step)
        self._last_product()
        self._store(place, k.value(0, u32), None)
        with k.when((k.thread & (WARPGROUP - 1)) == 0):
            k.wait_bulk(0)

    def _flat(self) -> None:
        k = self._k
        count = self.tile_count()
        with k.when(count != 0, uniform=True):
            self._first_block(self._own_tile(0))
            with k.loop(count) as turn:
                place = self._own_tile(turn)
                with k.loop(place.count, 1) as step:
                    self._step(place, step, turn)
                with k.when((place.count == 1) & (turn != 0), uniform=True):
                    self._free_stored_q(turn)
                with k.when(turn + 1 < count, uniform=True):
                    following = self._own_tile(turn + 1)
                    statistics = self._softmax.statistics()
                    self._step(following, 0, turn + 1, boundary=True)
                    self._store(place, turn & 1, statistics)
                    self._clear_output()
                with k.otherwise():
                    self._last_product()
                    self._store(place, turn & 1, None)
            with k.when((k.thread & (WARPGROUP - 1)) == 0):
                k.wait_bulk(0)

    def _own_tile(self, turn: Number) -> TilePlace:
        return self.tile(turn, self._row, self._warp)

    def _first_block(self, place: TilePlace) -> None:
        """S and P of a CTA's very first block: nothing to overlap it with."""
        k, p = self._k, self._parts
        p.q_full.wait(0, 0)
        self._read_q(k.value(0, u32))
        self._skip_keys(place, None)
        p.k_full.wait(self._ring.phase, self._ring.stage)
        self._issue_scores(k.value(0, u32))
        k.wgmma_wait(0, self._scores)
        self._release(p.k_free, self._ring.stage)
        self._blocks.first(place, 0)
        self._pack()
        self._clear_output()
        if place.hidden is not None:  # each stage's first use: no earlier one is left that somebody still reads
            with k.loop(place.hidden) as stage:
                self._release(p.v_free, stage)

    def _step(self, place: TilePlace, index: Number, turn: Traced | None = None, boundary: bool = False) -> None:
        """Issue this block's Q·Kᵀ, then the previous block's P·V; softmax while the latter runs.

        ``boundary``: the block is the first of the next tile, and the P·V the last of the one before.
        """
        k, c, p = self._k, self._config, self._parts
        self._v_stage.set(self._ring.stage)
        self._v_phase.set(self._ring.phase)
        self._ring.advance()
        if boundary:
            self._skip_keys(place, self._hidden_ring)
        p.k_full.wait(self._ring.phase, self._ring.stage)
        buffer = turn & 1 if turn is not None else k.value(0, u32)
        if boundary and turn is not None:
            p.q_full.wait((turn >> 1) & 1, buffer)
            self._read_q(buffer)
        self._take_turn()
        self._issue_scores(buffer)
        p.v_full.wait(self._v_phase, self._v_stage)
        self._issue_product(self._v_stage)
        self._pass_turn()
        if turn is not None and not boundary:
            with k.when((k.value(index, u32) == 1) & (turn != 0), uniform=True):
                self._free_stored_q(turn)
        k.wgmma_wait(1, self._scores)
        rescale = self._take_up(place, index, buffer, first=boundary)
        if c.hold:
            p.v_full.wait(self._v_phase, self._v_stage)  # satisfied: it keeps the wait below the exponentials
        k.wgmma_wait(0, self._output, self._scores)
        self._release(p.v_free, self._v_stage)
        self._pack()
        rescale()
        if boundary:
            self._skip_values(place)

    def _plain_step(self, place: TilePlace, index: Traced) -> None:
        """The previous block's P·V, then this block's Q·Kᵀ and softmax, one after the other."""
        k, p = self._k, self._parts
        p.v_full.wait(self._ring.phase, self._ring.stage)
        self._issue_product(self._ring.stage)
        k.wgmma_wait(0, self._output)
        self._release(p.v_free, self._ring.stage)
        self._ring.advance()
        p.k_full.wait(self._ring.phase, self._ring.stage)
        self._issue_scores(k.value(0, u32))
        k.wgmma_wait(0, self._scores)
        self._take_up(place, index, k.value(0, u32))()
        self._pack()

    def _last_product(self) -> None:
        """The last P·V of the last tile: its stage is not given back, nothing is loaded after it."""
        k, p = self._k, self._parts
        p.v_full.wait(self._ring.phase, self._ring.stage)
        self._issue_product(self._ring.stage)
        k.wgmma_wait(0, self._output)

    # -- key blocks that only other consumers' rows see
    def _skip_keys(self, place: TilePlace, values: Ring | None) -> None:
        """Give back the K of a tile's hidden blocks, and with it this consumer's turns.

        ``values`` is set to where their V will be.
        """
        if place.hidden is None:
            return
        if values is not None:
            values.stage.set(self._ring.stage)
            values.phase.set(self._ring.phase)
        with self._k.loop(place.hidden):
            self._parts.k_full.wait(self._ring.phase, self._ring.stage)  # else it would count for an earlier load
            self._release(self._parts.k_free, self._ring.stage)
            self._ring.advance()
            self._take_turn()
            self._pass_turn()

    def _skip_values(self, place: TilePlace) -> None:
        """Give back their V: only now, since its stages may still have held the tile before."""
        if self._hidden_ring is None or place.hidden is None:
            return
        with self._k.loop(place.hidden):
            self._parts.v_full.wait(self._hidden_ring.phase, self._hidden_ring.stage)
            self._release(self._parts.v_free, self._hidden_ring.stage)
            self._hidden_ring.advance()

    # -- turns at the tensor cores
    def _take_turn(self) -> None:
        if self._config.pingpong:
            self._k.bar_sync(self._number + 1, 2 * WARPGROUP)

    def _pass_turn(self) -> None:
        k, consumers = self._k, self._config.consumers
        if self._config.pingpong:
            last = self._number == consumers - 1
            following = 2 - self._number if consumers == 2 else k.select(last, k.value(1, u32), self._number + 2)
            k.bar_arrive(following, 2 * WARPGROUP)

    def _release(self, barriers: Mbarriers, stage: Number) -> None:
        """This warp is done with a stage."""
        barriers.arrive(stage, when=self._k.lane == 0)

    # -- products
    def _read_q(self, buffer: Traced) -> None:
        """Q of this warp into registers."""
        if not self._config.q_in_registers:
            return
        reader = self._q_reader.staged(buffer * self._config.consumers + self._number)
        for d in range(self._depth):
            for register, value in zip(self._q[4 * d : 4 * d + 4], reader.load(0, 16 * d), strict=True):
                register.set(value)

    def _issue_scores(self, buffer: Traced) -> None:
        """S = Q·Kᵀ of the block in the ring's stage, as one group."""
        k, c = self._k, self._config
        k.wgmma_fence()
        q_stage = buffer * c.consumers + self._number
        for d in range(self._depth):
            panel, within = divmod(16 * d, PANEL_COLS)
            key = self._k_operand.at(self._ring.stage.get(), panel * c.tile_n * PANEL_BYTES + 2 * within)
            if c.q_in_registers:
                q: Traced | list[Traced] = [r.get() for r in self._q[4 * d : 4 * d + 4]]
            else:
                q = self._q_operand.at(q_stage, panel * WARPGROUP_ROWS * PANEL_BYTES + 2 * within)
            k.wgmma(self._scores, q, key, inputs=c.dtype, accumulate=d > 0)
        k.wgmma_commit()

    def _issue_product(self, stage: Mutable) -> None:
        """O += P·V of the block in a stage, as one group."""
        k, c = self._k, self._config
        k.wgmma_fence()  # also behind the scores' fence: without it ptxas injects one and says so (C7519)
        for n in range(c.tile_n // 16):
            value = self._v_operand.at(stage.get(), 16 * n * PANEL_BYTES)
            p = [r.get() for r in self._p[4 * n : 4 * n + 4]]
            k.wgmma(self._output, p, value, inputs=c.dtype, transposed_b=True)
        k.wgmma_commit()

    # -- softmax
    def _take_up(self, place: TilePlace, index: Number, buffer: Traced, first: bool = False) -> Rescale:
        """Scores into P, and K's stage given back; returns what brings O to the new maxima."""

        def release() -> None:
            self._release(self._parts.k_free, self._ring.stage)

        if self._config.carry_max and not first:
            return self._blocks.carried(place, index, lambda: self._scores_again(buffer), release)
        release()
        return self._blocks.first(place, index) if first else self._blocks.following(place, index)

    def _scores_again(self, buffer: Traced) -> None:
        """This warp's scores of the ring's stage, once more; nothing of the reader outlives the case."""
        k, c = self._k, self._config
        reader = k.reader(self._parts.q, A, row=self._warp * 16).staged(buffer * c.consumers + self._number)

        def query(d: int) -> list[Traced]:
            if c.q_in_registers:
                return [r.get() for r in self._q[4 * d : 4 * d + 4]]
            return list(reader.load(0, 16 * d))

        scores_again(k, self._scores, query, self._parts.k, self._ring.stage.get(), self._depth, c.dtype)

    def _pack(self) -> None:
        """P as the operand of the next product. Its registers are free: no product is under way."""
        layout = wgmma_operand().tile(1, self._config.tile_n // 16)
        for register, value in zip(self._p, self._scores.as_operand(layout, self._config.dtype).registers, strict=True):
            register.set(value)

    def _clear_output(self) -> None:
        for register in self._output.registers:
            if isinstance(register, Mutable):
                register.set(0.0)

    # -- output
    def _store(self, place: TilePlace, buffer: Traced, statistics: tuple[list[Traced], list[Traced]] | None) -> None:
        """Normalise O and send it out through this tile's Q buffer; rows beyond the last are clipped by the TMA."""
        k, c = self._k, self._config
        logs = self._softmax.normalise(statistics)
        stage = buffer * c.consumers + self._number
        packed = self._output.packed(c.dtype)
        to = self._store_to.staged(stage)
        own_barrier = self._number + (c.consumers + 1)
        if c.q_in_registers:  # else the products that read it have been waited for
            k.syncwarp()  # every lane has read its part of Q: with one block of keys no turn stands in between
        for d in range(self._depth):
            piece = (*packed.atom(0, 2 * d), *packed.atom(0, 2 * d + 1))
            k.stmatrix(to.address(0, 16 * d), [piece[r] for r in self._store_order])
        k.fence_async()
        k.bar_sync(own_barrier, WARPGROUP)
        leader = (k.thread & (WARPGROUP - 1)) == 0
        row = place.q_block * c.tile_m + self._row
        tile = self._parts.q.stage(stage)
        for number, panel in enumerate(tile.layout.panels):
            where = self._maps.place(number, row, place.head, place.batch)
            k.tma_store(self._maps.o, where, tile, when=leader, offset=panel.byte_offset)
        k.commit_bulk()
        if logs:
            self._store_lse(place, logs)

    def _free_stored_q(self, turn: Traced) -> None:
        """The previous tile's output has left its Q buffer: the producer may fill it again."""
        k = self._k
        leader = (k.thread & (WARPGROUP - 1)) == 0
        with k.when(leader):
            k.wait_bulk(0, reads_only=True)
        self._parts.q_free.arrive((turn - 1) & 1, when=leader)

    def _store_lse(self, place: TilePlace, logs: list[Traced]) -> None:
        k, s = self._k, self._shape
        plan = reduction_plan(wgmma_accumulator(8), "col")
        first_lane = (k.lane & sum(plan.lane_masks)) == 0
        start = (place.batch * s.heads + place.head) * s.q_len
        tile_row = place.q_block * self._config.tile_m + self._row
        for group, value in enumerate(logs):
            row = tile_row + plan.result_coordinate(group, k.lane, self._warp)
            with k.when(first_lane & (row < s.q_len)):
                self._lse.store(value, start + row)
