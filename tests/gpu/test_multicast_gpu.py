"""Clusters on a GPU: the multicast example against float64, ranks and scopes as the emulator has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from tests.gpu.harness import launch  # noqa: E402 (after the skip)
from tests.hopper.multicast import example  # noqa: E402
from tests.hopper.test_clusters_emulated import pass_on, who  # noqa: E402
from warploom.core.dtypes import bf16, u32  # noqa: E402
from warploom.cuda.compile import compile_source  # noqa: E402
from warploom.cuda.device import target_of  # noqa: E402
from warploom.cuda.launch import load, scalar  # noqa: E402
from warploom.cuda.printer import print_cuda  # noqa: E402
from warploom.cuda.tensor_maps import encode  # noqa: E402
from warploom.interop.arrays import current_stream  # noqa: E402
from warploom.layout.tensor_map import TensorMapSpec  # noqa: E402


@pytest.fixture(autouse=True)
def hopper() -> None:
    if target_of(0).name != "sm_90a":
        pytest.skip("needs wgmma (sm_90a)")


def product(a: Any, b: Any, stages: int) -> Any:
    """A·Bᵀ by the example's kernel, into an array of NaN."""
    program = example.multicast_gemm.trace(stages=stages)
    compiled = compile_source(print_cuda(program), program.name, arch="sm_90a")
    kernel = load(compiled, 0)
    m, n, depth = a.shape[0], b.shape[0], a.shape[1]
    out = torch.full((m, n), torch.nan, device="cuda")
    maps = [
        encode(x.data_ptr(), TensorMapSpec(bf16, (depth, x.shape[0]), (2 * depth,), (example.TILE_K, rows), 128), 0)
        for x, rows in ((a, example.TILE_M), (b, example.HALF_N))
    ]
    grid = (m // example.TILE_M, n // example.TILE_N)
    made = kernel.configure(grid, program.threads, shared_bytes=program.shared_bytes)
    arguments = [*maps, out.data_ptr(), scalar(u32, n), scalar(u32, depth // example.TILE_K)]
    made.queue(current_stream("torch", 0), made.pack(arguments))
    torch.cuda.synchronize()
    return out


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize(("m", "n", "depth"), [(128, 128, 64), (256, 128, 256), (1024, 512, 1024), (8192, 2048, 512)])
def test_product_is_exact_to_the_last_bits_of_f32(m: int, n: int, depth: int, stages: int) -> None:
    generator = torch.Generator("cuda").manual_seed(m + n + depth + stages)
    a, b = (torch.randn(rows, depth, device="cuda", generator=generator).bfloat16() for rows in (m, n))
    got = product(a, b, stages).cpu().numpy().astype(np.float64)
    x, y = (t.double().cpu().numpy() for t in (a, b))
    allowed = depth * 2.0**-22 * (np.abs(x) @ np.abs(y).T)  # of float32 sums in any order
    assert np.isfinite(got).all()
    assert float((np.abs(got - x @ y.T) / allowed).max()) <= 1.0


def test_repeated_launches_agree_bit_by_bit() -> None:
    a, b = (torch.randn(rows, 2048, device="cuda").bfloat16() for rows in (2048, 1024))
    first = product(a, b, 4)
    for _ in range(20):
        assert torch.equal(first, product(a, b, 4))


def test_grids_that_the_cluster_does_not_divide_are_refused() -> None:
    from warploom.core.errors import ConfigError

    a, b = (torch.zeros(rows, 64, device="cuda", dtype=torch.bfloat16) for rows in (64, 128))
    with pytest.raises(ConfigError, match="multiple of the cluster"):
        product(a, b, 2)


def test_the_emulator_agrees_with_the_gpu() -> None:
    from warploom.emulate import emulate

    launch = example.example(np.random.default_rng(3))
    assert emulate(example.multicast_gemm.trace(), launch.grid, launch.arguments).findings == ()
    a, b = (
        torch.from_numpy(np.ascontiguousarray(x).view(np.int16)).view(torch.bfloat16).cuda()
        for x, _ in launch.arguments[:2]
    )
    np.testing.assert_allclose(product(a, b, 2).cpu().numpy(), launch.arguments[2], rtol=1e-4, atol=1e-3)


def test_ranks_and_places_are_the_emulators() -> None:
    from warploom.emulate import emulate

    emulated = np.zeros((6, 4, 8), np.uint32)
    emulate(who.trace(), (4, 6), [emulated])
    out = torch.zeros(6, 4, 8, dtype=torch.int32, device="cuda")
    launch(who.trace(), (4, 6), [out])
    np.testing.assert_array_equal(out.cpu().numpy(), emulated)


@pytest.mark.parametrize("how", ["barrier", "cluster cluster"])
def test_writes_cross_a_cluster(how: str) -> None:
    for _ in range(50):
        out = torch.full((512,), torch.nan, device="cuda")
        launch(pass_on.trace(how=how), 4, [out])
        expected = torch.arange(256.0, device="cuda").reshape(4, 64).roll(-1, dims=0)
        assert torch.equal(out[256:].reshape(4, 64), expected)
