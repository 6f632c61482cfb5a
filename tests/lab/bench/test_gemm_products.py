"""``benchmarks/gemm_h200.py`` from end to end on a GPU that is PyTorch on the CPU: what is timed was checked first."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tests.lab.bench.gpu import FakeGpu
from tests.project import load
from warploom_lab.bench import cells as harness

torch = pytest.importorskip("torch")

SHAPES = "name,m,n,k\nsmall.a.m16,16,64,128\nsmall.b.m128,128,128,128\n"
LEAST = {"geomean": 0.75, "least": 0.5}


@pytest.fixture
def products(monkeypatch, tmp_path):
    """(run of the script, what stands in for ``matmul``): by default a product in float32, rounded once."""
    script, stand_in = load("gemm_h200"), SimpleNamespace(calls=[], cost=1e-3)
    stand_in.product = lambda a, b, config: (a.float() @ b.float()).half()
    gpu = FakeGpu(monkeypatch)

    def matmul(a: Any, b: Any, *, config: Any, out: Any) -> Any:
        stand_in.calls.append(config)
        gpu.spend(stand_in.cost)
        return out.copy_(stand_in.product(a, b, config))

    def mm(a: Any, b: Any, *, out: Any) -> Any:
        gpu.spend(1e-3)
        return out.copy_(a.float() @ b.float())

    for make in ("randn", "empty"):
        on_cpu = getattr(torch, make)
        monkeypatch.setattr(
            torch, make, lambda *shape, device, dtype, on_cpu=on_cpu: on_cpu(*shape, dtype=torch.float32).to(dtype)
        )
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(script, "warploom", SimpleNamespace(matmul=matmul))
    monkeypatch.setattr(script, "LARGE", ("small.b.m128 n×k",))
    monkeypatch.setattr(script, "MOST_CALLS", 2)
    monkeypatch.setattr(harness, "build_all", lambda sources, arch: sources)
    (tmp_path / "gemm_shapes.csv").write_text(SHAPES, encoding="utf-8")
    (tmp_path / "targets.json").write_text(json.dumps({"products": dict.fromkeys(script.KEYS, LEAST)}), "utf-8")
    monkeypatch.setattr(load("scripts"), "HERE", tmp_path)

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        code = script.Products().main(["--out", str(tmp_path), "--rounds", "2", *arguments], lambda: gpu)
        return code, json.loads((tmp_path / "gemm.json").read_text(encoding="utf-8"))

    return run, stand_in


def test_every_cell_is_checked_and_timed(products):
    run, stand_in = products
    code, found = run()
    assert code == 0
    assert [(r["name"], r["weights"]) for r in found["shapes"]] == [
        (name, layout) for name in ("small.a.m16", "small.b.m128") for layout in ("n×k", "k×n")
    ]
    for row in found["shapes"]:
        for of in (row, row["company"]):
            assert {"cublas", row["configs"]["chosen"], row["configs"]["mma.sync"]} <= set(of["rates"])
            assert set(of["rates"]) == set(of["spread"]) == set(row["error"]) == set(of["sm_mhz"])
            general = [name for name in of["rates"] if name.startswith("matmul_sm80")]
            assert len(general) >= 2
            assert of["best mma.sync"] == max(of["rates"][name] for name in general)
            assert of["best"] == max(rate for name, rate in of["rates"].items() if name != "cublas")
        assert set(row["sm_mhz"].values()) == {1980}, "a row's own figures are rested"
        assert set(row["company"]["sm_mhz"].values()) == {1500}
        assert all(0 < error <= 1 for error in row["error"].values())
    assert None in stand_in.calls, "what is chosen is called as a user calls it"
    large = found["large"]["small.b.m128"]
    assert set(large) == {"cublas", "chosen", "mma.sync"}
    assert large["chosen"]["sustained"]["watts"] == 600.0
    assert large["cublas"]["rested"]["sm_mhz"] == 1980


def broken(a: Any, b: Any, config: Any) -> Any:
    """Right but for one element of one kind of kernel."""
    result = (a.float() @ b.float()).half()
    if config is not None and config.requires == "sm_80" and config.split_k == 1:
        result[-1, -1] += 1
    return result


def test_one_wrong_element_is_seen(products, capsys):
    run, stand_in = products
    stand_in.product = broken
    code, found = run("--only", "k×n")
    assert code == 1
    assert any("is wrong at small.b.m128 k×n" in text for text in found["missed"])
    assert "is wrong at small.b.m128 k×n" in capsys.readouterr().out


def test_what_writes_nothing_is_wrong_and_what_fails_is_told(products):
    run, stand_in = products
    stand_in.product = lambda a, b, config: torch.full((a.shape[0], b.shape[1]), float("nan"))
    code, found = run("--only", "b.m128 n")
    assert code == 1
    assert len(found["missed"]) == len(found["shapes"][0]["error"]) - 1, "all but cuBLAS"

    def refuses(a: Any, b: Any, config: Any) -> Any:
        if config is not None:
            raise RuntimeError("too many registers")
        return (a.float() @ b.float()).half()

    stand_in.product = refuses
    code, found = run("--only", "b.m128 n")
    row = found["shapes"][0]
    assert set(row["not_run"].values()) == {"RuntimeError: too many registers"}
    assert row["configs"]["best"] == row["configs"]["chosen"]


@pytest.mark.parametrize(("cost", "missed"), [(1e-3 / 0.76, 0), (1e-3 / 0.74, 4), (1e-3 / 0.49, 12)])
def test_what_misses_its_target_is_told(products, cost, missed):
    run, stand_in = products
    stand_in.cost = cost
    code, found = run()
    assert len(found["missed"]) == missed
    assert code == (missed > 0)


def test_graphs_rotate_past_the_l2():
    script = load("gemm_h200")
    for product in script.layers():
        assert 2 * product.k * (product.m + product.n) * product.sets > script.ROTATE_BYTES
        assert product.turns * product.sets <= script.MOST_CALLS
