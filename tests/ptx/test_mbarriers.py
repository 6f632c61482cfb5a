"""mbarriers of PTX: waits that are loops and waits that only look, and their end."""

from __future__ import annotations

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
