"""Classes of problems that share a fastest configuration: what must agree, and sizes up to a factor of about √2."""

from __future__ import annotations

import math
from collections.abc import Mapping


def size_class(operation: str, fixed: Mapping[str, object], sizes: Mapping[str, tuple[int, int, int]]) -> str:
    """The text of a class. ``sizes``: (size, least, most) with the limits as powers of two: nothing changes beyond."""
    rounded = {name: min(max(round(math.log2(max(x, 1))), least), most) for name, (x, least, most) in sizes.items()}
    words = [f"{name}={value}" for name, value in fixed.items()] + [f"{name}=2^{n}" for name, n in rounded.items()]
    return " ".join((operation, *words))
