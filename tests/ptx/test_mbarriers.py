"""mbarriers of PTX: waits that are loops and waits that only look, and their end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ptx.text import check, kernel, kinds

BEFORE = ".shared .align 8 .b8 bar[8]; .shared .align 4 .b8 word[4];"
INIT = """mov.u32 %r0, %tid.x; setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [bar], 1;
fence.mbarrier_init.release.cluster; bar.sync 0;"""
STORE = "mul.wide.u32 %d20, %r0, 4; add.s64 %d21, %d0, %d20; st.global.u32 [%d21], %r1;"
PRODUCER = "st.shared.u32 [word], 42; mbarrier.arrive.shared::cta.b64 _, [bar];"
WAITS = {
    "a loop": "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [bar], 0; @!done bra again; }",
    "two branches": """{ .reg .pred P; again: mbarrier.try_wait.parity.shared::cta.b64 P, [bar], 0, 0x989680;
        @P bra DONE; bra again; DONE: }""",
    "a loop with more in it": """mov.u32 %r7, 0; look: add.u32 %r7, %r7, 1;
        mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 %p5, [bar], 0; @!%p5 bra look;""",
}


def run(wait: str, seed: int | None = None, producer: str = PRODUCER):
    """Warp 1 waits for what thread 0 stores."""
    body = f"""{INIT} mov.u32 %r1, 42; setp.ge.u32 %p2, %r0, 32; @%p2 bra consumer;
    @!%p1 bra done; {producer} bra done;
    consumer: {wait} ld.shared.u32 %r1, [word];
    done: {STORE}"""
    out = np.zeros(64, np.uint32)
    return out, check(kernel(body, before=BEFORE, target="sm_90"), [out], 64, seed=seed).findings


@pytest.mark.parametrize("seed", [None, 0, 1, 3])
@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_orders_what_it_waits_for(wait, seed):
    out, findings = run(WAITS[wait], seed)
    assert out.tolist() == [42] * 64
    assert findings == ()


def test_without_a_wait_it_is_a_race():
    assert "race" in kinds(run("")[1])


@pytest.mark.parametrize("seed", [None, 0, 1, 3])
def test_a_look_that_nobody_heeds_is_no_wait(seed):
    look = "mbarrier.try_wait.parity.shared::cta.b64 %p6, [bar], 0;"
    assert "race" in kinds(run(look, seed=seed)[1])


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_for_what_never_comes_is_a_deadlock(wait):
    assert "deadlock" in kinds(run(WAITS[wait], producer="")[1])


@pytest.mark.parametrize("early", [True, False])
def test_the_end_of_an_mbarrier(early):
    end = "@%p1 mbarrier.inval.shared::cta.b64 [bar];"
    meet = "" if early else "bar.sync 0;"
    body = f"""{INIT} setp.lt.u32 %p2, %r0, 32; @%p2 bra first; {WAITS["a loop"]} bra done;
    first: @!%p1 bra done; {PRODUCER if not early else ""}
    done: {meet} {end} {meet} mov.u32 %r1, 1; {STORE}"""
    findings = check(kernel(body, before=BEFORE, target="sm_90"), [np.zeros(64, np.uint32)], 64).findings
    assert bool(findings) == early


def test_a_barrier_that_is_not_aligned():
    body = f"""mov.u32 %r0, %tid.x; setp.lt.u32 %p1, %r0, 32; mov.u32 %r1, 1; @%p1 st.shared.u32 [word], 5;
    barrier.sync 1; ld.shared.u32 %r1, [word]; {STORE}"""
    out = np.zeros(64, np.uint32)
    findings = check(
        kernel(body.replace("@%p1 st", "setp.eq.u32 %p2, %r0, 0; @%p2 st"), before=BEFORE), [out], 64
    ).findings
    assert out.tolist() == [5] * 64
    assert findings == ()


@pytest.mark.parametrize("first", [True, False])
def test_a_warp_may_arrive_and_then_wait_at_one_barrier(first):
    """Two warps take turns, of which one starts: the way of FlashAttention's warpgroups."""
    start = "@!%p1 bra go; bar.arrive 1, 64; go:" if first else ""
    body = f"""mov.u32 %r0, %tid.x; shr.u32 %r2, %r0, 5; setp.eq.u32 %p1, %r2, 0; {start}
    add.u32 %r3, %r2, 1; sub.u32 %r4, 2, %r2; bar.sync %r3, 64;
    setp.eq.u32 %p2, %r0, 0; @%p2 st.shared.u32 [word], 5; @%p1 bra give; ld.shared.u32 %r1, [word]; bra end;
    give: mov.u32 %r1, 0; bar.arrive %r4, 64; end: {STORE}"""
    out = np.zeros(64, np.uint32)
    findings = check(kernel(body, before=BEFORE), [out], 64).findings
    if first:
        assert findings == ()
        assert out.tolist() == [0] * 32 + [5] * 32
    else:
        assert "deadlock" in kinds(findings)


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("between", ["bar.sync 0;", "bar.warp.sync -1;", ""])
def test_nobody_knows_which_lane_is_elected(between, seed):
    body = f"""mov.u32 %r0, %tid.x; setp.eq.u32 %p1, %r0, 0; elect.sync %r1|%p2, -1;
    @%p2 mbarrier.init.shared::cta.b64 [bar], 1; {between} @%p1 mbarrier.arrive.shared::cta.b64 _, [bar];
    bar.sync 0; {WAITS["a loop"]}"""
    text = kernel(body, before=BEFORE, target="sm_90")
    found = check(text, [np.zeros(1, np.uint32)], seed=seed).findings
    assert ("mbarrier" in kinds(found)) == (not between)
    assert all(finding.grade == "error" for finding in found)
    by_triton = text.replace("[bar]", "[global_smem]").replace(" bar[", " global_smem[")
    found = check(by_triton, [np.zeros(1, np.uint32)], seed=seed).raise_if_found().findings
    assert kinds(found) == (set() if between else {"mbarrier"})
    assert all(finding.grade == "review" and "lane 0" in finding.relies_on for finding in found)


