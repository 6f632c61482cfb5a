"""The estimate of a kernel without a GPU, held against what its example is known to do."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.project import needs_nvdisasm
from warploom.checking.kernel_file import example_of, one_kernel
from warploom.core.dtypes import DTYPES
from warploom.core.targets import GPUS
from warploom.emulate import emulate
from warploom.isa.instruction import named
from warploom.isa.matrix import mma
from warploom.lang import Global, Kernel, Launch, f32, kernel
from warploom_lab.inspect.estimate import estimate, tensor_work

EXAMPLE = "examples/wgmma_pipeline.py"


@needs_nvdisasm
def test_the_product_of_the_example_is_counted_once_whoever_multiplies(invoke):
    found = json.loads(invoke("inspect", EXAMPLE, "--estimate", "H200", "--json", "-").stdout)["estimate"]
    rows = found["resources"]
    function = one_kernel(EXAMPLE)
    launch = example_of(function, function.trace())
    a, b, c = (x[0] if isinstance(x, tuple) else x for x in launch.arguments[:3])
    assert rows["tensor cores"]["amount"] == 2 * a.shape[0] * a.shape[1] * b.shape[0]
    assert rows["memory"]["amount"] == a.nbytes + b.nbytes + c.nbytes
    assert rows["tensor cores"]["per_second"] == pytest.approx(989.4e12, rel=1e-3)
    assert found["bound"] == max(rows, key=lambda name: rows[name]["seconds"])


@pytest.mark.parametrize(
    ("shape", "inputs", "sums", "factor"),
    [
        ("m16n8k16", "bf16", "f32", 1),
        ("m16n8k8", "tf32", "f32", 2),
        ("m16n8k32", "s8", "s32", 0.5),
        ("m8n8k4", "f64", "f64", 16),
    ],
)
def test_tensor_work_is_in_products_of_16_bits(shape, inputs, sums, factor):
    m, n, k = (int(x) for x in shape[1:].replace("n", " ").replace("k", " ").split())
    assert tensor_work(mma(shape, DTYPES[inputs], DTYPES[sums])) == 2 * m * n * k * factor


def test_each_warp_has_a_quarter_of_a_warpgroups_product():
    product = named("wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8")
    assert tensor_work(product) == 2 * 64 * 128 * 32 / 2 / 4
    assert tensor_work(named("add.u32")) == 0


@kernel(threads=64)
def powers(k: Kernel, x: Global[f32], y: Global[f32]) -> None:
    i = k.cta_x * 64 + k.thread
    value = x.load(i)
    for _ in range(100):
        value = k.exp2(value)
    y.store(value, i)


def test_the_bound_is_the_resource_that_takes_longest():
    x = np.zeros(256, np.float32)
    launch = Launch(2, [x, x.copy()])
    found = estimate(GPUS["A100"], launch, emulate(powers.trace(), 2, launch.arguments))
    assert found.bound.resource == "special functions"
    assert found.bound.amount == 2 * 64 * 100
    assert found.bound.seconds == pytest.approx(2 * 64 * 100 / (16 * 108 * 1.41e9))
    memory = next(s for s in found.shares if s.resource == "memory")
    assert memory.amount == found.l2_bytes == 2 * 2 * 64 * 4  # half of the arrays


@needs_nvdisasm
def test_what_cannot_be_estimated_is_refused(invoke):
    assert "A100, H100, H200" in invoke("inspect", EXAMPLE, "--estimate", "H300").stderr
    assert "FILE.py" in invoke("inspect", "attention", "--estimate", "H100").stderr
    assert "sm_90a" in invoke("inspect", EXAMPLE, "--estimate", "A100").stderr
