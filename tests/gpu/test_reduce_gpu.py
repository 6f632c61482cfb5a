"""Reductions and discovery on a GPU, with torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import warploom
from tests.project import load
from warploom.ops.backends import GpuCall
from warploom_lab.discover.fragments import gpu_runner, trace_fragment
from warploom_lab.discover.tracers import tracers
from warploom_lab.kernels.reduce.ladder import LADDER, SETTINGS
from warploom_lab.kernels.reduce.reference import row_max_reference, row_max_tolerance
from warploom_lab.kernels.reduce.tile import matmul_row_max

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")


@pytest.mark.parametrize("tracer", tracers(), ids=lambda t: t.name)
def test_the_catalogue_holds_on_this_gpu(tracer):
    if torch.cuda.get_device_capability() < tracer.capability:
        pytest.skip(f"{tracer.name} starts at compute capability {tracer.capability}")
    found = trace_fragment(tracer, gpu_runner())
    assert found.verdict != "differs", str(found.difference)


def test_products_by_wmma_are_right_against_float64():
    off = {name: ratio for name, ratio in load("wmma_products").errors(gpu_runner()).items() if not ratio <= 1}
    assert not off


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_the_papers_own_baseline_is_right_in_every_setting(setting):
    textbook = load("textbook")
    textbook.BesideTextbook().prepare(textbook.TEXTBOOK, setting)  # raises where a maximum is wrong


@pytest.mark.parametrize("op", ["max", "sum", "logsumexp"])
@pytest.mark.parametrize(("m", "n", "k"), [(512, 4096, 256), (1000, 777, 72), (3, 100000, 128), (1, 1, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matmul_reduce(op, m, n, k, dtype):
    torch.manual_seed(0)
    a = torch.randn(m, k, device="cuda", dtype=dtype)
    b = torch.randn(n, k, device="cuda", dtype=dtype).T
    bias = torch.randn(n, device="cuda", dtype=dtype)
    product = a.double() @ b.double() * 0.5 + bias.double()
    size = a.abs().double() @ b.abs().double() + bias.abs().double()
    bound = k * 2.0**-21 * (size.sum(-1) if op == "sum" else size.amax(-1)) + 1e-4
    expected = {"max": product.amax(-1), "sum": product.sum(-1), "logsumexp": product.logsumexp(-1)}[op]
    found = warploom.matmul_reduce(a, b, op, scale=0.5, bias=bias)
    assert bool(((found.double() - expected).abs() <= bound).all())
    assert torch.equal(found, warploom.matmul_reduce(a, b, op, scale=0.5, bias=bias))


def test_the_index_of_the_maximum():
    a = torch.randint(-2, 3, (700, 64), device="cuda").to(torch.bfloat16)
    b = torch.randint(-2, 3, (5000, 64), device="cuda").to(torch.bfloat16).T
    values, index = warploom.matmul_reduce(a, b, return_index=True)
    product = (a.float() @ b.float()).cpu().numpy()
    assert (index.cpu().numpy() == product.argmax(1)).all()
    assert (values.cpu().numpy() == product.max(1)).all()


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_linear_cross_entropy(kind):
    x = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16) / 16
    w = torch.randn(5003, 256, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(5003, (300,), device="cuda")
    expected = torch.nn.functional.cross_entropy(x.double() @ w.double().T, target, reduction="none")
    found = warploom.linear_cross_entropy(x, w, target.to(kind))
    assert float((found.double() - expected).abs().max()) < 1e-3


def test_memory_is_bounded_whatever_the_size():
    torch.manual_seed(1)
    a = torch.randn(20000, 16, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(300000, 16, device="cuda", dtype=torch.bfloat16).T
    target = torch.randint(300000, (20000,), device="cuda")
    for call in (
        lambda: warploom.matmul_reduce(a, b, return_index=True),
        lambda: warploom.linear_cross_entropy(a, b.T, target),
    ):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = call()
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before <= 64 * 2**20
    rows = torch.tensor([0, 1, 9999, 19999], device="cuda")
    product = a[rows].double() @ b.double()
    values, index = warploom.matmul_reduce(a, b, return_index=True)
    assert float((values[rows].double() - product.amax(-1)).abs().max()) < 1e-3
    chosen = product[torch.arange(4, device="cuda"), index[rows].long()]
    assert float((chosen - product.amax(-1)).abs().max()) < 1e-3
    loss = torch.logsumexp(product, -1) - product[torch.arange(4, device="cuda"), target[rows]]
    assert float((found[rows].double() - loss).abs().max()) < 1e-3


@pytest.mark.parametrize("mib", [64, 512])
def test_a_step_takes_little_beyond_its_gradients(mib):
    torch.manual_seed(1)
    x, w = (torch.randn(n, 512, device="cuda", dtype=torch.bfloat16).requires_grad_() for n in (4096, 128000))
    target = torch.randint(128000, (4096,), device="cuda")

    def step():
        x.grad = w.grad = None
        warploom.linear_cross_entropy(x, w, target, reduction="mean", workspace_mib=mib).backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= mib * 2**20


def test_numpy_arrays_go_to_the_gpu_and_back():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(s).astype(np.float16) for s in ((100, 64), (64, 333)))
    values, index = warploom.matmul_reduce(a, b, return_index=True)
    product = a.astype(np.float64) @ b.astype(np.float64)
    assert np.abs(values - product.max(1)).max() < 1e-2
    assert (np.take_along_axis(product, index[:, None].astype(np.int64), 1)[:, 0] >= product.max(1) - 1e-2).all()


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
@pytest.mark.parametrize("rung", LADDER.rungs, ids=lambda r: r.key)
def test_row_maxima_of_every_rung(rung, setting):
    config = replace(setting.of(rung.config), num_warps=3, repeats=min(setting.repeats, 6))
    program = matmul_row_max.trace(config=config)
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal((300, 16, 16)).astype(config.dtype.numpy) for _ in range(2))
    out, cycles = np.full((300, 16), np.nan, np.float32), np.zeros(300, np.uint64)
    arrays = {"a": a.view(np.uint16), "b": b.view(np.uint16), "out": out, "cycles": cycles}
    warploom.launch(program, 100, {p.name: arrays.get(p.name, 0) for p in program.parameters})
    assert (np.abs(out - row_max_reference(a, b)) <= row_max_tolerance(a, b)).all()


@pytest.mark.parametrize("in_every_tile", [False, True])
@pytest.mark.parametrize("quad_masks", [False, True])
def test_the_fused_softmax_tile(in_every_tile, quad_masks):
    fused = load("fused_softmax", "examples")
    rng = np.random.default_rng(1)
    q, keys, values = (rng.standard_normal((n, 16)).astype(np.float32) for n in (16, 80, 80))
    halves = [torch.from_numpy(x).to(torch.bfloat16).cuda() for x in (q, keys, values)]
    out, maxima, sums = (torch.zeros(s, device="cuda") for s in ((16, 16), (16,), (16,)))
    program = fused.softmax_tile.trace(in_every_tile=in_every_tile, quad_masks=quad_masks)
    call = GpuCall.prepare(program, (1, 1, 1), {"blocks": 5}, 0)
    call.launch_again(tuple(x.data_ptr() for x in (*halves, out, maxima, sums)), "torch")
    expected = fused.Expected.of(*(x.float().cpu().numpy() for x in halves))
    assert np.allclose(maxima.cpu().numpy(), expected.maxima, atol=1e-5)
    assert np.allclose(sums.cpu().numpy(), expected.sums, rtol=1e-4)
    assert np.abs(out.cpu().numpy() - expected.out).max() < 2.0**-7 * float(halves[2].abs().max())
