"""The planes of a clock: what a warp knows of the other agents, by their stamps.

A clock is an array with a row for each *plane*, which says in what sense something came before, and a column for each
agent: a warp, and on demand a single lane, or a queue of transactions that complete together. Clocks that were made
before an agent had its column lack it: they know nothing of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.ir.program import Program
from warploom.isa import effects as fx

Array = NDArray[Any]

ORDER, CONTROL, FAR, FENCED, FENCED_GLOBALLY, MAPS = range(6)
"""The planes of a clock: memory accesses that happened before; how far control has come, which carries no memory
accesses along; accesses that are visible beyond their CTA; accesses to shared memory, and writes to global memory, that
are fenced against the async proxy; writes of tensor maps that are published."""

NOBODY = -1
"""In place of a column: an agent of another cluster, of which nothing can be known."""


def planes_of(program: Program) -> int:
    """The number of planes that a program can tell apart."""
    if any(isinstance(e, fx.TensorMapFence) for _, e in program.effects):
        return MAPS + 1
    fenced = {e.space for _, e in program.effects if isinstance(e, fx.ProxyFence)}
    if fenced:
        return FENCED + 1 if fenced == {"shared"} else FENCED_GLOBALLY + 1
    return FAR + 1 if program.cluster != (1, 1, 1) else CONTROL + 1


def only_control(clock: Array) -> Array:
    """A new clock that knows how far control has come, and nothing of memory."""
    found = np.zeros_like(clock)
    found[CONTROL] = clock[CONTROL]
    return found


def joined(*clocks: Array) -> Array:
    """A new clock that knows all that some clocks know."""
    found = np.zeros((clocks[0].shape[0], max(clock.shape[1] for clock in clocks)), np.int32)
    for clock in clocks:
        mine = found[:, : clock.shape[1]]
        np.maximum(mine, clock, out=mine)
    return found
