"""Agents other than warps: what copies and multiplies for a CTA while its warps go on.

An engine has a column in the vector clocks, as a warp has: what is known of it is the newest stamp of its accesses that
has been waited for. Copies that complete on one mbarrier are one engine, the ``wgmma`` of one warpgroup another, the
bulk stores of one warp a third. One more column for each warp says up to which stamp its generic accesses are fenced
against the async proxy; it travels with the clocks, wherever the fence stands between the access and its use.
"""

from __future__ import annotations

from warploom.ir.program import Program
from warploom.isa import effects as fx

_MBARRIERS = 64  # with more, some share a column: an unordered access might then pass as ordered


class Engines:
    """The numbers of the engines of a CTA."""

    def __init__(self, warps: int, used: bool) -> None:
        self.warps = warps
        self.used = used
        self._mbarriers: dict[int, int] = {}

    @property
    def count(self) -> int:
        """Columns needed in the clocks."""
        return 3 * self.warps + _MBARRIERS if self.used else 0

    def warpgroup(self, number: int) -> int:
        """The ``wgmma`` of a warpgroup."""
        return self.warps + number

    def bulk_stores(self, warp: int) -> int:
        """The bulk stores of a warp."""
        return 2 * self.warps + warp

    def mbarrier(self, address: int) -> int:
        """The copies that complete on the mbarrier at a shared address."""
        number = self._mbarriers.setdefault(address, len(self._mbarriers))
        return 3 * self.warps + number % _MBARRIERS


def engine_name(engine: int, warps: int) -> tuple[str, str]:
    """Who an engine is, and what orders an access after its."""
    if engine < 2 * warps:
        number = engine - warps
        return f"warpgroup {number}", "wait for its group (wgmma.wait_group), then let the mbarrier or barrier tell"
    if engine < 3 * warps:
        cure = "wait for its group (cp.async.bulk.wait_group.read), then meet at a barrier"
        return f"warp {engine - 2 * warps}", cure
    return "the TMA", "wait for the phase of its mbarrier"


def uses_engines(program: Program) -> bool:
    """Whether a program has anything to do with mbarriers, bulk copies, ``wgmma`` or the async proxy."""
    kinds = (fx.MbarrierInit, fx.MbarrierArrive, fx.MbarrierWait, fx.BulkTensorCopy, fx.AsyncMatrix, fx.ProxyFence)
    return any(isinstance(e, kinds) for op in program.ops() for e in op.instruction.effects())
