"""Agents other than warps: what copies and multiplies for a CTA while its warps go on.

An engine has a column in the vector clocks, as a warp has: what is known of it is the newest stamp of its accesses that
has been waited for. Copies that complete on one mbarrier are one engine, the ``wgmma`` of one warpgroup another, the
bulk stores of one warp a third. One more column for each warp says up to which stamp its generic accesses are fenced
against the async proxy; it travels with the clocks, wherever the fence stands between the access and its use.

Engines are numbered within a cluster (a CTA alone, without clusters), whose CTAs copy into each other's memory.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.order.places import Places
from warploom.ir.program import Program
from warploom.isa import effects as fx


class TooManyMbarriersError(Exception):
    """More mbarriers than the clocks have columns for: run again with room for ``needed`` in each CTA."""

    def __init__(self, needed: int) -> None:
        super().__init__(f"{needed} mbarriers")
        self.needed = needed


class Engines:
    """The numbers of the engines of a cluster; ``mbarriers`` is how many of each CTA have a column."""

    def __init__(self, places: Places, used: bool, mbarriers: int) -> None:
        self.places = places
        self.warps, self.domain = places.warps, places.domain
        self.used = used
        self.capacity = mbarriers
        self._mbarriers: dict[int, int] = {}  # address → number, the same in every CTA

    @property
    def count(self) -> int:
        """Columns needed in the clocks."""
        return 3 * self.domain + self.places.together * self.capacity if self.used else 0

    @property
    def ranks(self) -> NDArray[np.int64]:
        """The CTA of the cluster whose shared memory each engine accesses."""
        warp = np.arange(3 * self.domain) % self.domain // self.warps
        return np.concatenate([warp, np.arange(self.count - warp.size) // self.capacity]) if self.used else warp[:0]

    def warpgroup(self, row: int) -> int:
        """The ``wgmma`` of the warpgroup of a warp."""
        return self.domain + row % self.domain // self.warps * self.warps + row % self.warps // 4

    def bulk_stores(self, row: int) -> int:
        """The bulk stores of a warp."""
        return 2 * self.domain + row % self.domain

    def mbarrier(self, cta: int, address: int) -> int:
        """The copies that complete on the mbarrier at a shared address of a CTA."""
        number = self._mbarriers.setdefault(address, len(self._mbarriers))
        if number >= self.capacity:
            raise TooManyMbarriersError(2 * number)
        return 3 * self.domain + cta % self.places.together * self.capacity + number

    def name(self, engine: int) -> tuple[str, str]:
        """Who an engine is, and what orders an access after its."""
        if engine < 2 * self.domain:
            cure = "wait for its group (wgmma.wait_group), then let the mbarrier or barrier tell"
            return f"warpgroup {engine % self.warps}", cure
        if engine < 3 * self.domain:
            cure = "wait for its group (cp.async.bulk.wait_group.read), then meet at a barrier"
            return f"warp {engine % self.warps}", cure
        return "the TMA", "wait for the phase of its mbarrier"


def uses_engines(program: Program) -> bool:
    """Whether a program has anything to do with mbarriers, bulk copies, ``wgmma`` or the async proxy."""
    kinds = (
        fx.MbarrierInit,
        fx.MbarrierArrive,
        fx.MbarrierWait,
        fx.BulkTensorCopy,
        fx.BulkStore,
        fx.BulkLoad,
        fx.AsyncMatrix,
        fx.AsyncStore,
        fx.CopyArrival,
        fx.ProxyFence,
        fx.TensorMapFence,
    )
    return any(isinstance(e, kinds) for _, e in program.effects)


def mbarriers_of(program: Program) -> int:
    """The mbarriers that a program initialises in its text; a loop or several lanes may make more."""
    return max(1, sum(isinstance(e, fx.MbarrierInit) for _, e in program.effects))


def fences_globally(program: Program) -> bool:
    """Whether a program fences ordinary accesses to global memory against the async proxy."""
    return any(isinstance(e, fx.ProxyFence) and e.space != "shared" for _, e in program.effects)
