"""Loads, stores and copies of PTX: vectors, bytes, variables in shared memory, atomics, and what is found there."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.ptx.text import check, kernel, kinds
from warploom.core.errors import ProblemError

TID = "mov.u32 %r0, %tid.x;"


@pytest.mark.parametrize(
    ("kind", "count", "dtype"),
    [
        ("u8", 1, np.uint8),
        ("s8", 1, np.int8),
        ("u16", 1, np.uint16),
        ("s16", 1, np.int16),
        ("b32", 1, np.uint32),
        ("b16", 2, np.uint16),
        ("b16", 4, np.uint16),
        ("u8", 2, np.uint8),
        ("s8", 4, np.int8),
        ("f32", 4, np.float32),
        ("f64", 2, np.float64),
        ("b64", 2, np.uint64),
    ],
)
def test_elements_of_every_width_as_vectors(kind, count, dtype):
    """Each thread moves a vector; sub-word integers are widened and stored as 32 bits as well."""
    size = np.dtype(dtype).itemsize
    registers = [{1: "%h", 2: "%h", 4: "%r", 8: "%d"}[size] + str(10 + i) for i in range(count)]
    if kind == "f32":
        registers = [f"%f{i}" for i in range(count)]
    elif kind == "f64":
        registers = [f"%e{i}" for i in range(count)]
    vector = f".v{count}" if count > 1 else ""
    listed = "{" + ", ".join(registers) + "}" if count > 1 else registers[0]
    signed = kind.replace("b", "u")
    body = f"""{TID} mul.wide.u32 %d20, %r0, {size * count}; add.s64 %d21, %d0, %d20; add.s64 %d22, %d1, %d20;
    ld.global{vector}.{kind} {listed}, [%d21]; st.global{vector}.{kind} [%d22], {listed};"""
    if size < 4:
        for i, register in enumerate(registers):
            body += f"cvt.{'s32.s16' if signed[0] == 's' else 'u32.u16'} %r3, {register};"
            body += f"mad.wide.u32 %d23, %r0, {4 * count}, %d2; st.global.u32 [%d23+{4 * i}], %r3;"
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, 32 * size * count, np.uint8).view(dtype)
    y, wide = np.zeros_like(x), np.zeros(32 * count, np.int32)
    assert check(kernel(body, ["u64"] * 3), [x, y, wide]).findings == ()
    assert y.tobytes() == x.tobytes()
    if size < 4:
        assert wide.tolist() == x.astype(np.int32).tolist()


def test_static_and_dynamic_shared_variables_lie_apart():
    body = f"""{TID} shl.b32 %r1, %r0, 2; mov.u32 %r2, one; mov.u32 %r3, all; add.u32 %r4, %r2, %r1;
    add.u32 %r5, %r3, %r1; st.shared.u32 [%r4], %r0; st.shared.u32 [%r5+128], 7; bar.sync 0;
    xor.b32 %r6, %r1, 4; add.u32 %r7, %r2, %r6; ld.shared.u32 %r8, [%r7]; ld.shared.u32 %r9, [all+128];
    add.u32 %r10, %r8, %r9; mul.wide.u32 %d1, %r0, 4; add.s64 %d2, %d0, %d1; st.global.u32 [%d2], %r10;"""
    before = ".shared .align 4 .b8 one[128]; .extern .shared .align 16 .b8 all[];"
    out = np.zeros(32, np.uint32)
    found = check(kernel(body, before=before), [out], shared_bytes=256)
    assert out.tolist() == [(n ^ 1) + 7 for n in range(32)]
    assert found.findings == ()
    assert [(r.name, r.offset, r.bytes) for r in found.program.shared] == [("one", 0, 128), ("all", 128, 256)]


def test_a_missing_barrier_is_a_race_with_both_lines():
    body = f"""{TID} shl.b32 %r1, %r0, 2; mov.u32 %r2, tile; add.u32 %r3, %r2, %r1;
    .loc 1 7 1
    st.shared.u32 [%r3], %r0;
    xor.b32 %r4, %r1, 128; add.u32 %r5, %r2, %r4;
    .loc 1 9 1
    ld.shared.u32 %r6, [%r5];
    mul.wide.u32 %d1, %r0, 4; add.s64 %d2, %d0, %d1; st.global.u32 [%d2], %r6;"""
    text = kernel(body, before='.file 1 "my_kernel.py"\n.shared .align 4 .b8 tile[256];')
    (finding,) = check(text, [np.zeros(64, np.uint32)], 64).findings
    assert finding.kind == "race"
    assert (finding.where.file, finding.where.line) == ("my_kernel.py", 9)
    assert finding.other is not None
    assert finding.other.line == 7
    lines = text.splitlines()
    assert "ld.shared" in lines[finding.where.ptx - 1]
    assert "st.shared" in lines[finding.other.ptx - 1]
    assert check(text.replace("xor.b32 %r4", "bar.sync 0; xor.b32 %r4"), [np.zeros(64, np.uint32)], 64).findings == ()


def test_without_lines_of_a_source_those_of_the_ptx_are_told():
    text = kernel("ld.global.u32 %r1, [%d0+4096]; st.global.u32 [%d0], %r1;")
    (finding,) = check(text, [np.zeros(32, np.uint32)], file="mine.ptx").findings
    assert finding.kind == "bounds"
    assert finding.where.file == "mine.ptx"
    assert "4096" in text.splitlines()[finding.where.line - 1]


def test_an_address_named_by_its_variable_stays_in_it():
    body = "st.shared.u32 [one+16], 1;"
    before = ".shared .align 4 .b8 one[16]; .shared .align 4 .b8 two[16];"
    (finding,) = check(kernel(body + "st.shared.u32 [two], 2;", before=before), [np.zeros(1, np.uint32)]).findings[:1]
    assert finding.kind == "bounds"
    assert "one" in finding.message


def test_an_address_that_a_register_has_from_one_variable_stays_in_it():
    before = ".shared .align 4 .b8 one[128]; .shared .align 4 .b8 two[128];"
    body = f"""{TID} mov.u32 %r2, one; mad.lo.u32 %r3, %r0, 4, %r2; mov.u32 %r4, two; mad.lo.u32 %r5, %r0, 4, %r4;
    st.shared.u32 [%r3], %r0; st.shared.u32 [%r5], 7; bar.sync 0;
    mov.u32 %r6, %r3; mov.u32 %r7, 0;
    again: ld.shared.u32 %r8, [%r6]; add.u32 %r6, %r6, STEP; add.u32 %r7, %r7, 1;
    setp.lt.u32 %p1, %r7, 2; @%p1 bra again;
    setp.ne.u32 %p2, %r0, 99; selp.u32 %r9, %r2, %r4, %p2; ld.shared.u32 %r10, [%r9+128];
    mul.wide.u32 %d1, %r0, 4; add.s64 %d2, %d0, %d1; st.global.u32 [%d2], %r8;"""
    text, out = kernel(body, before=before), np.zeros(32, np.uint32)
    assert check(text.replace("STEP", "0"), [out]).findings == ()
    assert out.tolist() == list(range(32))
    (finding,) = check(text.replace("STEP", "4"), [out]).findings
    assert (finding.kind, finding.lane) == ("bounds", 31)
    assert "one" in finding.message


WRAPPED = {
    "ld.shared": "ld.shared.u32 %r8, [ADDRESS];",
    "st.shared": "st.shared.u32 [ADDRESS], %r0; ld.shared.u32 %r8, [%r4];",
    "atom.shared": "atom.shared.add.u32 %r8, [ADDRESS], 1;",
    "ldmatrix": "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r8}, [ADDRESS];",
    "stmatrix": "stmatrix.sync.aligned.m8n8.x1.shared.b16 [ADDRESS], {%r0}; bar.sync 0; ld.shared.u32 %r8, [%r2];",
    "cp.async": "cp.async.cg.shared.global [ADDRESS], [%d1], 16; cp.async.wait_all; ld.shared.u32 %r8, [%r4];",
    "mbarrier": """setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [ADDRESS], 32; bar.sync 0;
        mbarrier.arrive.shared::cta.b64 _, [%r2]; mov.u32 %r8, 0;
        again: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra again;""",
}


@pytest.mark.parametrize("access", WRAPPED)
def test_a_shared_address_wraps_in_32_bits(access: str) -> None:
    """A base below the window and a displacement into it, as compilers write them; the sum past the window is none."""
    size = 16 if "matrix" in access or access == "cp.async" else 4
    fill = "" if access == "mbarrier" else "st.shared.v4.u32 [%r4], {%r0, %r0, %r0, %r0}; bar.sync 0;"
    body = f"""{TID} mov.u32 %r2, tile; mad.lo.u32 %r4, %r0, 16, %r2; {fill} add.s32 %r6, %r4, -4096;
    {WRAPPED[access].replace("ADDRESS", "%r6+4096")}
    mul.wide.u32 %d2, %r0, 4; add.s64 %d3, %d0, %d2; st.global.u32 [%d3], %r8;"""
    text = kernel(body, ["u64", "u64"], ".shared .align 16 .b8 tile[512];", target="sm_90")
    lanes, out = np.arange(32, dtype=np.uint32), np.full(32, 99, np.uint32)
    wanted = {"ldmatrix": lanes // 4, "stmatrix": lanes // 4 * 0, "cp.async": lanes * 0 + 7, "mbarrier": lanes * 0}
    assert check(text, [out, np.full(4, 7, np.uint32)]).findings == ()
    assert np.array_equal(out, wanted.get(access, lanes))
    beyond = check(text.replace("%r6+4096", f"%r6+{4096 + 512 + size}"), [out, np.full(4, 7, np.uint32)]).findings
    assert kinds(beyond) & {"bounds", "mbarrier"}


def test_a_remote_shared_address_wraps_before_its_cta_is_found() -> None:
    """Each CTA of a pair reads the other's word, by a base that lies in the window before it."""
    body = """mov.u32 %r0, %cluster_ctarank; mov.u32 %r2, tile; st.shared.u32 [%r2], %r0; xor.b32 %r1, %r0, 1;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; mapa.shared::cluster.u32 %r3, %r2, %r1;
    add.s32 %r6, %r3, BASE; ld.shared::cluster.u32 %r4, [%r6+PLUS];
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    mul.wide.u32 %d2, %r0, 4; add.s64 %d3, %d0, %d2; setp.eq.u32 %p1, %r4, %r4; mov.u32 %r7, %tid.x;
    setp.eq.u32 %p1, %r7, 0; @%p1 st.global.u32 [%d3], %r4;"""
    text = kernel(body, before=".shared .align 4 .b8 tile[4];", target="sm_90").replace("BASE", str(-(1 << 20)))
    out = np.full(2, 99, np.uint32)
    assert check(text.replace("PLUS", str(1 << 20)), [out], grid=2, cluster=2).findings == ()
    assert out.tolist() == [1, 0]
    assert "bounds" in kinds(check(text.replace("PLUS", str((1 << 20) + 4)), [out], grid=2, cluster=2).findings)


