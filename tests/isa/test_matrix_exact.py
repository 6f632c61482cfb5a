"""Integer and double ``mma``, ``movmatrix``: exact results, and what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.isa.every_form import WMMA_PRODUCTS
from warploom.core.dtypes import DTYPES, bf16, f16, f32, f64, s8, s32, tf32, u8
from warploom.core.errors import VerifyError
from warploom.isa.instruction import named
from warploom.isa.matrix import fragment_registers, mma, wmma_load, wmma_mma, wmma_store
from warploom.layout.wmma import WMMA_ACCUMULATORS

WARPS = 3


def packed(slot, matrices):
    return slot.registers(matrices)


@pytest.mark.parametrize(
    ("shape", "a", "b"), list(itertools.product(("m8n8k16", "m16n8k16", "m16n8k32"), (s8, u8), (s8, u8)))
)
def test_integer_products_are_exact(shape, a, b):
    instruction = mma(shape, a, s32, b)
    slots = instruction.slots
    rng = np.random.default_rng(0)
    kinds = [slot.dtype.numpy for slot in slots]
    bounds = [np.iinfo(k) for k in kinds]
    left, right, start = (
        rng.integers(x.min, x.max, (WARPS, *slot.layout.shape), endpoint=True).astype(k)
        for slot, x, k in zip(slots, bounds, kinds, strict=True)
    )
    operands = [r for slot, m in zip(slots, (left, right, start), strict=True) for r in packed(slot, m)]
    assert len(operands) == len(instruction.operand_types)
    found = slots[2].matrix(instruction.meaning(*operands))
    expected = (left.astype(np.int64) @ right.astype(np.int64) + start).astype(np.int32)  # wraps, as the GPU does
    assert (found == expected).all()


@pytest.mark.parametrize("shape", ["m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"])
def test_double_products(shape):
    instruction = mma(shape, f64, f64)
    rng = np.random.default_rng(1)
    matrices = [rng.integers(-1000, 1000, (WARPS, *slot.layout.shape)).astype(np.float64) for slot in instruction.slots]
    operands = [r for slot, m in zip(instruction.slots, matrices, strict=True) for r in packed(slot, m)]
    assert [o.dtype for o in operands] == [np.dtype(np.float64)] * len(instruction.operand_types)
    found = instruction.slots[2].matrix(instruction.meaning(*operands))
    assert (found == matrices[0] @ matrices[1] + matrices[2]).all()


def test_movmatrix_transposes():
    rows = np.arange(WARPS * 64, dtype=np.uint16).reshape(WARPS, 8, 8)
    (result,) = named("movmatrix.sync.aligned.m8n8.trans.b16").meaning(rows.view(np.uint32).reshape(WARPS, 32))
    assert (result.view(np.uint16).reshape(WARPS, 8, 8) == rows.transpose(0, 2, 1)).all()
    (back,) = named("movmatrix.sync.aligned.m8n8.trans.b16").meaning(result)
    assert (back.view(np.uint16).reshape(WARPS, 8, 8) == rows).all()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: mma("m16n8k8", s8, s32, s8),
        lambda: mma("m16n8k16", s8, s32, bf16),
        lambda: mma("m16n16k16", f64, f64),
        lambda: wmma_load("A", "m16n16k16", f32, "row", "global"),
        lambda: wmma_load("C", "m16n16k16", bf16, "row", "shared"),
        lambda: wmma_store("m8n8k4", f32, "row", "global"),
        lambda: wmma_mma("m16n16k16", bf16, f16),
    ],
)
def test_what_the_isa_does_not_have_is_refused(wrong):
    with pytest.raises(VerifyError):
        wrong()


def test_wmma_registers_are_those_of_the_isas_tables():
    def count(shape, operand, dtype):
        return fragment_registers(shape, operand, dtype)

    for shape in ("m16n16k16", "m32n8k16", "m8n32k16"):
        assert (count(shape, "A", f16), count(shape, "B", f16)) == (8, 8)
        assert (count(shape, "C", f16), count(shape, "C", f32), count(shape, "C", s32)) == (4, 8, 8)
    for dtype, expected in ((bf16, (4, 4, 8, 2, 2, 8)), (s8, (2, 2, 4, 1, 1, 4)), (u8, (2, 2, 4, 1, 1, 4))):
        found = tuple(count(s, o, dtype) for s in ("m16n16k16", "m32n8k16", "m8n32k16") for o in "AB")
        assert found == expected
    assert [count("m16n16k8", o, t) for o, t in (("A", tf32), ("B", tf32), ("C", f32))] == [4, 4, 8]
    assert [count("m8n8k4", o, f64) for o in "ABC"] == [1, 1, 2]


def test_types_of_wmma_mma_follow_its_registers():
    for shape, dtype in WMMA_PRODUCTS:
        for accumulator in WMMA_ACCUMULATORS[dtype.name]:
            product = wmma_mma(shape, dtype, DTYPES[accumulator])
            assert len(product.operand_types) == product.na + product.nb + product.nc
            assert len(product.result_types) == product.nc
