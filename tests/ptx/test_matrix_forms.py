"""``mma.sync`` and ``wgmma`` of 8-bit floats and integers, tf32 and f16 sums, against products of their values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ptx.text import check, kernel, kinds
from warploom.core.dtypes import DTYPES, DType, e4m3, e5m2
from warploom.isa.instruction import named
from warploom.isa.matrix import FragmentSlot
from warploom.layout.catalogue import mma_fragment, wgmma_accumulator
from warploom.layout.wgmma import MatrixDescriptor, element_addresses

TYPES = DTYPES | {"e4m3": e4m3, "e5m2": e5m2}
FLOATS = [("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3"), ("e5m2", "e5m2")]


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> np.ndarray[Any, Any]:
    """Elements whose products and sums are exact in every type of sums."""
    return rng.integers(0 if dtype.kind == "unsigned" else -3, 4, shape).astype(dtype.numpy)


def names(prefix: str, first: int, count: int) -> str:
    return ", ".join(f"{prefix}{n}" for n in range(first, first + count))


@pytest.mark.parametrize("shape", ["m16n8k16", "m16n8k32"])
@pytest.mark.parametrize("sums", ["f32", "f16"])
@pytest.mark.parametrize(("a", "b"), FLOATS)
def test_products_of_8_bit_floats(shape: str, sums: str, a: str, b: str) -> None:
    made = named(f"mma.sync.aligned.{shape}.row.col.{sums}.{a}.{b}.{sums}")
    assert made.since == "sm_89"
    rng, (of_a, of_b, of_c) = np.random.default_rng(1), made.slots
    types = TYPES[a], TYPES[b], TYPES[sums]
    given = [values(rng, slot.layout.shape, t) for slot, t in zip(made.slots, types, strict=True)]
    registers = [r for slot, x in zip(made.slots, given, strict=True) for r in slot.registers(x[None])]
    body = f"""mov.u32 %r0, %tid.x; mad.wide.u32 %d4, %r0, 4, %d0; mad.wide.u32 %d5, %r0, 4, %d1;
    {"".join(f"ld.global.b32 %r{10 + n}, [%d4+{128 * n}];" for n in range(len(registers)))}
    {made.ptx_name} {{{names("%r", 40, of_c.count)}}}, {{{names("%r", 10, of_a.count)}}},
    {{{names("%r", 10 + of_b.first, of_b.count)}}}, {{{names("%r", 10 + of_c.first, of_c.count)}}};
    {"".join(f"st.global.b32 [%d5+{128 * n}], %r{40 + n};" for n in range(of_c.count))}"""
    taken, out = np.concatenate([r.view(np.uint32) for r in registers]), np.zeros((of_c.count, 32), np.uint32)
    assert check(kernel(body, ["u64", "u64"], target="sm_90"), [taken, out]).findings == ()
    wide = [x.astype(np.float64) for x in given]
    np.testing.assert_array_equal(of_c.matrix([x[None] for x in out])[0], wide[0] @ wide[1] + wide[2])


N = 24
PRODUCTS = [
    *((f"m64n{N}k32.{sums}.{a}.{b}", a, b, sums) for a, b in FLOATS for sums in ("f32", "f16")),
    *((f"m64n{N}k32.s32.{a}.{b}", a, b, "s32") for a in ("s8", "u8") for b in ("s8", "u8")),
    (f"m64n{N}k32.s32.s8.u8.satfinite", "s8", "u8", "s32"),
    (f"m64n{N}k8.f32.tf32.tf32", "tf32", "tf32", "f32"),
    (f"m64n{N}k16.f16.f16.f16", "f16", "f16", "f16"),
    (f"m64n{N}k16.f32.bf16.bf16", "bf16", "bf16", "f32"),
]
CORES = MatrixDescriptor(0, stride=256, leading=128)
"""Matrices of 8 rows of 16 bytes one after another, two along K."""


def in_memory(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bytes of an operand in shared memory, (rows, k)."""
    size, (rows, depth) = x.dtype.itemsize, x.shape
    descriptor = CORES.high_word << 32 | CORES.low_word(0)
    places = element_addresses(descriptor, rows, depth, k_contiguous=True, element_bytes=size)
    memory = np.zeros(32 * rows, np.uint8)
    for byte in range(size):
        memory[places + byte] = x.view(np.uint8).reshape(*x.shape, size)[..., byte]
    return memory


