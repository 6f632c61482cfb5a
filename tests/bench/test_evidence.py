"""Environment, GPU state, targets and generated tables."""

import json
import types

import numpy as np
import pytest
from tests.project import load

from warploom.bench import monitor
from warploom.bench.environment import environment, gpu_slug
from warploom.bench.monitor import GpuMonitor, parse_nvidia_smi
from warploom.bench.tables import ladder_tables
from warploom.core.errors import ProblemError
from warploom.cuda.device import Gpu
from warploom.kernels.attention.ladder import FULL_LADDER
from warploom.kernels.matmul.ladder import FULL_LADDER as GEMM_LADDER

PAGES, FIGURES = load("page_tables"), load("figures")
BEFORE, Figure, load_targets, missed = FIGURES.BEFORE, FIGURES.Figure, FIGURES.load_targets, FIGURES.missed


def row(rung="best", median=400.0, ratio=1.2, seq=4096):
    spread = {"median": median, "low": median - 1, "high": median + 1}
    cell = {"seq": seq, "tflops": spread, "ratio": {"torch_flash": ratio}, "peers": {"torch_flash": {"tflops": spread}},
            "error": {"metric": "m", "value": 0.5, "bound": 1.0}}  # fmt: skip
    return {
        "rung": rung,
        "name": "name",
        "config": {"head_dim": 128},
        "error": {"metric": "m", "value": 0.5, "bound": 1.0},
        "findings": [],
        "wavefronts": {"ldmatrix": {"actual": 80, "ideal": 10}, "cp.async": {"actual": 0, "ideal": 0}},
        "targets": {"sm_80": {"registers": 168, "spill_bytes": 8}, "sm_90a": {"not_for": "shared memory"}},
        "gpu": {**cell, "cells": [cell]},
    }


def test_the_environment_is_json_with_versions():
    found = json.loads(json.dumps(environment()))
    assert found["packages"]["numpy"] == np.__version__
    assert found["date"].endswith("+00:00")
    assert found["python"]


def test_the_drivers_own_version_is_noted(monkeypatch):
    gpu = Gpu(1, "NVIDIA X", (9, 0), 1, 132, "sm_90a")
    report = types.SimpleNamespace(gpus=(gpu,), nvrtc="13.0", driver="13.0")
    asked = []
    core = types.SimpleNamespace(Device=lambda index: types.SimpleNamespace(pci_bus_id=f"bus {index}"))
    monkeypatch.setattr("warploom.cuda.device.probe", lambda: report)
    monkeypatch.setattr("warploom.cuda.device.cuda_core", lambda: core)
    monkeypatch.setattr(GpuMonitor, "__init__", lambda self, bus_id: asked.append(bus_id))
    monkeypatch.setattr(GpuMonitor, "state", lambda self: {"driver": "580.65.06"})
    found = environment()
    assert (found["driver"], found["cuda_driver"], asked) == ("580.65.06", "13.0", ["bus 1"])


def test_gpus_have_folder_names():
    assert gpu_slug({"gpu": {"name": "NVIDIA H200"}}) == "h200"
    assert gpu_slug({"gpu": {"name": "NVIDIA GeForce RTX 4090"}}) == "rtx-4090"
    assert gpu_slug({"gpu": {"name": "NVIDIA A100-SXM4-80GB"}}) == "a100sxm480gb"
    assert gpu_slug({"gpu": None}) == "cpu"


