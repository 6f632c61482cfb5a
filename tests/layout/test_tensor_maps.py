"""What the hardware takes of a tensor map: each rule is broken beside a map that keeps it."""

from __future__ import annotations

from typing import Any

import pytest

from warploom.core.dtypes import bf16
from warploom.core.errors import LayoutError
from warploom.layout.tensor_map import TensorMapSpec

GOOD: dict[str, Any] = {"dtype": bf16, "shape": (64, 32), "strides": (128,), "box": (64, 8), "swizzle_bytes": 128}
LARGE: dict[str, Any] = {"shape": (8,) * 6, "strides": (16,) * 5, "box": (8,) * 6, "swizzle_bytes": 0}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no dimension": ({"shape": (), "strides": (), "box": ()}, "1 to 5 dimensions"),
    "six dimensions": (LARGE, "1 to 5 dimensions"),
    "a box of another rank": ({"box": (64,)}, "1 to 5 dimensions"),
    "a stride too many": ({"strides": (2, 128)}, "one stride less"),
    "a stride too few": ({"strides": ()}, "one stride less"),
    "an empty box": ({"box": (64, 0)}, "1 to 256 elements"),
    "a large box": ({"box": (64, 257)}, "1 to 256 elements"),
    "a stride of eight bytes": ({"strides": (136,)}, "multiples of 16 bytes"),
    "another swizzle": ({"swizzle_bytes": 48}, "swizzled over"),
    "a row of eight bytes": ({"box": (4, 8), "swizzle_bytes": 0}, "inner row"),
    "a row beyond the swizzle": ({"swizzle_bytes": 64}, "inner row"),
}


def test_a_map_that_keeps_the_rules() -> None:
    assert TensorMapSpec(**GOOD).box == (64, 8)
    five = {
        name: value[:5] if name != "strides" else value[:4] for name, value in LARGE.items() if name != "swizzle_bytes"
    }
    assert len(TensorMapSpec(bf16, **five).shape) == 5


@pytest.mark.parametrize("name", BAD)
def test_a_map_that_breaks_one(name: str) -> None:
    changed, says = BAD[name]
    with pytest.raises(LayoutError, match=says):
        TensorMapSpec(**{**GOOD, **changed})