COPIES = """cvta.to.global.u64 %d1, %d0; mul.wide.u32 %d2, %r0, 4; add.s64 %d3, %d1, %d2; shl.b32 %r3, %r0, 2;
mov.u32 %r4, words; add.u32 %r5, %r4, %r3; cp.async.ca.shared.global [%r5], [%d3], 4;"""
MANY = ".shared .align 8 .b8 bar[8]; .shared .align 16 .b8 words[256];"


def copied(arrive: str, count: int = 64, wait: str = WAITS["a loop"], before: str = "", seed: int | None = None):
    """Each of 64 threads copies a word, and reads its neighbour's in the other warp."""
    body = f"""mov.u32 %r0, %tid.x; setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [bar], {count};
    bar.sync 0; {before} {COPIES} {arrive} {wait} xor.b32 %r6, %r3, 128; add.u32 %r7, %r4, %r6;
    ld.shared.u32 %r1, [%r7]; bar.sync 0; {STORE}"""
    out = np.arange(64, dtype=np.uint32)
    return out, check(kernel(body, before=MANY), [out], 64, seed=seed).findings


ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [bar];"


@pytest.mark.parametrize("seed", [None, 0, 3])
@pytest.mark.parametrize(
    "arrive",
    ["cp.async.mbarrier.arrive.noinc.shared.b64 [bar];", f"cp.async.mbarrier.arrive.shared::cta.b64 [bar]; {ARRIVE}"],
)
def test_copies_arrive_at_an_mbarrier_when_they_are_done(arrive: str, seed: int | None) -> None:
    out, findings = copied(arrive, seed=seed)
    assert findings == ()
    assert out.tolist() == [*range(32, 64), *range(32)]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"arrive": ARRIVE}, "in_flight"),  # an arrival that does not wait for the copies
        ({"arrive": f"cp.async.mbarrier.arrive.shared.b64 [bar]; {ARRIVE}", "wait": ""}, "in_flight"),
        ({"arrive": "cp.async.mbarrier.arrive.noinc.shared.b64 [bar];", "wait": "bar.sync 0;"}, "in_flight"),
        ({"arrive": "cp.async.mbarrier.arrive.shared.b64 [bar];"}, "deadlock"),  # which counts one more each
        ({"arrive": "cp.async.mbarrier.arrive.noinc.shared.b64 [bar];", "count": 65}, "deadlock"),
    ],
)
def test_copies_that_nobody_waits_for_by_their_mbarrier(change: dict[str, Any], kind: str) -> None:
    assert kind in kinds(copied(**change)[1])


@pytest.mark.parametrize(
    ("before", "count", "kind"),
    [
        ("mbarrier.arrive.noComplete.shared.b64 %d9, [bar], 2;", 192, ""),
        ("@%p1 mbarrier.arrive.noComplete.shared.b64 %d9, [bar], 2;", 2, "mbarrier"),  # which ends the phase
        (
            "@%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 16; "
            "@%p1 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 16;",
            64,
            "",
        ),
        ("@%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 16;", 64, "deadlock"),
    ],
)
def test_arrivals_that_do_not_end_a_phase_and_bytes_that_no_copy_brings(before: str, count: int, kind: str) -> None:
    findings = copied("cp.async.mbarrier.arrive.noinc.shared.b64 [bar];", count, before=before)[1]
    assert kinds(findings) >= {kind} if kind else findings == ()


COUNTED = """mov.u32 %r0, %tid.x; setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [bar], %r6;
fence.mbarrier_init.release.cluster; bar.sync 0; mov.u32 %r1, 42; setp.ge.u32 %p2, %r0, 32; @%p2 bra consumer;
@!%p1 bra done; st.shared.u32 [word], 42;"""


def counted(arrive: str, numbers: tuple[int, int]) -> tuple[Any, Any]:
    """Warp 1 waits for what thread 0 stores before it arrives; %r6 (arrivals of a phase) and %r7 are ``numbers``."""
    body = f"""{COUNTED} {arrive} bra done;
    consumer: {WAITS["a loop"]} ld.shared.u32 %r1, [word];
    done: {STORE}"""
    out = np.zeros(64, np.uint32)
    text = kernel(body, ["u64", "u32", "u32"], BEFORE, "sm_90").replace("%r51", "%r6").replace("%r52", "%r7")
    return out, check(text, [out, *map(np.uint32, numbers)], 64).findings


