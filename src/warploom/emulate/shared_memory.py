"""Shared memory of a batch of CTAs: bytes, who wrote and read each cell when, what is poison or still on its way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.clocks import Clocks
from warploom.emulate.frames import Frame, Origin
from warploom.emulate.report import Reporter
from warploom.ir.statements import Op
from warploom.isa.effects import BulkTensorCopy

Array = NDArray[Any]

SHARED_BASE = 1024
"""Where dynamic shared memory starts in the shared window: not 0, so that a kernel that forgets the base is found."""

# A record is stamp · 64 + lane; MANY stands for several lanes or a collective access.
LANE_BITS = 6
MANY = 32
NEVER = np.int32(0x7FFFFFFF)  # the writer's record of cells that hold no data: never written, or still in flight


def _how_to_wait(started: Op) -> str:
    bulk = any(isinstance(e, BulkTensorCopy) for e in started.instruction.effects())
    return "wait for the phase of its mbarrier (by its parity)" if bulk else "commit and wait for its group"


@dataclass(slots=True)
class Place:
    """Where an access goes: local byte addresses (broadcast shape), unit indices (warps, lanes), the lanes that act."""

    addresses: Array
    index: Array
    active: Array | None


class SharedMemory:
    """``bytes_per_cta`` for each of ``ctas`` CTAs; cells of ``granule`` bytes, the smallest access of the program."""

    def __init__(self, ctas: int, size: int, granule: int, clocks: Clocks, reporter: Reporter, checks: bool) -> None:
        self.size = size
        self.stride = -(-max(size, 16) // 16) * 16
        self.granule = granule
        self.clocks = clocks
        self.report = reporter
        self.checks = checks
        self.atomic: Array | None = None  # cells last written by an atomic
        self.data = np.zeros(ctas * self.stride, np.uint8)
        self.shadow: Array | None = None  # allocated when poison is first stored
        self.origins: dict[int, Origin] = {}  # stamp of a store → where its poison came from
        cells = ctas * self.stride // granule
        self.cells = cells
        if checks:
            self.writer = np.full(cells, NEVER, np.int32)
            self.writer_warp = np.zeros(cells, np.uint16)  # warps of the domain, then its engines
            self.readers = np.zeros((clocks.warps_per_cta, cells), np.int32)
            self.engine_readers: dict[int, Array] = {}  # engine → last read of each cell
            self.in_flight = np.zeros(cells, np.int32)  # 1 + index into copies
            self.copies: list[tuple[Op, int]] = []

    # -- addresses -----------------------------------------------------------------------------------------------

    def cta_base(self, frame: Frame) -> Array:
        """Byte offset of each warp's CTA, (A, B, 1)."""
        base = frame.seen.get(-1)
        if base is None:
            base = (frame.cta[:, :, None] * self.stride).astype(np.int64)
            frame.seen[-1] = base
        return base

    def locate(self, frame: Frame, address: Array, offset: int, size: int, lanes: int, op: Op) -> Place:
        """Check bounds and alignment; ``index`` counts units of ``size`` bytes over the whole batch."""
        local = address.astype(np.int64) + (offset - SHARED_BASE)
        local = np.broadcast_to(local, (*local.shape[:2], 32))[..., :lanes]
        active = None if frame.mask is None else frame.mask[..., :lanes]
        first, end = self._extent(op)
        bad = (local < first) | (local > end - size) | ((local & (size - 1)) != 0)
        if bad.any():
            active = self._refuse(frame, local, bad, active, size, op)
            local = np.where(bad, 0, local)
        unit = (local + self.cta_base(frame)) >> (size.bit_length() - 1)
        index = np.broadcast_to(unit, (*frame.shape, lanes)).reshape(frame.n, lanes)
        if active is not None:
            active = np.broadcast_to(active, (*frame.shape, lanes)).reshape(frame.n, lanes)
        return Place(local, index, active)

    def _extent(self, op: Op) -> tuple[int, int]:
        """First and last byte + 1 that an access may reach: its tile's, if it was formed from one."""
        tile = op.tile(0)  # where every instruction has the address of its access
        return (0, self.size) if tile is None else (tile.offset, min(self.size, tile.offset + tile.bytes))

    def _refuse(self, frame: Frame, local: Array, bad: Array, active: Array | None, size: int, op: Op) -> Array:
        wide = np.broadcast_to(bad, (*frame.shape, bad.shape[2])).reshape(frame.n, -1)
        everywhere = np.broadcast_to(local, (*frame.shape, bad.shape[2])).reshape(frame.n, -1)
        acting = np.ones_like(wide) if active is None else np.broadcast_to(active, (*frame.shape, bad.shape[2]))
        acting = acting.reshape(frame.n, -1)
        first, end = self._extent(op)
        outside = (everywhere < first) | (everywhere > end - size)
        name = op.instruction.mnemonic
        for kind, which in (("bounds", wide & acting & outside), ("misaligned", wide & acting & ~outside)):
            if not which.any():
                continue
            row, lane = (int(x[0]) for x in np.nonzero(which))
            where = int(everywhere[row, lane])
            if kind == "bounds":
                text = f"{name} of {size} bytes at byte {where} is outside the {self.size} bytes of shared memory"
                cure = ": correct the address, or ask for more shared memory"
                tile = op.tile(0)
                if tile is not None:
                    text = f"{name} of {size} bytes at byte {where} of shared memory is outside the tile "
                    text += f"{tile.name} (bytes {first} to {end - 1})"
                    cure = ": correct the row, column or stage"
                text += cure
            else:
                text = (
                    f"{name} at byte {where} of shared memory is not aligned to its {size} bytes: correct the address"
                )
            self.report.add(kind, op.where, text, int(frame.flat[row]), lane, count=int(which.sum()), address=where)  # type: ignore[arg-type]
        return (acting & ~wide).reshape(*frame.shape, -1)

    # -- loads ---------------------------------------------------------------------------------------------------

    def load(self, frame: Frame, place: Place, size: int, words: int, op: Op, collective: bool) -> tuple[
        Array, Array | None, Origin | None
    ]:  # fmt: skip
        """The words read (warps, lanes, words), their shadow if any is poison, and where the poison comes from."""
        word = np.dtype(f"u{size // words}")
        data = self.data.view(word).reshape(-1, words).take(place.index, axis=0)
        if not self.checks:
            return data, None, None
        shadow: Array | None = None
        origin: Origin | None = None
        stamp = self.clocks.stamp(op)
        cells = size // self.granule
        writer = self.writer.reshape(-1, cells).take(place.index, axis=0)
        limit = ((self.clocks.limit[frame.flat] << LANE_BITS) | 63)[:, None, None]
        suspicious = writer > limit
        if place.active is not None:
            suspicious &= place.active[:, :, None]
        if self.shadow is not None:
            shadow = self.shadow.view(word).reshape(-1, words).take(place.index, axis=0)
            if shadow.any():
                which = np.nonzero(shadow.any(axis=2))
                cell = place.index[which][0] * cells
                origin = self.origins.get(int(self.writer[cell]) >> LANE_BITS, (op.where, "poisoned shared memory"))
            else:
                shadow = None
        if suspicious.any():
            empty = self._examine_write(frame, place, suspicious, cells, op, "read", collective)
            if empty is not None:
                poison = np.repeat(empty.view(np.uint8) * np.uint8(255), self.granule, axis=2)
                poison = np.ascontiguousarray(poison).view(word)
                shadow = poison if shadow is None else shadow | poison
                flying = self.in_flight.reshape(-1, cells).take(place.index, axis=0)[empty].all()
                why = "are still being copied" if flying else "nobody has written"
                origin = (op.where, f"bytes of shared memory that {why}, read by {op.instruction.mnemonic}")
        self._record_read(frame, place, cells, stamp, collective)
        return data, shadow, origin

    def _record_read(self, frame: Frame, place: Place, cells: int, stamp: int, collective: bool) -> None:
        table = self.readers.reshape(-1, cells)
        where = place.index + (frame.local * (self.cells // cells))[:, None]
        if collective:
            if place.active is not None:
                where = where[place.active]
            table[where] = stamp << LANE_BITS | MANY
            return
        lane = np.broadcast_to(np.arange(where.shape[1], dtype=np.int32), where.shape)
        own = self.clocks.in_cta(frame.flat)[np.arange(frame.n), frame.local]
        epoch = np.broadcast_to(((own << LANE_BITS) | 63)[:, None], where.shape)
        if place.active is not None:
            where, lane, epoch = where[place.active], lane[place.active], epoch[place.active]
        old = table[where]
        others = (old > epoch[..., None]) & ((old & 63) != lane[..., None])
        code = np.where(others, MANY, lane[..., None]).astype(np.int32) | np.int32(stamp << LANE_BITS)
        table[where] = code
        shared = table[where] != code  # several lanes of the warp read the cell in this access
        if shared.any():
            table[where] = np.where(shared.any(axis=-1, keepdims=True), stamp << LANE_BITS | MANY, table[where])

    # -- stores --------------------------------------------------------------------------------------------------

    def check_write(self, frame: Frame, place: Place, size: int, op: Op, collective: bool, what: str = "write") -> None:
        """Compare a write (or the start of a copy) with every unordered access before it."""
        cells = size // self.granule
        limit = ((self.clocks.limit[frame.flat] << LANE_BITS) | 63)[:, None, None]
        suspicious = self.writer.reshape(-1, cells).take(place.index, axis=0) > limit
        if place.active is not None:
            suspicious &= place.active[:, :, None]
        if suspicious.any():
            self._examine_write(frame, place, suspicious, cells, op, what, collective)
        for agent, readers in (*enumerate(self.readers), *((-1 - e, r) for e, r in self.engine_readers.items())):
            read = readers.reshape(-1, cells).take(place.index, axis=0) > limit
            if place.active is not None:
                read &= place.active[:, :, None]
            if read.any():
                self._examine_reads(frame, place, read, agent, readers, cells, op, collective)

    def store(
        self, frame: Frame, place: Place, data: Array, shadow: Array | None, origin: Origin | None, op: Op,
        collective: bool, *, check: bool = True,
    ) -> None:  # fmt: skip
        """Write ``data`` (warps, lanes, words) now."""
        index, words = place.index, data.shape[2]
        size = words * data.dtype.itemsize
        lane = np.broadcast_to(np.arange(index.shape[1], dtype=np.int32), index.shape)
        rows = np.broadcast_to(frame.flat[:, None], index.shape)
        if self.checks and check:
            self.check_write(frame, place, size, op, collective)
        if place.active is not None:
            index, lane, rows, data = (x[place.active] for x in (index, lane, rows, data))
            shadow = shadow[place.active] if shadow is not None else None
        view = self.data.view(data.dtype).reshape(-1, words)
        view[index] = data
        if not self.checks:
            return
        stamp = self.clocks.stamp(op)
        if shadow is not None and self.shadow is None:
            self.shadow = np.zeros_like(self.data)
        if self.shadow is not None:
            self.shadow.view(data.dtype).reshape(-1, words)[index] = 0 if shadow is None else shadow
            if shadow is not None and origin is not None:
                self.origins[stamp] = origin
        self._record_write(index, rows, lane, data, view, size, stamp, op, collective)

    def _record_write(
        self, index: Array, rows: Array, lane: Array, data: Array, view: Array, size: int, stamp: int, op: Op,
        collective: bool,
    ) -> None:  # fmt: skip
        cells = size // self.granule
        table, warps = self.writer.reshape(-1, cells), self.writer_warp.reshape(-1, cells)
        code = (lane | np.int32(stamp << LANE_BITS))[..., None]
        local = (rows % self.clocks.domain).astype(np.uint16)[..., None]
        table[index] = code
        warps[index] = local
        self.in_flight.reshape(-1, cells)[index] = 0
        if self.atomic is not None:
            self.atomic.reshape(-1, cells)[index] = False
        clash = (table[index] != code) | (warps[index] != local)
        if clash.any():
            bad = clash.any(axis=-1)
            different = (view[index] != data).any(axis=-1) | (warps[index] != local).any(axis=-1)
            bad &= different
            if bad.any():
                self._report_clash(op, rows[bad], lane[bad], index[bad] * size, stamp)
            table[index[clash.any(axis=-1)]] = stamp << LANE_BITS | MANY
        if collective:
            table[index] = stamp << LANE_BITS | MANY

    def _report_clash(self, op: Op, rows: Array, lanes: Array, addresses: Array, stamp: int) -> None:
        message = (
            f"several threads write byte {int(addresses[0] % self.stride)} of shared memory in one execution of "
            f"{op.instruction.mnemonic}, and nothing says whose value stays: give each thread its own address"
        )
        self.report.add("race", op.where, message, int(rows[0]), int(lanes[0]), other=op.where, count=rows.size,
                        address=int(addresses[0] % self.stride))  # fmt: skip

    def begin_atomic(self, frame: Frame, place: Place, size: int, op: Op) -> None:
        """Check and record an atomic update: it conflicts with plain accesses only."""
        if not self.checks:
            return
        cells = size // self.granule
        if self.atomic is None:
            self.atomic = np.zeros(self.cells, np.bool_)
        self.check_write(frame, place, size, op, collective=False, what="atomic")
        stamp = self.clocks.stamp(op)
        shape = place.index.shape
        lane = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
        local = np.broadcast_to((frame.flat % self.clocks.domain)[:, None].astype(np.uint16), shape)
        index = place.index
        if place.active is not None:
            index, lane, local = index[place.active], lane[place.active], local[place.active]
        self.writer.reshape(-1, cells)[index] = (lane | np.int32(stamp << LANE_BITS))[..., None]
        self.writer_warp.reshape(-1, cells)[index] = local[..., None]
        self.atomic.reshape(-1, cells)[index] = True

    # -- copies in flight ----------------------------------------------------------------------------------------

    def begin_copy(self, frame: Frame, place: Place, size: int, op: Op) -> None:
        """The cells hold nothing that may be used until the copy has landed and been waited for."""
        self.check_write(frame, place, size, op, collective=False)
        cells = size // self.granule
        self.copies.append((op, int(frame.flat[0])))
        index = place.index if place.active is None else place.index[place.active]
        self.in_flight.reshape(-1, cells)[index] = len(self.copies)
        self.writer.reshape(-1, cells)[index] = NEVER

    def land(self, rows: Array, lane: Array, index: Array, data: Array, op: Op) -> None:
        """A copy's data arrives: flat lists of units, their threads and their words (units, words)."""
        words = data.shape[1]
        view = self.data.view(data.dtype).reshape(-1, words)
        view[index] = data
        if self.shadow is not None:
            self.shadow.view(data.dtype).reshape(-1, words)[index] = 0
        stamp = self.clocks.stamp(op)
        self._record_write(index, rows, lane, data, view, words * data.dtype.itemsize, stamp, op, collective=False)

    def agents(self, rows: Array, local: Array) -> Array:
        """Agents as clocks number them, from the writers' numbers within a domain: warps, then engines."""
        warps = self.clocks.domain
        first = self.report.first + rows // warps * warps
        return np.where(local < warps, first + local, warps - 1 - local.astype(np.int64))

    # -- the slow path: some access is not ordered by a whole barrier ---------------------------------------------

    def _examine_write(
        self, frame: Frame, place: Place, suspicious: Array, cells: int, op: Op, what: str, collective: bool
    ) -> Array | None:
        """Report conflicts with earlier writes. Returns which cells (warps, lanes, cells) were never written."""
        row, lane, part = np.nonzero(suspicious)
        cell = place.index[row, lane] * cells + part
        record, copy = self.writer[cell], self.in_flight[cell]
        rows, bytes_at = frame.flat[row], (cell * self.granule) % self.stride
        flying = copy > 0
        if flying.any():
            self.report_in_flight(op, what, rows[flying], lane[flying], copy[flying], bytes_at[flying])
        written = record != NEVER
        relevant = written
        if what == "atomic" and self.atomic is not None:
            relevant = written & ~self.atomic[cell]
        if relevant.any():
            mine = [x[relevant] for x in (rows, lane, cell, bytes_at)]
            stamps, lanes = record[relevant] >> LANE_BITS, record[relevant] & 63
            agents = self.agents(mine[0], self.writer_warp[mine[2]])
            fine = self.clocks.ordered(mine[0], mine[1], collective, agents, lanes, stamps)
            if not fine.all():
                wrong = ~fine
                self.report.races(op, what, mine[0][wrong], mine[1][wrong], agents[wrong], stamps[wrong],
                                  mine[3][wrong], "wrote")  # fmt: skip
        empty = ~written
        unset = empty & ~flying
        if what == "atomic" and unset.any():
            i = int(np.argmax(unset))
            message = (
                f"{op.instruction.mnemonic} updates byte {int(bytes_at[i])} of shared memory, never written: "
                "initialise it, and order that before"
            )
            self.report.add("uninitialised", op.where, message, int(rows[i]), int(lane[i]), count=int(unset.sum()),
                            address=int(bytes_at[i]))  # fmt: skip
        if what != "read" or not empty.any():
            return None
        never = np.zeros(suspicious.shape, np.bool_)
        never[row[empty], lane[empty], part[empty]] = True
        return never

    def report_in_flight(self, op: Op, what: str, rows: Array, lanes: Array, copies: Array, addresses: Array) -> None:
        """One finding for each copy (by its number) that is still writing at these addresses."""
        for number in np.unique(copies):
            these = copies == number
            i = int(np.argmax(these))
            started = self.copies[int(number) - 1][0]
            verb = "reads" if what == "read" else "overwrites"
            message = (
                f"{op.instruction.mnemonic} {verb} byte {int(addresses[i])} of shared memory while "
                f"{started.instruction.mnemonic} is still copying there: {_how_to_wait(started)} first"
            )
            self.report.add("in_flight", op.where, message, int(rows[i]), int(lanes[i]), other=started.where,
                            count=int(these.sum()), address=int(addresses[i]))  # fmt: skip

    def _examine_reads(
        self, frame: Frame, place: Place, read: Array, agent: int, readers: Array, cells: int, op: Op, collective: bool
    ) -> None:
        row, lane, part = np.nonzero(read)
        cell = place.index[row, lane] * cells + part
        record, rows = readers[cell], frame.flat[row]
        stamps, lanes = record >> LANE_BITS, record & 63
        if agent < 0:
            agents = np.full(rows.shape, agent)
        else:
            agents = self.report.first + rows - rows % self.clocks.warps_per_cta + agent
        fine = self.clocks.ordered(rows, lane, collective, agents, lanes, stamps)
        if not fine.all():
            wrong = ~fine
            self.report.races(op, "write", rows[wrong], lane[wrong], agents[wrong], stamps[wrong],
                              (cell[wrong] * self.granule) % self.stride, "read")  # fmt: skip
