"""The part of docs/evidence/ladder-gemm.md about uneven counts of tiles (see gemm_page.py and gemm_waves_h200.py)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from page_tables import markdown_table

from warploom.kernels.matmul.ladder import BEST32

SCHEDULES = {"whole": "whole tiles", "split_k": "split K", "stream_k": "stream-K"}
Row = Mapping[str, Any]


def _waves(row: Row, multiprocessors: int) -> float:
    """Of BEST32's tiles."""
    return -(-row["m"] // BEST32.tile_m) * -(-row["n"] // BEST32.tile_n) / multiprocessors


def _share(row: Row, schedule: str) -> float | None:
    return row[schedule]["tflops"] / row["cublas"]["tflops"] if schedule in row else None


def _cell(row: Row, schedule: str) -> str:
    share = _share(row, schedule)
    return "–" if share is None else f"{row[schedule]['tflops']:.0f} ({share:.2f})"


def wave_table(evidence: Any) -> str:
    """Each schedule's best on products of whole waves of tiles and of a little more, beside cuBLAS."""
    found = evidence.waves
    body = [
        [re.sub(r" .*", "", name), f"{_waves(row, found['multiprocessors']):.2f}",
         *(_cell(row, schedule) for schedule in SCHEDULES), f"{row['cublas']['tflops']:.0f}"]
        for name, row in found["waves"]["products"].items()
    ]  # fmt: skip
    return markdown_table(["product", "waves", *SCHEDULES.values(), "cuBLAS"], body)


def layer_table(evidence: Any) -> str:
    """The products of layers with few rows, where tiles are few and waves uneven."""
    body = [
        [name, f"{row['m']}×{row['n']}×{row['k']}", *(_cell(row, schedule) for schedule in SCHEDULES),
         f"{row['cublas']['tflops']:.0f}"]
        for name, row in evidence.waves["layers"]["products"].items()
    ]  # fmt: skip
    return markdown_table(["product", "m×n×k", *SCHEDULES.values(), "cuBLAS"], body)


def layer_summary(evidence: Any) -> str:
    """How often each schedule is the fastest, and what all of them reach together."""
    rows = list(evidence.waves["layers"]["products"].values())
    fastest = [max((s for s in SCHEDULES if s in row), key=lambda s: row[s]["tflops"]) for row in rows]
    counts = ", ".join(f"{name} {fastest.count(key)} times" for key, name in SCHEDULES.items())
    summary = evidence.waves["layers"]["summary"]
    means = ", ".join(f"{name} {summary[key]['geomean']:.2f}" for key, name in SCHEDULES.items() if key in summary)
    best = summary["best"]
    return (
        f"Of these {len(rows)} the fastest is {counts}. The geometric means relative to cuBLAS: {means}, the best of "
        f"each {best['geomean']:.2f} and never below {best['least']:.2f}."
    )


def uneven(evidence: Any) -> str:
    """What a fraction of a wave costs with whole tiles, and with stream-K."""
    found = evidence.waves
    rows = sorted(found["waves"]["products"].values(), key=lambda row: _waves(row, found["multiprocessors"]))
    steps: list[str] = []
    for before, after in pairwise(rows):
        waves = [_waves(row, found["multiprocessors"]) for row in (before, after)]
        if waves[0] == int(waves[0]) and waves[1] < waves[0] + 0.2:
            losses = (1.0 - after[s]["tflops"] / before["whole"]["tflops"] for s in ("whole", "stream_k"))
            steps.append("from {:g} to {:.2f} waves {:.0%} and {:.0%}".format(*waves, *losses))
    return f"What is lost of the rate of the whole waves before, by whole tiles and by stream-K: {'; '.join(steps)}."