ATOMICS = {
    "add.u32": (5, 32 * 3),
    "min.s32": (-4, -7),
    "max.u32": (5, 31),
    "and.b32": (0xFF, 0),
    "or.b32": (0, 31),
    "exch.b32": (9, None),
    "inc.u32": (0, 32 % 4),
    "add.f32": (0.5, 0.5 + 32 * 3),
}


@pytest.mark.parametrize("opcode", ["atom", "red"])
@pytest.mark.parametrize("op", ["add.u32", "max.u32", "or.b32", "add.f32"])
def test_atomics_of_all_lanes(opcode, op):
    value = {"add.u32": "3", "max.u32": "%r0", "or.b32": "%r0", "add.f32": "0f40400000"}[op]
    target = ("%f1, " if op.endswith("f32") else "%r1, ") if opcode == "atom" else ""
    memory = np.array([0.5], np.float32) if op.endswith("f32") else np.array([1], np.uint32)
    body = f"{TID} {opcode}.relaxed.gpu.global.{op} {target}[%d0], {value};"
    assert check(kernel(body), [memory], 32, 3).findings == ()
    wanted = {"add.u32": 1 + 96 * 3, "max.u32": 31, "or.b32": 31, "add.f32": 0.5 + 96 * 3}[op]
    assert memory[0] == wanted


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_whose_turn_it_is_at_an_atomic_is_open(space: str, seed: int | None) -> None:
    place = "%d0" if space == "global" else "n"
    body = f"""{TID} mov.u32 %r4, 0; setp.eq.u32 %p1, %r0, 0; @%p1 st.shared.u32 [n], %r4; bar.sync 0;
    atom.{space}.add.u32 %r1, [{place}], 1; mul.wide.u32 %d2, %r1, 4; add.u64 %d3, %d1, %d2;
    st.global.u32 [%d3], %r0;"""
    lanes = np.full(32, 99, np.uint32)
    text = kernel(body, ["u64", "u64"], ".shared .align 4 .b8 n[4];")
    assert check(text, [np.zeros(1, np.uint32), lanes], seed=seed).findings == ()
    assert np.array_equal(np.sort(lanes), np.arange(32))
    assert np.array_equal(lanes, np.arange(32)) == (seed is None)


