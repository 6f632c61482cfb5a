"""Where the warps of a kernel wait: ncu's samples of each instruction, with who it waits for.

The hardware notes, every few thousand cycles, where a warp stands and why it does not issue ("warp state sampling" in
the Nsight Compute documentation). Joined with the listing this tells which instruction waits, for whom, how many
instructions stand between the two, and which line of Python asked for it.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from warploom.core.errors import ConfigError
from warploom_lab.inspect.purpose import executed_groups, is_tensor
from warploom_lab.inspect.report import SassReport
from warploom_lab.inspect.sass import SassInstruction, parse_sass
from warploom_lab.inspect.waits import ScoreboardWait, waits

REASONS = {
    "barrier": "barrier",
    "branch_resolving": "branch_resolving",
    "dispatch": "dispatch_stall",
    "drain": "drain",
    "gmma": "gmma",
    "imc": "imc_miss",
    "lg": "lg_throttle",
    "long_sb": "long_scoreboard",
    "math": "math_pipe_throttle",
    "membar": "membar",
    "mio": "mio_throttle",
    "misc": "misc",
    "no_inst": "no_instruction",
    "not_selected": "not_selected",
    "selected": "selected",
    "short_sb": "short_scoreboard",
    "sleep": "sleeping",
    "tex": "tex_throttle",
    "wait": "wait",
}
"""ncu's names of columns behind ``stall_`` → why a resident warp does not issue; ``selected`` is the one that does."""
_ALL = "# Samples"
_EXECUTED = "Instructions Executed"
SHORT, LONG = "short_scoreboard", "long_scoreboard"
"""The reasons that have a producer: shared memory, shuffles and special functions; global and local memory."""


REST = "other"
"""Samples of a reason that ncu's page has no column for (``gmma``: a wgmma that is waited for)."""
ALIKE = 0.9
"""The share of equal opcodes from which on two disassemblies are of the same code: releases call some differently."""


@dataclass(frozen=True)
class Sampled:
    """One instruction as ncu lists it: its text, how many warps executed it, and samples by reason."""

    text: str
    samples: Mapping[str, int]
    executed: int = 0


@dataclass(frozen=True)
class Spot:
    """An instruction at which warps were found: its samples, whom it waits for, the author's line."""

    instruction: SassInstruction
    samples: Mapping[str, int]
    executed: int = 0
    waits: tuple[ScoreboardWait, ...] = ()
    line: str = ""

    @property
    def total(self) -> int:
        """All samples."""
        return sum(self.samples.values())

    def wait(self, reason: str) -> ScoreboardWait | None:
        """The producer that a reason speaks of: global and local memory, or all others."""
        wanted = [wait for wait in self.waits if wait.is_long == (reason == LONG)]
        return next(iter(wanted or self.waits), None) if reason in (SHORT, LONG) else None


@dataclass(frozen=True)
class Samples:
    """The samples of one launch, instruction by instruction."""

    spots: Sequence[Spot] = field(repr=False)

    @property
    def total(self) -> int:
        """All samples."""
        return sum(spot.total for spot in self.spots)

    @property
    def shares(self) -> dict[str, float]:
        """Each reason's share of the samples in %, the largest first; ``selected`` is the issue itself."""
        counts: Counter[str] = Counter()
        for spot in self.spots:
            counts.update(spot.samples)
        return {r: 100 * n / self.total for r, n in counts.most_common() if n}

    @property
    def groups(self) -> dict[str, int]:
        """Executed warp instructions by purpose; zeroing, copies and constants told apart by their operands."""
        return executed_groups((spot.instruction, spot.executed) for spot in self.spots)

    def hottest(self, most: int = 12) -> list[dict[str, Any]]:
        """The instructions with most samples: share in %, reasons, producer and distance, the author's line."""
        ordered = sorted(self.spots, key=lambda spot: -spot.total)[:most]
        return [self._row(spot) for spot in ordered if spot.total]

    def _row(self, spot: Spot) -> dict[str, Any]:
        row: dict[str, Any] = {
            "address": f"{spot.instruction.address:#06x}",
            "sass": str(spot.instruction),
            "share, %": round(100 * spot.total / self.total, 2),
            "reasons, %": {r: round(100 * n / self.total, 2) for r, n in Counter(spot.samples).most_common(3) if n},
            "line": spot.line,
        }
        scoreboards = [(count, reason) for reason in (SHORT, LONG) if (count := spot.samples.get(reason, 0))]
        wait = spot.wait(max(scoreboards)[1]) if scoreboards else None
        if wait is not None:
            row["waits for"] = str(wait.producer)
            row["between"] = wait.between
        return row

    def pairs(self) -> list[dict[str, Any]]:
        """Who waits for whom: share of all samples in % by reason and by the opcodes of waiter and producer.

        ``between`` is the median over the samples of the instructions that stand between the two.
        """
        found: dict[tuple[str, str, str], list[tuple[int, int]]] = {}
        for spot in self.spots:
            for reason in (SHORT, LONG):
                count, wait = spot.samples.get(reason, 0), spot.wait(reason)
                if count and wait is not None:
                    key = reason, spot.instruction.mnemonic, wait.producer.mnemonic
                    found.setdefault(key, []).append((wait.between, count))
        rows = [
            {
                "reason": reason,
                "waits": waiter,
                "for": producer,
                "between": _median(weighted),
                "places": len(weighted),
                "share, %": round(100 * sum(n for _, n in weighted) / self.total, 2),
            }
            for (reason, waiter, producer), weighted in found.items()
        ]
        return sorted(rows, key=lambda row: -row["share, %"])

    def json(self) -> dict[str, Any]:
        """As it is written to files."""
        return {
            "samples": self.total,
            "shares, %": {r: round(s, 2) for r, s in self.shares.items()},
            "who waits for whom": self.pairs()[:10],
            "hottest": self.hottest(),
        }


