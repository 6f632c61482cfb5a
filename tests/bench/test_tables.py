"""A ladder's tables in a terminal of 80 columns: every figure whole."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from warploom.bench.tables import ladder_tables

ROOT = Path(__file__).resolve().parents[2]
ROWS = json.loads((ROOT / "benchmarks/results/h200/attention-d128-bf16.json").read_text(encoding="utf-8"))["rows"]


def shown(rows, width):
    text = io.StringIO()
    for table in ladder_tables(rows):
        Console(file=text, width=width).print(table)
    return text.getvalue()


@pytest.mark.parametrize("sizes", [2, 6])
def test_nothing_is_cut_at_80_columns(sizes):
    rows = [row | {"gpu": row["gpu"] | {"cells": row["gpu"]["cells"][:sizes]}} for row in ROWS]
    narrow, wide = shown(rows, 80), shown(rows, 400)
    assert max(map(len, narrow.splitlines())) <= 80
    figures = [word for word in wide.split() if any(c.isdigit() for c in word)]
    assert sorted(word for word in narrow.split() if any(c.isdigit() for c in word)) == sorted(figures)


def test_many_sizes_name_the_peer():
    assert "× torch_flash" in shown(ROWS, 80)
    ratio = ROWS[2]["gpu"]["cells"][-1]["ratio"]["torch_flash"]
    assert f"{ratio:.2f}×" in shown(ROWS, 80)