COPY = """{tid} mul.wide.u32 %d20, %r0, 16; add.s64 %d21, %d0, %d20; shl.b32 %r1, %r0, 4; mov.u32 %r2, tile;
    add.u32 %r3, %r2, %r1; cp.async.cg.shared.global [%r3], [%d21], 16, {size}; cp.async.commit_group;
    {wait} bar.sync 0; xor.b32 %r4, %r1, 512; add.u32 %r5, %r2, %r4; ld.shared.v4.f32 {{%f1, %f2, %f3, %f4}}, [%r5];
    add.s64 %d22, %d1, %d20; st.global.v4.f32 [%d22], {{%f1, %f2, %f3, %f4}};"""


@pytest.mark.parametrize("wait", ["cp.async.wait_group 0;", "cp.async.wait_all;", "cp.async.wait_group 1;", ""])
def test_copies_are_waited_for(wait):
    x, y = np.arange(256, dtype=np.float32), np.zeros(256, np.float32)
    body = COPY.format(tid=TID, size=16, wait=wait)
    text = kernel(body, ["u64", "u64"], ".shared .align 16 .b8 tile[1024];")
    found = kinds(check(text, [x, y], 64).findings)
    if wait in ("cp.async.wait_group 0;", "cp.async.wait_all;"):
        assert found == set()
        assert np.array_equal(y.reshape(2, 128), x.reshape(2, 128)[::-1])
    else:
        assert {"in_flight", "leak"} <= found


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("kind", ["f16", "bf16", "f16x2", "bf16x2"])
def test_sums_of_halves(kind, space):
    """64 threads add to four places, of which pairs of halves are two elements."""
    half, pair = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}[kind.removesuffix("x2")], kind.endswith("x2")
    size, register = (4, "%r9") if pair else (2, "%h9")
    bits = "b32" if pair else "b16"
    target = {"global": "%d23", "shared": "%r12"}[space]
    moved = f"""setp.lt.u32 %p1, %r0, 4; @%p1 st.shared.{bits} [%r12], {"0" if pair else "%h0"}; bar.sync 0;
    atom.shared.add.noftz.{kind} {register}, [%r12], {register}; bar.sync 0; ld.shared.{bits} {register}, [%r12];
    @%p1 st.global.{bits} [%d23], {register};"""
    body = f"""mov.u32 %r0, %tid.x; mov.b16 %h0, 0; mul.wide.u32 %d20, %r0, {size}; add.s64 %d21, %d0, %d20;
    ld.global.{bits} {register}, [%d21]; and.b32 %r10, %r0, 3; mul.wide.u32 %d22, %r10, {size}; add.s64 %d23, %d1, %d22;
    mov.u32 %r11, sums; mad.lo.u32 %r12, %r10, {size}, %r11;
    {moved if space == "shared" else f"red.relaxed.gpu.global.add.noftz.{kind} [{target}], {register};"}"""
    x = np.random.default_rng(1).integers(-8, 9, (64, 2 if pair else 1)).astype(half)
    y = np.zeros((4, 2 if pair else 1), half)
    text = kernel(body, ["u64", "u64"], ".shared .align 16 .b8 sums[16];", target="sm_90")
    assert check(text, [x, y], 64).findings == ()
    assert np.array_equal(y.astype(int), x.astype(int).reshape(16, 4, -1).sum(0))


