"""How many warps of a kernel fit on one SM, and which resource is used up first.

Units of allocation on compute capability 8.0 to 12.0 (CUDA C++ Programming Guide, "Hardware Multithreading", and CUDA's
occupancy calculator): registers per warp in steps of 256, each warp in one of the SM's four partitions; shared memory
per CTA in steps of 128 bytes after the kibibyte that the system keeps for itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from warploom.core.errors import ConfigError
from warploom.core.targets import Target

_WARP = 32
_PARTITIONS = 4
_REGISTER_UNIT = 256
_SHARED_UNIT = 128


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Theoretical occupancy of one kernel on one target.

    ``limits`` has, for each resource, the CTAs per SM it would allow alone; ``limited_by`` names those that allow the
    fewest. Shared memory is taken to be configured for its largest share of the L1 cache.
    """

    ctas_per_sm: int
    warps_per_sm: int
    max_warps_per_sm: int
    limits: dict[str, int]
    limited_by: tuple[str, ...]

    @property
    def fraction(self) -> float:
        """Resident warps over the SM's maximum."""
        return self.warps_per_sm / self.max_warps_per_sm


def occupancy(target: Target, *, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """The :class:`Occupancy` of CTAs of ``threads`` with ``registers`` per thread and ``shared_bytes`` per CTA.

    ``ctas_per_sm`` is 0 where one CTA does not fit. Raises ConfigError if ``threads`` is not 1 … 1024.
    """
    if not 1 <= threads <= 1024:
        raise ConfigError(f"a CTA has 1 to 1024 threads, not {threads}")
    warps = -(-threads // _WARP)
    per_warp = _round_up(max(registers, 1) * _WARP, _REGISTER_UNIT)
    warps_by_registers = target.registers_per_sm // _PARTITIONS // per_warp * _PARTITIONS
    shared = _round_up(shared_bytes + target.shared_reserved_per_block, _SHARED_UNIT)
    fits = shared_bytes <= target.shared_per_block
    limits = {
        "warps": target.threads_per_sm // _WARP // warps,
        "CTAs": target.blocks_per_sm,
        "registers": warps_by_registers // warps,
        "shared memory": target.shared_per_sm // shared if fits else 0,
    }
    ctas = min(limits.values())
    names = tuple(name for name, allowed in limits.items() if allowed == ctas)
    return Occupancy(ctas, ctas * warps, target.threads_per_sm // _WARP, limits, names)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
