"""Shared memory of a batch of CTAs: bytes, poison, and where addresses go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.control.frames import Frame, Origin, Turns, apply_in_turn, displaced, in_turn, widened
from warploom.emulate.findings.findings import Kind
from warploom.emulate.findings.report import MemoryReports
from warploom.emulate.memory.access import Access, Place
from warploom.emulate.memory.history import NEVER, History
from warploom.emulate.memory.remote import RemoteAccesses
from warploom.emulate.order.clocks import BITS, Clocks
from warploom.ir.statements import Op
from warploom.isa.base import Instruction
from warploom.isa.effects import Access as Effect

Array = NDArray[Any]


SHARED_BASE = 1024
"""Where dynamic shared memory starts in the shared window: not 0, so that a kernel that forgets the base is found."""


class SharedMemory:
    """``size`` bytes for each of ``ctas`` CTAs; cells of ``granule`` bytes, the smallest access of the program.

    ``parts``: part of a warp may meet, so that it matters which lanes have read a cell.
    """

    def __init__(
        self, ctas: int, size: int, granule: int, clocks: Clocks, report: MemoryReports, checks: bool, parts: bool
    ) -> None:
        self.size, self.granule, self.checks = size, granule, checks
        self.stride = -(-max(size, 16) // 16) * 16
        self.clocks, self.report = clocks, report
        self.afar = RemoteAccesses(clocks, report, self.stride)
        self.data = np.zeros(ctas * self.stride, np.uint8)
        self.shadow: Array | None = None  # allocated when poison is first stored
        self.origins: dict[int, Origin] = {}  # stamp of a store → where its poison came from
        self.history = History(ctas if checks else 0, self.stride // granule, granule, clocks, report, parts=parts)

    # -- addresses -----------------------------------------------------------------------------------------------

    def cta_base(self, frame: Frame) -> Array:
        """Byte offset of each warp's CTA, (A, B, 1)."""
        base = frame.seen.get(-1)
        if base is None:
            base = (frame.cta[:, :, None] * self.stride).astype(np.int64)
            frame.seen[-1] = base
        return base

    def place(self, frame: Frame, address: Array, op: Op, access: Effect) -> Place:
        """Where an access goes, within bounds and aligned: units of its size over the whole batch."""
        size, lanes = access.bytes, access.lanes
        base, address = self.cta_base(frame), displaced(address, access.offset)
        if access.remote:
            address, base = self.afar.locate(frame, address, lanes, op)
        local = address.astype(np.int64) - SHARED_BASE
        local = widened(local, (*local.shape[:2], 32))[..., :lanes]
        active = None if frame.mask is None else frame.mask[..., :lanes]
        first, end = self._extent(op)
        bad = (local < first) | (local > end - size) | ((local & (size - 1)) != 0)
        if np.count_nonzero(bad):  # faster than any()
            active = self._refuse(frame, local, bad, active, size, op)
            local = np.where(bad, 0, local)
        unit = (local + base) >> (size.bit_length() - 1)
        index = widened(unit, (*frame.shape, lanes)).reshape(frame.n, lanes)
        if active is not None:
            active = widened(active, (*frame.shape, lanes)).reshape(frame.n, lanes)
        bound = self.clocks.bound[frame.span]
        return Place(frame, op, size, access.collective, local, index, active, size // self.granule, bound)

    def names(self, place: Place) -> Array:
        """What tells the addresses of a place from all others of the launch, (warps, lanes): below all global ones."""
        start = self.stride * (self.clocks.first // self.clocks.warps_per_cta)
        return -1 - start - place.index * place.size

    def _extent(self, op: Op) -> tuple[int, int]:
        """First and last byte + 1 that an access may reach: its tile's, if it was formed from one."""
        tile = op.tile(0)  # where every instruction has the address of its access
        return (0, self.size) if tile is None else (tile.offset, min(self.size, tile.offset + tile.bytes))

    def _refuse(self, frame: Frame, local: Array, bad: Array, active: Array | None, size: int, op: Op) -> Array:
        """Report the lanes whose addresses are wrong. Returns those that may go on."""
        wide = np.broadcast_to(bad, (*frame.shape, bad.shape[2])).reshape(frame.n, -1)
        everywhere = np.broadcast_to(local, (*frame.shape, bad.shape[2])).reshape(frame.n, -1)
        acting = np.ones_like(wide)
        if active is not None:
            acting = np.broadcast_to(active, (*frame.shape, bad.shape[2])).reshape(frame.n, -1)
        first, end = self._extent(op)
        outside = (everywhere < first) | (everywhere > end - size)
        kinds: tuple[tuple[Kind, Array], ...] = (("bounds", outside), ("misaligned", ~outside))
        for kind, part in kinds:
            which = wide & acting & part
            if which.any():
                row, lane = (int(x[0]) for x in np.nonzero(which))
                who = int(frame.flat[row]), lane, int(which.sum())
                self.report.refused(kind, op, who, int(everywhere[row, lane]), size, (first, end), self.size)
        return (acting & ~wide).reshape(*frame.shape, -1)

    # -- loads ---------------------------------------------------------------------------------------------------

    def load(self, place: Place, access: Effect) -> tuple[Array, Array | None, Origin | None]:
        """The words read (warps, lanes, words), their shadow if any is poison, and where the poison comes from."""
        op, words, strong = place.op, access.words, access.order != "weak"
        word = np.dtype(f"u{place.size // words}")
        data = self.data.view(word).reshape(-1, words).take(place.index, axis=0)
        if place.active is not None:
            data[~place.active] = 0
        if not self.checks:
            return data, None, None
        shadow: Array | None = None
        origin: Origin | None = None
        history, stamp, parts = self.history, self.clocks.stamp(op), place.parts
        if self.shadow is not None:
            shadow = self.shadow.view(word).reshape(-1, words).take(place.index, axis=0)
            if shadow.any():
                cell = place.index[np.nonzero(shadow.any(axis=2))][0] * parts
                origin = self.origins.get(int(history.wrote[cell]) >> BITS, (op.where, "poisoned shared memory"))
            else:
                shadow = None
        late, _ = history.check(place, "read", strong=strong)
        if late is not None:
            last = history.wrote.reshape(-1, parts).take(place.index, axis=0)
            empty = late & (last >= NEVER)
            if empty.any():
                poison = np.repeat(empty.view(np.uint8) * np.uint8(255), self.granule, axis=2)
                poison = np.ascontiguousarray(poison).view(word)
                shadow = poison if shadow is None else shadow | poison
                why = "are still being copied" if (last[empty] > NEVER).all() else "nobody has written"
                origin = (op.where, f"bytes of shared memory that {why}, read by {op.instruction.mnemonic}")
        history.note("strong read" if strong else "read", place, stamp)
        return data, shadow, origin

    # -- stores --------------------------------------------------------------------------------------------------

    def _holds(self, place: Place, data: Array, shadow: Array | None) -> Array:
        """The written cells (warps, lanes, parts) that hold what is to be stored, none of it poison."""
        parts = place.parts
        shape = (*place.index.shape, parts, self.granule)
        now = self.data.reshape(-1, place.size).take(place.index, axis=0).reshape(shape)
        same = (now == np.ascontiguousarray(data).view(np.uint8).reshape(shape)).all(axis=-1)
        same &= self.history.wrote.reshape(-1, parts).take(place.index, axis=0) < NEVER
        if self.shadow is not None:
            same &= ~self.shadow.reshape(-1, place.size).take(place.index, axis=0).reshape(shape).any(axis=-1)
        if shadow is not None:
            same &= ~np.ascontiguousarray(shadow).view(np.uint8).reshape(shape).any(axis=-1)
        return same

    def store(
        self, place: Place, access: Effect, data: Array, shadow: Array | None = None, origin: Origin | None = None
    ) -> None:
        """Write ``data`` (warps, lanes, words) now."""
        index, history, strong = place.index, self.history, access.order != "weak"
        lane = np.broadcast_to(np.arange(index.shape[1], dtype=np.int32), index.shape)
        rows = np.broadcast_to(place.frame.flat[:, None], index.shape)
        alike: Array | None = None
        if strong:
            self._begin_strong(place, "write")
        elif self.checks:
            _, same = history.check(place, "write", holds=lambda: self._holds(place, data, shadow))
            alike = None if same is None or not same.any() else np.asarray(same.any(axis=2))
        if place.active is not None:
            index, lane, rows, data = (x[place.active] for x in (index, lane, rows, data))
            shadow = shadow[place.active] if shadow is not None else None
        self._put(index, data, shadow)
        if not self.checks:
            return
        stamp = self.clocks.stamp(place.op)
        if shadow is not None and origin is not None:
            self.origins[stamp] = origin
        if strong:
            return
        several = self._note_write(index, rows, lane, data, stamp, place.op, collective=place.collective)
        if several is not None:
            wide = np.zeros(place.index.shape, np.bool_)
            wide[... if place.active is None else place.active] = several
            alike = wide if alike is None else alike | wide
        if alike is not None and alike.any():
            history.note("alike", replace(place, active=alike), stamp)

    def _put(self, index: Array, data: Array, shadow: Array | None = None) -> None:
        """The bytes, and what of them is poison, of units of (…, words)."""
        self.data.view(data.dtype).reshape(-1, data.shape[-1])[index] = data
        if shadow is not None and self.checks and self.shadow is None:
            self.shadow = np.zeros_like(self.data)
        if self.shadow is not None:
            self.shadow.view(data.dtype).reshape(-1, data.shape[-1])[index] = 0 if shadow is None else shadow

    def _note_write(
        self, index: Array, rows: Array, lane: Array, data: Array, stamp: int, op: Op, *, collective: bool = False
    ) -> Array | None:
        """Note what was written: units and their words (…, words), and their threads.

        Returns which of them lie where another warp wrote the same at once, None for none.
        """
        size = data.shape[-1] * data.dtype.itemsize
        found = self.history.write(index, rows, lane, stamp, size // self.granule, collective=collective)
        if found is None:
            return None
        clash, elsewhere = found
        bad = clash & (self.data.view(data.dtype).reshape(-1, data.shape[-1])[index] != data).any(axis=-1)
        if bad.any():
            self._clash(op, bad, rows, lane, index, size)
        return np.isin(index, index[elsewhere]) if elsewhere.any() else None

    def _begin_strong(self, place: Place, what: str) -> None:
        """Check and record a strong write, such as an atomic update: it conflicts with ordinary accesses only."""
        if self.checks:
            self.history.check(place, what, strong=True)
            self.history.note("strong write", place, self.clocks.stamp(place.op))
            self.history.fill(place.cells)

    def begin_update(self, place: Place, access: Effect) -> None:
        """Check and record an atomic update."""
        self._begin_strong(place, access.mode)

    def update(
        self, place: Place, access: Effect, instruction: Instruction, values: list[Array], turns: Turns
    ) -> Array:
        """Lanes take turns to update. Returns the old values, (1, warps, lanes)."""
        acting = np.arange(place.index.size) if place.active is None else np.nonzero(place.active.reshape(-1))[0]
        view = self.data.view(instruction.operand_types[1].numpy)
        return apply_in_turn(instruction, view, place.index, values, acting[in_turn(acting, turns)])[None]

    # -- copies of cp.async ----------------------------------------------------------------------------------------

    def begin_copy(self, place: Place) -> int:
        """The cells hold nothing that may be used until the copy has landed and been waited for. Returns its number."""
        self.history.check(place, "write")
        return self.history.begin(place.op, place.cells)

    def bring(self, index: Array, data: Array) -> None:
        """A copy's bytes arrive: units, and their words (units, words)."""
        self._put(index, data)

    def land(self, rows: Array, lane: Array, index: Array, data: Array, op: Op) -> None:
        """A copy's data arrives, as its threads' own writes: flat lists of units, their threads and their words."""
        self._put(index, data)
        several = self._note_write(index, rows, lane, data, self.clocks.stamp(op), op)
        if several is not None:  # copies are no stores: what one has brought, another one is still bringing
            self._clash(op, several, rows, lane, index, data[0].nbytes)

    def _clash(self, op: Op, which: Array, rows: Array, lane: Array, index: Array, size: int) -> None:
        """A finding: some threads, at units of a size, have written different values to one place at once."""
        mine = Access(op, "write", (rows[which],), lane[which], index[which])
        self.report.clash(mine, mine.cells * size % self.stride)
