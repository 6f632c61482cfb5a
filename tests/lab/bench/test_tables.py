"""A ladder's tables in a terminal of 80 columns: every figure whole."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from tests.project import ROOT
from warploom_lab.bench.ladder import config_json
from warploom_lab.bench.tables import conditions, gpu_cells, ladder_tables, tile_text
from warploom_lab.kernels.matmul.ladder import FULL_LADDER, LADDER

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


def test_many_sizes_name_the_baseline():
    ratio = ROWS[2]["gpu"]["cells"][-1]["ratio"]["torch_flash"]
    assert {"×", "torch_flash", f"{ratio:.2f}×"} <= set(shown(ROWS, 80).split())


def test_rows_that_were_not_timed_have_one_table():
    assert [len(ladder_tables([ROWS[0] | changes])) for changes in ({}, {"gpu": None})] == [2, 1]


def test_each_load_and_data_has_a_table_and_each_cell_the_tile_that_won():
    config = config_json(LADDER.rung("03").config)
    cell = {"n": 4096, "tflops": {"median": 437.0, "low": 430.0, "high": 440.0}, "ratio": {"cublas": 0.57}}
    cells = [
        cell | {"data": data, "load": load, "n": n, "config": config | {"tile_m": n // 16}}
        for data in ("uniform", "normal")
        for load in ("sustained", "rested")
        for n in (4096, 8192)
    ]
    row = {"rung": "03", "name": "03_MMAMultistage", "config": config, "gpu": {"cells": cells}}
    assert conditions([row]) == [
        "uniform data, sustained",
        "uniform data, rested",
        "normal data, sustained",
        "normal data, rested",
    ]
    for of in conditions([row]):
        header, body = gpu_cells([row], of)
        assert header[2:] == ["N = 4096", "N = 8192"]
        assert [text.splitlines()[-1] for text in body[0][2:]] == ["256×128×64 64×64 s3", "512×128×64 64×64 s3"]
    assert gpu_cells([row | {"gpu": {"cells": [cell]}}])[1][0][2].endswith("0.57× cublas"), "its own tile is not said"


def test_a_tile_in_words():
    best = LADDER.rung("best16").config
    assert tile_text(config_json(best)) == "256×256×32 128×64 s4 g8"
    assert tile_text(config_json(replace(best, opt_level=1, block_stride=0))) == "256×256×32 128×64 s4 -O1"
    assert tile_text(config_json(FULL_LADDER.rung("h3").config)) == ""
