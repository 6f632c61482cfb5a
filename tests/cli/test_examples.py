"""The examples run: kernels under all checks and on a GPU, programs at small sizes."""

from __future__ import annotations

import json
import runpy
import sys
from typing import Any

import numpy as np
import pytest
from tests.project import ROOT

import warploom
from warploom.bench.checking import check_kernel, kernels_of
from warploom.ops.backends import gpu_target

EXAMPLES = ROOT / "examples"
OF_TILES = ("attention_steps.py", "matmul_tiles.py")
NO_TILES = ("rowmax.py", "reductions.py", "fused_softmax.py", "warp_gemm.py", "norm_int8.py", "top2_gate.py",
            "small_inverse.py")  # fmt: skip
KERNELS = [one for name in (*NO_TILES, *OF_TILES) for one in kernels_of(str(EXAMPLES / name))]
IN_REGISTERS = {one.name for name in NO_TILES for one in kernels_of(str(EXAMPLES / name))} - {
    "matmul_rowmax", "product", "small_inverse",
}  # fmt: skip


@pytest.mark.parametrize("function", KERNELS, ids=lambda f: f.name)
def test_kernels_are_right_and_without_findings(function):
    checked = check_kernel(function, seed=3)
    assert checked.ok
    assert checked.emulation.findings == ()
    assert all(not w.conflicts for w in checked.emulation.traffic.shared.values())
    assert not (checked.emulation.traffic.shared and function.name in IN_REGISTERS)


@pytest.mark.parametrize("line", ["k.syncthreads()  # ... and", "k.wait_group(1)", "k.syncthreads()  # the stage"])
def test_every_line_that_orders_the_gemm_is_needed(line, tmp_path):
    lines = (EXAMPLES / "warp_gemm.py").read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [text for text in lines if not text.strip().startswith(line)]
    assert len(kept) == len(lines) - 1
    (tmp_path / "mutant.py").write_text("".join(kept), encoding="utf-8")
    (mutant,) = kernels_of(str(tmp_path / "mutant.py"))
    assert {finding.kind for finding in check_kernel(mutant).emulation.findings} & {"race", "in_flight"}


@pytest.mark.gpu
@pytest.mark.parametrize("function", KERNELS, ids=lambda f: f.name)
def test_kernels_are_right_on_a_gpu(function):
    if function.requires == "sm_90a" and gpu_target(0).name != "sm_90a":
        pytest.skip("needs sm_90a")
    assert function.example_launch is not None
    example = function.example_launch(np.random.default_rng(5))
    names = [p.name for p in function.trace().parameters]
    arrays = {name: x[0] if isinstance(x, tuple) else x for name, x in zip(names, example.arguments, strict=True)}
    for name in example.expect:
        if arrays[name].dtype == np.float32:
            arrays[name].fill(np.nan)
    warploom.launch(function, example.grid, example.arguments)
    for name, (expected, tolerance) in example.expect.items():
        seen = np.isfinite(arrays[name])  # a wide matrix is written in part, the rest is as it was
        assert seen.sum() in (expected.size, 256)
        assert np.abs(arrays[name] - expected)[seen].max() <= max(tolerance, 1e-5)


def run(name: str, monkeypatch: Any, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_the_search_finds_the_nearest_over_several_blocks(monkeypatch, capsys):
    run("nearest_neighbours.py", monkeypatch, "--vectors", "96", "--queries", "8", "--dimension", "16", "--block", "64")
    assert "8 queries against 96 vectors" in capsys.readouterr().out
    search = runpy.run_path(str(EXAMPLES / "nearest_neighbours.py"))["search"]
    rng = np.random.default_rng(0)
    queries, vectors = (rng.standard_normal((n, 16)).astype(np.float16) for n in (8, 100))
    best, where = search(queries, iter([vectors[:64], vectors[64:]]))
    scores = queries.astype(np.float64) @ vectors.astype(np.float64).T
    assert (where == scores.argmax(1)).all()
    assert np.abs(best - scores.max(1)).max() < 1e-3


def test_the_loss_of_a_vocabulary(monkeypatch, capsys):
    run("vocabulary_loss.py", monkeypatch, "--tokens", "40", "--words", "200", "--width", "32")
    text = capsys.readouterr().out
    assert float(text.rsplit(":", 1)[1].split()[0]) < 1e-3 or "MiB" in text


def test_a_small_gpt_trains_alike_with_own_and_pytorchs_kernels(monkeypatch, tmp_path):
    pytest.importorskip("torch")
    losses: list[list[float]] = []
    for kind in ("warploom", "torch"):
        file = tmp_path / f"{kind}.json"
        options = f"--tiny --device cpu --attention {kind} --loss {kind} --out {file}"
        run("train_gpt.py", monkeypatch, *options.split())
        losses.append(json.loads(file.read_text(encoding="utf-8"))["losses"])
    np.testing.assert_allclose(*losses, rtol=1e-4)  # the second is after a step


def test_requests_served_together_are_answered_as_if_they_were_alone():
    """By the same weights without a cache, all tokens of a request at once, in float32."""
    torch = pytest.importorskip("torch")
    example = runpy.run_path(str(EXAMPLES / "serve.py"))
    size = example["TINY"]
    torch.manual_seed(0)
    server = example["Server"](size, "cpu")
    for parameter in server.layers.parameters():
        parameter.data.mul_(3)  # so that attention decides about tokens
    given = example["requests"](size, 4, seed=0)
    example["serve"](server, given)
    assert sorted(server.free) == list(range(size.pages))
    (layer,) = server.layers.float()
    server.words.float()
    for request in given:
        assert len(request.answer) == request.wanted
        tokens = request.prompt + request.answer
        x = server.words(torch.tensor(tokens))
        parts = layer.qkv(layer.norms[0](x)).unflatten(-1, (-1, layer.head_dim))
        q, k, v = parts.split((size.heads, size.kv_heads, size.kv_heads), 1)
        q, k = (layer.turned(y, torch.arange(len(tokens))) for y in (q, k))
        q, k, v = (y.transpose(0, 1) for y in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + layer.merge(out.transpose(0, 1).flatten(1))
        logits = (x + layer.feed(layer.norms[1](x))) @ server.words.weight.T
        best = logits[len(request.prompt) - 1 : -1]
        chosen = best.gather(1, torch.tensor(request.answer)[:, None])[:, 0]
        assert (best.max(1).values - chosen).max() <= 0.02 * best.abs().max()  # ties of bfloat16 apart
