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
from warploom.checking.kernel_file import check_kernel, compared, in_orders, kernels_of
from warploom.core.errors import TraceError, VerifyError
from warploom.ops.backends import gpu_target

EXAMPLES = ROOT / "examples"
OF_TILES = (
    "attention_steps.py",
    "matmul_tiles.py",
    "softmax_tiles.py",
    "cache_tiles.py",
    "sequence_tiles.py",
    "gradient_tiles.py",
)
NO_TILES = (
    "rowmax.py",
    "reductions.py",
    "fused_softmax.py",
    "warp_gemm.py",
    "norm_int8.py",
    "top2_gate.py",
    "small_inverse.py",
)
KERNELS = [one for name in (*NO_TILES, *OF_TILES) for one in kernels_of(str(EXAMPLES / name))]
IN_REGISTERS = {one.name for name in NO_TILES for one in kernels_of(str(EXAMPLES / name))} - {
    "matmul_rowmax",
    "product",
    "small_inverse",
}


@pytest.mark.parametrize("function", KERNELS, ids=lambda f: f.name)
def test_kernels_are_right_and_without_findings(function):
    checked = check_kernel(function, seed=3)
    assert checked.ok
    assert checked.emulation.findings == ()
    assert all(not w.conflicts for w in checked.emulation.traffic.shared.values())
    assert not (checked.emulation.traffic.shared and function.name in IN_REGISTERS)


PLANTED = [
    ("warp_gemm.product", "k.syncthreads()  # ... and", "", "race"),
    ("warp_gemm.product", "k.wait_group(1)", "", "in_flight"),
    ("warp_gemm.product", "k.syncthreads()  # the stage", "", "race"),
    ("attention_steps.ring", "softmax.begin()", "", "refused"),
    ("attention_steps.ring", "row=warp_row)", "row=0)", "wrong"),
    ("attention_steps.overlap", "output_sums.wait(s)", "", "refused"),
    ("matmul_tiles.on_sm80", "copies.begin(depth // DEPTH, places)", "", "refused"),
    ("matmul_tiles.on_sm80", "stage(0), (2, 2)", "stage(0), (2, 1)", "refused"),
    ("matmul_tiles.on_sm80", "stage(0), (2, 2)", "stage(0), (4, 1)", "refused"),
    ("matmul_tiles.on_sm90", "panels.prepare(k.value(0, u32))", "", "refused"),
    ("matmul_tiles.in_turns", "turns.taken(), ", "k.when(k.thread == k.thread), ", "deadlock"),
    ("softmax_tiles.by_old_maxima", "load_left(k, held, q_tile, 0)", "", "refused"),
    ("softmax_tiles.by_old_maxima", "put_ones(k, v_tile, DIM, bf16)", "", "uninitialised"),
    ("softmax_tiles.by_old_maxima", "rescale()", "", "wrong"),
    ("softmax_tiles.by_old_maxima", "lambda block=block: multiply(block)", "nothing", "wrong"),
    ("cache_tiles.added_up", "ring.wait(0)", "", "in_flight"),
    ("cache_tiles.added_up", "k.syncwarp()  # ... and", "", "race"),
    ("cache_tiles.added_up", "k.syncwarp()  # every lane", "", "race"),
    ("cache_tiles.added_up", "ring.look_up(sequence, block + 1)", "", "wrong"),
    ("cache_tiles.gathered", "k.syncwarp()", "", "race"),
    ("cache_tiles.gathered", "get.release()", "", "refused"),
    ("cache_tiles.gathered", "runs.look_up(sequence, block + 1)", "", "wrong"),
    ("sequence_tiles.listed", "of_keys=False, most=slots", "of_keys=False, most=slots - 1", "wrong"),
    ("sequence_tiles.averaged", "changed.producer().written()", "", "refused"),
    ("sequence_tiles.averaged", "consumer().wait()", "consumer().tile", "in_flight"),
    ("sequence_tiles.sums_of_lists", "own.set(0.0)", "", "wrong"),
    ("sequence_tiles.sums_of_lists", "at.advance()", "", "wrong"),
    ("sequence_tiles.sums_by_claims", "order.claim(turn + 1)", "", "uninitialised"),
    ("cache_tiles.put_together", "total * factor", "total", "wrong"),
    ("cache_tiles.grouped", "lambda row: row // GROUP", "lambda row: row", "wrong"),
    ("cache_tiles.fp8_scores", "k.syncwarp()", "", "race"),
    ("cache_tiles.fp8_scores", "position(col + 2 * i)", "col + 2 * i", "race"),
    ("cache_tiles.fp8_attention", "ring.drain()", "", "in_flight"),
    ("cache_tiles.fp8_attention", "sums.finish()", "", "race"),
    ("cache_tiles.fp8_attention", ", fp8=True", ", fp8=False", "wrong"),
    ("cache_tiles.fp8_values", "k.wait_group(0)", "", "in_flight"),
    ("cache_tiles.fp8_values", "zero(sums)", "", "refused"),
    ("gradient_tiles.score_gradient", "k.syncwarp()", "", "race"),
    ("gradient_tiles.score_gradient", "x * -LOG2_E", "x * LOG2_E", "wrong"),
    ("gradient_tiles.score_gradient", "(log, s, k.lane, first", "(log, s, k.lane, first + 1", "bounds"),
    ("gradient_tiles.attention_received", "row=warp_row", "row=0", "wrong"),
    ("gradient_tiles.attention_received", "first + warp_row, kv_len", "first + warp_row, kv_len + 1", "bounds"),
    ("gradient_tiles.attention_received", "vector_tile(k, 16,", "k.shared(f32, 16,", "misaligned"),
    ("gradient_tiles.attention_received", "k.syncwarp()", "", "race"),
    ("gradient_tiles.sent", "await_sent(k)", "", "refused"),
    ("gradient_tiles.transposed", "k.syncthreads()  # it has left", "", "race"),
    ("gradient_tiles.transposed", "k.syncthreads()  # every warp", "", "race"),
    ("gradient_tiles.added_in_turn", "k.fence_async()", "", "proxy"),
    ("gradient_tiles.added_in_turn", "k.wait_bulk(0)", "", "refused"),
    ("gradient_tiles.added_in_turn", "turns.await_turn(0, k.cta_x)", "k.cta_x == 0", "in_flight"),
    ("gradient_tiles.added_in_turn", "turns.pass_on(0)", "", "deadlock"),
    ("gradient_tiles.added_across", "both.sync()", "", "race"),
    ("gradient_tiles.added_by_warps", "k.syncwarp()  # every lane has added", "", "race"),
    ("gradient_tiles.added_by_warps", "end - first", "end - first - 1", "race"),
    ("gradient_tiles.added_by_warps", "end - first", "k.grid_x", "deadlock"),
    ("gradient_tiles.added_by_warps", "(16, DIM), block", "(16, DIM), block * 0", "wrong"),
]
"""(kernel, what of it is left out or replaced, what is found)"""


