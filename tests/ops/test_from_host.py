"""CPU arrays on a GPU: what is copied there meets the kernel's parameters. The GPU is played by the emulator."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import warploom
from warploom.core.targets import target
from warploom.emulate import emulate
from warploom.lang.functions import silu
from warploom.ops import attention_plan, backends, matmul, places
from warploom.ops.recipes import Recipe


class Copy:
    """What DeviceCopy is, in the host's memory; ``copy=False`` leaves it poisoned."""

    addresses = count(4096, 4096)
    memory: dict[int, np.ndarray[Any, Any]] = {}  # noqa: RUF012

    def __init__(self, host: np.ndarray[Any, Any], device: int, *, copy: bool = True) -> None:
        self.host, self.pointer = host, next(self.addresses)
        self.memory[self.pointer] = host.copy() if copy else np.full_like(host, np.nan)

    def download(self) -> None:
        self.host[...] = self.memory[self.pointer]


class EmulatedCall:
    """A GpuCall whose launches are emulated."""

    device = 0
    run_from_host = backends.GpuCall.run_from_host

    def __init__(self, recipe: Recipe, grid: Any, scalars: Mapping[str, int], device: int, mapped: Any = ()) -> None:
        assert not mapped
        self.program, self.grid = recipe.program, grid
        self.scalars = [scalars[p.name] for p in self.program.parameters if p.kind == "scalar"]

    def launch_again(self, pointers: tuple[int, ...], kind: str) -> None:
        arrays = [Copy.memory[p] for p in pointers]
        found = emulate(self.program, self.grid, [*arrays, *self.scalars])
        assert found.findings == ()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of sm_80 with two multiprocessors."""
    monkeypatch.setattr("warploom.cuda.buffers.DeviceCopy", Copy)
    monkeypatch.setattr(places, "gpu_present", lambda: True)
    monkeypatch.setattr(places, "gpu_target", lambda _: target("sm_80"))
    monkeypatch.setattr(places, "multiprocessors", lambda _: 2)
    for room in (matmul, attention_plan):
        monkeypatch.setattr(room, "tuned", lambda *_: None)
    monkeypatch.setattr(backends.GpuCall, "prepare", EmulatedCall)


def random(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(ml_dtypes.bfloat16)


def near(found: np.ndarray[Any, Any], exact: np.ndarray[Any, Any]) -> bool:
    return bool((np.abs(found.astype(np.float64) - exact) <= 2**-7 * (np.abs(exact) + 1)).all())


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("config", [None, "BM=32,BN=32,BK=32,WM=16,WN=16,STAGES=2,accumulate=f32,dtype=bf16,split_k=2"])
def test_what_is_combined_with_the_sums(batch: tuple[int, ...], config: str | None) -> None:
    a, b, bias = random(*batch, 40, 72), random(72, 48), random(48)
    gate, residual = random(*batch, 40, 48), random(*batch, 40, 48)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    assert near(warploom.matmul(a, b, config=config), exact)
    exact += bias.astype(np.float64)
    assert near(warploom.matmul(a, b, bias=bias, config=config), exact)
    exact = exact / (1 + np.exp(-exact)) * gate.astype(np.float64) + residual.astype(np.float64)
    found = warploom.matmul(
        a, b, bias=bias, epilogue=lambda s, g, r: silu(s) * g + r, extras=(gate, residual), config=config
    )
    assert near(found, exact)


@pytest.mark.usefixtures("gpu")
def test_attention_with_its_log_sum_exp() -> None:
    q, k, v = (random(1, 70, 2, 64) for _ in range(3))
    out, lse = warploom.attention(q, k, v, return_lse=True)
    scores = np.einsum("bqhd,bkhd->bhqk", q.astype(np.float64), k.astype(np.float64)) / 8
    exact = np.log(np.exp(scores).sum(-1))
    weights = np.exp(scores - exact[..., None])
    assert near(out, np.einsum("bhqk,bkhd->bqhd", weights, v.astype(np.float64)))
    assert np.abs(lse - exact).max() <= 1e-4