def test_a_copy_fills_with_zeros_what_it_does_not_read():
    x, y = np.arange(1, 257, dtype=np.float32), np.zeros(256, np.float32)
    body = "mov.u32 %r9, %tid.x; and.b32 %r9, %r9, 1; shl.b32 %r9, %r9, 4;" + COPY.format(
        tid=TID, size="%r9", wait="cp.async.wait_all;"
    )
    text = kernel(body, ["u64", "u64"], ".shared .align 16 .b8 tile[1024];")
    assert check(text, [x, y], 64).findings == ()
    keep = np.where(np.arange(256) // 4 % 2 == 1, x, 0).reshape(2, 128)[::-1]
    assert np.array_equal(y.reshape(2, 128), keep)


def test_predicated_loads_leave_the_others_alone():
    body = f"""{TID} setp.lt.u32 %p1, %r0, 20; mul.wide.u32 %d20, %r0, 4; add.s64 %d21, %d0, %d20;
    add.s64 %d22, %d1, %d20; mov.u32 %r1, 5; @%p1 ld.global.u32 %r1, [%d21]; @!%p1 add.u32 %r1, %r1, 1;
    st.global.u32 [%d22], %r1;"""
    x, y = np.arange(100, 120, dtype=np.uint32), np.zeros(32, np.uint32)
    assert check(kernel(body, ["u64", "u64"]), [x, y]).findings == ()
    assert y.tolist() == [*range(100, 120), *[6] * 12]


def test_a_register_that_only_a_predicate_sets_is_poison_elsewhere():
    body = f"""{TID} setp.lt.u32 %p1, %r0, 20; mul.wide.u32 %d20, %r0, 4; add.s64 %d22, %d0, %d20;
    @%p1 mov.u32 %r1, 5; st.global.u32 [%d22], %r1;"""
    (finding,) = check(kernel(body), [np.zeros(32, np.uint32)]).findings
    assert finding.kind == "uninitialised"
    assert finding.count == 12


MERGES = {
    "add.f16x2": "add.f16x2 %r5, %r4, %r4; mov.b32 {%h4, _}, %r5;",
    "fma.rn.bf16x2": "fma.rn.bf16x2 %r5, %r4, %r4, %r4; mov.b32 {%h4, _}, %r5;",
    "prmt.b32": "prmt.b32 %r5, %r4, %r4, 0x1010; cvt.u16.u32 %h4, %r5;",
    "shf.l.wrap.b32": "shf.l.wrap.b32 %r5, %r4, %r4, 16; shr.u32 %r5, %r5, 16; cvt.u16.u32 %h4, %r5;",
    "bfe.u32": "bfe.u32 %r5, %r4, 0, 16; cvt.u16.u32 %h4, %r5;",
    "bfi.b32": "bfi.b32 %r5, %r4, 0, 8, 16; shr.u32 %r5, %r5, 8; cvt.u16.u32 %h4, %r5;",
    "lop3.b32": "lop3.b32 %r5, %r4, 0xffff, %r0, 0xea; cvt.u16.u32 %h4, %r5;",
    "not.b32": "not.b32 %r5, %r4; cvt.u16.u32 %h4, %r5;",
}


@pytest.mark.parametrize("merge", MERGES)
def test_an_unset_half_of_a_pair_spoils_nothing_but_itself(merge: str) -> None:
    """Compilers leave the half of a pair unset that nobody uses; four lanes sum halves, and one of them stores."""
    body = f"""{TID} cvt.u16.u32 %h1, %r0; shl.b32 %r1, %r0, 1; mov.u32 %r2, tile; add.u32 %r3, %r2, %r1;
    st.shared.b16 [%r3], %h1; bar.sync 0; setp.lt.u32 %p1, %r0, 4; setp.eq.u32 %p2, %r0, 0;
    @%p1 ld.shared.b16 %h2, [%r3]; cvt.u32.u16 %r6, %h2; shfl.sync.bfly.b32 %r7, %r6, 2, 31, -1; cvt.u16.u32 %h3, %r7;
    mov.b32 %r4, {{%h3, %h9}}; {MERGES[merge]}
    cvt.u32.u16 %r6, %h4; shfl.sync.bfly.b32 %r7, %r6, 1, 31, -1; cvt.u16.u32 %h5, %r7;
    @%p2 st.global.b16 [%d0], %h5;"""
    text, out = kernel(body, before=".shared .align 4 .b8 tile[64];", target="sm_90"), np.zeros(1, np.uint16)
    assert check(text, [out]).findings == ()
    planted = check(text.replace("{%h3, %h9}", "{%h9, %h3}"), [out]).findings
    assert kinds(planted) == {"uninitialised"}


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_ldmatrix_and_mma_multiply(kind):
    """A 16×16 times 16×8 product of one warp, from a row-major A and a column-major B in shared memory."""
    half = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}[kind]
    body = f"""{TID} mul.wide.u32 %d20, %r0, 16; add.s64 %d21, %d0, %d20; shl.b32 %r1, %r0, 4; mov.u32 %r2, a;
    add.u32 %r3, %r2, %r1; cp.async.cg.shared.global [%r3], [%d21], 16;
    setp.lt.u32 %p1, %r0, 16; add.s64 %d22, %d1, %d20; mov.u32 %r4, b; add.u32 %r5, %r4, %r1;
    @%p1 cp.async.cg.shared.global [%r5], [%d22], 16;
    cp.async.wait_all; bar.warp.sync -1;
    and.b32 %r6, %r0, 15; shl.b32 %r6, %r6, 5; shr.u32 %r7, %r0, 4; shl.b32 %r7, %r7, 4; add.u32 %r6, %r6, %r7;
    add.u32 %r6, %r6, %r2;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r6];
    and.b32 %r8, %r0, 7; shl.b32 %r8, %r8, 5; shr.u32 %r9, %r0, 3; and.b32 %r9, %r9, 1; shl.b32 %r9, %r9, 4;
    add.u32 %r8, %r8, %r9; add.u32 %r8, %r8, %r4;
    ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{%r14, %r15}}, [%r8];
    mov.f32 %f0, 0f00000000;
    mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%f1, %f2, %f3, %f4}}, {{%r10, %r11, %r12, %r13}},
        {{%r14, %r15}}, {{%f0, %f0, %f0, %f0}};
    shr.u32 %r20, %r0, 2; and.b32 %r21, %r0, 3; shl.b32 %r22, %r20, 3; shl.b32 %r23, %r21, 1;
    add.u32 %r24, %r22, %r23; mul.wide.u32 %d23, %r24, 4; add.s64 %d24, %d2, %d23;
    st.global.v2.f32 [%d24], {{%f1, %f2}}; st.global.v2.f32 [%d24+256], {{%f3, %f4}};"""
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-4, 5, shape).astype(half) for shape in ((16, 16), (8, 16)))
    d = np.full((16, 8), np.nan, np.float32)
    text = kernel(body, ["u64"] * 3, ".shared .align 16 .b8 a[512]; .shared .align 16 .b8 b[256];")
    assert check(text, [a, b, d]).findings == ()
    assert np.array_equal(d, a.astype(np.float32) @ b.astype(np.float32).T)


def test_threads_have_their_places_in_three_dimensions():
    body = """mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z; mov.u32 %r4, %ntid.x; mov.u32 %r5, %ntid.y;
    mad.lo.u32 %r6, %r3, %r5, %r2; mad.lo.u32 %r6, %r6, %r4, %r1; mad.lo.u32 %r7, %r3, 100, %r1;
    mad.lo.u32 %r7, %r2, 10, %r7; mul.wide.u32 %d1, %r6, 4; add.s64 %d2, %d0, %d1; st.global.u32 [%d2], %r7;"""
    out = np.zeros((4, 2, 8), np.uint32)
    assert check(kernel(body), [out], (8, 2, 4)).findings == ()
    z, y, x = np.indices(out.shape)
    assert np.array_equal(out, 100 * z + 10 * y + x)


