from __future__ import annotations

import numpy as np
import pytest

from warploom.core.errors import LayoutError
from warploom.layout import FragmentLayout, LinearMap, MatrixPlan, ldmatrix_plan, mma_fragment, stmatrix_plan

A = mma_fragment("m16n8k16", "A")
B = mma_fragment("m16n8k16", "B")
LANES = np.arange(32)


def load(plan: MatrixPlan, memory: np.ndarray) -> np.ndarray:
    """ldmatrix as the PTX ISA describes it, on a memory tile [rows, cols] → elements [32, 2 · count] of the target."""
    at = plan.address.apply(lane=LANES)
    chunks = np.stack([memory[r, c : c + 8] for r, c in zip(at["row"], at["col"], strict=True)])  # [lane, 8]
    elements = np.zeros((32, 2 * plan.count), dtype=memory.dtype)
    for i in range(plan.count):
        matrix = chunks[8 * i : 8 * i + 8]
        if plan.transposed:
            matrix = matrix.T
        target = plan.register_order[i]
        elements[:, 2 * target : 2 * target + 2] = matrix[LANES // 4].reshape(32, 4, 2)[LANES, LANES % 4]
    return elements


CASES = [
    # target in memory coordinates, transposed
    (A, False),
    (A.transposed(), True),
    (B, True),
    (B.transposed(), False),
    (B.tile(1, 2), True),
    (B.tile(1, 2).transposed(), False),
    (B.tile(2, 1).transposed(), False),
    (mma_fragment("m16n8k8", "A", 16), False),
    (mma_fragment("m16n8k8", "B", 16).transposed(), False),
    (mma_fragment("m16n8k8", "B", 16), True),
    (mma_fragment("m16n8k8", "B", 16).tile(4, 1), True),
]


@pytest.mark.parametrize(("target", "transposed"), CASES)
def test_ldmatrix_fills_the_fragment(target: FragmentLayout, transposed: bool) -> None:
    plan = ldmatrix_plan(target, transposed)
    memory = np.arange(target.shape[0] * target.shape[1]).reshape(target.shape)
    assert (load(plan, memory) == memory.reshape(-1)[target.gather_index()]).all()
    assert plan.count == target.registers
    assert stmatrix_plan(target, transposed).address == plan.address


def test_addresses_of_the_gemm_series() -> None:
    at = ldmatrix_plan(A, False).address.apply(lane=LANES)
    assert (at["row"] == (LANES >> 3 & 1) * 8 + (LANES & 7)).all()
    assert (at["col"] == (LANES >> 4) * 8).all()
    plan = ldmatrix_plan(B, True)
    assert plan.count == 2
    assert (plan.address.apply(lane=LANES)["row"] == (LANES & 15)).all()


def test_both_orders_of_the_16x16_load() -> None:
    # K as two B operands: kernel 9 loads row-major, so that each operand's two registers are neighbours; kernel 8
    # loads column-major and has to copy.
    keys = B.tile(1, 2).transposed()
    assert keys.map.bases("register") == ((0, 1), (0, 8), (8, 0))
    ninth = ldmatrix_plan(keys, False)
    assert ninth.register_order == (0, 1, 2, 3)
    assert ninth.address.bases("lane")[3:] == ((0, 8), (8, 0))
    eighth = ldmatrix_plan(keys, False, bit_order=(0, 2, 1))
    assert eighth.register_order == (0, 2, 1, 3)
    assert eighth.address.bases("lane")[3:] == ((8, 0), (0, 8))
    memory = np.arange(256).reshape(16, 16)
    expected = memory.reshape(-1)[keys.gather_index()]
    for plan in (eighth, ninth):
        assert (load(plan, memory) == expected).all()
    assert ldmatrix_plan(keys.map.permute_bits("register", (0, 2, 1)), False).address == eighth.address
    assert str(eighth).startswith("ldmatrix.x4 {r0, r2, r1, r3} from lane")


def test_what_ldmatrix_cannot_load_is_refused() -> None:
    with pytest.raises(LayoutError, match="with transposed"):
        ldmatrix_plan(B, False)
    with pytest.raises(LayoutError, match="without transposed"):
        ldmatrix_plan(A, True)
    with pytest.raises(LayoutError, match="16-bit ones"):
        ldmatrix_plan(mma_fragment("m16n8k8", "A", 32), False)
    with pytest.raises(LayoutError, match="in parts"):
        ldmatrix_plan(A.tile(1, 2), False)
    with pytest.raises(LayoutError, match="stay first"):
        ldmatrix_plan(A, False, bit_order=(1, 0, 2))
    spread = LinearMap(dict(A.atom.ins) | {"register": [(0, 1), (0, 8), (0, 0)]}, {"row": 16, "col": 16})
    assert ldmatrix_plan(spread, False).count == 4  # a matrix loaded twice is legal
    unaligned = LinearMap({"register": [(0, 1), (0, 4)], "lane": A.atom.bases("lane")}, {"row": 16, "col": 16})
    with pytest.raises(LayoutError, match="16-byte aligned"):
        ldmatrix_plan(unaligned, False)
