"""What the emulator objects to: one frozen object per defect, merged by kind and source lines.

One cause, one finding: what is taken for a consequence of an earlier finding is folded under it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
    "assert",
]
Grade = Literal["error", "review"]

_EFFECTS: frozenset[Kind] = frozenset({"race", "in_flight", "proxy", "uninitialised", "leak", "cluster"})
"""What a warp that waits for ever may bring about elsewhere; all others are mistakes of their own."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One defect. ``message`` says what happened and what to do; ``count`` how many lanes it happened to.

    ``where`` is the line that ran into it, ``other`` the line it conflicts with. ``cta`` (linear), ``warp`` (within its
    CTA), ``lane`` and ``address`` describe the first lane it was seen in; ``address`` is in bytes: from the start of
    shared memory, or from the start of the array. ``rank`` is the CTA's in its cluster, None without clusters, and
    ``loops`` are the lines of the loops around it with their indices, the outermost first.
    ``between`` are the steps of the run between which a barrier would end a race of threads of one CTA.
    ``relies_on`` says in one sentence what usual behaviour of GPUs the code relies on, where a compiler has chosen so;
    empty for every other defect. ``follows`` are findings that probably have the same cause.
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
    loops: tuple[tuple[SourceLine, int], ...] = ()
    between: tuple[int, int] | None = field(default=None, repr=False, compare=False)
    relies_on: str = ""
    follows: tuple[Finding, ...] = ()

    @property
    def grade(self) -> Grade:
        """Whether it is an error, or for review: GPUs run it as it was meant, and PTX does not promise that they do."""
        return "review" if self.relies_on else "error"

    @property
    def lines(self) -> str:
        """Its line, and the other one, each with the calls of the author's functions that led there."""
        line = self.where.stack if self.where != NOWHERE else "(no source line)"
        other = line if self.other is None else self.other.stack
        return line if other == line else f"{line} and {other}"

    @property
    def consequences(self) -> str:
        """The findings that probably follow from this one, kinds and lines in one sentence; empty if nothing does."""
        if not self.follows:
            return ""
        listed = dict.fromkeys(f"{f.kind} at {f.lines}" for f in self.follows)
        return f"This probably explains {len(listed)} more: {', '.join(listed)}"

    @property
    def place(self) -> str:
        """The number of times that the defect was met, and the first lane that met it."""
        rank = "" if self.rank is None else f" (rank {self.rank} of its cluster)"
        place = f"in CTA {self.cta}{rank}, warp {self.warp}, lane {self.lane}"
        place += "".join(f", where the loop at {line} has index {index}" for line, index in self.loops)
        return f"{self.count} times; first {place}" if self.count > 1 else place

    def __str__(self) -> str:
        more = f". {self.consequences}" if self.follows else ""
        relies = f". For review: {self.relies_on}" if self.relies_on else ""
        return f"{self.kind} at {self.lines}: {self.message} ({self.place}){relies}{more}"


class Findings:
    """Collects findings; those of one kind with the same lines are merged and counted."""

    def __init__(self, stop: bool = False, enabled: bool = True) -> None:
        # With when each began, and the reach of what would mend it.
        self._found: dict[tuple[str, SourceLine, SourceLine | None], tuple[float, Finding, int]] = {}
        self._stop = stop
        self.enabled = enabled

    def __len__(self) -> int:
        return len(self._found)

    def add(self, finding: Finding, since: int | None = None, reach: int = 0) -> None:
        """Record ``finding``; raises EmulationError at once if asked to stop at the first.

        ``since``: how many there were when it began, if that is not now. It comes before their effects. ``reach``: of
        those that are merged, the one that needs the strongest cure (between lanes 0, warps 1, CTAs 2, an atomic 3) is
        told.
        """
        if not self.enabled:
            return
        key = (finding.kind, finding.where, finding.other)
        began, earlier, most = self._found.get(key, (0.0, None, 0))
        if earlier is None:
            began = len(self._found) if since is None else self._before_effects(finding.kind, since)
        else:
            finding = replace(finding if reach > most else earlier, count=earlier.count + finding.count)
        self._found[key] = began, finding, max(reach, most)
        if self._stop and finding.grade == "error":
            raise EmulationError(str(finding), (finding,))

    def _before_effects(self, kind: Kind, since: int) -> float:
        mistakes = (began for began, other, _ in self._found.values() if other.kind not in {*_EFFECTS, kind})
        return max((since - 0.5, *mistakes))

    @property
    def all(self) -> tuple[Finding, ...]:
        """The merged findings, in the order in which they began."""
        return tuple(finding for _, finding, _ in sorted(self._found.values(), key=lambda found: found[0]))


_LATE: frozenset[Kind] = frozenset({"uninitialised", "deadlock", "leak"})
"""What never came, waits for ever or is left over: after something else has gone wrong, its consequence."""
_MEETING: frozenset[Kind] = frozenset({"barrier", "mbarrier", "cluster", "divergence", "member_mask", "deadlock"})
"""A meeting that goes wrong puts every order in doubt: of data, and of the other barriers."""
_DATA: frozenset[Kind] = frozenset({"race", "in_flight", "proxy"})
_ORDER: frozenset[Kind] = _MEETING | _LATE | _DATA
_INDEX: frozenset[Kind] = frozenset({"bounds", "misaligned"})
"""What one index does wherever it is used."""
_ABSENT: frozenset[Kind] = frozenset({"divergence", "member_mask"})
"""Lanes that are not where they are needed: what of the data is not ordered after that is its consequence."""


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
        head = findings[0]
        if head.kind in _DATA:  # a wrong index explains what it meets
            findings.sort(key=lambda f: f.kind not in _ABSENT and not (f.kind in _INDEX and f.where == head.where))
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
    """The findings (in the order of their appearance) that none before explains; each with those it explains.

    Errors come first, and explain no findings for review, nor these them.
    """
    errors, others = ([f for f in findings if f.grade == grade] for grade in ("error", "review"))
    return (*_causes(errors), *_causes(others))


def _causes(findings: Sequence[Finding]) -> tuple[Finding, ...]:
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