def test_a_signed_element_fills_a_wider_register_with_its_sign() -> None:
    x, out = np.arange(-16, 16, dtype=np.int32), np.zeros(32, np.int64)
    body = """
    mov.u32 %r0, %tid.x; mad.wide.u32 %d2, %r0, 4, %d0; mad.wide.u32 %d3, %r0, 8, %d1;
    ld.global.s32 %d4, [%d2]; st.global.b64 [%d3], %d4;"""
    assert check(kernel(body, ["u64", "u64"]), [x, out]).findings == ()
    np.testing.assert_array_equal(out, x)


@pytest.mark.parametrize("move", ["mov.b32 %r1, %f1;", "mov.b64 %d5, {%f1, %f1}; mov.b64 {%r2, %r1}, %d5;"])
def test_a_decimal_constant_in_an_f32_register_has_the_bits_of_an_f32(move: str) -> None:
    out = np.zeros(1, np.uint32)
    check(kernel(f"mov.f32 %f1, 1.5; {move} st.global.u32 [%d0], %r1;"), [out], block=32)
    assert out.view(np.float32)[0] == 1.5


def test_vectors_of_atomics() -> None:
    x, old = np.ones(132, np.float32), np.zeros(128, np.float32)
    body = """
    mov.u32 %r0, %tid.x; mad.wide.u32 %d2, %r0, 16, %d0; mad.wide.u32 %d3, %r0, 16, %d1; mov.f32 %f0, 0f40000000;
    atom.global.gpu.acq_rel.v4.add.f32 {%f1, %f2, %f3, %f4}, [%d2], {%f0, %f0, %f0, %f0};
    red.global.v2.add.f32 [%d2+8], {%f0, %f0};
    st.global.v4.f32 [%d3], {%f1, %f2, %f3, %f4};"""
    assert check(kernel(body, ["u64", "u64"], target="sm_90"), [x, old]).findings == ()
    np.testing.assert_array_equal(x, [*np.tile([3, 3, 5, 5], 32), 1, 1, 1, 1])
    np.testing.assert_array_equal(old, 1)
    off = body.replace("[%d2],", "[%d2+4],")
    assert kinds(check(kernel(off, ["u64", "u64"], target="sm_90"), [x, old]).findings) == {"misaligned"}


def test_copies_leave_out_sources_under_a_predicate() -> None:
    x, y = np.arange(256, dtype=np.float32), np.full(256, np.nan, np.float32)
    body = "setp.lt.u32 %p1, %r0, 8;" + COPY.format(tid="", size="%p1", wait="cp.async.wait_group 0;")
    text = kernel(TID + body, ["u64", "u64"], ".shared .align 16 .b8 tile[1024];")
    assert check(text, [x, y], 64).findings == ()
    x[:32] = 0
    assert np.array_equal(y.reshape(2, 128), x.reshape(2, 128)[::-1])


TELLS = {
    "accesses": ("st.release.SCOPE.global.u32 [%d1], 1;", "ld.acquire.SCOPE.global.u32 %r1, [%d1];", ""),
    "fences": (
        "fence.acq_rel.SCOPE; st.relaxed.gpu.global.u32 [%d1], 1;",
        "ld.relaxed.gpu.global.u32 %r1, [%d1];",
        "fence.acq_rel.SCOPE;",
    ),
    "halves of fences": (
        "fence.release.SCOPE; st.relaxed.gpu.global.u32 [%d1], 1;",
        "ld.relaxed.gpu.global.u32 %r1, [%d1];",
        "fence.acquire.SCOPE;",
    ),
    "a fence and atomics": (
        "fence.sc.SCOPE; atom.relaxed.SCOPE.global.add.u32 %r9, [%d1], 1;",
        "atom.acquire.SCOPE.global.add.u32 %r1, [%d1], 0;",
        "",
    ),
}
"""How a thread tells another one of what it has stored: before the flag, a look at the flag, after it."""


def told(reader: int, tell: str, look: str, then: str) -> Any:
    """The findings of a thread of a CTA (in CTA 0 of its other warp) that reads what thread 0 of CTA 0 stored."""
    body = f"""mov.u32 %r0, %tid.x; mov.u32 %r5, %ctaid.x; mad.lo.u32 %r6, %r5, 64, %r0;
    setp.eq.u32 %p1, %r6, 0; setp.eq.u32 %p2, %r6, {reader * 64 or 32};
    @%p2 bra reads; @!%p1 bra done;
    st.global.u32 [%d0], 42; {tell} bra done;
    reads: {look} setp.ne.u32 %p3, %r1, 0; @!%p3 bra reads; {then} ld.global.u32 %r2, [%d0]; st.global.u32 [%d2], %r2;
    done:"""
    data, flag, out = (np.zeros(1, np.uint32) for _ in range(3))
    text = kernel(body, ["u64"] * 3, target="sm_90")
    findings = check(text, [data, flag, out], 64, grid=4, cluster=2).findings
    assert out[0] == 42
    return findings


