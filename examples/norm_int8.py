"""RMS norm of bf16 rows to int8 with a scale for each row, one warp a row. Check it: warploom check norm_int8.py"""

import ml_dtypes
import numpy as np

from warploom.lang import Global, Kernel, Launch, bf16, f32, kernel, s8, u32

WARPS = 4
SPAN = 128
"""Columns that a warp takes at a time, four for each lane."""


@kernel(threads=32 * WARPS, outputs=["y", "scale"])
def norm_int8(
    k: Kernel, x: Global[bf16], weight: Global[f32], y: Global[s8], scale: Global[f32], rows: u32, *, cols: int = 256
) -> None:
    """y = round(n / scale) for n = x / rms(x) · weight, with scale = max(abs(n)) / 127 in each row."""
    row = k.cta_x * WARPS + k.warp
    with k.when(row < rows):
        start = k.mul_wide(row, cols)
        columns = [first + k.lane * 4 for first in range(0, cols, SPAN)]
        values, weights = [], []
        for col in columns:
            for pair in (x + start).load(col, 2, dtype=u32):
                values += k.unpack(pair, bf16)
            weights += weight.load(col, 4)
        squares = over_lanes(k, "add", k.reduce_values("add", [v * v for v in values]))
        factor = k.rsqrt(squares * (1 / cols) + 1e-6)
        normed = [v * factor * w for v, w in zip(values, weights, strict=True)]
        largest = over_lanes(k, "max", k.reduce_values("max", [abs(v) for v in normed]))
        inverse = 127.0 / k.maximum(largest, 1e-20)
        for i, col in enumerate(columns):
            (y + start).store(k.pack_bytes([v * inverse for v in normed[4 * i : 4 * i + 4]], s8), col, dtype=u32)
        with k.when(k.lane == 0):
            scale.store(largest / 127.0, row)


def over_lanes(k: Kernel, op, x):
    """The sum or the maximum of a warp's values, in every lane."""
    for step in (16, 8, 4, 2, 1):
        x = k.reduce_values(op, [x, k.shfl_xor(x, step)])
    return x


@norm_int8.example
def random_rows(rng: np.random.Generator, cols: int = 256) -> Launch:
    rows = 6
    x, weight = rng.standard_normal((rows, cols)).astype(ml_dtypes.bfloat16), rng.standard_normal(cols)
    exact = x.astype(np.float64)
    normed = exact / np.sqrt((exact**2).mean(1, keepdims=True) + 1e-6) * weight
    scale = abs(normed).max(1) / 127
    arguments = [x, weight.astype(np.float32), np.zeros((rows, cols), np.int8), np.full(rows, np.nan, np.float32), rows]
    expect = {"y": (normed / scale[:, None], 0.51), "scale": (scale, 1e-5)}  # rounded to a whole number: off by a half
    return Launch(-(-rows // WARPS), arguments, expect)
