"""``benchmarks/gemm_h200.py`` from end to end on a GPU that is PyTorch on the CPU: what is timed was checked first."""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.project import load
from warploom.core.dtypes import f16
from warploom.core.targets import target
from warploom.kernels.matmul.choice import choose
from warploom.kernels.matmul.problem import contiguous_problem
from warploom.kernels.matmul.sm90 import MatmulSm90
from warploom.ops.matmul import MatmulPlan

torch = pytest.importorskip("torch")

SM90 = target("sm_90a")
SHAPES = "name,m,n,k\nsmall.a.m16,16,64,128\nsmall.b.m128,128,128,128\n"


def on_cpu(make: Any) -> Any:
    def made(*shape: Any, device: str, dtype: Any) -> Any:
        assert device == "cuda"
        return make(*shape).to(dtype)

    return made


TORCH_ON_CPU = SimpleNamespace(**(vars(torch) | {"randn": on_cpu(torch.randn), "empty": on_cpu(torch.empty)}))
STOPWATCH = SimpleNamespace(mark=time.perf_counter, seconds=lambda start, end: max(end - start, 1e-7))


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """(script, what stands in for ``matmul``): by default a product in float32, rounded once."""
    script, cells = load("gemm_h200"), load("gemm_cells")
    stand_in = SimpleNamespace(product=lambda a, b, config: (a.float() @ b.float()).half(), calls=[])

    def matmul(a: Any, b: Any, *, config: Any = None, out: Any = None) -> Any:
        stand_in.calls.append(config)
        result = stand_in.product(a, b, config)
        return result if out is None else out.copy_(result)

    def plan(x: Any, w: Any, config: Any = None) -> MatmulPlan:
        problem = contiguous_problem(x.shape[0], w.shape[1], x.shape[1], f16, b_rows=w.stride(1) == 1)
        chosen = MatmulSm90() if problem.m >= 128 else choose(problem, SM90)[0]
        return MatmulPlan(problem, config or chosen, "", SM90.name, "GPU 0", 132)

    def graph(one: Any, calls: int, _torch: Any) -> Any:
        return type(one)(one.name, lambda _: [one.run(i) for i in range(calls)])

    def fake_bench() -> Any:
        made = object.__new__(cells.Bench)
        made._clock, made._monitor = STOPWATCH, SimpleNamespace(sm_clock=lambda: 1980.0)
        return made

    sustained = {"watts": 690.0, "sm_mhz": 1400, "tflops": 400.0, "tflop_per_joule": 0.6}
    for module in (script, cells):
        monkeypatch.setattr(module, "torch", TORCH_ON_CPU)
        monkeypatch.setattr(module, "warploom", SimpleNamespace(matmul=matmul))
        monkeypatch.setattr(module, "gpu_target", lambda _: SM90)
    monkeypatch.setattr(script, "plan_matmul", plan)
    monkeypatch.setattr(script, "compile_all", lambda plans: len(list(plans)))
    monkeypatch.setattr(script, "Bench", fake_bench)
    monkeypatch.setattr(script, "environment", lambda _: {"gpu": {"name": "NVIDIA X"}})
    monkeypatch.setattr(script, "LARGE", ("b.m128",))
    cost = SimpleNamespace(json=lambda: {"median": 9.0})
    monkeypatch.setattr(script, "microseconds", lambda calls, *_: dict.fromkeys(calls, cost))
    monkeypatch.setattr(cells, "graphed", graph)
    monkeypatch.setattr(cells, "power_of", lambda *_: SimpleNamespace(json=lambda flops: sustained))
    for name, value in {"PAUSE_SECONDS": 0.0, "SAMPLE_SECONDS": 1e-6, "MOST_CALLS": 2, "ROTATE_BYTES": 7e4}.items():
        monkeypatch.setattr(cells, name, value)
    (tmp_path / "gemm_shapes.csv").write_text(SHAPES, encoding="utf-8")
    targets = {word: {"geomean": 1e-6, "least": 1e-6} for word in ("chosen", "mma.sync")}
    (tmp_path / "targets.json").write_text(
        json.dumps({"products": targets, "host_microseconds": {"matmul": 15}}), encoding="utf-8"
    )
    monkeypatch.setattr(load("scripts"), "HERE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["gemm_h200.py", "--out", str(tmp_path)])
    return script, stand_in


def written(folder: Any) -> dict[str, Any]:
    return json.loads((folder / "gemm.json").read_text(encoding="utf-8"))


def test_every_cell_is_checked_and_timed(bench, tmp_path):
    script, stand_in = bench
    assert script.main() == 0
    found = written(tmp_path)
    assert [(r["name"], r["weights"]) for r in found["shapes"]] == [
        (name, layout) for name in ("small.a.m16", "small.b.m128") for layout in ("n×k", "k×n")
    ]
    for row in found["shapes"]:
        assert {"cublas", row["configs"]["chosen"], row["configs"]["mma.sync"]} <= set(row["rates"])
        assert set(row["rates"]) == set(row["spread"]) == set(row["error"]) == set(row["mhz"])
        assert set(row["rates"]) <= set(row["glance"])
        general = [name for name in row["rates"] if name.startswith("matmul_sm80")]
        assert len(general) >= 2
        assert row["best mma.sync"] == max(row["rates"][name] for name in general)
        assert row["best"] == max(rate for name, rate in row["rates"].items() if name != "cublas")
        assert all(0 < error <= 1 for error in row["error"].values())
    wide = [row for row in found["shapes"] if row["name"] == "small.b.m128"]
    assert all(row["configs"]["chosen"].startswith("matmul_sm90") for row in wide)
    assert None in stand_in.calls, "what is chosen is called as a user calls it"
    assert set(found["summary"]) == {f"{layout} {key}" for layout in ("n×k", "k×n") for key in script.KEYS}
    large = found["large"]["small.b.m128"]
    assert set(large) == {"cublas", "chosen", "mma.sync"}
    assert large["mma.sync"]["config"] == wide[0]["configs"]["best mma.sync"]
    assert large["chosen"]["sustained"]["watts"] == 690.0


def broken(a: Any, b: Any, config: Any) -> Any:
    """Right but for one element of one kind of kernel."""
    result = (a.float() @ b.float()).half()
    if config is not None and config.requires == "sm_80" and config.split_k == 1:
        result[-1, -1] += 1
    return result


def test_one_wrong_element_is_seen_and_not_timed(bench, tmp_path, capsys):
    script, stand_in = bench
    stand_in.product = broken
    sys.argv += ["--parts", "shapes"]
    assert script.main() == 1
    rows = written(tmp_path)["shapes"]
    seen = {name for row in rows for name in row["wrong"]}
    assert seen
    assert not any(set(row["wrong"]) & set(row["rates"]) for row in rows)
    assert f"missed: small.b.m128 k×n: {next(iter(rows[-1]['wrong']))}" in capsys.readouterr().out


def test_what_writes_nothing_is_wrong(bench, tmp_path):
    script, stand_in = bench
    stand_in.product = lambda a, b, config: torch.full((a.shape[0], b.shape[1]), float("nan"))
    sys.argv += ["--parts", "shapes,large", "--only", "b.m128"]
    assert script.main() == 1
    found = written(tmp_path)
    assert {row["chosen"] for row in found["shapes"]} == {0}
    assert {bool(row["wrong"]) for row in found["large"]["small.b.m128"].values() if "config" in row} == {True}


@pytest.mark.parametrize(
    ("word", "figure", "value", "failing"),
    [
        ("chosen", "geomean", 0.74, 1),
        ("mma.sync", "geomean", 0.74, 1),
        ("mma.sync", "least", 0.49, 1),
        ("mma.sync", "least", 0.5, 0),
        ("chosen", "geomean", float("nan"), 1),
    ],
)
def test_what_misses_its_target_is_told(word, figure, value, failing):
    script, least = load("gemm_h200"), {"geomean": 0.75, "least": 0.5}
    targets = {"products": {"chosen": least, "mma.sync": least}, "host_microseconds": {"matmul": 15}}
    reached = {f"{layout} {key}": {"geomean": 0.9, "least": 0.8} for layout in script.LAYOUTS for key in script.KEYS}
    assert script.missed({"summary": reached, "host_us": {"matmul": {"median": 14.9}}}, targets) == []
    reached[f"k×n {script.HELD[word]}"][figure] = value
    found = script.missed({"summary": reached}, targets)
    assert len(found) == failing
    assert all(text.startswith(f"{word}, weights k×n: {figure}") for text in found)
    assert script.missed({"host_us": {"matmul": {"median": 15.1}}}, targets) == ["host: 15.1 µs a call, not 15"]


def test_graphs_rotate_past_the_l2_in_whole_turns():
    cells, script = load("gemm_cells"), load("gemm_h200")
    for layer in script.layers():
        assert layer.calls % layer.sets == 0
        assert 2 * layer.k * (layer.m + layer.n) * layer.sets > cells.ROTATE_BYTES
        assert layer.calls <= cells.MOST_CALLS