@pytest.mark.parametrize("how", TELLS)
@pytest.mark.parametrize("scope", ["cta", "cluster", "gpu", "sys"])
@pytest.mark.parametrize("reader", [0, 1, 2])
def test_what_a_scope_reaches(how: str, scope: str, reader: int) -> None:
    reached = {"cta": 0, "cluster": 1}.get(scope, 2)
    assert bool(told(reader, *(x.replace("SCOPE", scope) for x in TELLS[how]))) == (reader > reached)


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("other", [0, 1, 2])
def test_atomics_of_a_scope_race_with_those_beyond_it(other: int, seed: int | None) -> None:
    for first, second in itertools.product(("cta", "cluster", "gpu"), repeat=2):
        body = f"""{TID} mov.u32 %r5, %ctaid.x; mad.lo.u32 %r6, %r5, 64, %r0;
        setp.eq.u32 %p1, %r6, 0; setp.eq.u32 %p2, %r6, {other * 64 or 32};
        @%p1 red.relaxed.{first}.global.add.u32 [%d0], 1; @%p2 red.relaxed.{second}.global.add.u32 [%d0], 1;"""
        count = np.zeros(1, np.uint32)
        findings = check(kernel(body, target="sm_90"), [count], 64, grid=4, cluster=2, seed=seed).findings
        assert count[0] == 2
        reached = min({"cta": 0, "cluster": 1, "gpu": 2}[scope] for scope in (first, second))
        assert kinds(findings) == ({"race"} if other > reached else set()), (first, second)


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize(
    ("tell", "told"),
    [
        ("st.release.gpu.global.u32 [%d1], 0; st.relaxed.gpu.global.u32 [%d1], 1;", True),  # one release pattern
        ("st.release.gpu.global.u32 [%d1+4], 0; st.relaxed.gpu.global.u32 [%d1], 1;", False),
        ("st.relaxed.gpu.global.u32 [%d1], 0; st.relaxed.gpu.global.u32 [%d1], 1;", False),
        ("st.release.gpu.global.u32 [%d1], 0; st.global.u32 [%d0], 42; st.relaxed.gpu.global.u32 [%d1], 1;", False),
    ],
)
def test_a_strong_write_after_a_release_of_the_same_word(tell: str, told: bool, seed: int | None) -> None:
    body = f"""{TID} mov.u32 %r5, %ctaid.x; mad.lo.u32 %r6, %r5, 32, %r0;
    setp.eq.u32 %p1, %r6, 0; setp.eq.u32 %p2, %r6, 32; @%p2 bra reads; @!%p1 bra done;
    st.global.u32 [%d0], 42; {tell} bra done;
    reads: ld.acquire.gpu.global.u32 %r1, [%d1]; setp.ne.u32 %p3, %r1, 0; @!%p3 bra reads;
    ld.global.u32 %r2, [%d0]; st.global.u32 [%d2], %r2;
    done:"""
    findings = check(kernel(body, ["u64"] * 3), [np.zeros(2, np.uint32) for _ in range(3)], grid=2, seed=seed).findings
    assert kinds(findings) == (set() if told else {"race"})


