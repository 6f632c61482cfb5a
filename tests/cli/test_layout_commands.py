"""``warploom layout`` and ``warploom discover``."""

from __future__ import annotations

import json
import re
from io import StringIO

import pytest
from rich.console import Console

from warploom.cli import pictures
from warploom.layout import FRAGMENTS
from warploom.layout.draw import Cell, Grid
from warploom.layout.fit import Difference


def test_all_fragments_are_listed(invoke):
    done = invoke("layout")
    assert done.exit_code == 0
    assert all(name in done.output for name in FRAGMENTS)


@pytest.mark.parametrize("view", ["elements", "lanes", "permutation"])
def test_a_fragment_is_shown(invoke, view):
    done = invoke("layout", "wmma.m16n16k16.C.b32", "--view", view)
    assert done.exit_code == 0, done.output
    assert {"elements": "31 i7", "lanes": "lane 31", "permutation": "x[7]"}[view] in done.output


@pytest.mark.parametrize("columns", [40, 80])
def test_a_narrow_terminal_shows_the_whole_fragment(monkeypatch, invoke, columns):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = re.sub(r"\x1b\[[0-9;]*m", "", invoke("layout", "mma.m16n8k16.A.b16").stdout)
    assert "…" not in shown
    for lane, i in ((0, 0), (31, 3), (31, 7)):
        assert f"{lane} i{i} " in shown


def test_a_caption_stands_once_below_the_last_part(monkeypatch):
    cells = tuple(tuple(Cell(f"{row}{col}") for col in range(8)) for row in range(2))
    grid = Grid("head", tuple(map(str, range(8))), ("a", "b"), cells, caption=("below",), gap=(8, 0))
    for width in range(20, 60):  # parts of all widths, those that divide the columns among them
        written = StringIO()
        shown = Console(file=written, width=width, force_terminal=True)
        monkeypatch.setattr(pictures, "console", lambda shown=shown: shown)
        pictures.show(grid)
        text = written.getvalue()
        assert (text.count("below"), text.count("head")) == (1, 1), width


def test_files_are_written(invoke, tmp_path):
    svg, png = tmp_path / "a" / "x.svg", tmp_path / "x.txt"  # a name decides nothing
    pytest.importorskip("matplotlib")
    done = invoke("layout", "shared.64x64.bf16", "--svg", str(svg), "--png", str(png))
    assert done.exit_code == 0, done.output
    assert svg.read_text().startswith("<svg")
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("dtype", ["f8", "i4"])
def test_a_tile_of_what_is_no_type_of_ours_is_refused(invoke, dtype):
    done = invoke("layout", f"shared.16x64.{dtype}")
    assert done.exit_code == 2
    assert "e4m3" in done.stderr
    assert invoke("layout", "shared.16x64.e4m3", "--json", "-").exit_code == 0


def test_only_names_like_the_one_given_are_suggested(invoke):
    assert "mma." not in invoke("layout", "nosuch").stderr
    assert "mma.m16n8k16.A.b16" in invoke("layout", "mma.m16n8k16.A").stderr


def test_json_has_map_and_formulas(invoke):
    done = invoke("layout", "mma.m16n8k16.C.b32", "--json", "-")
    found = json.loads(done.output)
    assert found["formulas"]["col"] == "2*(lane & 3) + (i & 1)"
    assert found["atom"]["lane"] == [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    tile = json.loads(invoke("layout", "shared.64x96.bf16.none", "--json", "-").output)
    assert [p["cols"] for p in tile["panels"]] == [64, 32]


def test_discovery_on_the_emulator(invoke, tmp_path):
    out = tmp_path / "rows.json"
    done = invoke("discover", "mma.m16n8k16.D", "--on", "emulator", "--figures", "--json", str(out))
    assert done.exit_code == 0, done.output
    assert "agrees" in done.output
    assert "31 i3" in done.output
    rows = json.loads(out.read_text())["fragments"]
    assert {r["verdict"] for r in rows} == {"agrees"}
    assert rows[0]["formulas"]["row"] == "(lane >> 2) + 8*((i >> 1) & 1)"


def test_json_on_standard_output_stands_alone(invoke):
    done = invoke("discover", "movmatrix", "--on", "emulator", "--figures", "--json", "-")
    assert [row["name"] for row in json.loads(done.stdout)["fragments"]]
    assert "fragments: 0 differ" in done.stderr


def test_a_difference_is_an_exit_status_and_names_the_place(invoke, monkeypatch):
    difference = Difference("mma", 7, 2, (1, 1), (2, 2), 3)
    monkeypatch.setattr("warploom_lab.discover.fragments.compare", lambda *_: difference)
    done = invoke("discover", "movmatrix", "--on", "emulator")
    assert done.exit_code == 1
    assert "lane 7, register 2 holds (1, 1)" in done.output
