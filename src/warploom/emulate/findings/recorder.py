"""The listener that tasks, transactions, barriers and findings call as a run goes on.

:class:`RunListener` forgets what it hears; :mod:`warploom.emulate.launch.recording` has the listener that keeps it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


class RunListener:
    """A listener of a run that keeps nothing."""

    def enter(self, report: Any) -> None:
        """Other CTAs run from now on."""

    def goes_on(self, task: Any, group: Any) -> None:
        """Lanes of a task go on."""

    def stops(self, group: Any, done: bool) -> None:
        """Lanes have come to the end of their block, if ``done``, or stop before."""

    def starts(self, started: Any) -> None:
        """Transactions that threads wait for by groups begin."""

    def ends(self, ended: Any, done: Any, op: Any) -> None:
        """Transactions of some (warps, lanes) end, where ``op`` waits for them."""

    def takes_off(self, landing: Any) -> None:
        """A transaction that ends on an mbarrier begins."""

    def lands(self, landing: Any) -> None:
        """A transaction on an mbarrier ends, and may end waits."""

    def ends_waits(self, rows: Collection[int], by: int | None = None) -> None:
        """Waits of warps end, by an arrival of a warp, or by what has just landed."""

    def finds(self, finding: Any, row: int) -> None:
        """A warp meets a defect."""

    def finish(self) -> Any:
        """Return the record of the run; None where nothing was recorded."""
