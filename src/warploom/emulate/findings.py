"""What the emulator objects to: one frozen object per defect, merged by kind and source lines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from warploom.core.errors import EmulationError
from warploom.ir.statements import NOWHERE, SourceLine

Kind = Literal[
    "race",
    "in_flight",
    "uninitialised",
    "bounds",
    "misaligned",
    "divergence",
    "member_mask",
    "deadlock",
    "barrier",
    "mbarrier",
    "proxy",
    "leak",
    "cluster",
    "layout",
    "undefined",
    "overflow",
]


@dataclass(frozen=True, slots=True)
class Finding:
    """One defect. ``message`` says what happened and what to do; ``count`` how many lanes it happened to.

    ``where`` is the line that ran into it, ``other`` the line it conflicts with. ``cta`` (linear), ``warp`` (within its
    CTA), ``lane`` and ``address`` describe the first lane it was seen in; ``address`` is in bytes: from the start of
    shared memory, or from the start of the array. ``rank`` is the CTA's in its cluster, None without clusters.
    """

    kind: Kind
    message: str
    where: SourceLine
    other: SourceLine | None = None
    count: int = 1
    cta: int = 0
    warp: int = 0
    lane: int = 0
    address: int | None = None
    rank: int | None = None

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" (rank {self.rank} of its cluster)"
        place = f"CTA {self.cta}{rank}, warp {self.warp}, lane {self.lane}"
        lines = f"{self.where}" if self.where != NOWHERE else "(no source line)"
        if self.other is not None and self.other != self.where:
            lines += f" and {self.other}"
        times = f" ({self.count} times; first in {place})" if self.count > 1 else f" (in {place})"
        return f"{self.kind} at {lines}: {self.message}{times}"


class Findings:
    """Collects findings; those of one kind with the same lines are merged and counted."""

    def __init__(self, stop: bool = False, enabled: bool = True) -> None:
        self._found: dict[tuple[str, SourceLine, SourceLine | None], Finding] = {}
        self._stop = stop
        self.enabled = enabled

    def add(self, finding: Finding) -> None:
        """Record ``finding``; raises EmulationError at once if asked to stop at the first."""
        if not self.enabled:
            return
        key = (finding.kind, finding.where, finding.other)
        earlier = self._found.get(key)
        self._found[key] = replace(earlier, count=earlier.count + finding.count) if earlier else finding
        if self._stop:
            raise EmulationError(str(finding), (finding,))

    @property
    def all(self) -> tuple[Finding, ...]:
        """The merged findings, in order of first appearance."""
        return tuple(self._found.values())
