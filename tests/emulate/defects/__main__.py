"""The table of planted defects: ``python -m tests.emulate.defects [--seeds N] [--out FILE.md]``."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from tests.emulate.defects import base
from tests.emulate.defects.base import Defect, Verdict, judge

HEAD = """# Planted defects

Each line is a mistake of a kind that a public report describes, in CUTLASS, Triton, FlashAttention or another project.
It is planted in a small kernel beside the same kernel without it. Variants differ in width, stages, barriers or the way
of the copy. `python -m tests.emulate.defects --out docs/evidence/planted-defects.md` makes this page; the tests run all
of it.

"""


@dataclass(frozen=True)
class Judged:
    """A defect and what was said of it."""

    defect: Defect
    verdict: Verdict

    @property
    def found(self) -> bool:
        """Whether it was found or refused, as what it is."""
        return base.is_found(self.defect, self.verdict)


def main() -> int:
    """Run every defect and every twin, twins also under seeds. Exit code 1 if one is missed or a twin is not clean."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="adversarial orders in which each twin runs")
    parser.add_argument("--out", type=Path, help="write the page here")
    options = parser.parse_args()
    judged = [Judged(d, judge(d.build, d.name, d.setting)) for d in base.every_defect()]
    twins, orders = base.every_twin(), (None, *range(options.seeds))
    unclean = [t for t in twins if any(judge(t.build, base.NONE, t.setting, seed) != Verdict() for seed in orders)]
    summary = _summary(judged)
    clean = (
        f"{len(twins) - len(unclean)} of {len(twins)} correct twins are clean and right, in {len(orders)} orders each."
    )
    if options.out is not None:
        options.out.write_text(f"{HEAD}{summary}\n{clean}\n\n{_details(judged)}")
    print(f"{summary}\n{clean}")
    missed = [one for one in judged if not one.found]
    for one in missed:
        print(f"missed: {one.defect}: {one.verdict.kinds}")
    for twin in unclean:
        print(f"not clean without its defect: {twin.build.__name__} {dict(twin.setting)}")
    return 1 if missed or unclean else 0


def _summary(judged: list[Judged]) -> str:
    """Counts by group."""
    rows = [
        "| group | defects | with variants | found or refused | at a line concerned | by one finding |",
        "|---|---|---|---|---|---|",
    ]
    groups = [(group, list(ones)) for group, ones in groupby(judged, lambda one: one.defect.group)]
    for group, ones in [*groups, ("all", judged)]:
        kinds = len({(one.defect.build, one.defect.name) for one in ones})
        at = sum(base.is_at_its_line(one.defect, one.verdict) for one in ones)
        alone = sum(len(one.verdict.kinds) == 1 for one in ones)
        rows.append(f"| {group} | {kinds} | {len(ones)} | {sum(one.found for one in ones)} | {at} | {alone} |")
    return "\n".join(rows) + "\n"


def _details(judged: list[Judged]) -> str:
    """Each defect with its report and what is said of it, by kernel."""
    parts: list[str] = []
    for (group, build), ones in groupby(judged, lambda one: (one.defect.group, one.defect.build)):
        title = (build.__doc__ or "").rstrip(".")
        parts += [f"## {group[0].upper()}{group[1:]}: {title[0].lower()}{title[1:]}", ""]
        parts += ["| defect | variants | is said | reported in |", "|---|---|---|---|"]
        by_name: dict[str, list[Judged]] = {}
        for one in ones:
            by_name.setdefault(one.defect.name, []).append(one)
        for name, same in by_name.items():
            said = ", ".join(dict.fromkeys(one.verdict.kinds[0] for one in same if one.verdict.kinds))
            parts.append(f"| {name} | {len(same)} | {said} | {_link(same[0].defect.report)} |")
        parts.append("")
    return "\n".join(parts)


def _link(report: str) -> str:
    repository, number = report.split("#")
    return f"[{repository.split('/')[1]} {number}](https://github.com/{repository}/issues/{number})"


if __name__ == "__main__":
    sys.exit(main())
