"""Shared memory of a batch of CTAs: bytes, poison, and where addresses go, to other CTAs of a cluster too.

Sources: PTX ISA, "mapa", "State Spaces" (``.shared::cluster``); CUDA Programming Guide, "Distributed Shared Memory".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.control.frames import Frame, Origin, displaced, widened
from warploom.emulate.findings.report import Reporter
from warploom.emulate.memory.access import MemoryAccess, SharedAccess
from warploom.emulate.memory.history import MANY, NEVER, SharedHistory
from warploom.emulate.memory.memory import MODES, OwnedMemory
from warploom.emulate.order.clocks import BITS, Clocks
from warploom.ir.statements import Op
from warploom.isa.effects import Access as Effect
from warploom.isa.memory import WINDOW_BITS

Array = NDArray[Any]

_BELOW = {lanes: np.arange(32) < lanes for lanes in (8, 16, 32)}
SHARED_BASE = 1024
"""Where dynamic shared memory starts in the shared window: not 0, so that a kernel that forgets the base is found."""


class SharedMemory(OwnedMemory):
    """``size`` bytes for each of ``ctas`` CTAs; cells of ``granule`` bytes, the smallest access of the program.

    ``apart``: lanes of one warp may learn different things, so that it matters which of them have read a cell.
    """

    def __init__(
        self, ctas: int, size: int, granule: int, clocks: Clocks, report: Reporter, checks: bool, apart: bool
    ) -> None:
        stride = -(-max(size, 16) // 16) * 16
        cells = ctas if checks else 0, stride // granule, granule
        self.history = SharedHistory(*cells, clocks, report, apart=apart)
        super().__init__(ctas, size, stride, report, self.history)
        self.clocks, self.granule, self.checks = clocks, granule, checks
        self.afar = RemoteAccesses(clocks, report, self.stride)
        self.origins: dict[int, Origin] = {}  # stamp of a store → where its poison came from

    # -- addresses -----------------------------------------------------------------------------------------------

    def cta_base(self, frame: Frame) -> Array:
        """Byte offset of each warp's CTA, (warps, 1)."""
        base = frame.seen.get(-1)
        if base is None:
            base = (frame.cta[:, None] * self.stride).astype(np.int64)
            frame.seen[-1] = base
        return base

    def place(self, frame: Frame, address: Array, op: Op, access: Effect) -> SharedAccess:
        """Where an access goes, within bounds and aligned: units of its size over the whole batch."""
        size, lanes = access.bytes, access.lanes
        base, address = self.cta_base(frame), displaced(address, access.offset)
        if access.remote:
            address, base = self.afar.locate(frame, address, lanes, op)
        local = address.astype(np.int64) - SHARED_BASE
        local, active = widened(local, (local.shape[0], 32)), frame.active
        tile = op.tile(
            0
        )  # where every instruction has the address of its access: it stays within a tile it is formed from
        first, end = (0, self.size) if tile is None else (tile.offset, min(self.size, tile.offset + tile.bytes))
        outside = (local < first) | (local > end - size)
        bad = (outside | ((local & (size - 1)) != 0)) & _BELOW[lanes]
        if np.count_nonzero(bad):  # faster than any()
            whose = f"the {self.size} bytes of shared memory: correct the address, or ask for more shared memory"
            if tile is not None:
                whose = f"the tile {tile.name} (bytes {first} to {end - 1}): correct the row, column or stage"
            active = self.refuse(frame, op, local, bad, outside, size, whose)
            local = np.where(bad, 0, local)
        local = local[:, :lanes]
        unit = (local + base) >> (size.bit_length() - 1)
        index = widened(unit, (frame.n, lanes))
        active = None if active is None else active[:, :lanes]
        return SharedAccess(
            op=op,
            what=MODES[access.mode],
            rows=(frame.rows,),
            index=index,
            parts=size // self.granule,
            whole=access.collective,
            active=active,
            bound=self.clocks.bound[frame.span],
            strong=access.mode == "atomic" or access.order != "weak",
            narrow=int(access.scope == "cta" and self.clocks.home > self.clocks.warps_per_cta),
            width=size // access.words,
            frame=frame,
            size=size,
            addresses=local,
        )

    def names(self, place: SharedAccess) -> Array:
        """A number (warps, lanes) for each address, which no other address of the launch has: below all global ones."""
        start = self.stride * (self.clocks.first // self.clocks.warps_per_cta)
        return -1 - start - place.index * place.size

    # -- accesses ------------------------------------------------------------------------------------------------

    def load(self, place: SharedAccess, access: Effect) -> tuple[Array, Array | None, Origin | None]:
        """The words read (warps, lanes, words), their shadow if any is poison, and where the poison comes from."""
        op, history, data = place.op, self.history, self.words(self.data, place, access)
        if self.tracked(place) is None:
            return data, None, None
        shadow: Array | None = None
        origin: Origin | None = None
        if self.shadow is not None:
            shadow = self.words(self.shadow, place, access)
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
                poison = np.ascontiguousarray(poison).view(data.dtype)
                shadow = poison if shadow is None else shadow | poison
                why = "are still being copied" if (last[empty] > NEVER).all() else "nobody has written"
                origin = (op.where, f"bytes of shared memory that {why}, read by {op.instruction.mnemonic}")
        history.note(place)
        return data, shadow, origin

    def store(
        self,
        place: SharedAccess,
        access: Effect,
        data: Array,
        shadow: Array | None = None,
        origin: Origin | None = None,
    ) -> None:
        """Write ``data`` (warps, lanes, words) now."""
        super().store(place, access, data, shadow if self.checks else None)
        if shadow is not None and origin is not None:
            self.origins[place.stamp] = origin

    # -- copies of cp.async ----------------------------------------------------------------------------------------

    def begin_copy(self, place: SharedAccess) -> int:
        """The cells hold nothing that may be used until the copy has landed and been waited for. Returns its stamp."""
        self.history.check(place)
        stamp = self.clocks.stamp(place.op)
        self.history.begin(place.cells, stamp)
        return stamp

    def land(self, rows: Array, lanes: Array, units: Array, data: Array, op: Op, shadow: Array | None = None) -> None:
        """A copy's data arrives, as its threads' own writes: flat lists of units, their threads and their words."""
        self.put(units, data, shadow)
        parts = data[0].nbytes // self.granule
        at = MemoryAccess(op=op, what="write", rows=(rows,), lanes=lanes, index=units[:, None], parts=parts)
        self.tracked(at)
        several = self.history.write(at)
        if several is not None:  # copies are no stores: what one has brought, another one is still bringing
            self.check_clash(at, several[1] | (several[0] & self.differs(at, at, data[:, None])))
            self.history.wrote.reshape(-1, at.parts)[units[several[0][:, 0]]] = self.history.coded(at.stamp, MANY)


_NOWHERE = np.uint32(1 << 31)  # beyond all shared memory


_BEFORE = "before that CTA has begun: let the cluster meet (barrier.cluster) before"
_AFTER = "when that CTA has exited: let the cluster meet (barrier.cluster) at the end"


class RemoteAccesses:
    """Accesses of a batch to other CTAs' shared memory: where they go, and whether those CTAs are there by then.

    Each CTA's memory begins ``stride`` bytes after that of the one before it.
    """

    def __init__(self, clocks: Clocks, report: Reporter, stride: int) -> None:
        self.clocks, self.report, self.stride = clocks, report, stride
        self.last: dict[tuple[int, int], tuple[Op, int, int, Callable[[], str]]] = {}  # by row and CTA

    def locate(self, frame: Frame, address: Array, lanes: int, op: Op) -> tuple[Array, Array]:
        """Addresses within their CTA, and where its memory begins; an address that none has for a rank too high."""
        rank = np.broadcast_to((address >> np.uint32(WINDOW_BITS)).astype(np.int64) - 1, frame.shape)
        together = self.clocks.domain // self.clocks.warps_per_cta
        own, exists = frame.cta[:, None], rank < together
        number = np.where(exists & (rank >= 0), own // together * together + rank, own)
        self._note(frame, number, op)
        place = np.where(exists, address & np.uint32((1 << WINDOW_BITS) - 1), _NOWHERE)
        return place, (number * self.stride)[:, :lanes]

    def _note(self, frame: Frame, number: Array, op: Op) -> None:
        for position, row in enumerate(frame.rows.tolist()):
            theirs = number[position]
            acting = np.ones(32, np.bool_) if frame.active is None else frame.active[position]
            for cta in np.unique(theirs[acting]).tolist():
                if cta != row // self.clocks.warps_per_cta:
                    lane = int(np.nonzero(acting & (theirs == cta))[0][0])
                    self.reach(op, row, lane, cta, self.clocks.now + 1)

    def reach(
        self, op: Op, row: int, lane: int, cta: int, stamp: int, what: Callable[[], str] = lambda: "the shared memory"
    ) -> None:
        """A lane accesses the memory of another CTA, or arrives at an mbarrier there."""
        if (row, cta) not in self.last and not self._has_begun(row, cta):
            self.report.unreachable(op, row, lane, cta * self.clocks.warps_per_cta, what(), _BEFORE)
        self.last[row, cta] = op, lane, stamp, what

    def _has_begun(self, row: int, cta: int) -> bool:
        """Whether a warp knows of anything that a CTA of its cluster has done."""
        warps = np.arange(cta * self.clocks.warps_per_cta, (cta + 1) * self.clocks.warps_per_cta)
        return bool(self.clocks.passed(row)[self.clocks.columns[warps]].any())

    def at_exit(self) -> None:
        """Accesses to the memory of a CTA that may have exited: none of its threads knows of them."""
        warps = self.clocks.warps_per_cta
        for (row, cta), (op, lane, stamp, what) in self.last.items():
            rows = np.arange(cta * warps, (cta + 1) * warps)
            if not any(self.clocks.anybody_knows(rows, row, who, stamp) for who in (None, lane)):
                self.report.unreachable(op, row, lane, int(rows[0]), what(), _AFTER)
