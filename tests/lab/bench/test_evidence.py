"""Environment, GPU state and targets."""

import json
import types

import numpy as np
import pytest

from tests.project import load
from warploom.core.errors import ProblemError
from warploom.cuda.device import Gpu
from warploom.measure import monitor
from warploom.measure.monitor import GpuMonitor, parse_nvidia_smi
from warploom_lab.bench.evidence import environment, gpu_slug
from warploom_lab.kernels.attention.ladder import FULL_LADDER
from warploom_lab.kernels.matmul.ladder import FULL_LADDER as GEMM_LADDER

FIGURES = load("figures")
BEFORE, Figure, load_targets, missed = FIGURES.BEFORE, FIGURES.Figure, FIGURES.load_targets, FIGURES.missed


def row(rung="best", *, tflops=400.0, ratio=1.2, **size):
    cell = {"seq": 4096, "tflops": {"median": tflops}, "ratio": {"torch_flash": ratio}} | size
    return {"rung": rung, "config": {"head_dim": 128}, "gpu": {**cell, "cells": [cell]}}


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


@pytest.mark.parametrize(
    ("name", "folder"),
    [("H200", "h200"), ("GeForce RTX 4090", "rtx-4090"), ("A100-SXM4-80GB", "a100sxm480gb"), (None, "cpu")],
)
def test_gpus_have_folder_names(name, folder):
    assert gpu_slug({"gpu": name and {"name": f"NVIDIA {name}"}}) == folder


def test_nvidia_smi_is_read_where_nvml_is_missing(monkeypatch):
    assert parse_nvidia_smi("1980, 3201, 512.5, 41, 580.10") == {
        "sm_mhz": 1980.0,
        "memory_mhz": 3201.0,
        "watts": 512.5,
        "celsius": 41.0,
        "driver": "580.10",
    }
    assert "watts" not in parse_nvidia_smi("1980, 3201, [N/A], 41, 580.10")

    def no_nvml(name):
        raise ImportError(name)

    done = types.SimpleNamespace(stdout="345, 3201, 78.0, 35, 580.10\n")
    monkeypatch.setattr(monitor.importlib, "import_module", no_nvml)
    monkeypatch.setattr(monitor.subprocess, "run", lambda *_, **__: done)
    gpu = GpuMonitor("0000:01:00.0")
    assert gpu.state()["sm_mhz"] == 345.0
    assert [gpu.sm_clock(), gpu.joules(), gpu.watts(), gpu.power_limit()] == [None] * 4

    def no_program(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(monitor.subprocess, "run", no_program)
    assert gpu.state() == {}


TARGET = Figure("best", 1.12, {"seq": 4096}, "torch_flash", {"head_dim": 128})
BEFORE_IT = Figure("best", 0.98, {"n": 8192}, BEFORE)


@pytest.mark.parametrize(
    ("figure", "rows", "says"),
    [
        (TARGET, [row(ratio=1.12)], []),
        (TARGET, [row(ratio=1.05)], ["1.12", "1.05"]),
        (TARGET, [row(ratio=float("nan"))], ["nan"]),
        (TARGET, [row("1", ratio=0.1), row(ratio=1.3), row(ratio=0.1, seq=512)], []),
        (Figure("best", 500, {"seq": 4096}), [row()], ["400", "500"]),
        (BEFORE_IT, [row(n=8192, over_rung_before=1.1)], []),
        (BEFORE_IT, [row(n=8192, over_rung_before=0.97)], ["the rung before"]),
        (BEFORE_IT, [row(n=8192)], []),  # without the rung before there is nothing to hold
    ],
)
def test_targets_are_held_against_rows(figure, rows, says):
    found = missed([figure], rows)
    assert len(found) == bool(says)
    assert all(part in found[0] for part in says)


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
