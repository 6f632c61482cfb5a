"""The parts of docs/evidence/ladder-gemm.md from ncu's counters (see gemm_page.py and profile_gemm_h200.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from warploom_lab.kernels.matmul.ladder import LADDER

Row = Mapping[str, Any]

WHOLE, RAGGED, UNALIGNED = "whole tiles", "ragged", "unaligned"
"""Products that both sides count: multiples of every tile, others, and such whose lines begin within 128 bytes."""
MERGED = (
    "ptxas joins two loads of 2 bytes from neighbouring columns of A, which the Program has one by one, into one of 4"
)
EDGES = (
    "ptxas puts the epilogue's loads under the predicates of the stores that need them; the Program also loads what "
    "lies outside of C"
)
ARRIVAL = (
    "the hardware counts what arrives, line by line of global memory: lines that are not aligned in two pieces, rows "
    "of 64 bytes (BK = 32) each by itself, lines that cross 128 bytes of shared memory (00b's padding) in pieces, and "
    "more with the prefetch hint LTC128B that ptxas gives LDGSTS from rung 04 on"
)

OPAQUE = "the emulator counts wmma.load and wmma.store as the LDSM and the STS that ptxas makes of them for whole tiles"


def reason(rung: str, product: str, kind: str) -> str | None:
    """Why the hardware may count otherwise than the emulator, which runs the Program; None where it must not."""
    if kind in ("ldmatrix", "st.shared") and _is_opaque(rung):
        return OPAQUE
    if kind == "ld.shared" and rung == "01a":
        return MERGED
    if kind == "ld.shared" and product != WHOLE:
        return EDGES
    if kind == "cp.async" and (product == UNALIGNED or _hinted(rung) or _is_padded(rung)):
        return ARRIVAL
    return None


def _is_opaque(rung: str) -> bool:
    """Whether a rung goes through the WMMA API."""
    return getattr(LADDER.rung(rung).config, "wmma", False)


def _is_padded(rung: str) -> bool:
    """Whether the rows of a rung's shared tiles have padding behind them."""
    return getattr(LADDER.rung(rung).config, "padding", 0) > 0


def _hinted(rung: str) -> bool:
    """Whether ptxas gives a rung's copies a prefetch hint at -O3."""
    return getattr(LADDER.rung(rung).config, "pipelined", True)  # from 06 on every kernel is


Apart = dict[str, list[tuple[str, float]]]
"""Of a class of access that the two sides count differently: by product the rungs, with ncu's count over the other."""


def _text(apart: Apart) -> str:
    parts: list[str] = []
    for product, found in apart.items():
        rungs, ratios = zip(*found, strict=True)
        times = " to ".join(dict.fromkeys(f"{x:.2f}" for x in (min(ratios), max(ratios))))
        parts.append(f"{times} times on {product} ({_listed(rungs)})")
    return ", ".join(parts)


def both_sides(profile: Row) -> str:
    """What ncu counts as the emulator does, and what not, with the reason of each."""
    sizes = {name: "×".join(map(str, size)) for name, size in profile["small"].items()}
    products = ", ".join(f"{size} ({name})" for name, size in sizes.items())
    on = profile["environment"]["gpu"]["name"].removeprefix("NVIDIA ").partition(" ")[0]
    text = f"On the {on}, ncu counts exactly these wavefronts, class by class, on {products}"
    found = _apart(profile["rungs"])
    if not found:
        return f"{text}, for every rung."
    lines = [f"- `{kind}`, {_text(apart)}: {why}." for (why, kind), apart in found.items()]
    return f"{text}, except for\n\n" + "\n".join(lines) + _without_hint(profile)


def _apart(rungs: Mapping[str, Any]) -> dict[tuple[str, str], Apart]:
    """What the two sides count differently, by reason and class. Raises ValueError where there is no reason."""
    found: dict[tuple[str, str], Apart] = {}
    for rung, row in rungs.items():
        for product, counted in row["wavefronts"].items():
            for kind, pair in counted.items():
                why = reason(rung, product, kind)
                if pair["emulator"] == pair["ncu"]:
                    continue
                if why is None:
                    raise ValueError(f"rung {rung}, {product}: nothing explains {kind} {pair}")
                apart = found.setdefault((why, kind), {})
                apart.setdefault(product, []).append((rung, pair["ncu"] / pair["emulator"]))
    return found


def _listed(rungs: Sequence[str]) -> str:
    return f"rung {rungs[0]}" if len(rungs) == 1 else f"rungs {rungs[0]} to {rungs[-1]}"


def _without_hint(profile: Row) -> str:
    """What the same rungs count where ptxas gives no hint. Raises ValueError where the two sides differ there too."""
    rungs = profile.get("without the hint", {})
    apart = [
        (rung, product, kind)
        for rung, row in rungs.items()
        for product, counted in row.items()
        for kind, pair in counted.items()
        if pair["emulator"] != pair["ncu"]
    ]
    if apart:
        raise ValueError(f"at -O1 both sides differ: {apart}")
    products = list(dict.fromkeys(name for row in rungs.values() for name in row))
    if not rungs:
        return ""
    return (
        f"\n\nAt -O1, where ptxas gives no hint, all classes agree for {_listed(list(rungs))} "
        f"on {' and '.join(products)}."
    )