@pytest.mark.parametrize("a_source", ["shared", "registers"])
@pytest.mark.parametrize(("form", "a", "b", "sums"), PRODUCTS)
def test_products_of_a_warpgroup(form: str, a: str, b: str, sums: str, a_source: str) -> None:
    """Two products, the second added to the first."""
    bits, depth = TYPES[a].bits, int(form.partition(".")[0].partition("k")[2])
    rng = np.random.default_rng(2)
    left, right = values(rng, (64, depth), TYPES[a]), values(rng, (N, depth), TYPES[b])
    layout = wgmma_accumulator(N, 16 if sums == "f16" else 32)
    accumulator = FragmentSlot(layout, TYPES[sums], 0, layout.registers)
    rows = mma_fragment(f"m16n8k{depth}", "A", bits)
    of_a = FragmentSlot(rows, TYPES[a], 0, rows.registers).registers(left.reshape(4, 16, depth))
    first = "%d10" if a_source == "shared" else f"{{{names('%r', 30, 4)}}}"
    scales = "" if sums == "s32" else ", 1, 1"
    transposes = "" if bits != 16 else ", 0, 0" if a_source == "shared" else ", 0"
    product = f"wgmma.mma_async.sync.aligned.{form} {{{names('d', 0, layout.registers)}}}, {first}, %d11, %p"
    body = f""".reg .{"f32" if sums == "f32" else "b32"} d<{
        layout.registers
    }>; mov.u32 %r0, %tid.x; mov.u32 %r1, memory;
    mad.lo.u32 %r2, %r0, 4, %r1; {"".join(f"mad.wide.u32 %d{5 + i}, %r0, 4, %d{i};" for i in range(3))}
    {"".join(f"ld.global.b32 %r{30 + i}, [%d6+{512 * i}];" for i in range(4))}
    {"".join(f"ld.global.u32 %r3, [%d5+{512 * i}]; st.shared.u32 [%r2+{512 * i}], %r3;" for i in range(6))}
    fence.proxy.async; bar.sync 0;
    {
        "".join(
            f"add.u32 %r4, %r1, {2048 * i}; shr.u32 %r4, %r4, 4; cvt.u64.u32 %d9, %r4; "
            f"or.b64 %d{10 + i}, %d9, {CORES.high_word << 32 | CORES.low_word(0)};"
            for i in (0, 1)
        )
    }
    setp.ne.b32 %p1, 0, 0; setp.eq.b32 %p2, 0, 0; wgmma.fence.sync.aligned;
    {"".join(f"{product}{i}{scales}{transposes};" for i in (1, 2))}
    wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
    {"".join(f"st.global.b32 [%d7+{512 * n}], d{n};" for n in range(layout.registers))}"""
    memory = np.zeros(3072, np.uint8)
    memory[:2048], memory[2048 : 2048 + 32 * N] = in_memory(left), in_memory(right)
    taken = np.concatenate([r.reshape(-1) for r in of_a]).view(np.uint32)
    out = np.zeros((layout.registers, 128), np.uint32)
    text = kernel(body, ["u64"] * 3, ".shared .align 128 .b8 memory[3072];", "sm_90a")
    assert check(text, [memory.view(np.uint32), taken, out], 128).findings == ()
    wide = [x.astype(np.float64) for x in (left, right)]
    np.testing.assert_array_equal(accumulator.matrix([x[None] for x in out])[0], 2 * wide[0] @ wide[1].T)
    early = text.replace("wgmma.wait_group.sync.aligned 0;", "")
    assert "in_flight" in kinds(check(early, [memory.view(np.uint32), taken, out], 128).findings)