@pytest.mark.parametrize(("half", "other"), [("release", "acquire"), ("acquire", "release")])
def test_each_half_of_a_fence_is_one_side(half: str, other: str) -> None:
    tells = [x.replace("SCOPE", "gpu") for x in TELLS["halves of fences"]]
    assert told(2, *tells) == ()
    assert kinds(told(2, *(x.replace(f"fence.{half}", f"fence.{other}") for x in tells))) == {"race"}


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("scope", ["cta", "gpu"])
def test_atomics_of_several_ctas_need_a_scope_that_holds_them(scope: str, seed: int | None) -> None:
    text = kernel(f"red.relaxed.{scope}.global.add.u32 [%d0], 1;")
    assert check(text, [np.zeros(1, np.uint32)], 64, seed=seed).findings == ()
    findings = check(text, [np.zeros(1, np.uint32)], 64, grid=2, seed=seed).findings
    assert kinds(findings) == ({"race"} if scope == "cta" else set())


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_an_atomic_of_a_cta_races_with_one_of_the_gpu_in_another_cta(seed: int | None) -> None:
    body = """mov.u32 %r0, %ctaid.x; setp.eq.u32 %p1, %r0, 0; @%p1 red.relaxed.SCOPE.global.add.u32 [%d0], 1;
    @!%p1 red.relaxed.gpu.global.add.u32 [%d0], 1;"""
    for scope in ("gpu", "cta"):
        found = check(kernel(body.replace("SCOPE", scope)), [np.zeros(1, np.uint32)], 32, grid=2, seed=seed).findings
        assert kinds(found) == ({"race"} if scope == "cta" else set())


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize(("load", "update"), [("gpu", "gpu"), ("gpu", "cta"), ("cta", "gpu")])
@pytest.mark.parametrize("ctas", [1, 2])
def test_a_strong_read_races_with_updates_beyond_its_scope(load: str, update: str, ctas: int, seed: int | None) -> None:
    """PTX ISA, "Morally Strong Operations": each operation's scope includes the thread that executes the other."""
    body = f"""{TID} mov.u32 %r5, %ctaid.x; mov.u32 %r7, %ntid.x; mad.lo.u32 %r6, %r5, %r7, %r0;
    setp.eq.u32 %p1, %r6, 0; setp.eq.u32 %p2, %r6, 32; @%p1 red.relaxed.{update}.global.add.u32 [%d0], 1;
    @%p2 ld.relaxed.{load}.global.u32 %r1, [%d0]; @%p2 st.global.u32 [%d1], %r1;"""
    given = [np.zeros(1, np.uint32), np.zeros(1, np.uint32)]
    findings = check(kernel(body, ["u64", "u64"]), given, 64 // ctas, grid=ctas, seed=seed).findings
    assert kinds(findings) == ({"race"} if ctas == 2 and "cta" in (load, update) else set())


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(
    ("first", "second", "mixed"),
    [
        ("red.relaxed.gpu.SPACE.add.u32 [AT], 1;", "red.relaxed.gpu.SPACE.add.u64 [AT], %d30;", True),
        ("red.relaxed.gpu.SPACE.add.u32 [AT], 1;", "red.relaxed.gpu.SPACE.add.u32 [AT], 1;", False),
        ("st.relaxed.gpu.SPACE.u32 [AT], 1;", "ld.relaxed.gpu.SPACE.u64 %d31, [AT];", True),
        ("st.relaxed.gpu.SPACE.u32 [AT], 1;", "ld.relaxed.gpu.SPACE.v2.u32 {%r10, %r11}, [AT];", False),
    ],
)
@pytest.mark.parametrize("space", ["shared", "global"])
def test_strong_accesses_of_two_widths_race(
    space: str, first: str, second: str, mixed: bool, ordered: bool, seed: int | None
) -> None:
    """PTX ISA, "Morally Strong Operations": if both are memory operations, they overlap completely."""
    at = {"shared": "word", "global": "%d0"}[space]
    first, second = (x.replace("SPACE", space).replace("AT", at) for x in (first, second))
    body = f"""{TID} mov.u64 %d30, 1; setp.eq.u32 %p1, %r0, 0; setp.eq.u32 %p2, %r0, 32; setp.eq.u32 %p3, %r0, 1;
    @%p3 st.{space}.u64 [{at}], 0; bar.sync 0; @%p1 {first} {"bar.sync 0;" * ordered} @%p2 {second}"""
    text = kernel(body, before=".shared .align 8 .b8 word[8];")
    findings = check(text, [np.zeros(2, np.uint32)], 64, seed=seed).findings
    assert kinds(findings) == ({"race"} if mixed and not ordered else set())


@pytest.mark.parametrize(("fences", "reaches"), [("gpu cta", True), ("cta gpu", True), ("cta cta", False)])
def test_a_narrow_fence_takes_nothing_from_a_wide_one_before_it(fences: str, reaches: bool) -> None:
    """PTX ISA, "Release and Acquire Patterns": a fence followed by a strong write, whatever is between."""
    tell = "".join(f"fence.acq_rel.{scope};" for scope in fences.split())
    look = TELLS["fences"][1]
    found = told(1, f"{tell} st.relaxed.gpu.global.u32 [%d1], 1;", look, "fence.acq_rel.gpu;")
    assert kinds(found) == (set() if reaches else {"race"})


COUNT = f"""{TID} mov.u32 %r1, %nctaid.x; mov.u32 %r2, %ntid.x; mul.lo.u32 %r3, %r1, %r2; sub.u32 %r3, %r3, 1;
    atom.relaxed.gpu.global.add.u32 %r4, [%d0], 1; setp.eq.u32 %p1, %r4, %r3; @%p1 st.global.u32 [%d0], 0;"""
"""All threads count, and the last one resets the counter by a plain store."""
ONE_OF_EACH_CTA = COUNT.replace("mul.lo.u32 %r3, %r1, %r2;", "mov.u32 %r3, %r1; setp.ne.u32 %p2, %r0, 0; @%p2 ret;")
TOLD = """.shared .align 4 .b32 last[1];
    setp.eq.u32 %p4, %r0, 0; selp.b32 %r9, 1, 0, %p1; @%p4 st.shared.u32 [last], %r9;
    bar.sync 0; ld.shared.u32 %r9, [last]; setp.eq.u32 %p5, %r0, 33; setp.ne.and.u32 %p5, %r9, 0, %p5;"""
BY_ANOTHER = (
    COUNT.replace("mul.lo.u32 %r3, %r1, %r2;", "mov.u32 %r3, %r1; setp.eq.u32 %p3, %r0, 0; setp.ne.u32 %p1, %r0, %r0;")
    .replace("atom", "@%p3 atom")
    .replace("setp.eq.u32 %p1, %r4, %r3;", f"@%p3 setp.eq.u32 %p1, %r4, %r3; {TOLD}")
    .replace("@%p1 st.global", "@%p5 st.global")
)
"""Thread 0 counts for its CTA, and thread 33 of the last one resets the counter, behind a barrier."""
FIRST = "setp.eq.u32 %p1, %r4, %r3", "setp.eq.u32 %p1, %r4, 0"
ROUNDS = "atom.relaxed.gpu.global.add.u32 %r5, [%d0], 0; " * 12
RESETS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "one of each CTA": (ONE_OF_EACH_CTA, [FIRST, ("relaxed.gpu", "relaxed.cta")]),
    "all threads": (COUNT, [FIRST, ("relaxed.gpu", "relaxed.cta")]),
    "a plain load": (COUNT.replace("st.global.u32 [%d0], 0", "ld.global.u32 %r9, [%d0]"), [FIRST]),
    "another thread": (BY_ANOTHER, [FIRST, (TOLD, "setp.eq.u32 %p5, %r0, 33;"), ("relaxed.gpu", "relaxed.cta")]),
    "many rounds": (COUNT.replace("atom", f"{ROUNDS} atom"), [FIRST]),
}


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize("name", RESETS)
def test_the_last_one_to_count_resets_the_counter(name: str, seed: int | None) -> None:
    """Its atomic has read what those of all others have left, so that they come before its plain access."""
    body, defects = RESETS[name]
    out = np.zeros(1, np.uint32)
    assert check(kernel(body), [out], 64, grid=8, seed=seed).findings == ()
    assert "st.global" not in body or out.tolist() == [0]
    for right, wrong in defects:
        assert right in body
        text = kernel(body.replace(right, wrong).replace(";", ";\n"))  # a finding on each line
        found = check(text, [np.zeros(1, np.uint32)], 64, grid=8, seed=seed).findings
        races = [x.message for cause in found for x in (cause, *cause.follows) if x.kind == "race"]
        assert any("st.global" in message or "ld.global" in message for message in races)


def test_atomics_of_a_cta_are_read_by_its_last_one() -> None:
    text = kernel(COUNT.replace("relaxed.gpu", "relaxed.cta"))
    assert check(text, [np.zeros(1, np.uint32)], 64).findings == ()


ATOM, RED = "atom.relaxed.gpu.global.add.u32 %r4, [%d0], 1;", "red.relaxed.gpu.global.add.u32 [%d0], 1;"
STORE = "st.relaxed.gpu.global.u32 [%d0], 1;"


@pytest.mark.parametrize(
    ("writes", "clean"),
    [
        ((ATOM, ATOM, ATOM), True),
        ((STORE, ATOM, ATOM), True),
        ((RED, RED, ATOM), True),
        ((ATOM, STORE, ATOM), False),  # ends what atomics hand on
        ((ATOM, ATOM, STORE), False),  # reads nothing
        ((ATOM, ATOM, RED), False),  # tells nobody what it has read
    ],
)
def test_what_an_atomic_reads_comes_before_a_plain_store(writes: tuple[str, str, str], clean: bool) -> None:
    body = "mov.u32 %r1, %laneid; setp.ne.u32 %p2, %r1, 0; @%p2 ret; mov.u32 %r0, %ctaid.x;"
    for cta, write in enumerate(writes):
        body += f"setp.eq.u32 %p1, %r0, {cta}; @%p1 {write}"
    text = kernel(body + "@%p1 st.global.u32 [%d0], 0;")
    findings = check(text, [np.zeros(1, np.uint32)], grid=3).findings
    assert kinds(findings) == (set() if clean else {"race"})


