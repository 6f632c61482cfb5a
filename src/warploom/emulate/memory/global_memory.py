"""Global memory: the buffers of the arguments, bounds, and races on what the kernel writes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.control.frames import Frame, Origin, Turns, apply_in_turn, displaced, in_turn
from warploom.emulate.findings.report import MemoryReports
from warploom.emulate.findings.traffic import TrafficCounter
from warploom.emulate.memory.buffers import ADDRESS_BITS, GlobalBuffer, Region
from warploom.emulate.memory.global_history import GlobalHistory, Mode
from warploom.emulate.order.clocks import Clocks
from warploom.ir.statements import Op
from warploom.isa.base import Instruction
from warploom.isa.effects import Access
from warploom.layout.fragments import WARP_SIZE

Array = NDArray[Any]


@dataclass(slots=True)
class Target:
    """The lanes of an access that go to one buffer: positions among the flattened lanes, and byte offsets."""

    buffer: GlobalBuffer
    positions: Array | None  # None: all lanes
    offsets: Array

    def of(self, which: Array) -> Target:
        """The same of some of its lanes alone."""
        positions = np.arange(self.offsets.size) if self.positions is None else self.positions
        return Target(self.buffer, positions[which], self.offsets[which])


@dataclass(slots=True)
class GlobalPlace:
    """Where the lanes of a frame access ``size`` bytes each (an array where they differ), by buffer."""

    frame: Frame
    op: Op
    size: Array | int
    address: Array
    targets: list[Target]

    def of(self, lanes: Array) -> GlobalPlace:
        """The same of some lanes (warps, lanes) alone."""
        flat = lanes.reshape(-1)
        targets = [t.of(flat if t.positions is None else flat[t.positions]) for t in self.targets]
        return GlobalPlace(self.frame, self.op, self.size, self.address, targets)

    def count(self, counter: TrafficCounter, name: str) -> None:
        """Count the sectors."""
        counter.global_access(name, self.op.where, self.address.view(np.int64), self.size, self.frame.active)


class GlobalMemory:
    """All buffers of a launch. Lives for the whole grid; ``clocks`` and ``report`` change with the batch."""

    def __init__(self, buffers: list[GlobalBuffer], written: set[str] | None, granule: int, checks: bool) -> None:
        self.buffers = {b.address >> ADDRESS_BITS: b for b in buffers}
        self.granule = granule
        self.checks = checks
        self.histories: dict[Region, GlobalHistory] = {}
        self.clocks: Clocks
        self.report: MemoryReports
        if checks:
            self._make_regions(buffers, written)

    def _make_regions(self, buffers: list[GlobalBuffer], written: set[str] | None) -> None:
        """Join overlapping buffers into regions; keep those that may be written."""
        for buffer in buffers:
            buffer.region = None
        groups: list[list[GlobalBuffer]] = []
        for buffer in sorted((b for b in buffers if b.data.size), key=lambda b: b.real):
            if groups and buffer.real < max(b.real + b.data.size for b in groups[-1]):
                groups[-1].append(buffer)
            else:
                groups.append([buffer])
        for group in groups:
            if written is not None and not any(b.name in written for b in group):
                continue
            # Cells must not straddle accesses: count them from a multiple of 16 bytes below the first buffer's start.
            real = group[0].real - group[0].skew % 16
            region = Region(real, max(b.real + b.data.size for b in group) - real)
            self.histories[region] = GlobalHistory(region, self.granule)
            for buffer in group:
                buffer.region = region

    # -- addresses -----------------------------------------------------------------------------------------------

    def place(self, frame: Frame, address: Array, op: Op, access: Access, size: Array | int = 0) -> GlobalPlace:
        """Where the active lanes go; ``size`` in bytes if not all of the access. Who is out of bounds is left out."""
        size = access.bytes if isinstance(size, int) and not size else size
        at = frame.full(displaced(address, access.offset))
        return GlobalPlace(frame, op, size, at, self.resolve(frame, at, size, op, frame.active, access.bytes))

    def names(self, place: GlobalPlace) -> Array:
        """What tells the addresses of a place from all others, (warps, lanes)."""
        return place.address

    def resolve(
        self, frame: Frame, address: Array, size: Array | int, op: Op, active: Array | None, alignment: int
    ) -> list[Target]:
        """Which buffers the active lanes go to. Lanes out of bounds or misaligned are reported and left out."""
        flat = address.reshape(-1)
        if flat.size == 0:
            return []
        buffer = self.buffers.get(int(flat[0]) >> ADDRESS_BITS)
        if buffer is not None and active is None:
            offsets = (flat - np.uint64(buffer.start)).view(np.int64)
            longest = size if isinstance(size, int) else int(size.max())
            low, high = int(offsets.min()), int(offsets.max())
            aligned = not ((offsets + buffer.skew) & (alignment - 1)).any()
            if low >= 0 and high + longest <= buffer.data.size and aligned:
                self._check_gaps(frame, whole := Target(buffer, None, offsets), size, op)
                return [whole]
        return self._resolve_slowly(
            frame, flat, np.broadcast_to(size, address.shape).reshape(-1), op, active, alignment
        )

    def _resolve_slowly(
        self, frame: Frame, flat: Array, size: Array, op: Op, active: Array | None, alignment: int
    ) -> list[Target]:
        acting = np.ones(flat.size, np.bool_) if active is None else active.reshape(-1)
        acting = acting & (size > 0)
        number = flat >> np.uint64(ADDRESS_BITS)
        targets: list[Target] = []
        lanes = flat.size // frame.n
        for which in np.unique(number[acting]):
            positions = np.nonzero(acting & (number == which))[0]
            buffer = self.buffers.get(int(which))
            if buffer is None:
                # A pointer below its array reaches into the gap after the previous one.
                near = self.buffers.get(int(which) + 1)
                self._report_bounds(frame, positions, flat[positions], lanes, op, near)
                continue
            offsets = (flat[positions] - np.uint64(buffer.start)).view(np.int64)
            inside = (offsets >= 0) & (offsets + size[positions] <= buffer.data.size)
            if not inside.all():
                self._report_bounds(frame, positions[~inside], flat[positions[~inside]], lanes, op, buffer)
            skewed = ((offsets + buffer.skew) & (alignment - 1)) != 0
            wrong = inside & skewed
            if wrong.any():
                row, lane = divmod(int(positions[wrong][0]), lanes)
                at = int(offsets[wrong][0])
                message = f"{op.instruction.mnemonic} at byte {at} of {buffer.element(at)} is not aligned to "
                message += f"{alignment} bytes: correct the address, or use a narrower access"
                self.report.add(
                    "misaligned", op.where, message, int(frame.flat[row]), lane, count=int(wrong.sum()), address=at
                )
            good = inside & ~skewed
            if good.any():
                targets.append(Target(buffer, positions[good], offsets[good]))
                self._check_gaps(frame, targets[-1], size[positions[good]], op)
        return targets

    def _check_gaps(self, frame: Frame, target: Target, size: Array | int, op: Op) -> None:
        """Accesses between the elements of a view: the kernel takes it for an array without gaps."""
        wrong = target.buffer.in_gaps(target.offsets, size)
        if wrong.size and self.checks:
            lane = wrong[0] if target.positions is None else target.positions[wrong[0]]
            row, lane, at = *divmod(int(lane), WARP_SIZE), int(target.offsets[wrong[0]])
            message = f"{op.instruction.mnemonic} at byte {at} of {target.buffer.name} reaches between its elements, "
            message += f"which lie apart: take its strides (Strided[…, {len(target.buffer.shape)}]), or pass it "
            message += "through np.ascontiguousarray"
            self.report.add("bounds", op.where, message, int(frame.flat[row]), lane, count=wrong.size, address=at)

    def _report_bounds(
        self, frame: Frame, positions: Array, addresses: Array, lanes: int, op: Op, buffer: GlobalBuffer | None
    ) -> None:
        row, lane = divmod(int(positions[0]), lanes)
        count = positions.size
        if buffer is None:
            text = f"{op.instruction.mnemonic} at address {int(addresses[0]):#x}, which is in no array"
            where = int(addresses[0])
        else:
            where = int(addresses[0]) - buffer.start
            has = f"shape {buffer.shape}" if buffer.shape else f"{buffer.data.size} bytes"
            text = f"{op.instruction.mnemonic} at byte {where} of {buffer.element(where)}, where {buffer.name} has "
            text += has
        text += ": correct the address, or guard the access"
        self.report.add("bounds", op.where, text, int(frame.flat[row]), lane, count=count, address=where)

    @staticmethod
    def words(buffer: GlobalBuffer, word: np.dtype[Any], words: int) -> tuple[Array, int]:
        """The buffer as rows of words, and the byte offset of row 0 (views of skewed buffers start inside)."""
        size = word.itemsize * words
        first = -buffer.skew % size
        usable = max(0, (buffer.data.size - first) // size * size)
        return buffer.data[first : first + usable].view(word).reshape(-1, words), first

    def text(self, address: int) -> str:
        """The string that ends by 0 at an address; "?" where none is."""
        buffer = self.buffers.get(address >> ADDRESS_BITS)
        start = 0 if buffer is None else address - buffer.start
        if buffer is None or not 0 <= start < buffer.data.size:
            return "?"
        return buffer.data[start:].tobytes().split(b"\0", 1)[0].decode(errors="replace")

    # -- accesses ------------------------------------------------------------------------------------------------

    def load(self, place: GlobalPlace, access: Access) -> tuple[Array, None, None]:
        """The words read, (warps, lanes, words); global memory has no poison."""
        self.track(place, "read", access)
        return self.read(place, np.dtype(f"u{access.bytes // access.words}"), access.words), None, None

    def read(self, place: GlobalPlace, word: np.dtype[Any], words: int) -> Array:
        """Words (warps, lanes, words) as they are; zeros where a lane reads nothing."""
        size, shape, targets = word.itemsize * words, (place.frame.n, WARP_SIZE), place.targets
        if len(targets) == 1 and targets[0].positions is None:
            rows, first = self.words(targets[0].buffer, word, words)
            return rows.take((targets[0].offsets - first) // size, axis=0).reshape(*shape, words)
        out = np.zeros((shape[0] * shape[1], words), word)
        for target in targets:
            rows, first = self.words(target.buffer, word, words)
            out[target.positions] = rows[(target.offsets - first) // size]
        return out.reshape(*shape, words)

    def take(self, place: GlobalPlace, word: np.dtype[Any], words: int) -> tuple[list[GlobalPlace], Array]:
        """What a copy reads now, and where it will be checked to have read once more; zeros beyond a lane's size."""
        whole = word.itemsize * words
        sizes = np.broadcast_to(place.size, place.address.shape).reshape(-1)
        if (sizes == whole).all():
            whole_place = replace(place, size=whole)
            self.track(whole_place, "read")
            return [whole_place], self.read(whole_place, word, words)
        data, parts = np.zeros((sizes.size, whole), np.uint8), list[GlobalPlace]()
        for target in place.targets:
            mine = sizes if target.positions is None else sizes[target.positions]
            for length in np.unique(mine[mine > 0]).tolist():
                part = target.of(mine == length)
                data[part.positions, :length] = target.buffer.data[part.offsets[:, None] + np.arange(length)]
                parts.append(replace(place, size=length, targets=[part]))
                self.track(parts[-1], "read")
        return parts, data.view(word).reshape(place.frame.n, WARP_SIZE, words)

    def store(
        self, place: GlobalPlace, access: Access, data: Array, shadow: Array | None = None, origin: Origin | None = None
    ) -> None:
        """Write words (warps, lanes, words); of lanes that write one address the last wins, as the check reports."""
        self.track(place, "write" if access.order == "weak" else "atomic", access, data=data)
        flat = data.reshape(-1, data.shape[2])
        for target in place.targets:
            if self.may_write(place.frame, target, place.op):
                rows, first = self.words(target.buffer, data.dtype, data.shape[2])
                index = (target.offsets - first) // (data.dtype.itemsize * data.shape[2])
                rows[index] = flat if target.positions is None else flat[target.positions]

    def begin_update(self, place: GlobalPlace, access: Access) -> None:
        """Check and record an atomic update."""
        self.track(place, "atomic", access, strong=True)

    def update(
        self, place: GlobalPlace, access: Access, instruction: Instruction, values: list[Array], turns: Turns
    ) -> Array:
        """Lanes take turns to update each element of a vector. Returns the old values, (elements, warps, lanes)."""
        old = np.zeros((access.words, place.frame.n * WARP_SIZE), instruction.operand_types[1].numpy)
        for target in place.targets:
            if not self.may_write(place.frame, target, place.op):
                continue
            rows, first = self.words(target.buffer, old.dtype, 1)
            where = slice(None) if target.positions is None else target.positions
            picked = [v.reshape(-1)[where] for v in values]
            index, order = (target.offsets - first) // rows.itemsize, in_turn(np.arange(old.shape[1])[where], turns)
            for i in range(access.words):
                operands = picked[i :: access.words]
                old[i][where] = apply_in_turn(instruction, rows[:, 0], index + i, operands, order)
        return old.reshape(-1, place.frame.n, WARP_SIZE)

    def may_write(self, frame: Frame, target: Target, op: Op) -> bool:
        """Whether the buffer is writable; a finding if not."""
        if target.buffer.writable:
            return True
        message = f"{op.instruction.mnemonic} writes {target.buffer.name}, a read-only array: pass a writable one"
        self.report.add("bounds", op.where, message, int(frame.flat[0]), 0, count=target.offsets.size)
        return False

    # -- races ---------------------------------------------------------------------------------------------------

    def enter(self, clocks: Clocks, report: MemoryReports) -> None:
        """Work for this batch from now on."""
        self.clocks, self.report = clocks, report
        for history in self.histories.values():
            history.clocks, history.report = clocks, report

    def history(self, buffer: GlobalBuffer | None) -> GlobalHistory | None:
        """That of the memory of a buffer; None for none, as the kernel does not write it."""
        return self.histories.get(buffer.region) if buffer is not None and buffer.region is not None else None

    def track(
        self,
        place: GlobalPlace,
        mode: Mode,
        access: Access | None = None,
        *,
        data: Array | None = None,
        strong: bool = False,
        since: int | None = None,
    ) -> None:
        """Check an access against the unordered ones before it, and record it; without an ``access`` a weak one.

        A read ``since`` a stamp has gone on from there: what was written later conflicts with it, ordered or not.
        """
        if not self.checks:
            return
        frame, per_lane = place.frame, max(1, int(np.max(place.size)) // self.granule)
        for target in place.targets:
            history = self.history(target.buffer)
            if history is None:
                continue
            positions = np.arange(frame.n * WARP_SIZE) if target.positions is None else target.positions
            cells = (history.cells(target.buffer, target.offsets)[:, None] + np.arange(per_lane)).reshape(-1)
            rows, lanes = (np.repeat(x, per_lane) for x in (frame.flat[positions // WARP_SIZE], positions % WARP_SIZE))
            mine = history.access(place.op, mode, target.buffer, cells, rows, lanes)
            mine.strong = strong or (access is not None and access.order != "weak")
            mine.cta_only = access is not None and access.scope == "cta"
            history.check(mine)
            if access is not None and access.read_only:
                history.check_unwritten(mine)
            if since is not None:
                history.check_unchanged(mine, since)
            history.note(mine)
            if mode == "atomic" and mine.cta_only:
                history.check_scope(mine)
            if mode == "write" and not mine.strong and data is not None:
                history.check_clash(mine, data.reshape(-1, data.shape[2])[positions], per_lane)
