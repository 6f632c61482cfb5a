"""The history of global memory, which outlives a batch of CTAs.

A table for each warp of a grid would be too large: reads and updates are kept in lists, sorted by cell. Agents are
numbered as the grid counts warps; numbers below zero are queues of transactions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.control.frames import ASCENDING
from warploom.emulate.memory.access import MemoryAccess
from warploom.emulate.memory.history import ALIKE, History, Kind, Lanes
from warploom.emulate.order.clocks import BITS, LANES
from warploom.emulate.order.planes import FAR, FENCED_GLOBALLY
from warploom.ir.statements import Op
from warploom.isa.effects import Access as Effect

Array = NDArray[Any]

FLYING = 1 << 40
"""Added to the stamp at which a bulk store has begun to write: nobody can know of it."""
UNWRITTEN = np.int64(-1)
"""The record of cells of arrays that are marked as uninitialised, until somebody writes them."""
_UNMERGED = 8  # lists that may wait to be merged


class AccessList:
    """Accesses of one kind since the cells were last written: of each thread the last one.

    New ones are kept as a list of their own, sorted by cell, until there are many: then the shortest are merged.
    """

    def __init__(self, past: str, history: GlobalHistory) -> None:
        self.past, self.history = past, history
        self._lists: list[tuple[Array, Array, Array]] = []  # cells, agents, records; the longest first

    def note(self, at: MemoryAccess) -> None:
        """Record an access."""
        mine = at.flat
        if at.turns is not ASCENDING:
            self.history.turns[at.stamp] = bytes(at.turns)
        order = np.argsort(mine.cells, kind="stable")
        records = self.history.coded(mine.stamp, 0 if mine.agent else mine.lane_of_each[order, 0])
        agents = self.history.writers(mine)[order]
        self._lists.append((mine.cells[order], agents, np.broadcast_to(records, agents.shape)))
        if len(self._lists) > _UNMERGED:
            merged = self._lists.pop()
            while self._lists and (len(self._lists) >= _UNMERGED or self._lists[-1][0].size < 2 * merged[0].size):
                merged = self._merged(self._lists.pop(), merged)
            self._lists.append(merged)

    def _merged(self, first: tuple[Array, ...], second: tuple[Array, ...]) -> tuple[Array, Array, Array]:
        """Both lists, without what a write has ended and without a thread's older accesses to the same cell."""
        cells, agents, records = (np.concatenate(pair) for pair in zip(first, second, strict=True))
        kept = np.nonzero(self._current(cells, records))[0]
        launches = self.history.clocks.earlier.number_of(records >> BITS)
        keys = agents * LANES + (records & LANES - 1), launches, cells
        kept = kept[np.lexsort([key[kept] for key in keys])]
        last = np.ones(kept.size, np.bool_)
        last[:-1] = np.logical_or.reduce([key[kept[1:]] != key[kept[:-1]] for key in keys])
        kept = kept[last]
        return cells[kept], agents[kept], records[kept]

    def _current(self, cells: Array, records: Array) -> Array:
        """Which records the last write of their cells has not ended; equal stores may be made with it, at one stamp."""
        return records >> BITS >= self.history.wrote[cells] >> BITS

    def late(
        self, at: MemoryAccess, harmless: Callable[[], Array] | None = None, *, ended: bool = False
    ) -> Iterator[tuple[MemoryAccess, Array, Array, Lanes | None]]:
        """Yield those to the cells of an access, all at once, with agents and records, whoever knows of them.

        ``ended``: those that the last write has ended, as far as they are still listed.
        """
        if harmless is not None:
            at = at.among(~harmless() & (True if at.active is None else at.active[..., None]))
        at = at.flat
        wanted, found = at.cells, list[tuple[Array, Array, Array]]()
        for cells, agents, records in self._lists:
            low, high = np.searchsorted(cells, wanted, "left"), np.searchsorted(cells, wanted, "right")
            counts = high - low
            if not counts.any():
                continue
            mine = np.repeat(np.arange(wanted.size), counts)
            theirs = np.repeat(low - (np.cumsum(counts) - counts), counts) + np.arange(mine.size)
            these = self._current(wanted[mine], records[theirs]) != ended
            if these.any():
                found.append((mine[these], agents[theirs[these]], records[theirs[these]]))
        if found:
            lines, agents, records = (np.concatenate(parts) for parts in zip(*found, strict=True))
            yield at[lines], agents, records, None


