"""Which column of a vector clock stands for whom: the warps, their fences, the engines, and what is visible how far.

A clock has a column for each warp and one for each engine; one more for each warp says how far its control has come,
which is also known from what carries no memory accesses along; and where a program can tell them apart, there are more
for its writes that are visible beyond its CTA, and for those to global memory that are fenced against the async proxy.
The first engines are no engines: they say up to when each warp's accesses to shared memory are so fenced.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.order.places import Places

Array = NDArray[Any]

ASYNC_AGENT = -(1 << 40)
"""Agents from here downwards are loads of global memory by the mbarrier they complete on; known singly alone."""
PUBLISHED = 4 * ASYNC_AGENT
"""Agents from here downwards are mbarriers whose initialisation was published to the cluster."""


class Columns:
    """The columns of one batch.

    ``across``: the program orders accesses across clusters, so that there are columns for all warps of the grid;
    otherwise only for those of a *domain*, a cluster (without clusters, a CTA). ``first`` is the grid-wide number of
    the batch's first warp, ``ranks`` the CTA of the cluster of each engine.
    """

    def __init__(self, places: Places, first: int, across: bool, ranks: Array, global_fences: bool) -> None:
        self.warps_per_cta = places.warps
        self.domain = places.domain
        self.clustered = places.together > 1
        self.across = across
        self.first = first
        self.ranks = ranks
        self.engines = ranks.size
        self.warps = places.ctas * places.warps if across else self.domain
        self._passed = self.warps + self.engines
        self._visible = self._passed + self.domain
        self._fenced = self._visible + self.domain * self.clustered
        self.global_fences = global_fences
        self.count = self._fenced + self.warps * global_fences

    def of_row(self, row: Any) -> Any:
        """The column of a warp of the batch (of several)."""
        return self.first + row if self.across else row % self.domain

    def of_agents(self, agents: Array) -> Array:
        """The column of grid-wide warp numbers of the own domain (all, with ``across``), and of -1 - engine."""
        warps = agents if self.across else agents % self.domain
        return np.where(agents < 0, self.warps - 1 - agents, warps) if self.engines else warps

    def passed(self, agents: Any) -> Any:
        """The column of how far any lane of warps of the own domain has come."""
        return self._passed + agents % self.domain

    def visible(self, agents: Any) -> Any:
        """The column of what warps of the own domain have made visible beyond their CTA."""
        return self._visible + agents % self.domain

    def fenced(self, agents: Any) -> Any:
        """The column of the accesses to shared memory that warps of the own domain have fenced."""
        return self.warps + agents % self.domain

    def fenced_globally(self, agents: Any) -> Any:
        """The column of the writes to global memory that warps have fenced."""
        return self._fenced + (agents if self.across else agents % self.domain)

    def domain_of(self, row: int) -> slice:
        """The columns of the warps of a row's domain."""
        first = self.first + row // self.domain * self.domain if self.across else 0
        return slice(first, first + self.domain)

    @property
    def control(self) -> slice:
        """The columns of :meth:`passed`."""
        return slice(self._passed, self._visible)

    @property
    def fences(self) -> slice:
        """The columns of :meth:`fenced`."""
        return slice(self.warps, self.warps + self.domain)

    @property
    def global_fence(self) -> slice:
        """The columns of :meth:`fenced_globally`."""
        return slice(self._fenced, self.count)

    @property
    def far(self) -> slice:
        """The columns of :meth:`visible`."""
        return slice(self._visible, self._fenced)

    def same_domain(self, agents: Array, row: Array | int) -> Array:
        """Whether agents have a column in the clock of a row."""
        if self.across:
            return agents > ASYNC_AGENT
        warps = agents // self.domain == (self.first + row) // self.domain
        return (agents > ASYNC_AGENT) & ((agents < 0) | warps)
