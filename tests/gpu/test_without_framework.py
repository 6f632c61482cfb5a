"""A process that has NumPy alone: no framework has made a CUDA context before the first call."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

PROGRAM = """
import numpy as np, warploom
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, 512, 2, 128)).astype(np.float16) for _ in range(3))
out, lse = warploom.attention(q, k, v, return_lse=True)
scores = np.einsum("bqhd,bkhd->bhqk", q.astype(float), k.astype(float)) / 128**0.5
p = np.exp(scores - scores.max(-1, keepdims=True))
expected = np.einsum("bhqk,bkhd->bqhd", p / p.sum(-1, keepdims=True), v.astype(float))
assert np.abs(out - expected).max() < 2e-3, np.abs(out - expected).max()
assert np.isfinite(lse).all()
product = warploom.matmul(q[0, :, 0], k[0, :, 0].T)
assert np.allclose(product, q[0, :, 0].astype(float) @ k[0, :, 0].astype(float).T, atol=0.1)
print("right")
"""


def test_attention_and_matmul_on_numpy_arrays():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "right", done.stderr