def _is_atomic(op: Op | None) -> bool:
    return op is not None and any(isinstance(e, Effect) and e.mode == "atomic" for e in op.instruction.effects())


def _next(which: Array) -> Array:
    """For each place, the next one after it that is among ``which``; their number if there is none."""
    places = np.append(np.where(which, np.arange(which.size), which.size)[1:], which.size)
    return np.minimum.accumulate(places[::-1])[::-1]


class GlobalHistory(History):
    """The history of global memory that a kernel writes, in cells of ``granule`` bytes.

    ``base`` are the bytes, in the history, at which buffers begin, by their numbers. ``clocks`` and ``report`` change
    with the batch.
    """

    read_plane, fenced_plane = FAR, FENCED_GLOBALLY

    def __init__(self, size: int, granule: int, base: Array) -> None:
        super().__init__(-(-size // granule), granule, UNWRITTEN, FLYING)
        self.wrote[:] = 0
        self.base = base
        self.turns = dict[
            int, bytes
        ]()  # stamp → the order in which lanes took turns at an atomic, other than ascending
        self.generic = np.zeros(self.wrote.shape, np.bool_)  # last written by an ordinary instruction

    def stored(self, cells: Array) -> Array:
        """The cells whose last write an ordinary instruction has made."""
        return (self.wrote[cells] >> BITS < FLYING) & self.generic[cells]

    def _table(self, past: str) -> AccessList:
        return AccessList(past, self)

    def writers(self, at: MemoryAccess) -> Array:
        """The numbers in the grid of those who make an access."""
        rows = at.rows[0]
        return np.full(rows.shape, at.agent) if at.agent else self.clocks.first + rows

    def _warps(self, mine: MemoryAccess) -> Array:
        return self.clocks.first + mine.rows[0]

    def _columns(self, writers: Array, rows: Array) -> Array:
        return self.clocks.column_of(writers, rows)

    def agents(self, writers: Array, rows: Array) -> Array:
        """The numbers in the grid of writers, to these rows."""
        return writers

    def _ordinary(self, mine: MemoryAccess, past: str, writers: Array) -> Array:
        written = self.generic[mine.cells] if past == "wrote" else past != "read"  # not asked of reads
        return (writers >= 0) & written

    def judge(self, mine: MemoryAccess, past: str, writers: Array, record: Array, *more: Any, **named: Any) -> Array:
        """Report conflicts as :meth:`History.judge`: an earlier launch is one agent, known if it was over before."""
        earlier = self.clocks.earlier
        if earlier.ends:
            number = earlier.number_of(record >> BITS)
            places = np.append(earlier.places, 0)[number]
            agents = self.clocks.agents(self.clocks.warps + np.maximum(places, 0), mine.rows[0])
            writers = np.where(number < len(earlier.ends), agents, writers)
            record = np.where(places < 0, record & LANES - 1, record)
        return super().judge(mine, past, writers, record, *more, **named)

    def bytes(self, mine: MemoryAccess) -> Array:
        """The bytes in their buffers that an access's cells begin at."""
        assert mine.numbers is not None
        return mine.cells * self.granule - self.base[mine.numbers[:, 0]]

    def _harmless(self, mine: MemoryAccess, kind: Kind | None, writers: Array, record: Array, known: Array) -> Any:
        """Return which records are harmless, as :meth:`History._harmless`; updates that an atomic has read are, too."""
        if kind is None or known.all():
            return False
        if kind.what == "update" and kind.scope is not None and not mine.strong:
            return self._observed(mine, writers, record, known, kind.scope * self.clocks.warps_per_cta)
        return super()._harmless(mine, kind, writers, record, known)

    def _observed(self, mine: MemoryAccess, writers: Array, record: Array, known: Array, warps: int) -> Array:
        """Which strong writes an atomic has read that the accessor knows of; PTX calls this observation order.

        An atomic reads what the write before it has left, and through an atomic before it what that has read. It must
        return that: no other thread can tell that it came later. Scopes end at so many ``warps``; 0: nowhere.
        """
        stamps, which = np.unique(record >> BITS, return_inverse=True)
        ops = [self.clocks.history[stamp] for stamp in stamps.tolist()]
        ranks = np.array([np.argsort(list(self.turns.get(stamp, ASCENDING))) for stamp in stamps.tolist()])
        line = mine.lane_of_each[:, 0], mine.rows[0], mine.cells
        order = np.lexsort((ranks[which, record & LANES - 1], writers, which, *line))
        atomic = np.array([_is_atomic(op) for op in ops])[which[order]]
        returns = np.array([op is not None and bool(op.results) for op in ops])[which[order]]
        reader = _next(returns & known[order])
        seen = (reader < _next(~atomic)) & (writers[order] >= 0)  # the async proxy's are morally strong with no atomic
        reader[~seen] = 0
        for same in (*line, *([writers // warps] if warps else ())):
            seen &= same[order[reader]] == same[order]
        found = np.zeros(seen.shape, np.bool_)
        found[order] = seen
        return found

    def _repeated(self, mine: MemoryAccess, past: str, writers: Array, record: Array) -> Array:
        found = np.zeros(record.shape, np.bool_)
        if past != "read" or mine.what != "write" or not self.report.compiled:
            return found
        ops = np.array([id(self.clocks.history[stamp]) for stamp in (record >> BITS).tolist()])
        own, warps = writers == self._warps(mine), mine.rows[0]
        read = set(zip(warps[own].tolist(), ops[own].tolist(), mine.cells[own].tolist(), strict=True))
        elements = Counter((warp, op) for warp, op, _ in read)
        for i, key in enumerate(zip(warps.tolist(), ops.tolist(), mine.cells.tolist(), strict=True)):
            found[i] = key in read and elements[key[:2]] > 1  # a number, one cell, is for all lanes that read it
        return found

    def check_ended(self, mine: MemoryAccess) -> None:
        """Report conflicts of equal stores with reads and updates that the last write has ended."""
        for kind, earlier in self.tables.items():
            if kind is not ALIKE and isinstance(earlier, AccessList):
                for found, writers, records, each in earlier.late(mine, ended=True):
                    self.judge(found, earlier.past, writers, records, each, kind=kind)

    def note(self, at: MemoryAccess) -> None:
        """Record a read or an update; updates need a value to begin with."""
        if at.what == "atomic":
            self.check_initialised(at)
        super().note(at)

    def check_initialised(self, at: MemoryAccess) -> None:
        """Report what an access reads, and uses, of cells that nobody has written."""
        if (self.wrote[at.cells] == UNWRITTEN).any():
            mine = at.flat
            never = mine[self.wrote[mine.cells] == UNWRITTEN]
            self.report.tell("never written", never, self.bytes(never))

    def write(self, at: MemoryAccess) -> tuple[Array, Array] | None:
        """Note who has written some units, as :meth:`History.write`."""
        self.generic[at.cells] = not at.proxy
        return super().write(at)

    def land(self, mine: MemoryAccess) -> None:
        """The thread of a bulk store knows that it has written, where no other one has begun to since."""
        mine = mine[self.still_written(mine.cells, mine.stamp)]
        mine.stamp = self.clocks.stamp(mine.op)
        self.write(mine)

    # -- writes at any time ------------------------------------------------------------------------------------------

    def written_since(self, cells: Array, stamp: int) -> Array:
        """Which cells have been written after a stamp."""
        records = self.wrote[cells]
        return super().written_since(cells, stamp) & (records >> BITS < FLYING) & (records != UNWRITTEN)

    def check_unwritten(self, mine: MemoryAccess) -> None:
        """Report a read through a cache for what the kernel does not write."""
        begun = self.clocks.earlier.begun
        self.check_unchanged(mine.flat, "cached", begun)
        for kind, earlier in self.tables.items():
            if kind.what == "update":
                for written, _, records, _ in earlier.late(mine, None):
                    if (now := records >> BITS > begun).any():
                        self.report.tell("cached", written[now], self.bytes(written[now]), int(records[now][0] >> BITS))

    def end_read(self, mine: MemoryAccess) -> None:
        """A transaction has read until now, what others may not have written meanwhile; reads count from now on."""
        self.check_unchanged(mine, "overwritten", mine.stamp)
        mine.stamp = self.clocks.stamp(mine.op)
        self.note(mine)
