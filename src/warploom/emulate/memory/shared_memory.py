"""Shared memory of a batch of CTAs: bytes, poison, and where addresses go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.control.frames import Frame, Origin, Turns, apply_in_turn, displaced, in_turn, widened
from warploom.emulate.findings.findings import Kind
from warploom.emulate.findings.report import MemoryReports
from warploom.emulate.memory.access import Access, SharedAccess
from warploom.emulate.memory.history import NEVER, SharedHistory
from warploom.emulate.memory.lane_reads import MANY
from warploom.emulate.memory.remote import RemoteAccesses
from warploom.emulate.order.clocks import BITS, Clocks
from warploom.ir.statements import Op
from warploom.isa.base import Instruction
from warploom.isa.effects import Access as Effect

Array = NDArray[Any]


_MODES = {"load": "read", "store": "write", "atomic": "atomic"}
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
        self.history = SharedHistory(
            ctas if checks else 0, self.stride // granule, granule, clocks, report, parts=parts
        )

    # -- addresses -----------------------------------------------------------------------------------------------

    def cta_base(self, frame: Frame) -> Array:
        """Byte offset of each warp's CTA, (A, B, 1)."""
        base = frame.seen.get(-1)
        if base is None:
            base = (frame.cta[:, :, None] * self.stride).astype(np.int64)
            frame.seen[-1] = base
        return base

    def place(self, frame: Frame, address: Array, op: Op, access: Effect) -> SharedAccess:
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
        return SharedAccess(
            op=op,
            what=_MODES[access.mode],
            rows=(frame.flat,),
            index=index,
            parts=size // self.granule,
            whole=access.collective,
            active=active,
            bound=self.clocks.bound[frame.span],
            strong=access.mode == "atomic" or access.order != "weak",
            frame=frame,
            size=size,
            addresses=local,
        )

    def names(self, place: SharedAccess) -> Array:
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

    # -- accesses ------------------------------------------------------------------------------------------------

    def load(self, place: SharedAccess, access: Effect) -> tuple[Array, Array | None, Origin | None]:
        """The words read (warps, lanes, words), their shadow if any is poison, and where the poison comes from."""
        op, words, history = place.op, access.words, self.history
        word = np.dtype(f"u{place.size // words}")
        data = self.data.view(word).reshape(-1, words).take(place.index, axis=0)
        if place.active is not None:
            data[~place.active] = 0
        if not self.checks:
            return data, None, None
        shadow: Array | None = None
        origin: Origin | None = None
        stamp = self.clocks.stamp(op)
        if self.shadow is not None:
            shadow = self.shadow.view(word).reshape(-1, words).take(place.index, axis=0)
            if shadow.any():
                cell = place.index[np.nonzero(shadow.any(axis=2))][0] * place.parts
                origin = self.origins.get(int(history.wrote[cell]) >> BITS, (op.where, "poisoned shared memory"))
            else:
                shadow = None
        late, _ = history.check(place)
        if late is not None:
            last = history.wrote.reshape(-1, place.parts).take(place.index, axis=0)
            empty = late & (last >= NEVER)
            if empty.any():
                poison = np.repeat(empty.view(np.uint8) * np.uint8(255), self.granule, axis=2)
                poison = np.ascontiguousarray(poison).view(word)
                shadow = poison if shadow is None else shadow | poison
                why = "are still being copied" if (last[empty] > NEVER).all() else "nobody has written"
                origin = (op.where, f"bytes of shared memory that {why}, read by {op.instruction.mnemonic}")
        history.table("strong read" if place.strong else "read").note(place, stamp)
        return data, shadow, origin

    def _holds(self, place: SharedAccess, data: Array, shadow: Array | None) -> Array:
        """The cells (warps, lanes, parts) into which a store put what is to be stored, none of it poison."""
        shape = (*place.index.shape, place.parts, self.granule)
        wrote, writer = (x.reshape(-1, place.parts)[place.index] for x in (self.history.wrote, self.history.writer))
        same = (wrote < NEVER) & (writer < self.clocks.warps)
        now = self.data.reshape(-1, place.size).take(place.index, axis=0).reshape(shape)
        same &= (now == np.ascontiguousarray(data).view(np.uint8).reshape(shape)).all(axis=-1)
        if self.shadow is not None:
            same &= ~self.shadow.reshape(-1, place.size).take(place.index, axis=0).reshape(shape).any(axis=-1)
        if shadow is not None:
            same &= ~np.ascontiguousarray(shadow).view(np.uint8).reshape(shape).any(axis=-1)
        return same

    def store(
        self,
        place: SharedAccess,
        access: Effect,
        data: Array,
        shadow: Array | None = None,
        origin: Origin | None = None,
    ) -> None:
        """Write ``data`` (warps, lanes, words) now."""
        acting, same = ... if place.active is None else place.active, None
        if self.checks and place.strong:
            self.begin_update(place, access)
        elif self.checks:
            _, same = self.history.check(place, lambda: self._holds(place, data, shadow))
        data = data[acting]
        self.put(place.units, data, None if shadow is None else shadow[acting])
        if not self.checks:
            return
        stamp = self.clocks.stamp(place.op)
        if shadow is not None and origin is not None:
            self.origins[stamp] = origin
        if not place.strong:
            self._note_write(place, data, stamp, same)

    def _note_write(self, place: Access, data: Array, stamp: int, same: Array | None) -> None:
        """Note a store; of the ``same`` values that are there, and of several threads at once, as one of many."""
        history, alike = self.history, np.zeros(place.index.shape, np.bool_)
        if same is not None:
            alike |= same.any(axis=2)
        cells = np.zeros(0, np.int64) if same is None else place.among(same).cells
        kept = history.wrote[cells], history.writer[cells]
        several = history.write(place, self.clocks.columns[place.rows[0]], stamp)
        history.wrote[cells], history.writer[cells] = kept
        if several is not None:
            alike[... if place.active is None else place.active] |= np.isin(place.units, place.units[several[0]])
            self._check_clash(place, several[0] & self._differs(place, data))
        if alike.any():
            history.table("alike").note(replace(place, active=alike), stamp)

    def _differs(self, place: Access, data: Array) -> Array:
        """Which of the units that were written have other bytes than these now."""
        return (self.data.view(data.dtype).reshape(-1, data.shape[-1])[place.units] != data).any(axis=-1)

    def _check_clash(self, place: Access, bad: Array) -> None:
        """Report threads that have written different values to one place at once."""
        if bad.any():
            wide = np.zeros(place.index.shape, np.bool_)
            wide[... if place.active is None else place.active] = bad
            mine = place.among(wide[..., None] & (np.arange(place.parts) == 0))
            self.report.clash(mine, self.history.bytes(mine))

    def put(self, units: Array, data: Array, shadow: Array | None = None) -> None:
        """Set the bytes of units (…, words), and what of them is poison."""
        self.data.view(data.dtype).reshape(-1, data.shape[-1])[units] = data
        if shadow is not None and self.checks and self.shadow is None:
            self.shadow = np.zeros_like(self.data)
        if self.shadow is not None:
            self.shadow.view(data.dtype).reshape(-1, data.shape[-1])[units] = 0 if shadow is None else shadow

    def begin_update(self, place: SharedAccess, access: Effect) -> None:
        """Check and record a strong write, such as an atomic update: it conflicts with ordinary accesses only."""
        if self.checks:
            history, cells = self.history, place.cells
            history.check(place)
            history.table("strong write").note(place, self.clocks.stamp(place.op))
            history.wrote[cells[history.wrote[cells] == NEVER]] = 0

    def update(
        self, place: SharedAccess, access: Effect, instruction: Instruction, values: list[Array], turns: Turns
    ) -> Array:
        """Lanes take turns to update. Returns the old values, (1, warps, lanes)."""
        acting = np.arange(place.index.size) if place.active is None else np.nonzero(place.active.reshape(-1))[0]
        view = self.data.view(instruction.operand_types[1].numpy)
        return apply_in_turn(instruction, view, place.index, values, acting[in_turn(acting, turns)])[None]

    # -- copies of cp.async ----------------------------------------------------------------------------------------

    def begin_copy(self, place: SharedAccess) -> int:
        """The cells hold nothing that may be used until the copy has landed and been waited for. Returns its stamp."""
        self.history.check(place)
        stamp = self.clocks.stamp(place.op)
        self.history.begin(place.cells, stamp)
        return stamp

    def land(self, rows: Array, lanes: Array, units: Array, data: Array, op: Op) -> None:
        """A copy's data arrives, as its threads' own writes: flat lists of units, their threads and their words."""
        self.put(units, data)
        parts, stamp = data[0].nbytes // self.granule, self.clocks.stamp(op)
        place = Access(op=op, what="write", rows=(rows,), lanes=lanes, index=units[:, None], parts=parts)
        several = self.history.write(place, self.clocks.columns[rows], stamp)
        if several is not None:  # copies are no stores: what one has brought, another one is still bringing
            clash, elsewhere = several
            self.history.wrote.reshape(-1, parts)[units[clash[:, 0]]] = self.history.coded(stamp, MANY)
            self._check_clash(place, elsewhere | (clash & self._differs(place, data[:, None])))
