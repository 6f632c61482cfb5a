"""The short tables of what calls reach: the right cell, the right peer, the right mean."""

from __future__ import annotations

import pytest
from tests.project import load

tables = load("call_tables")


def rows_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line][2:]


def test_attention_has_a_row_per_mask_and_a_dash_where_nothing_ran():
    def cell(seq, causal, ours, **ratio):
        peers = {name: {"median": value} for name, value in ratio.items()}
        return {"head_dim": 64, "causal": causal, "seq": seq, "tflops": {"warploom": {"median": ours}}, "ratio": peers}

    result = {"cells": [
        cell(512, True, 100.4, torch_cudnn=0.5), cell(4096, False, 300.6, torch_cudnn=1.254, flash_attention_4=0.996),
    ]}  # fmt: skip
    assert rows_of(tables.attention_calls(result)) == [
        ["64", "full", "–", "–", "301 · 1.25× · 1.00×", "–"],
        ["64", "causal", "100 · 0.50× · –", "–", "–", "–"],
    ]


def test_products_are_grouped_by_rows_and_layout_with_their_geometric_mean():
    rows = [("a.x.m256", "n×k", 50, 40, 100), ("b.x.m256", "n×k", 200, 90, 100), ("a.x.m16", "k×n", 3, 1, 2)]
    shapes = [{"name": n, "weights": w, "chosen": c, "best mma.sync": g, "cublas": p} for n, w, c, g, p in rows]
    assert rows_of(tables.products({"shapes": shapes})) == [
        ["16", "k×n", "1", "1.50×", "1.50×", "1.50×", "0.50×", "0.50×", "0.50×"],
        ["256", "n×k", "2", "0.50×", "1.00×", "2.00×", "0.40×", "0.60×", "0.90×"],
    ]


def test_every_product_has_its_cells():
    rates = {"cublas": 100.0, "wgmma,a": 95.2, "BM=1": 60.0}
    row = {
        "name": "a.x.m16", "weights": "n×k", "cublas": 100.0, "chosen": 95.2, "best mma.sync": 60.0,
        "configs": {"chosen": "wgmma,a", "best mma.sync": "BM=1"},
        "spread": {name: [rate - 1, rate + 1] for name, rate in rates.items()},
    }  # fmt: skip
    others = [row | {"name": "b.y.m16"}, row | {"name": "b.y.m16", "weights": "k×n"}]
    cells = ["100 (99–101)", "95 (94–96) · 0.95×", "60 (59–61) · 0.60×"]
    assert rows_of(tables.product_cells({"shapes": [row, *others]})) == [
        ["a.x.m16", *cells, "–", "–", "–"], ["b.y.m16", *cells, *cells],
    ]  # fmt: skip


def test_products_without_their_configurations_are_no_cells():
    assert "Not measured" in tables.product_cells({"shapes": [{"name": "a.x.m16", "weights": "n×k", "cublas": 1.0}]})


def test_large_products_stand_beside_cublas_rested_and_alone():
    def row(rested, alone, watts):
        power = {"tflops": alone, "watts": watts, "sm_mhz": 1400, "tflop_per_joule": alone / watts}
        return {"rested": {"median": rested, "low": rested - 1, "high": rested + 1, "sm_mhz": 1980}, "sustained": power}

    kernels = {"cublas": row(800, 600, 700.2), "mma.sync": row(500, 420, 690.0), "broken": {"wrong": "nan"}}
    assert rows_of(tables.large_products({"large": {"a.x.m8192": kernels}})) == [
        ["a.x.m8192", "cublas", "800 (799–801)", "1.00×", "1980", "600", "1.00×", "700", "1400", "0.86"],
        ["a.x.m8192", "mma.sync", "500 (499–501)", "0.62×", "1980", "420", "0.70×", "690", "1400", "0.61"],
    ]
    assert "Not measured" in tables.large_products({"shapes": []})


@pytest.mark.parametrize(("compiled", "expected"), [(3.0, "2.00× torch"), (1.5, "1.50× torch.compile")])
def test_reductions_are_held_against_the_faster_of_pytorchs_ways(compiled, expected):
    row = {
        "op": "max", "m": 1, "n": 2, "k": 3, "warploom_s": {"median": 2e-3},
        "over": {"torch": 2.0, "torch.compile": compiled},
        "warploom_extra_bytes": 2**20, "torch_extra_bytes": 2**22, "torch.compile_extra_bytes": 2**22,
    }  # fmt: skip
    table = tables.reductions({"result": {"against_torch": [row], "loss_against_torch": []}})
    assert rows_of(table) == [["max", "1 × 2 × 3", "2.00", expected, "1", "4"]]
