"""One cause, one finding: what is taken for a consequence of an earlier finding is folded under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from warploom.emulate.findings import Finding, Kind
from warploom.ir.statements import NOWHERE, SourceLine

_LATE: frozenset[Kind] = frozenset({"uninitialised", "deadlock", "leak"})
"""What never came, waits for ever or is left over: after something else has gone wrong, its consequence."""
_MEETING: frozenset[Kind] = frozenset({"barrier", "mbarrier", "cluster", "divergence", "member_mask", "deadlock"})
"""A meeting that goes wrong puts every order in doubt: of data, and of the other barriers."""
_DATA: frozenset[Kind] = frozenset({"race", "in_flight", "proxy"})
_ORDER: frozenset[Kind] = _MEETING | _LATE | _DATA
_INDEX: frozenset[Kind] = frozenset({"bounds", "misaligned"})
"""What one index does wherever it is used."""


@dataclass
class _Cause:
    first: Finding
    rest: list[Finding] = field(default_factory=list[Finding])
    lines: set[SourceLine] = field(default_factory=set[SourceLine])
    kinds: set[Kind] = field(default_factory=set[Kind])
    between: tuple[int, int] | None = None

    def explains(self, finding: Finding) -> bool:
        """Whether a later finding is probably this one again: at its lines, of its lanes, or by a broken order."""
        if finding.kind in _LATE or not self.lines.isdisjoint(_lines(finding)):
            return True
        if self._common(finding) is not None:
            return True
        if finding.kind in _INDEX and _lanes(finding) == _lanes(self.first):
            return True
        return finding.kind in _ORDER and bool(self.kinds & _ORDER) and bool({finding.kind, *self.kinds} & _MEETING)

    def _common(self, finding: Finding) -> tuple[int, int] | None:
        """Where one barrier ends this and a later race of threads of one CTA; None where there is no such place."""
        if self.between is None or finding.between is None:
            return None
        (first, last), (begin, end) = self.between, finding.between
        return (max(first, begin), min(last, end)) if max(first, begin) < min(last, end) else None

    def finding(self) -> Finding:
        """The cause with its consequences. What has not been written because of a race is no more than its effect."""
        findings = [self.first, *self.rest]
        if self.first.kind == "uninitialised":
            read = self.first.other  # the line of the access that came too early
            findings.sort(key=lambda f: f.kind not in _DATA or read not in (f.where, f.other))
        return replace(findings[0], follows=tuple(findings[1:]))

    def take(self, findings: Sequence[Finding]) -> None:
        self.rest += findings
        for finding in findings:
            self.note(finding)

    def note(self, finding: Finding) -> None:
        self.between = self._common(finding) or self.between
        self.lines |= _lines(finding)
        self.kinds.add(finding.kind)


def _lines(finding: Finding) -> set[SourceLine]:
    return {line for line in (finding.where, finding.other) if line is not None and line != NOWHERE}


def _lanes(finding: Finding) -> tuple[Kind, int, int, int, int]:
    return finding.kind, finding.cta, finding.warp, finding.lane, finding.count


def causes(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings (in the order of their appearance) that none before explains; each with those it explains."""
    found: list[_Cause] = []
    for finding in findings:
        explained = [cause for cause in found if cause.explains(finding)]
        if not explained:
            found.append(_Cause(finding, between=finding.between))
            found[-1].note(finding)
            continue
        explained[0].take([finding])
        if finding.kind in _LATE:
            continue
        for other in explained[1:]:  # one cause after all
            explained[0].take([other.first, *other.rest])
            found.remove(other)
    return tuple(cause.finding() for cause in found)