def test_copies_that_read_nothing_touch_no_sector() -> None:
    body = f"""{TID} setp.lt.u32 %p1, %r0, 8; selp.b32 %r9, 16, 0, %p1; mul.wide.u32 %d20, %r0, 16;
    add.s64 %d21, %d0, %d20; mov.u32 %r2, tile; mad.lo.u32 %r3, %r0, 16, %r2;
    cp.async.cg.shared.global [%r3], [%d21], 16, %r9; cp.async.wait_all;"""
    run = check(kernel(body, before=".shared .align 16 .b8 tile[512];"), [np.zeros(128, np.float32)])
    assert run.findings == ()
    (copies,) = run.traffic.global_memory.values()
    assert (copies.requests, copies.sectors, copies.bytes) == (1, 4, 128)


@pytest.mark.parametrize("place", [-4, 0, 12, 16, 24])
def test_local_memory_ends_where_its_variables_do(place: int) -> None:
    body = f""".local .align 16 .b8 own[16]; mov.u32 %r2, own;
    st.local.v4.u32 [%r2], {{%r2, %r2, %r2, %r2}}; ld.local.u32 %r1, [%r2+{place}];
    mov.u32 %r3, 1; {TID} mul.wide.u32 %d2, %r0, 4; add.s64 %d3, %d0, %d2; st.global.u32 [%d3], %r3;"""
    found = check(kernel(body), [np.zeros(32, np.uint32)]).findings
    assert kinds(found) == (set() if 0 <= place < 16 else {"bounds"})


def test_initial_values_of_variables() -> None:
    before = ".const .align 4 .f32 one[2] = {0f3F800000, 0f40000000}; .const .align 8 .f64 two = 0d4008000000000000;"
    body = """.reg .b32 %none<0>; ld.const.v2.f32 {%f1, %f2}, [one]; ld.const.f64 %e1, [two]; cvt.rn.f32.f64 %f3, %e1;
    mov.u32 %r0, %laneid; setp.eq.u32 %p1, %r0, 0; @%p1 st.global.f32 [%d0], %f1; @%p1 st.global.f32 [%d0+4], %f2;
    @%p1 st.global.f32 [%d0+8], %f3;"""
    out = np.zeros(3, np.float32)
    assert check(kernel(body, before=before), [out]).findings == ()
    assert out.tolist() == [1, 2, 3]


def test_constant_memory_that_the_host_would_write_is_refused() -> None:
    text = kernel("ld.const.u32 %r1, [c]; st.global.u32 [%d0], %r1;", before=".const .align 4 .b8 c[8];")
    with pytest.raises(ProblemError, match="cudaMemcpyToSymbol"):
        check(text, [np.zeros(1, np.uint32)])


GRID_SYNC = """mov.u32 %r1, %envreg2; cvt.u64.u32 %d5, %r1; mov.u32 %r2, %envreg1; cvt.u64.u32 %d6, %r2;
    bfi.b64 %d7, %d6, %d5, 32, 32; setp.ne.s64 %p1, %d7, 0; @%p1 bra given; trap;
    given: bar.sync 0; @%p4 bra met;
    add.s64 %d7, %d7, 4; mov.u32 %r5, -2147483647; sub.s32 %r5, %r5, %r4;
    setp.eq.u32 %p2, %r7, 0; selp.b32 %r6, %r5, 1, %p2; atom.add.ORDER.gpu.u32 %r8, [%d7], %r6;
    look: ld.acquire.gpu.u32 %r9, [%d7]; xor.b32 %r9, %r9, %r8; setp.gt.s32 %p3, %r9, -1; @%p3 bra look;
    met: bar.sync 0;"""
"""What CUDA makes of ``cooperative_groups::this_grid().sync()``: the barrier is in what the system gives the launch."""


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("order", ["release", "relaxed"])
def test_the_ctas_of_a_cooperative_grid_meet(order: str, seed: int | None) -> None:
    """Each CTA stores its number, they meet, and each reads that of the next one."""
    body = f"""mov.u32 %r0, %tid.x; mov.u32 %r7, %ctaid.x; mov.u32 %r4, %nctaid.x;
    setp.ne.u32 %p4, %r0, 0; mul.wide.u32 %d2, %r7, 4; add.s64 %d3, %d0, %d2; @!%p4 st.global.u32 [%d3], %r7;
    {GRID_SYNC.replace("ORDER", order)}
    add.u32 %r10, %r7, 1; rem.u32 %r10, %r10, %r4; mul.wide.u32 %d4, %r10, 4; add.s64 %d4, %d0, %d4;
    @!%p4 ld.global.u32 %r11, [%d4]; @!%p4 st.global.u32 [%d3+32], %r11;"""
    out = np.zeros(16, np.uint32)
    findings = check(kernel(body), [out], 64, grid=8, seed=seed).findings
    assert out.tolist() == [*range(8), *range(1, 8), 0]
    assert kinds(findings) == ({"race"} if order == "relaxed" else set())


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("memory", ["global_smem", "mine"])
@pytest.mark.parametrize(("step", "rounding"), [("0f33800000", True), ("0f3A000000", False)])
def test_sums_that_lanes_store_may_differ_by_rounding_where_triton_has_chosen_so(
    step: str, rounding: bool, memory: str, seed: int | None
) -> None:
    """Lane i stores 1 + i · 2⁻²⁴ or 1 + i / 2048, all to one place."""
    body = f"""{TID} cvt.rn.f32.u32 %f0, %r0; fma.rn.f32 %f1, %f0, {step}, 0f3F800000; st.shared.f32 [{memory}], %f1;"""
    found = check(kernel(body, before=f".shared .align 4 .b8 {memory}[4];"), [np.zeros(1, np.uint32)], seed=seed)
    (finding,) = found.findings
    assert finding.kind == "race"
    assert finding.grade == ("review" if rounding and memory == "global_smem" else "error")
