"""What the Triton kernels of the tests are run on, and what they should give."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.with_triton import kernels


@dataclass
class Case:
    """A launch: ``error`` is the largest error of its outputs over the tolerance; right is at most 1."""

    kernel: Any
    grid: Any
    arguments: list[Any]
    error: Callable[[], float]
    meta: dict[str, Any] = field(default_factory=dict)


def within(got: Any, wanted: Any, tolerance: float) -> float:
    """The largest error over what is allowed, relative to the largest element; NaN is infinite."""
    worst = np.abs(got.astype(np.float64) - wanted).max() / (tolerance * max(1.0, np.abs(wanted).max()))
    return float("inf") if np.isnan(worst) else float(worst)


def add(rng: np.random.Generator) -> Case:
    x, y = rng.standard_normal((2, 3000)).astype(np.float32)
    out = np.full_like(x, np.nan)
    grid: Callable[..., Any] = lambda meta: (-(-meta["n"] // meta["BLOCK"]),)  # noqa: E731
    return Case(kernels.add, grid, [x, y, out, 3000], lambda: within(out, x + y, 1e-7), {"BLOCK": 1024})


def softmax(rng: np.random.Generator) -> Case:
    x = rng.standard_normal((13, 781)).astype(np.float32)
    out = np.full_like(x, np.nan)
    powers = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    wanted = powers / powers.sum(1, keepdims=True)
    return Case(
        kernels.softmax,
        3,
        [x, out, 13, 781, 781],
        lambda: within(out, wanted, 1e-6),
        {"BLOCK": 1024, "STAGES": 3, "num_warps": 8},
    )


def matmul(rng: np.random.Generator) -> Case:
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((100, 96), (96, 128)))
    c = np.full((100, 128), np.nan, np.float16)
    wanted = a.astype(np.float64) @ b.astype(np.float64)
    return Case(
        kernels.matmul,
        (2, 2),
        [a, b, c, 100, 128, 96, 96, 128, 128],
        lambda: within(c, wanted, 1e-3),
        {"TILE_M": 64, "TILE_N": 64, "TILE_K": 32, "num_stages": 3},
    )


def layer_norm(rng: np.random.Generator) -> Case:
    x = rng.standard_normal((5, 1504)).astype(np.float16)
    weight, bias = rng.standard_normal((2, 1504)).astype(np.float16)
    out, mean, rstd = np.full_like(x, np.nan), np.full(5, np.nan, np.float32), np.full(5, np.nan, np.float32)
    exact = x.astype(np.float64)
    away = exact - exact.mean(1, keepdims=True)
    wanted = away / np.sqrt((away**2).mean(1, keepdims=True) + 1e-5) * weight + bias
    return Case(
        kernels.layer_norm,
        5,
        [x, weight, bias, out, mean, rstd, 1504, 1e-5],
        lambda: max(within(out, wanted, 1e-3), within(mean, exact.mean(1), 1e-5)),
        {"BLOCK": 1024},
    )


def locks(rng: np.random.Generator) -> Case:
    x = rng.integers(-8, 8, (12, 200)).astype(np.float32)
    sums, held = np.zeros((2, 200), np.float32), np.zeros(2, np.int32)
    wanted = np.stack([x[0::2].sum(0), x[1::2].sum(0)])
    return Case(
        kernels.row_sums_under_locks,
        12,
        [x, sums, held, 200],
        lambda: within(sums, wanted, 1e-6) + held.sum(),
        {"GROUPS": 2, "BLOCK": 256},
    )


def attention(rng: np.random.Generator, length: int = 192, heads: int = 2, causal: bool = True) -> Case:
    q, k, v = rng.standard_normal((3, heads, length, 64)).astype(np.float16)
    out, lse = np.full_like(q, np.nan), np.full((heads, length), np.nan, np.float32)
    scores = np.einsum("hid,hjd->hij", q.astype(np.float64), k.astype(np.float64)) / 8
    if causal:
        scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = powers / powers.sum(-1, keepdims=True) @ v.astype(np.float64)
    scale = 0.125 * float(np.log2(np.e))
    in_twos = (np.log(powers.sum(-1)) + scores.max(-1)) / np.log(2)
    return Case(
        kernels.attention,
        (length // 64, heads),
        [q, k, v, out, lse, scale, length],
        lambda: max(within(out, wanted, 2e-3), within(lse, in_twos, 1e-5)),
        {"TILE_M": 64, "TILE_N": 64, "HEAD": 64, "CAUSAL": causal, "num_stages": 2},
    )


class Descriptor:
    """What Triton's TensorDescriptor tells, of a NumPy array."""

    def __init__(self, base: Any, block_shape: list[int]) -> None:
        self.base, self.block_shape = base, block_shape
        self.shape, self.strides = list(base.shape), [base.shape[1], 1]


def descriptors(rng: np.random.Generator) -> Case:
    """A matmul by tensor maps, for sm_90."""
    a, b = (rng.standard_normal((n, 320)).astype(np.float16) for n in (128, 96))
    c = np.full((128, 96), np.nan, np.float16)
    given = [Descriptor(x, [64, 64]) for x in (a, b, c)]
    return Case(
        kernels.matmul_by_descriptors,
        (2, 2),
        [*given, 320],
        lambda: within(c, a.astype(np.float64) @ b.astype(np.float64).T, 1e-3),
        {"TILE_M": 64, "TILE_N": 64, "TILE_K": 64, "num_stages": 3},
    )


def own_descriptors(rng: np.random.Generator, tile_m: int = 64, specialised: bool = False) -> Case:
    """The same with tensor maps that the kernel makes."""
    a, b = (rng.standard_normal((n, 320)).astype(np.float16) for n in (128, 96))
    c = np.full((128, 96), np.nan, np.float16)
    wanted = a.astype(np.float64) @ b.astype(np.float64).T
    return Case(
        kernels.matmul_with_own_descriptors,
        (128 // tile_m, 2),
        [a, b, c, 128, 96, 320],
        lambda: within(c, wanted, 1e-3),
        {"TILE_M": tile_m, "TILE_N": 64, "TILE_K": 64, "SPECIALISED": specialised, "num_stages": 3},
    )


def specialised(rng: np.random.Generator) -> Case:
    """The same by warps of different roles."""
    return own_descriptors(rng, 128, specialised=True)


CASES = {make.__name__: make for make in (add, softmax, matmul, layer_norm, locks, attention)}
HOPPER = {make.__name__: make for make in (matmul, attention, descriptors, own_descriptors, specialised)}
