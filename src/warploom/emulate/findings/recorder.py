"""Who is told of a run as it happens: tasks, transactions, barriers and findings name what they do anyway.

This one forgets it, so that a run costs no more; :mod:`warploom.emulate.launch.recording` has the one that keeps it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


class RunListener:
    """Is told of a run, and forgets it."""

    def enter(self, report: Any) -> None:
        """Other CTAs run from now on."""

    def goes_on(self, task: Any, group: Any) -> None:
        """Lanes of a task go on."""

    def stops(self, group: Any, done: bool) -> None:
        """They have come to the end of their block, if ``done``, or stop before."""

    def starts(self, started: Any) -> None:
        """Transactions that threads wait for by groups begin."""

    def ends(self, ended: Any, done: Any, op: Any) -> None:
        """Transactions of some (warps, lanes) end, where ``op`` waits for them."""

    def takes_off(self, landing: Any) -> None:
        """A transaction that ends on an mbarrier begins."""

    def lands(self, landing: Any) -> None:
        """It ends, and may end waits."""

    def ends_waits(self, rows: Collection[int], by: int | None = None) -> None:
        """Waits of warps end, by an arrival of a warp, or by what has just landed."""

    def finds(self, finding: Any, row: int) -> None:
        """A warp meets a defect."""

    def finish(self) -> Any:
        """Return the record of the run; None where nothing was recorded."""
