"""``wmma`` against NumPy, in every order of the operands."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx.text import check, kernel
from warploom.core.errors import PtxError


def product(a_order: str, b_order: str, space: str = "global") -> str:
    """One warp multiplies two 16x16 matrices of f16."""
    a, b, c = ("{" + ", ".join(f"%{x}{i}" for i in range(8)) + "}" for x in ("a", "b", "f"))
    return f""".reg .b32 %a<8>; .reg .b32 %b<8>; mov.u32 %r9, 16;
    wmma.load.a.sync.aligned.{a_order}.m16n16k16.{space}.f16 {a}, [%d0], %r9;
    wmma.load.b.sync.aligned.{b_order}.m16n16k16.{space}.f16 {b}, [%d1], %r9;
    wmma.load.c.sync.aligned.row.m16n16k16.global.f32 {c}, [%d2], 16;
    wmma.mma.sync.aligned.{a_order}.{b_order}.m16n16k16.f32.f32 {c}, {a}, {b}, {c};
    bar.warp.sync -1; wmma.store.d.sync.aligned.col.m16n16k16.global.f32 [%d2], {c}, %r9;"""


@pytest.mark.parametrize("a_order", ["row", "col"])
@pytest.mark.parametrize("b_order", ["row", "col"])
def test_a_product_of_fragments(a_order: str, b_order: str) -> None:
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal((16, 16)).astype(np.float16) for _ in range(2))
    c = rng.standard_normal((16, 16)).astype(np.float32)
    left, right = (
        x.astype(np.float64) if order == "row" else x.astype(np.float64).T for x, order in ((a, a_order), (b, b_order))
    )
    wanted = (left @ right + c).T
    assert check(kernel(product(a_order, b_order), ["u64"] * 3), [a, b, c]).findings == ()
    assert np.abs(c - wanted).max() < 1e-4


@pytest.mark.parametrize(("given", "wrong"), [("f32.f32", "f16.f32"), ("m16n16k16.global.f16", "m8n8k32.global.s4")])
def test_what_is_refused(given: str, wrong: str) -> None:
    x = np.zeros((16, 16), np.float16)
    with pytest.raises(PtxError, match="wmma"):
        check(kernel(product("row", "col").replace(given, wrong), ["u64"] * 3), [x, x, x.astype(np.float32)])


@pytest.mark.parametrize(
    "form",
    [
        "wmma.load.a.sync.aligned.row.m16n16k16.shared.s8 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%r9], %r10;",
        "wmma.store.d.sync.aligned.row.m16n16k16.global.f16 [%d1], {%f1, %f2, %f3, %f4, %f5, %f6, %f7, %f8}, %r9;",
    ],
)
def test_a_wrong_count_of_registers_is_refused(form: str) -> None:
    with pytest.raises(PtxError, match="registers"):
        check(kernel(form), [np.zeros(1)])
