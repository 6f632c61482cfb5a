"""The parts of docs/ladder-gemm.md from ncu's counters (see gemm_page.py and profile_gemm_h200.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from warploom.bench.tables import markdown_table

Row = Mapping[str, Any]

WHOLE = "whole tiles"
"""The product on which both sides must count the same."""
CAUSES = {
    "ld.shared": "ptxas puts the epilogue's loads under the predicates of the stores that need them, and the Program "
    "loads what lies outside of C as well",
    "cp.async": "the hardware writes a line of the tile in pieces where it arrives in pieces",
}
"""Why the hardware counts otherwise at edges, by class of access."""


def counters(evidence: Any) -> str:
    """What ncu counts of each rung: pipes, L2, and the two reasons that most cycles between issues go to."""
    body: list[list[str]] = []
    for key, row in evidence.profile["rungs"].items():
        if "counters" not in row:
            continue
        found = row["counters"]
        stalls = sorted(found["stall shares, %"].items(), key=lambda item: -item[1])
        reasons = [f"{name} {share:.0f} %" for name, share in stalls if name != "selected"]
        pipes, memory = found.get("pipes, %", {}), found.get("memory, %", {})
        figures = pipes.get("tensor"), memory.get("shared loads"), memory.get("L2 hit rate")
        body.append([key, *(_percent(x) for x in figures), ", ".join(reasons[:2])])
    header = ["rung", "tensor pipe busy", "shared loads, of their peak", "L2 hit rate", "cycles between issues"]
    return markdown_table(header, body)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f} %"


def both_sides(evidence: Any) -> str:
    """Whether ncu counts the wavefronts that the emulator does: product by product, and why not."""
    profile = evidence.profile
    return " ".join(
        _whole(profile) if name == WHOLE else _edges(profile, name, "×".join(map(str, size)))
        for name, size in profile["small"].items()
    )


def _whole(profile: Row) -> str:
    """Rung by rung on the product of whole tiles."""
    apart = {
        key: {kind: pair for kind, pair in row["wavefronts"][WHOLE].items() if pair["emulator"] != pair["ncu"]}
        for key, row in profile["rungs"].items()
    }
    size = "×".join(map(str, profile["small"][WHOLE]))
    text = f"On the H200, ncu counts exactly these wavefronts, class by class, on {size}, which is whole tiles"
    reasons = [
        f"{key}, whose {kind} take {pair['ncu']:.0f} and not {pair['emulator']:.0f} ({profile['merged'][key]})"
        for key, pairs in apart.items()
        for kind, pair in pairs.items()
    ]
    return f"{text}, for every rung" + (f" but {'; '.join(reasons)}." if reasons else ".")


def _edges(profile: Row, name: str, size: str) -> str:
    """Class by class on a product with edges, over all rungs that agree on whole tiles."""
    rows = [row["wavefronts"] for key, row in profile["rungs"].items() if key not in profile["merged"]]
    same: list[str] = []
    other: list[str] = []
    for kind in rows[0][name]:
        ratios = [row[name][kind]["ncu"] / row[name][kind]["emulator"] for row in rows if row[name][kind]["emulator"]]
        if all(ratio == 1 for ratio in ratios):
            same.append(kind)
        else:
            other.append(f"{kind} take {min(ratios):.2f} to {max(ratios):.2f} times as many: {CAUSES[kind]}")
    text = f"On {size} ({name}) it counts the same of {', '.join(same)}"
    return text + (f"; {'; '.join(other)}." if other else ".")
