"""Two reports side by side: what one rung, architecture or optimisation level changes against another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from warploom_lab.inspect.purpose import GROUPS
from warploom_lab.inspect.report import ADDRESSED, SassReport


@dataclass(frozen=True, slots=True)
class Change:
    """One figure of two kernels; None where a report does not know it."""

    name: str
    before: int | None
    after: int | None

    @property
    def difference(self) -> int | None:
        """After minus before."""
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def differs(self) -> bool:
        """Whether the two figures are not the same."""
        return self.before != self.after


@dataclass(frozen=True)
class Comparison:
    """Static differences: ``figures`` (registers, spills, …), counts by purpose and by opcode, each for the whole
    listing and for one iteration of the main loop."""

    before: SassReport
    after: SassReport
    figures: tuple[Change, ...]
    groups: tuple[Change, ...]
    loop_groups: tuple[Change, ...]
    counts: tuple[Change, ...]
    loop_counts: tuple[Change, ...]

    @property
    def same_code(self) -> bool:
        """Whether both listings are the same instructions with the same operands."""
        first, second = (list(map(str, report.instructions)) for report in (self.before, self.after))
        return first == second

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain values: ``{"registers": {"before": 226, "after": 171}, …}`` per table."""
        tables = ("figures", "groups", "loop_groups", "counts", "loop_counts")
        return {"same_code": self.same_code} | {
            table: {c.name: {"before": c.before, "after": c.after} for c in getattr(self, table)} for table in tables
        }


def compare(before: SassReport, after: SassReport) -> Comparison:
    """The static differences between two reports; opcodes in the order of their largest change."""
    return Comparison(
        before,
        after,
        tuple(_figures(before, after)),
        _ordered(before.groups, after.groups),
        _ordered(before.loop_groups, after.loop_groups),
        _by_size(before.counts, after.counts),
        _by_size(before.loop_counts, after.loop_counts),
    )


def _figures(before: SassReport, after: SassReport) -> list[Change]:
    found = [
        Change("registers per thread", before.registers, after.registers),
        Change("stack bytes", before.stack_bytes, after.stack_bytes),
        Change("spill store bytes", before.spill_store_bytes, after.spill_store_bytes),
        Change("spill load bytes", before.spill_load_bytes, after.spill_load_bytes),
        Change("static shared bytes", before.static_shared_bytes, after.static_shared_bytes),
        Change("dynamic shared bytes", before.dynamic_shared_bytes, after.dynamic_shared_bytes),
        Change("instructions", len(before.instructions), len(after.instructions)),
        Change("main-loop instructions", len(before.loop_instructions), len(after.loop_instructions)),
    ]
    for name in ADDRESSED:
        used = [len(report.address_registers(name)) for report in (before, after)]
        found.append(Change(f"{name} address registers", *used))
    known = [report.known_occupancy() for report in (before, after)]
    warps = [occupancy.warps_per_sm if occupancy else None for occupancy in known]
    found.append(Change("warps per SM", *warps))
    return found


def _ordered(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[Change, ...]:
    return tuple(Change(g, before.get(g, 0), after.get(g, 0)) for g in GROUPS if g in before or g in after)


def _by_size(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[Change, ...]:
    names = dict.fromkeys([*before, *after])
    changes = [Change(name, before.get(name, 0), after.get(name, 0)) for name in names]
    return tuple(sorted(changes, key=lambda c: -abs(c.difference or 0)))
