"""Operations of PTX that are undefined for some operands are found, and those that are defined for all are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ptx.text import SIZES, check, kernel, kinds

INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")


def findings(instruction: str, bits: int, a: int, b: int) -> set[str]:
    """What is found where every thread runs ``instruction`` on two loaded integers, ``%in0`` and ``%in1``."""
    size = bits // 8
    dtype = np.dtype(f"u{size}")
    declared = "".join(f".reg .{SIZES[size]} %{name};\n" for name in ("in0", "in1", "out"))
    body = declared + "mov.u32 %r0, %tid.x;\n"
    body += "".join(f"mad.wide.u32 %d{20 + i}, %r0, {size}, %d{i};\n" for i in range(3))
    body += "".join(f"ld.global.{SIZES[size]} %in{i}, [%d{20 + i}];\n" for i in range(2))
    body += f"{instruction}\nst.global.{SIZES[size]} [%d22], %out;\n"
    given = [np.full(32, x % (1 << bits), dtype) for x in (a, b)]
    return kinds(check(kernel(body, ["u64"] * 3), [*given, np.zeros(32, dtype)]).findings)


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("op", ["div", "rem"])
def test_a_division_by_zero_is_found(op: str, kind: str) -> None:
    bits, text = int(kind[1:]), f"{op}.{kind} %out, %in0, %in1;"
    assert findings(text, bits, 7, 0) == {"undefined"}
    assert findings(text, bits, 7, 3) == set()


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("op", ["div", "rem"])
def test_a_division_by_a_constant_zero_is_found(op: str, kind: str) -> None:
    bits = int(kind[1:])
    assert findings(f"{op}.{kind} %out, %in0, 0;", bits, 7, 0) == {"undefined"}
    assert findings(f"{op}.{kind} %out, %in0, 3;", bits, 7, 0) == set()


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("op", ["div", "rem"])
def test_a_quotient_that_its_type_does_not_hold_is_found(op: str, kind: str) -> None:
    bits, least = int(kind[1:]), 1 << int(kind[1:]) - 1
    expected = {"undefined"} if kind[0] == "s" else set[str]()
    assert findings(f"{op}.{kind} %out, %in0, %in1;", bits, least, -1) == expected
    assert findings(f"{op}.{kind} %out, %in0, -1;", bits, least, 0) == expected
    assert findings(f"{op}.{kind} %out, %in0, %in1;", bits, least + 1, -1) == set()


@pytest.mark.parametrize("count", [0, 31, 32, 33, 200, -1])
@pytest.mark.parametrize("form", ["shl.b32", "shr.u32", "shr.s32", "shf.l.clamp.b32", "shf.r.wrap.b32"])
def test_a_shift_of_ptx_is_defined_for_every_count(form: str, count: int) -> None:
    operands = "%in0, %in0, %in1" if form.startswith("shf") else "%in0, %in1"
    assert findings(f"{form} %out, {operands};", 32, 5, count) == set()


@pytest.mark.parametrize("form", ["add.s32", "sub.s32", "mul.lo.s32", "neg.s32", "abs.s32"])
def test_signed_arithmetic_of_ptx_wraps(form: str) -> None:
    operands = "%in0" if form.startswith(("neg", "abs")) else "%in0, %in1"
    assert findings(f"{form} %out, {operands};", 32, 1 << 31, 1 << 31) == set()


@pytest.mark.parametrize("mode", ["idx", "bfly", "up", "down"])
def test_a_distance_beyond_the_warp_is_found_and_a_lane_is_taken_modulo_32(mode: str) -> None:
    clamp = 0 if mode == "up" else 31
    text = f"shfl.sync.{mode}.b32 %out, %in0, %in1, {clamp}, -1;"
    assert findings(text, 32, 5, 33) == ({"undefined"} if mode != "idx" else set())
    assert findings(text, 32, 5, 3) == set()


def copied(valid: int) -> Any:
    """Findings of a ``cp.async`` of 16 bytes that reads ``valid`` of them, which is loaded."""
    body = """
    mov.u32 %r0, %tid.x; mul.wide.u32 %d20, %r0, 16; add.s64 %d21, %d0, %d20; add.s64 %d22, %d1, %d20;
    ld.global.u32 %r2, [%d2]; mov.u32 %r3, memory; mad.lo.s32 %r3, %r0, 16, %r3;
    cp.async.cg.shared.global [%r3], [%d21], 16, %r2; cp.async.commit_group; cp.async.wait_group 0;
    ld.shared.v4.u32 {%r4, %r6, %r7, %r8}, [%r3]; st.global.v4.u32 [%d22], {%r4, %r6, %r7, %r8};
    """
    text = kernel(body, ["u64"] * 3, before=".shared .align 16 .b8 memory[512];\n")
    arrays = [np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32), np.array([valid], np.uint32)]
    return kinds(check(text, arrays).findings)


def test_a_copy_that_reads_more_than_it_copies_is_found() -> None:
    assert copied(17) == {"undefined"}
    assert copied(16) == copied(5) == set()
