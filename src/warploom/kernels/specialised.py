"""What the warp-specialised kernels of sm_90a have in common: a producer warpgroup beside consumer warpgroups."""

from __future__ import annotations

WARPGROUP = 128
"""Threads of a warpgroup."""
WARPGROUP_ROWS = 64
"""Rows of the product that one ``wgmma`` of a warpgroup makes."""
BARRIER_BYTES = 256
"""Shared memory behind the tiles that is set aside for the mbarriers."""
MOST_CONSUMERS = 3

# Per thread, by the number of consumers: in all no more than the CTA is launched with (65536 / threads, in steps of 8).
_CONSUMER_REGISTERS = {1: 240, 2: 240, 3: 160}
_PRODUCER_REGISTERS = {1: 40, 2: 24, 3: 32}


class Specialised:
    """The roles of a configuration with ``consumers``: one warpgroup loads, the others multiply."""

    consumers: int

    @property
    def threads(self) -> int:
        """Threads per CTA: the consumers and one producer warpgroup."""
        return WARPGROUP * (self.consumers + 1)

    @property
    def num_warps(self) -> int:
        """Warps per CTA."""
        return self.threads // 32

    @property
    def consumer_registers(self) -> int:
        """The consumers' register budget (``setmaxnreg``)."""
        return _CONSUMER_REGISTERS[self.consumers]

    @property
    def producer_registers(self) -> int:
        """The producer's register budget (``setmaxnreg``)."""
        return _PRODUCER_REGISTERS[self.consumers]

    def _role_problems(self) -> list[str]:
        """Why these are no roles; empty if they are."""
        if 1 <= self.consumers <= MOST_CONSUMERS:
            return []
        return [f"there are 1 to {MOST_CONSUMERS} consumer warpgroups, not {self.consumers}"]
