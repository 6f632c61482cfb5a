"""Where the warps of a launch stand: numbered CTA by CTA, and the CTAs of a cluster one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.core.errors import ProblemError
from warploom.ir.program import Program

Array = NDArray[Any]


@dataclass(frozen=True)
class Places:
    """The warps of a grid. ``grid`` and ``cluster`` count CTAs along x, y and z, ``warps`` the warps of a CTA.

    The CTA of warp n is in *slot* n // warps. Without clusters that is its linear number in the grid.
    """

    grid: tuple[int, int, int]
    cluster: tuple[int, int, int]
    warps: int

    @classmethod
    def of(cls, program: Program, grid: tuple[int, int, int]) -> Places:
        """Raises ProblemError for a grid that the clusters do not divide."""
        if any(g % c for g, c in zip(grid, program.cluster, strict=True)):
            raise ProblemError(
                f"{program.name} runs in clusters of {program.cluster} CTAs: the grid {grid} must be a multiple of that"
            )
        return cls(grid, program.cluster, program.warps)

    @property
    def ctas(self) -> int:
        """CTAs of the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def together(self) -> int:
        """CTAs of a cluster."""
        return self.cluster[0] * self.cluster[1] * self.cluster[2]

    @property
    def domain(self) -> int:
        """Warps of a cluster: those that share memory and barriers."""
        return self.together * self.warps

    def coordinates(self, slot: Array) -> tuple[Array, Array, Array]:
        """The place in the grid of the CTAs in these slots."""
        inside, outside = self.inside(slot), self.cluster_place(slot)
        x, y, z = (q * c + i for q, c, i in zip(outside, self.cluster, inside, strict=True))
        return x, y, z

    def inside(self, slot: Array) -> tuple[Array, Array, Array]:
        """The place of CTAs in their clusters."""
        rank, (cx, cy, _) = slot % self.together, self.cluster
        return rank % cx, rank // cx % cy, rank // (cx * cy)

    def cluster_place(self, slot: Array) -> tuple[Array, Array, Array]:
        """The place of their clusters in the grid of clusters."""
        number = slot // self.together
        nx, ny = self.grid[0] // self.cluster[0], self.grid[1] // self.cluster[1]
        return number % nx, number // nx % ny, number // (nx * ny)

    def linear(self, slot: int) -> int:
        """The CTA's number in the grid, x fastest."""
        x, y, z = (int(i) for i in self.coordinates(np.array(slot)))
        return x + self.grid[0] * (y + self.grid[1] * z)

    def rank(self, slot: int) -> int | None:
        """The CTA's rank in its cluster; None for kernels without clusters."""
        return slot % self.together if self.together > 1 else None

    def special(self, register: str, slot: Array) -> Array:
        """A special register about CTAs in these slots: ``ctaid.y``, ``nctaid.x``, ``cluster_ctarank`` …"""
        if register == "cluster_ctarank":
            return slot % self.together
        if register == "cluster_nctarank":
            return np.full_like(slot, self.together)
        if register == "smid":
            return np.zeros_like(slot)
        name, axis = register.split(".")
        if name == "nctaid":
            return np.full_like(slot, self.grid["xyz".index(axis)])
        places = {"ctaid": self.coordinates, "cluster_ctaid": self.inside, "clusterid": self.cluster_place}
        return places[name](slot)["xyz".index(axis)]
