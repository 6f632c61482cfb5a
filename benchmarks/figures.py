"""Figures that a measurement must reach, kept as data beside the results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warploom.core.errors import ProblemError

BEFORE = "the rung before"
"""The baseline of a figure that holds a rung against its predecessor in the ladder."""


@dataclass(frozen=True)
class Figure:
    """Rung ``rung`` is at least ``at_least`` times as fast as ``baseline``; without one it reaches that many TFLOP/s.

    ``baseline`` names one of the cell's baselines, or is :data:`BEFORE`: both ran in the same rounds.
    ``where`` names the cell: {"seq": 4096}; the flags in ``when`` must be those of the row: {"head_dim": 128}.
    """

    rung: str
    at_least: float
    where: Mapping[str, Any]
    baseline: str | None = None
    when: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        unit = f"× {self.baseline}" if self.baseline else " TFLOP/s"
        where = ", ".join([f"{name} = {value}" for name, value in self.where.items()])
        return f"rung {self.rung} at {where}: at least {self.at_least}{unit}"


def load_targets(path: Path, family: str) -> list[Figure]:
    """The figures of ``family`` in a file ``{"attention": [{"rung", "at_least", "where", "baseline"}, …]}``.

    Raises ProblemError for a file that is not so.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8")).get(family, [])
        return [Figure(**entry) for entry in entries]
    except OSError as error:
        raise ProblemError(f"the targets file {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ProblemError(
            f"{path} is no file of targets ({error}); write "
            '{"attention": [{"rung": "best", "baseline": "torch_flash", "where": {"seq": 4096}, "at_least": 1.12}]}'
        ) from error


def missed(figures: Sequence[Figure], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each figure that a row fell short of, with what it reached.

    Figures of rows that were not run are passed over, and so are those against a rung before that was not.
    """
    found: list[str] = []
    for figure in figures:
        for row in rows:
            if row["rung"] != figure.rung or any(row["config"].get(k) != v for k, v in (figure.when or {}).items()):
                continue
            for cell in (row["gpu"] or {}).get("cells", ()):
                if all(cell.get(k) == v for k, v in figure.where.items()):
                    if figure.baseline == BEFORE and "over_rung_before" not in cell:
                        continue
                    reached = _reached(figure, cell)
                    if reached is None or not reached >= figure.at_least:
                        conditions = "".join([f", {cell[name]}" for name in ("data", "load") if name in cell])
                        found.append(f"{figure}, reached {reached}{conditions}")
    return found


def _reached(figure: Figure, cell: Mapping[str, Any]) -> float | None:
    if figure.baseline is None:
        return cell["tflops"]["median"]
    return cell["over_rung_before"] if figure.baseline == BEFORE else cell["ratio"].get(figure.baseline)
