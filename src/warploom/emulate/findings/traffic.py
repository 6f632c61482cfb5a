"""What a run moved: wavefronts of shared memory, sectors of global memory, executed instructions, by source line."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.ir.statements import SourceLine
from warploom.layout.banks import ideal_wavefronts, wavefronts

SECTOR_BYTES = 32
"""Global memory moves in sectors of 32 bytes (CUDA C++ Best Practices Guide, "Coalesced Access to Global Memory")."""


class Counts:
    """Numbers that grow."""

    def add(self, *more: int) -> None:
        """Count more of each, in the order in which they are declared."""
        mine = vars(self)
        for name, number in zip(mine, more, strict=True):
            mine[name] += number


@dataclass
class Wavefronts(Counts):
    """Executed wavefronts of shared-memory accesses, what they would be without bank conflicts, and the accesses."""

    actual: int = 0
    ideal: int = 0
    accesses: int = 0

    @property
    def conflicts(self) -> int:
        """Wavefronts beyond the ideal."""
        return self.actual - self.ideal


@dataclass
class Sectors(Counts):
    """Global accesses: warp requests, the 32-byte sectors they touch, and the bytes the lanes asked for.

    ``ideal`` are the fewest sectors that hold the bytes of each request.
    """

    requests: int = 0
    sectors: int = 0
    bytes: int = 0
    ideal: int = 0


@dataclass
class EngineTraffic(Counts):
    """Data that an engine beside the warps moved: operations, bytes of shared memory, bytes of global memory."""

    operations: int = 0
    shared_bytes: int = 0
    global_bytes: int = 0


def access_class(mnemonic: str) -> str:
    """The class an instruction's traffic is counted in: ``ldmatrix``, ``st.shared``, ``cp.async``, ``ld.global`` …"""
    if mnemonic.startswith(("cp.async", "ldmatrix", "stmatrix")):
        return "cp.async" if mnemonic.startswith("cp.async") else mnemonic.split(".", 1)[0]
    space = "shared" if ".shared" in mnemonic else "global"
    return f"{mnemonic.split('.', 1)[0]}.{space}"


@dataclass
class Traffic:
    """Totals over all CTAs. ``lines`` attributes shared wavefronts to (source line, class), ``global_lines`` sectors.

    ``engines`` counts what does not go through the lanes: ``tma.load`` and ``tma.store`` (whole boxes in shared
    memory, of global memory what exists of them), ``wgmma.a`` and ``wgmma.b`` (operands read from shared memory, once
    for a warpgroup). Operands in registers move nothing.
    """

    shared: dict[str, Wavefronts] = field(default_factory=dict[str, Wavefronts])
    global_memory: dict[str, Sectors] = field(default_factory=dict[str, Sectors])
    engines: dict[str, EngineTraffic] = field(default_factory=dict[str, EngineTraffic])
    lines: dict[tuple[SourceLine, str], Wavefronts] = field(default_factory=dict[tuple[SourceLine, str], Wavefronts])
    global_lines: dict[tuple[SourceLine, str], Sectors] = field(default_factory=dict[tuple[SourceLine, str], Sectors])

    def __getitem__(self, name: str) -> Wavefronts:
        """The shared wavefronts of a class; zeros where the kernel has none."""
        return self.shared.get(name, Wavefronts())


_CACHE_LIMIT = 4096


class TrafficCounter:
    """Counts as the kernel runs. Equal address patterns (shifted by whole bank rows) are analysed once."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.executed: Counter[str] = Counter()
        self._patterns: dict[tuple[int, tuple[int, ...], bytes, bytes | None], tuple[int, ...]] = {}

    def shared(
        self,
        name: str,
        where: SourceLine,
        addresses: NDArray[Any],
        size: int,
        active: NDArray[np.bool_] | None,
        repeat: int,
    ) -> None:
        """Count ``repeat`` × the accesses [..., lanes] of ``size`` bytes a lane."""
        row = addresses[..., :1] & ~np.int64(127)
        pattern = (addresses - row).astype(np.int32)
        key = (size, pattern.shape, pattern.tobytes(), None if active is None else active.tobytes())
        counts = self._patterns.get(key)
        if counts is None:
            counts = tuple(int(count(addresses, size, active).sum()) for count in (wavefronts, ideal_wavefronts))
            if len(self._patterns) > _CACHE_LIMIT:
                self._patterns.clear()
            self._patterns[key] = counts
        accesses = addresses.size // addresses.shape[-1] if active is None else int(active.any(axis=-1).sum())
        for table, entry in ((self.traffic.shared, name), (self.traffic.lines, (where, name))):
            table.setdefault(entry, Wavefronts()).add(counts[0] * repeat, counts[1] * repeat, accesses * repeat)  # type: ignore[index,arg-type]

    def global_access(
        self,
        name: str,
        where: SourceLine,
        addresses: NDArray[Any],
        size: NDArray[Any] | int,
        active: NDArray[np.bool_] | None,
    ) -> None:
        """Count the accesses [warps, lanes]; ``size`` bytes per lane (an array where lanes differ)."""
        sector = addresses >> 5
        if not isinstance(size, int):  # copies that read nothing touch nothing
            sector = np.where(size > 0, sector, -1)
        if active is not None:
            sector = np.where(active, sector, -1)
        ordered = np.sort(sector, axis=-1)
        fresh = ordered[:, 1:] != ordered[:, :-1]
        first = ordered[:, 0] >= 0
        lanes = active if active is not None else np.True_
        sectors = int(np.count_nonzero(fresh & (ordered[:, 1:] >= 0)) + np.count_nonzero(first))
        sizes = (np.broadcast_to(size, addresses.shape) * lanes).sum(axis=-1)
        more = int(np.count_nonzero(sizes)), sectors, int(sizes.sum()), int((-(-sizes // SECTOR_BYTES)).sum())
        self.traffic.global_memory.setdefault(name, Sectors()).add(*more)
        self.traffic.global_lines.setdefault((where, name), Sectors()).add(*more)

    def engine(self, name: str, shared_bytes: int, global_bytes: int = 0) -> None:
        """Count one operation of an engine."""
        self.traffic.engines.setdefault(name, EngineTraffic()).add(1, shared_bytes, global_bytes)
