"""Shared memory of other CTAs of a cluster: loads and stores by addresses of ``mapa``, what must order them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx.text import check, kernel, kinds

SYNC = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
START = """mov.u32 %r0, %tid.x; mov.u32 %r9, %cluster_ctarank; xor.b32 %r8, %r9, 1; mov.u32 %r1, s;
    mul.lo.u32 %r2, %r0, 4; add.u32 %r1, %r1, %r2; mad.lo.u32 %r3, %r9, 100, %r0;"""
OUT = """mov.u32 %r7, %ctaid.x; mad.lo.u32 %r5, %r7, 64, %r0;
    mul.wide.u32 %d2, %r5, 4; add.u64 %d3, %d0, %d2; st.global.u32 [%d3], %r4;"""
WAIT = """{ .reg .pred done; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [bar], 0;
    @!done bra again; }"""
LOADS = f"""{START} st.shared.u32 [%r1], %r3; FIRST mapa.shared::cluster.u32 %r6, %r1, %r8;
    ld.shared::cluster.u32 %r4, [%r6]; LAST {OUT}"""
STORES = f"""{START} {SYNC} mapa.shared::cluster.u32 %r6, %r1, %r8; st.shared::cluster.u32 [%r6], %r3; FIRST
    ld.shared.u32 %r4, [%r1]; {OUT}"""
GENERIC = f"""{START} st.shared.u32 [%r1], %r3; FIRST cvt.u64.u32 %d4, %r1; cvta.shared.u64 %d5, %d4;
    mapa.u64 %d6, %d5, %r8; ld.u32 %r4, [%d6]; LAST {OUT}"""
TEXTS = {"loads": LOADS, "stores": STORES, "generic": GENERIC}


def run(text: str, first: str = SYNC, last: str = SYNC, seed: int | None = None):
    """Two clusters of two CTAs, whose threads exchange 100 times their rank plus their number."""
    text = kernel(
        text.replace("FIRST", first).replace("LAST", last), before=".shared .align 4 .b8 s[256];", target="sm_90"
    )
    out = np.zeros(256, np.uint32)
    return out, check(text, [out], 64, grid=4, cluster=2, seed=seed).findings


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("name", TEXTS)
def test_ctas_exchange_what_they_hold(name: str, seed: int | None) -> None:
    out, findings = run(TEXTS[name], seed=seed)
    assert findings == ()
    assert out.tolist() == ([100 + i for i in range(64)] + list(range(64))) * 2


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("instead", ["", "bar.sync 0;"])
def test_a_barrier_of_the_cta_does_not_order_them(name: str, instead: str) -> None:
    assert kinds(run(TEXTS[name], first=instead)[1]) & {"race", "uninitialised"}


@pytest.mark.parametrize("name", ["loads", "generic"])
def test_a_cta_must_not_exit_while_others_read_its_memory(name: str) -> None:
    assert kinds(run(TEXTS[name], last="")[1]) == {"cluster"}


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("begins", [SYNC, SYNC.replace("arrive", "arrive.relaxed")])
def test_a_cta_must_have_begun_before_others_write_its_memory(begins: str, seed: int | None) -> None:
    assert run(STORES.replace(SYNC, begins, 1), seed=seed)[1] == ()
    assert kinds(run(STORES.replace(SYNC, "bar.sync 0;", 1), seed=seed)[1]) == {"cluster"}


@pytest.mark.parametrize("released", [".release.cluster", ""])
@pytest.mark.parametrize("acquired", [".acquire.cluster", ""])
def test_what_is_stored_afar_is_told_at_the_scope_of_the_cluster(released: str, acquired: str) -> None:
    first = f"""mapa.shared::cluster.u32 %r10, bar, %r8; mbarrier.arrive{released}.shared::cluster.b64 _, [%r10];
        {WAIT.replace(".acquire.cluster", acquired)}"""
    begin = f"setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [bar], 64; {SYNC}"
    text = STORES.replace(SYNC, begin, 1).replace("FIRST", first) + SYNC
    text = kernel(text, before=".shared .align 16 .b8 s[256]; .shared .align 8 .b8 bar[8];", target="sm_90")
    found = kinds(check(text, [np.zeros(256, np.uint32)], 64, grid=4, cluster=2).findings)
    assert found == (set() if released and acquired else {"race"})


@pytest.mark.parametrize("fence", ["fence.acq_rel.cluster;", "fence.sc.gpu;", "fence.acq_rel.cta;", ""])
def test_what_is_stored_afar_is_fenced_at_the_scope_of_the_cluster(fence: str) -> None:
    first = f"""mapa.shared::cluster.u32 %r10, bar, %r8; {fence}
        mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%r10]; {WAIT}"""
    begin = f"setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [bar], 64; {SYNC}"
    text = STORES.replace(SYNC, begin, 1).replace("FIRST", first) + SYNC
    text = kernel(text, before=".shared .align 16 .b8 s[256]; .shared .align 8 .b8 bar[8];", target="sm_90")
    found = kinds(check(text, [np.zeros(256, np.uint32)], 64, grid=4, cluster=2).findings)
    assert found == (set() if "cluster" in fence or "gpu" in fence else {"race"})


def test_what_is_read_from_afar_may_not_be_overwritten() -> None:
    again = f"st.shared.u32 [%r1], 5; {SYNC}"
    assert "race" in kinds(run(LOADS, last=again)[1])
    assert run(LOADS, last=SYNC + again)[1] == ()


def test_a_rank_that_the_cluster_does_not_have() -> None:
    assert kinds(run(LOADS.replace("xor.b32 %r8, %r9, 1", "add.u32 %r8, %r9, 2"))[1]) >= {"bounds"}


COUNTS = f"""{START} mov.u32 %r4, 0; st.shared.u32 [%r1], %r4; FIRST ATOMIC; LAST ld.shared.u32 %r4, [%r1]; {OUT}"""
ATOMICS = {
    "shared": "mapa.shared::cluster.u32 %r6, %r1, %r8; atom.shared::cluster.add.u32 %r5, [%r6], %r3",
    "generic": """cvt.u64.u32 %d4, %r1; cvta.shared.u64 %d5, %d4; mapa.u64 %d6, %d5, %r8;
        red.relaxed.gpu.add.u32 [%d6], %r3""",
}


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("atomic", ATOMICS)
def test_atomics_on_what_other_ctas_hold(atomic: str, seed: int | None) -> None:
    out, findings = run(COUNTS.replace("ATOMIC", ATOMICS[atomic]), seed=seed)
    assert findings == ()
    assert out.tolist() == ([100 + i for i in range(64)] + list(range(64))) * 2


@pytest.mark.parametrize("atomic", ATOMICS)
@pytest.mark.parametrize("missing", ["first", "last"])
def test_atomics_on_what_other_ctas_hold_must_be_ordered_with_the_rest(atomic: str, missing: str) -> None:
    first, last = ("bar.sync 0;", SYNC) if missing == "first" else (SYNC, "bar.sync 0;")
    findings = run(COUNTS.replace("ATOMIC", ATOMICS[atomic]), first, last)[1]
    assert kinds(findings) & {"race", "uninitialised"}


ASYNC = f"""{START} setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [bar], 1;
    fence.mbarrier_init.release.cluster; {SYNC}
    mov.u32 %r10, bar; mov.u32 %r11, s; mapa.shared::cluster.u32 %r10, %r10, %r8;
    mapa.shared::cluster.u32 %r11, %r11, %r8;
    @!%p1 bra wait; mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], EXPECTED;
    {{ .reg .v4 .s32 abcd; mov.s32 abcd.x, %r9; mov.s32 abcd.y, 5; mov.s32 abcd.z, 6; mov.s32 abcd.w, 7;
    st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.s32 [%r11], abcd, [%r10]; }}
    wait: WAIT setp.ge.u32 %p2, %r0, 4; @%p2 bra end; ld.shared.u32 %r4, [%r1]; {OUT} end: {SYNC}"""


@pytest.mark.parametrize(
    ("expected", "wait", "kind"),
    [
        ("16", WAIT, ""),
        ("16", "", "in_flight"),
        ("32", WAIT, "deadlock"),
        ("16", "bar.sync 0;", "in_flight"),
    ],
)
def test_words_that_are_stored_asynchronously(expected: str, wait: str, kind: str) -> None:
    text = ASYNC.replace("EXPECTED", expected).replace("WAIT", wait)
    text = kernel(text, before=".shared .align 16 .b8 s[256]; .shared .align 8 .b8 bar[8];", target="sm_90")
    out = np.zeros(256, np.uint32)
    found = kinds(check(text, [out], 64, grid=4, cluster=2).findings)
    assert (kind in found) if kind else not found
    if not kind:
        assert out.reshape(4, 64)[:, :4].tolist() == [[1, 5, 6, 7], [0, 5, 6, 7]] * 2


@pytest.mark.parametrize(
    ("kind", "size", "values"),
    [
        ("b32", 4, "%r3"),
        ("f32", 4, "%f1"),
        ("s64", 8, "%d7"),
        ("f64", 8, "%e1"),
        ("v2.u32", 8, "{%r3, %r9}"),
        ("v2.f32", 8, "{%f1, %f2}"),
        ("v2.b64", 16, "{%d7, %d8}"),
    ],
)
def test_each_thread_stores_words_of_its_own_asynchronously(kind: str, size: int, values: str) -> None:
    """Every thread sends to the other CTA what it would have stored in its own memory."""
    body = f"""{START.replace("%r0, 4", f"%r0, {size}")} mov.u32 %r10, bar; setp.ne.u32 %p1, %r0, 0;
    mov.b32 %f1, %r3; mov.b32 %f2, %r9; cvt.u64.u32 %d7, %r3; mul.lo.u64 %d7, %d7, 0x300000001; cvt.u64.u32 %d8, %r9;
    mov.b64 %e1, %d7; @%p1 bra met;
    mbarrier.init.shared::cta.b64 [bar], 1; fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {64 * size}; met: {SYNC}
    mapa.shared::cluster.u32 %r10, %r10, %r8; mapa.shared::cluster.u32 %r11, %r1, %r8;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.{kind} [%r11], {values}, [%r10];
    {WAIT} mov.u32 %r7, %ctaid.x; mad.lo.u32 %r5, %r7, 64, %r0; mul.wide.u32 %d2, %r5, {size}; add.u64 %d3, %d0, %d2;
    {"".join(f"ld.shared.u32 %r4, [%r1+{n}]; st.global.u32 [%d3+{n}], %r4;" for n in range(0, size, 4))} {SYNC}"""
    before = ".shared .align 16 .b8 s[1024]; .shared .align 8 .b8 bar[8];"
    out = np.zeros((4, 64, size // 4), np.uint32)
    assert check(kernel(body, before=before, target="sm_90"), [out], 64, grid=4, cluster=2).findings == ()
    for cta in range(4):
        rank = 1 - cta % 2
        word = 100 * rank + np.arange(64)
        sent = {"%r3": [word], "%f1": [word]}.get(values, [word, 3 * word if "64" in kind else word * 0 + rank])
        sent += [word * 0 + rank, word * 0] if size == 16 else []
        assert np.array_equal(out[cta], np.stack(sent, axis=-1))
    late = body.replace(WAIT, "bar.sync 0;")
    assert "in_flight" in kinds(check(kernel(late, before=before, target="sm_90"), [out], 64, 4, cluster=2).findings)


BULK = f"""mov.u32 %r0, %tid.x; mov.u32 %r9, %cluster_ctarank; xor.b32 %r8, %r9, 1; mov.u32 %r1, s; mov.u32 %r2, bar;
    setp.ne.u32 %p1, %r0, 0; @%p1 bra met; mbarrier.init.shared::cta.b64 [bar], 1; fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 256; met: {SYNC} @%p1 bra wait;
    mapa.shared::cluster.u32 %r3, %r1, %r8; mapa.shared::cluster.u32 %r4, %r2, RANK;
    mul.wide.u32 %d2, %r9, 256; add.u64 %d3, %d1, %d2;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%d3], 256, [%r4];
    wait: {{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [bar], 0; @!done bra again; }}
    mul.lo.u32 %r5, %r0, 4; add.u32 %r6, %r1, %r5; ld.shared.u32 %r4, [%r6]; {SYNC} {OUT}"""


@pytest.mark.parametrize("rank", ["%r8", "%r9"])
def test_bytes_from_global_memory_to_the_other_cta(rank: str) -> None:
    """The copy completes on an mbarrier of the CTA that it goes to, or is found."""
    text = kernel(
        BULK.replace("RANK", rank),
        ["u64", "u64"],
        target="sm_90",
        before=".shared .align 16 .b8 s[256]; .shared .align 8 .b8 bar[8];",
    )
    out, x = np.zeros(128, np.uint32), np.arange(128, dtype=np.uint32)
    findings = check(text, [out, x], 64, grid=2, cluster=2).findings
    if rank == "%r8":
        assert findings == ()
        assert out.tolist() == [*range(64, 128), *range(64)]
    else:
        assert "mbarrier" in kinds(findings)


@pytest.mark.parametrize("mask", [3, 2, 1, 5])
def test_bytes_from_global_memory_to_several_ctas(mask: int) -> None:
    """CTA 0 sends the same bytes to the CTAs of a mask, to the same place, where they complete on their mbarriers."""
    body = f"""mov.u32 %r0, %tid.x; mov.u32 %r9, %cluster_ctarank; mov.u32 %r1, s; mov.u16 %h1, {mask};
    setp.ne.u32 %p1, %r0, 0; mov.u32 %r3, {mask}; shr.u32 %r3, %r3, %r9; and.b32 %r3, %r3, 1; mov.u32 %r4, 0;
    @%p1 bra met; mbarrier.init.shared::cta.b64 [bar], 1; fence.mbarrier_init.release.cluster;
    mul.lo.u32 %r6, %r3, 256; mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], %r6; met: {SYNC}
    or.b32 %r5, %r0, %r9; setp.ne.u32 %p2, %r5, 0; @%p2 bra wait;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [s], [%d1], 256, [bar], %h1;
    wait: {{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [bar], 0; @!done bra again; }}
    mul.lo.u32 %r5, %r0, 4; add.u32 %r6, %r1, %r5; setp.ne.u32 %p3, %r3, 0; @%p3 ld.shared.u32 %r4, [%r6];
    {SYNC} {OUT}"""
    before = ".shared .align 16 .b8 s[256]; .shared .align 8 .b8 bar[8];"
    out, x = np.zeros(128, np.uint32), np.arange(1, 65, dtype=np.uint32)
    findings = check(kernel(body, ["u64", "u64"], before, "sm_90"), [out, x], 64, grid=2, cluster=2).findings
    if mask == 5:
        assert "bounds" in kinds(findings)
        return
    assert findings == ()
    assert out.reshape(2, 64).tolist() == [(x * (mask >> cta & 1)).tolist() for cta in (0, 1)]


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("scope", ["cta", "cluster", "gpu"])
def test_updates_of_two_ctas_need_the_scope_of_the_cluster(scope: str, own: bool, seed: int | None) -> None:
    """PTX ISA, "Morally Strong Operations": each operation's scope includes the thread that executes the other."""
    target = "%r9" if own else "0"
    body = f"""mov.u32 %r0, %tid.x; mov.u32 %r9, %cluster_ctarank; mov.u32 %r1, s; setp.eq.u32 %p1, %r0, 0;
    @%p1 st.shared.u32 [s], 0; {SYNC} mapa.shared::cluster.u32 %r6, %r1, {target};
    red.relaxed.{scope}.shared::cluster.add.u32 [%r6], 1; {SYNC}"""
    text = kernel(body, target="sm_90", before=".shared .align 4 .b8 s[4];")
    found = check(text, [np.zeros(1, np.uint32)], 64, grid=4, cluster=2, seed=seed).findings
    assert kinds(found) == ({"race"} if scope == "cta" and not own else set())
