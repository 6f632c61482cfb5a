"""Parts of pages about training: what they say of results, and nothing without them."""

from __future__ import annotations

import pytest
from tests.project import load

sections = load("training_sections")


def rows_of(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][2:]


def cell(head_dim, causal, length, ours, name=None, **ratio):
    return {
        "head_dim": head_dim, "causal": causal, "q_len": length, "kv_len": length,
        "cell": name or f"d{head_dim} mask {length}", "tflops": {"warploom": {"median": ours}},
        "ratio": {peer: {"median": value} for peer, value in ratio.items()},
    }  # fmt: skip


def test_gradients_stand_by_head_dim_and_mask():
    found = sections.gradients({"cells": [
        cell(64, False, 512, 300.4, cudnn=1.25), cell(64, False, 4096, 400, cudnn=1.5),
        cell(64, True, 16384, 500, cudnn=0.5), cell(64, True, 16384, 1, name="d64 causal 16384 window 1024"),
    ]})  # fmt: skip
    assert "ratio to cuDNN (" in found
    assert rows_of(found) == [
        ["64", "full", "300 · 1.25×", "–", "400 · 1.50×", "–"],
        ["64", "causal", "–", "–", "–", "500 · 0.50×"],
    ]


def test_the_cost_of_equal_bits_stands_below_the_gradients():
    cells = [cell(64, False, n, 300, cudnn=1.0, deterministic=x) for n, x in ((512, 1.0), (1024, 1.21))]
    assert "takes 1.00 to 1.21 times as long, 1.10 times in the mean" in sections.gradients({"cells": cells})


def test_limits_stand_beside_what_a_step_needs():
    row = {
        "cell": "d64 full 4096", "forward": {"tflops": 700, "watts": 690.4, "sm_mhz": 1600}, "cycles": 3200,
        "backward": {"tflops": 560, "watts": 700, "sm_mhz": 1700}, "demand": {"tensor": 2560, "banks": 2816},
        "banks": 2900,
    }  # fmt: skip
    assert rows_of(sections.limits({"rows": [row]})) == [
        ["d64 full 4096", "560", "0.80", "700 W, 1700 MHz", "690 W, 1600 MHz", "3200", "2560", "2816 / 2900"]
    ]


def test_losses_stand_beside_their_peers():
    row = {"m": 1, "n": 2, "k": 3, "seconds": {"warploom": {"median": 0.05}}, "extra_bytes": {"warploom": 57 << 20}}
    other = row | {"seconds": {"liger": {"median": 1.0}}, "extra_bytes": {"liger": 1 << 20}}
    assert rows_of(sections.losses({"rows": [row, other]})) == [
        ["1 × 2 × 3", "50.0 ms · 57 MiB", "–"],
        ["1 × 2 × 3", "–", "1000.0 ms · 1 MiB"],
    ]


@pytest.fixture
def training():
    runs = [
        {"attention": kind, "loss": kind, "seed": seed, "parameters": 2e6, "losses": [2.0, 1.0 + seed],
         "tokens_per_second": 3000, "peak_bytes": 2**30}
        for kind in ("warploom", "torch") for seed in (0, 1)
    ]  # fmt: skip
    return {"runs": runs, "last": 1, "apart": 0.5, "spread": 0.4, "steps": 2, "tokens": 8}


def test_trainings_stand_beside_each_other(training, tmp_path):
    found = sections.training(training)
    assert rows_of(found) == [[kind, kind, "1.000 · 2.000", "3k", "1.0 GiB"] for kind in ("warploom", "torch")]
    assert "0.5000 from PyTorch's at most, further than" in found


def test_a_training_is_drawn(training, tmp_path):
    pytest.importorskip("matplotlib")
    sections.draw_training(training, tmp_path / "curves.svg")
    assert "<svg" in (tmp_path / "curves.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sections.SECTIONS)
def test_a_section_that_was_not_measured_is_left_out(name):
    assert load("render").table(f"h200/no-such-file.json {name}").strip() == ""
