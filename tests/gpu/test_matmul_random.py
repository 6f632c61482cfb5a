"""Two thousand random matrix products on the GPU: what calls choose, and every rung of the ladder."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

from tests.gpu.products import EPILOGUES, Family, assert_products  # noqa: E402 (after the skip)
from warploom.core.dtypes import bf16, f16, f32  # noqa: E402
from warploom_lab.kernels.matmul.ladder import BEST32, LADDER, summed_in  # noqa: E402
from warploom_lab.kernels.matmul.ladder_config import RungGemm  # noqa: E402

FAMILIES = 40
PROBLEMS_PER_FAMILY = 50
CONFIGS: tuple[Any, ...] = (
    *(rung.config for rung in LADDER.rungs),
    replace(BEST32, tile_m=64, warp_m=32, tile_n=64, warp_n=32),
)


def family(number: int) -> Family:
    """A third takes the configuration that calls choose; rungs of the ladder have no epilogue."""
    draw = random.Random(number)
    dtype = draw.choice([f16, f16, bf16])
    accumulate = draw.choice([f32, f32, f16]) if dtype is f16 else f32
    free = number % 8 == 7
    chosen = None if number % 3 == 0 or free else CONFIGS[number % len(CONFIGS)]
    found = Family(
        dtype,
        accumulate,
        draw.choice([None, None, f32, f16, bf16]),
        draw.random() < 0.6,
        draw.random() < 0.5,
        1 if free else draw.choice([1, 2, 4, 8, 8, 8]),
        free,
        draw.choice(list(EPILOGUES)),
        draw.random() < 0.4,
        draw.choice([1.0, 1.0, -0.5]),
        draw.random() < 0.4,
        None if chosen is None else replace(summed_in(chosen, accumulate), dtype=dtype),  # type: ignore[type-var]
    )
    return replace(found, epilogue="none", bias=False, alpha=1.0) if isinstance(chosen, RungGemm) else found


@pytest.mark.parametrize("number", range(FAMILIES))
def test_random_products(number: int) -> None:
    assert_products(family(number), PROBLEMS_PER_FAMILY, number)


def test_the_families_cover_what_there_is() -> None:
    """Both layouts of A and B, every type of result, every epilogue and rung, every alignment, extents of any kind."""
    found = [family(number) for number in range(FAMILIES)]
    assert {(f.a_rows, f.b_rows) for f in found} == {(x, y) for x in (True, False) for y in (True, False)}
    assert {f.out for f in found} == {None, f16, bf16, f32}
    assert {f.epilogue for f in found} == set(EPILOGUES)
    assert {f.unit for f in found} == {1, 2, 4, 8}
    assert {(f.dtype, f.accumulate) for f in found} == {(f16, f32), (f16, f16), (bf16, f32)}
    assert sum(f.free for f in found) >= 5
    assert len({f.config for f in found}) >= len(CONFIGS)