def _median(weighted: Sequence[tuple[int, int]]) -> int:
    """The value at which half of the weight is reached."""
    ordered, half, reached = sorted(weighted), sum(n for _, n in weighted) / 2, 0
    for value, count in ordered:
        reached += count
        if reached >= half:
            return value
    return 0


def parse_source_page(text: str) -> list[list[Sampled]]:
    """The kernels in what ``ncu --page source --print-source sass --csv`` printed, each as its instructions in order.

    Raises ConfigError where no table has samples.
    """
    kernels: list[list[Sampled]] = []
    header: list[str] = []
    for row in csv.reader(io.StringIO(text)):
        cells = dict(zip(header, row, strict=False))
        samples = {r: _count(cells[name]) for x, r in REASONS.items() if (name := f"stall_{x}") in cells}
        if "Source" in row:
            header = row
            kernels.append([])
        elif samples and (source := cells["Source"].strip()):
            if (rest := _count(cells.get(_ALL, "")) - sum(samples.values())) > 0:
                samples[REST] = rest
            kernels[-1].append(Sampled(source, samples, _count(cells.get(_EXECUTED, ""))))
    if not any(name.removeprefix("stall_") in REASONS for name in header):
        raise ConfigError("this is no source page of ncu with samples: no column is called Source, or none stall_…")
    return kernels


def _count(text: str) -> int:
    digits = text.replace(",", "").strip()
    return int(float(digits)) if digits and digits[0].isdigit() else 0


def locate(sampled: Sequence[Sampled], report: SassReport | None) -> Samples:
    """The samples on the listing of the same kernel, whose encodings tell who waits for whom.

    Where there is no listing, or it is of other code than ran, ncu's own text stands in, and nothing tells the
    producers.
    """
    texts = [_instruction(number, one.text) for number, one in enumerate(sampled)]
    if report is None or not _same_code(report.listing.instructions, texts):
        return Samples([Spot(i, one.samples, one.executed) for i, one in zip(texts, sampled, strict=True)])
    known = waits(report.flow)
    spots: list[Spot] = []
    for instruction, one in zip(report.listing.instructions, sampled, strict=False):
        line = report.python_line(instruction)
        whom = known.get(instruction.address, ())
        spots.append(Spot(instruction, one.samples, one.executed, whom, str(line) if line else ""))
    return Samples(spots)


def _instruction(number: int, text: str) -> SassInstruction:
    """One line of ncu's listing; a line that is no SASS we know keeps its first word as the opcode."""
    try:
        (found,) = parse_sass(f"{text.rstrip('; ')} ;")[0].instructions
    except ConfigError:
        found = SassInstruction(0, "", text.split()[0], ())
    return replace(found, address=16 * number)


def _same_code(listing: Sequence[SassInstruction], texts: Sequence[SassInstruction]) -> bool:
    """Whether two disassemblies, of which the second may lack the padding, are of the same instructions."""
    if len(texts) > len(listing):
        return False
    pairs = list(zip(listing, texts, strict=False))
    tensor = all(is_tensor(a) == is_tensor(b) for a, b in pairs)
    return tensor and sum(a.mnemonic == b.mnemonic for a, b in pairs) >= ALIKE * len(pairs)