def test_nvidia_smi_is_read_where_nvml_is_missing(monkeypatch):
    assert parse_nvidia_smi("1980, 3201, 512.5, 41, 580.10") == {
        "sm_mhz": 1980.0, "memory_mhz": 3201.0, "watts": 512.5, "celsius": 41.0, "driver": "580.10",
    }  # fmt: skip
    assert "watts" not in parse_nvidia_smi("1980, 3201, [N/A], 41, 580.10")

    def no_nvml(name):
        raise ImportError(name)

    done = types.SimpleNamespace(stdout="345, 3201, 78.0, 35, 580.10\n")
    monkeypatch.setattr(monitor.importlib, "import_module", no_nvml)
    monkeypatch.setattr(monitor.subprocess, "run", lambda *_, **__: done)
    gpu = GpuMonitor("0000:01:00.0")
    assert gpu.state()["sm_mhz"] == 345.0
    assert gpu.sm_clock() is None

    def no_program(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(monitor.subprocess, "run", no_program)
    assert gpu.state() == {}


def test_targets_are_held_against_rows():
    figure = Figure("best", 1.12, {"seq": 4096}, "torch_flash", {"head_dim": 128})
    assert missed([figure], [row(ratio=1.12)]) == []
    (text,) = missed([figure], [row(ratio=1.05)])
    assert "1.12" in text
    assert "1.05" in text
    assert missed([figure], [row(ratio=float("nan"))])
    assert missed([figure], [row(rung="1", ratio=0.1), row(ratio=1.3), row(ratio=0.1, seq=512)]) == []
    assert missed([Figure("best", 500, {"seq": 4096})], [row()])


def test_a_rung_is_held_against_the_one_before():
    figure = Figure("03", 0.98, {"n": 8192}, BEFORE)
    entry = row("03")
    entry["gpu"]["cells"][0] |= {"n": 8192, "over_rung_before": 1.1}
    assert missed([figure], [entry]) == []
    entry["gpu"]["cells"][0]["over_rung_before"] = 0.97
    (text,) = missed([figure], [entry])
    assert "the rung before" in text
    del entry["gpu"]["cells"][0]["over_rung_before"]
    assert missed([figure], [entry]) == [], "without the rung before there is nothing to hold"


def test_targets_of_another_family_do_not_matter(tmp_path):
    file = tmp_path / "targets.json"
    file.write_text(json.dumps({"attention": [{"rung": "best", "at_least": 1, "where": {"seq": 4096}}]}))
    assert load_targets(file, "gemm") == []
    assert load_targets(file, "attention")[0].at_least == 1


@pytest.mark.parametrize("text", ["", "[]", '{"attention": [{"rang": "best"}]}', '{"attention": 3}'])
def test_a_broken_targets_file(tmp_path, text):
    file = tmp_path / "targets.json"
    file.write_text(text)
    with pytest.raises(ProblemError, match="no file of targets"):
        load_targets(file, "attention")


@pytest.mark.parametrize(("family", "ladder"), [("attention", FULL_LADDER), ("gemm", GEMM_LADDER)])
def test_the_projects_own_targets_name_its_rungs(pytestconfig, family, ladder):
    figures = load_targets(pytestconfig.rootpath / "benchmarks" / "targets.json", family)
    assert figures
    assert {figure.rung for figure in figures} <= {rung.key for rung in ladder.rungs}


def test_markdown_tables_are_filled_from_rows():
    text = "a\n<!-- table: h200/x.json gpu -->\nold\n<!-- end table -->\nb\n"
    assert PAGES.table_names(text) == ["h200/x.json gpu"]
    filled = PAGES.fill_markdown(text, {"h200/x.json gpu": PAGES.MARKDOWN_TABLES["gpu"]([row()])})
    assert "| best | name | 400 (1.20×) |" in filled
    assert "old" not in filled
    assert PAGES.fill_markdown(filled, {"h200/x.json gpu": PAGES.MARKDOWN_TABLES["gpu"]([row()])}) == filled
    assert filled.startswith("a\n<!-- table")
    assert filled.endswith("b\n")
    assert "| torch_flash | 400 (399–401) |" in PAGES.MARKDOWN_TABLES["peers"]([row()])
    assert "| 8.00 | – | 168 (8) | does not fit |" in PAGES.MARKDOWN_TABLES["static"]([row()])


def test_rich_tables_have_a_second_part_only_where_rows_were_timed():
    assert len(ladder_tables([row()])) == 2
    assert len(ladder_tables([row() | {"gpu": None}])) == 1