@pytest.mark.parametrize(
    ("arrive", "init", "number"),
    [
        ("mbarrier.arrive.shared::cta.b64 _, [bar], %r7;", 3, 3),
        ("mbarrier.arrive.release.cta.shared::cta.b64 %d9, [bar], %r7;", 2, 2),
        (
            """mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], %r7;
            mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 32;""",
            1,
            32,
        ),
        (
            """mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], %r7; mbarrier.arrive.shared::cta.b64 _, [bar], 2;
            mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 16;""",
            2,
            16,
        ),
    ],
)
def test_counts_and_bytes_in_registers(arrive: str, init: int, number: int) -> None:
    out, findings = counted(arrive, (init, number))
    assert findings == ()
    assert out.tolist() == [42] * 64
    assert kinds(counted(arrive, (init + 1, number))[1]) & {"deadlock", "mbarrier"}


def test_an_mbarrier_of_no_arrivals_is_a_finding() -> None:
    assert "mbarrier" in kinds(counted(PRODUCER, (0, 0))[1])


def test_a_relaxed_arrival_counts_and_releases_nothing() -> None:
    arrive = "mbarrier.arrive.{}.cta.shared::cta.b64 _, [bar];"
    assert counted(arrive.format("release"), (1, 1))[1] == ()
    out, findings = counted(arrive.format("relaxed"), (1, 1))
    assert out.tolist() == [42] * 64
    assert kinds(findings) == {"race"}


RELAXED = "mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [bar];"
STORED = "st.shared.u32 [word], 42;"


@pytest.mark.parametrize("seed", [None, 0, 1, 3])
@pytest.mark.parametrize("fence", ["fence.acq_rel.cta;", "fence.release.cta;", "fence.sc.gpu;", "membar.cta;"])
def test_a_relaxed_arrival_releases_what_its_thread_has_fenced(fence: str, seed: int | None) -> None:
    out, findings = run(WAITS["a loop"], seed, f"{STORED} {fence} {RELAXED}")
    assert findings == ()
    assert out.tolist() == [42] * 64


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize(
    "producer",
    [f"{STORED} {RELAXED}", f"fence.acq_rel.cta; {STORED} {RELAXED}", f"{STORED} fence.acquire.cta; {RELAXED}"],
)
def test_a_relaxed_arrival_releases_nothing_that_is_not_fenced(producer: str, seed: int | None) -> None:
    assert kinds(run(WAITS["a loop"], seed, producer)[1]) == {"race"}


@pytest.mark.parametrize("seed", [None, 0, 3])
@pytest.mark.parametrize(
    ("arrive", "wait", "told"),
    [
        ("release", "acquire", True),
        ("release", "relaxed", False),
        ("release", "relaxed, fenced", True),
        ("relaxed", "relaxed, fenced", False),
        ("fence, relaxed", "relaxed, fenced", True),
        ("fence, relaxed", "relaxed", False),
    ],
)
def test_a_relaxed_wait_acquires_by_a_fence_behind_it(arrive: str, wait: str, told: bool, seed: int | None) -> None:
    """PTX ISA, "Release and Acquire Patterns": a strong read followed by a fence is an acquire pattern."""
    fence, order = "fence.acq_rel.cta;", wait.partition(",")[0]
    loop = WAITS["a loop"].replace(".parity.", f".parity.{order}.cta.") + fence * ("fenced" in wait)
    loop = loop.replace("test_wait", "try_wait")
    arrival = RELAXED if "relaxed" in arrive else RELAXED.replace("relaxed", "release")
    out, findings = run(loop, seed, f"{STORED} {fence * ('fence' in arrive)} {arrival}")
    assert kinds(findings) == (set() if told else {"race"})
    assert out.tolist() == [42] * 64


@pytest.mark.parametrize("fences", [32, 16])
def test_each_lane_fences_for_itself(fences: int) -> None:
    """32 lanes store a word each and arrive, of which so many fence; the other warp reads all words."""
    body = f"""mov.u32 %r0, %tid.x; setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [bar], 32; bar.sync 0;
    and.b32 %r2, %r0, 31; shl.b32 %r2, %r2, 2; mov.u32 %r3, words; add.u32 %r3, %r3, %r2; mov.u32 %r1, %r0;
    setp.ge.u32 %p2, %r0, 32; @%p2 bra consumer; st.shared.u32 [%r3], %r0;
    setp.lt.u32 %p3, %r0, {fences}; @%p3 fence.acq_rel.cta; {RELAXED} bra done;
    consumer: {WAITS["a loop"]} ld.shared.u32 %r1, [%r3];
    done: {STORE}"""
    out = np.zeros(64, np.uint32)
    found = check(kernel(body, before=MANY, target="sm_90"), [out], 64).findings
    assert out.tolist() == [*range(32)] * 2
    assert kinds(found) == (set() if fences == 32 else {"race"})