@pytest.mark.parametrize(("kernel", "text", "instead", "found"), PLANTED)
def test_what_an_example_leaves_out_is_found(kernel, text, instead, found, tmp_path):
    name, function = kernel.split(".")
    before, defined, after = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").partition(f"def {function}(")
    assert text in after
    (tmp_path / "mutant.py").write_text(
        before + defined + after.replace(text, instead or f"pass  # {text}", 1), "utf-8"
    )
    (mutant,) = kernels_of(f"{tmp_path / 'mutant.py'}:{function}")
    if found == "refused":
        with pytest.raises((TraceError, VerifyError)):
            check_kernel(mutant)
        return
    checked = in_orders(lambda seed: check_kernel(mutant, seed))
    assert not checked.ok
    assert found in {finding.kind for finding in checked.emulation.findings} or found == "wrong"


@pytest.mark.gpu
@pytest.mark.parametrize("function", KERNELS, ids=lambda f: f.name)
def test_kernels_are_right_on_a_gpu(function):
    if function.requires == "sm_90a" and gpu_target(0).name != "sm_90a":
        pytest.skip("needs sm_90a")
    assert function.example_launch is not None
    example = function.example_launch(np.random.default_rng(5))
    names = [p.name for p in function.trace().parameters if p.stride_of is None]
    arrays = {name: x[0] if isinstance(x, tuple) else x for name, x in zip(names, example.arguments, strict=True)}
    warploom.launch(function, example.grid, example.arguments)
    for name, (expected, tolerance) in example.expect.items():
        assert compared(name, arrays[name], expected, max(tolerance, 1e-5)).ok


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
        options = f"--steps 2 --device cpu --attention {kind} --loss {kind} --out {file}"
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


def test_examples_of_models_end_soon_without_a_gpu_and_show_how_far_they_are(monkeypatch, capsys, tmp_path):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pictures = tmp_path / "loss.svg", tmp_path / "requests.svg"
    run("train_gpt.py", monkeypatch, "--steps", "3", "--picture", str(pictures[0]), "--out", str(tmp_path / "run.json"))
    text = capsys.readouterr().out
    losses = [float(line.split()[-1]) for line in text.splitlines() if line.startswith("step ")]
    assert len(losses) == 3
    assert all(4 < loss < 6 for loss in losses)  # of 256 words at random 5.5; each step sees other text
    run("serve.py", monkeypatch, "--requests", "2", "--picture", str(pictures[1]))
    assert "2 requests" in capsys.readouterr().out
    drawn = [picture.read_text(encoding="utf-8") for picture in pictures]
    assert drawn[0].count("<path") == 2  # from each loss to the next
    highest = max(json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))["losses"])
    assert f">{highest:.2f}<" in drawn[0]
    assert all(f"request {number}: steps" in drawn[1] for number in (0, 1))


def test_the_first_kernel_says_what_it_computes(monkeypatch, capsys):
    run("rowmax.py", monkeypatch)
    assert "largest element of each row" in capsys.readouterr().out
