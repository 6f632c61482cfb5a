"""Control flow without a structure: where lanes part and meet, who waits for whom, what is divergent for certain."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx.text import check, kernel, kinds
from warploom.core.errors import EmulationError

STORE = "mov.u32 %r50, %tid.x; mul.wide.u32 %d30, %r50, 4; add.s64 %d31, %d0, %d30; st.global.u32 [%d31], %r1;"


def run(body: str, threads: int = 32, grid: int = 1, before: str = "", **options):
    """What threads of the first CTA leave in %r1, and the findings."""
    out = np.zeros(threads * grid, np.uint32)
    return out, check(kernel(body, before=before), [out], threads, grid, **options).findings


@pytest.mark.parametrize("seed", [None, 1, 3])
def test_lanes_leave_a_loop_one_by_one(seed):
    body = f"""
    mov.u32 %r2, %tid.x; mov.u32 %r1, 0; mov.u32 %r3, 0;
    again:
    add.u32 %r1, %r1, %r3; add.u32 %r3, %r3, 1; setp.le.u32 %p1, %r3, %r2; @%p1 bra again;
    {STORE}"""
    out, findings = run(body, 64, seed=seed)
    assert out.tolist() == [n * (n + 1) // 2 for n in range(64)]
    assert findings == ()


def test_lanes_meet_again_after_both_sides_of_a_branch():
    body = f"""
    mov.u32 %r2, %laneid; setp.lt.u32 %p1, %r2, 10; @%p1 bra low;
    add.u32 %r3, %r2, 100; bra join;
    low: add.u32 %r3, %r2, 200;
    join: shfl.sync.bfly.b32 %r1, %r3, 1, 31, 0xffffffff;
    {STORE}"""
    out, findings = run(body)
    assert out.tolist() == [(n ^ 1) + (200 if n ^ 1 < 10 else 100) for n in range(32)]
    assert findings == ()


def test_code_out_of_order_and_a_jump_back_that_is_no_loop():
    body = f"""
    mov.u32 %r2, %laneid; and.b32 %r3, %r2, 1; setp.eq.u32 %p1, %r3, 0; bra start;
    join: bar.warp.sync 0xffffffff; shfl.sync.idx.b32 %r1, %r4, 5, 31, -1; bra end;
    odd: mov.u32 %r4, 7; bra join;
    start: @!%p1 bra odd;
    mov.u32 %r4, 9; bra join;
    end: {STORE}"""
    out, findings = run(body)
    assert out.tolist() == [7] * 32
    assert findings == ()


@pytest.mark.parametrize("threads", [32, 64])
def test_an_indirect_branch_goes_where_each_lane_says(threads):
    body = f"""
    mov.u32 %r2, %tid.x; rem.u32 %r3, %r2, 3; mov.u32 %r1, 0;
    table: .branchtargets zero, one, two;
    brx.idx %r3, table;
    zero: mov.u32 %r1, 5; bra join;
    one: mov.u32 %r1, 6;
    two: add.u32 %r1, %r1, 10;
    join: {STORE}"""
    out, findings = run(body, threads)
    assert out.tolist() == [(5, 16, 10)[n % 3] for n in range(threads)]
    assert findings == ()


def test_lists_of_targets_belong_to_their_braces():
    block = """{{ table: .branchtargets zero, one; brx.idx %r3, table;
    zero: add.u32 %r1, %r1, {}; bra join; one: add.u32 %r1, %r1, {}; join: }}"""
    body = f"""
    mov.u32 %r2, %tid.x; and.b32 %r3, %r2, 1; mov.u32 %r1, 0; {block.format(1, 2)} {block.format(10, 20)}; {STORE}"""
    out, findings = run(body.replace("};", "}"))
    assert out.tolist() == [(11, 22)[n % 2] for n in range(32)]
    assert findings == ()


def test_an_indirect_branch_beyond_its_list_is_found():
    body = f"""
    mov.u32 %r3, %laneid; mov.u32 %r1, 1;
    table: .branchtargets zero, one;
    brx.idx %r3, table;
    zero: mov.u32 %r1, 2;
    one: {STORE}"""
    out, findings = run(body)
    assert kinds(findings) == {"undefined"}
    assert out[:2].tolist() == [2, 1]


@pytest.mark.parametrize(("early", "found"), [("", set()), ("bar.sync 0;", {"divergence"})])
def test_a_barrier_in_a_branch_of_some_lanes(early, found):
    """The barrier behind the branch is for all lanes, wherever they come from; one inside it is not."""
    body = f"""
    mov.u32 %r2, %tid.x; mov.u32 %r1, 1; and.b32 %r3, %r2, 31; setp.ne.u32 %p1, %r3, 3; @%p1 bra join;
    mov.u32 %r1, 2; {early}
    join: bar.sync 0; {STORE}"""
    out, findings = run(body, 64)
    assert kinds(findings) == found
    if not found:
        assert out.tolist() == [1 + (n % 32 == 3) for n in range(64)]


def test_one_barrier_in_both_branches_is_no_meeting_of_a_warp():
    """Lanes of one warp at two barrier instructions: aligned ones need the whole warp."""
    body = f"""
    mov.u32 %r2, %tid.x; mov.u32 %r1, 1; and.b32 %r3, %r2, 1; setp.eq.u32 %p1, %r3, 0; @%p1 bra even;
    bar.sync 0; bra join;
    even: bar.sync 0;
    join: {STORE}"""
    assert "divergence" in kinds(run(body)[1])


def test_a_shuffle_in_one_branch_that_names_the_other_lanes_is_found():
    body = f"""
    mov.u32 %r2, %laneid; mov.u32 %r1, 1; setp.lt.u32 %p1, %r2, 16; @%p1 bra join;
    shfl.sync.bfly.b32 %r1, %r2, 1, 31, 0xffffffff;
    join: bar.warp.sync -1; {STORE}"""
    assert kinds(run(body)[1]) == {"member_mask"}
    assert kinds(run(body.replace("0xffffffff", "0xffff0000"))[1]) == set()
    # Once the other lanes have ended, nobody is missing.
    assert kinds(run(body.replace("bar.warp.sync -1;", ""))[1]) == set()


def test_a_predicated_barrier_is_a_branch():
    body = f"mov.u32 %r2, %laneid; mov.u32 %r1, 1; setp.lt.u32 %p1, %r2, %r3; @%p1 bar.sync 0; {STORE} bar.sync 0;"
    assert kinds(run("mov.u32 %r3, 32;" + body)[1]) == set()
    assert kinds(run("mov.u32 %r3, 5;" + body)[1]) == {"divergence"}


@pytest.mark.parametrize("uniform", [True, False])
def test_a_branch_declared_uniform(uniform):
    body = f"""
    mov.u32 %r2, %laneid; mov.u32 %r1, 1; setp.lt.u32 %p1, %r2, {16 if not uniform else 32};
    @%p1 bra.uni join;
    mov.u32 %r1, 2;
    join: {STORE}"""
    assert kinds(run(body)[1]) == (set() if uniform else {"divergence"})


def test_threads_that_have_ended_are_not_waited_for():
    """CUDA, compute capability 7: barriers and shuffles are for the threads that have not exited."""
    body = f"""
    mov.u32 %r2, %tid.x; mov.u32 %r1, 1; setp.ge.u32 %p1, %r2, 40; @%p1 ret;
    bar.sync 0; bar.warp.sync 0xffffffff; {STORE}"""
    out, findings = run(body, 128)
    assert out.tolist() == [1] * 40 + [0] * 88
    assert findings == ()


@pytest.mark.parametrize("seed", [None, 0, 3])
def test_ended_warps_release_those_at_a_barrier(seed):
    """Warp 0 waits at the barrier before the others end."""
    body = f"""
    mov.u32 %r2, %tid.x; mov.u32 %r1, 0; mov.u32 %r3, 0; setp.lt.u32 %p1, %r2, 32; @%p1 bra wait;
    again: add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 9; @%p2 bra again;
    ret;
    wait: bar.sync 0; mov.u32 %r1, 1; {STORE}"""
    out, findings = run(body, 96, seed=seed)
    assert out.tolist() == [1] * 32 + [0] * 64
    assert findings == ()


SPIN = """
    mov.u32 %r2, %tid.x; setp.ne.u32 %p1, %r2, 0; @%p1 bra inside;
    again: atom.global.acquire.gpu.cas.b32 %r3, [%d0], 0, 1; setp.ne.u32 %p2, %r3, 0; @%p2 bra again;
    inside: bar.sync 0;
    @%p1 bra done;
    ld.global.u32 %r4, [%d0+4]; add.u32 %r4, %r4, 1; st.global.u32 [%d0+4], %r4;
    atom.global.release.gpu.exch.b32 %r5, [%d0], 0;
    done: ret;
"""


@pytest.mark.parametrize("seed", [None, 2, 3])
def test_a_lock_that_ctas_spin_on(seed):
    memory = np.zeros(2, np.uint32)
    found = check(kernel(SPIN), [memory], 64, 9, seed=seed)
    assert memory.tolist() == [0, 9]
    assert found.findings == ()


def test_a_lock_without_release_is_a_race():
    memory = np.zeros(2, np.uint32)
    assert kinds(check(kernel(SPIN.replace(".release", ".relaxed")), [memory], 64, 9).findings) == {"race"}


@pytest.mark.usefixtures("impatient")
def test_a_lock_that_is_never_free_is_a_deadlock_not_a_hang():
    memory = np.array([1, 0], np.uint32)
    assert kinds(check(kernel(SPIN), [memory], 32, 1).findings) == {"deadlock"}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops that change nothing are given up soon."""
    monkeypatch.setattr("warploom.emulate.launch.machine._IDLE_PASSES", 10)
    monkeypatch.setattr("warploom.emulate.control.tasks._MANY_PASSES", 10)


@pytest.mark.usefixtures("impatient")
def test_a_loop_that_counts_in_memory_ends() -> None:
    count = "again: atom.global.add.u32 %r3, [%d0], 1; setp.lt.u32 %p1, %r3, 40; @%p1 bra again;"
    memory = np.zeros(1, np.uint32)
    found = check(kernel(f"mov.u32 %r2, %tid.x; setp.eq.u32 %p2, %r2, 0; @!%p2 ret; {count}"), [memory])
    assert memory.tolist() == [41]
    assert found.findings == ()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("load", ["ld.global.u32 %r3, [%d0]", "ld.shared.u32 %r3, [tile]"])
@pytest.mark.parametrize("told", [True, False])
def test_waiting_by_plain_loads_is_a_race_not_a_hang(load: str, told: bool) -> None:
    """Warp 0 looks for what warp 1 stores."""
    store = load.replace("ld", "st").replace("%r3, ", "").replace("]", "], 7") if told else ""
    body = f"""
    mov.u32 %r2, %tid.x; setp.eq.u32 %p3, %r2, 0; @%p3 st.shared.u32 [tile], 0; bar.sync 0;
    setp.lt.u32 %p1, %r2, 32; @!%p1 bra other;
    again: {load}; setp.eq.u32 %p2, %r3, 0; @%p2 bra again; ret;
    other: setp.eq.u32 %p4, %r2, 32; @%p4 {store or "mov.u32 %r1, 0"};"""
    found = check(kernel(body, before=".shared .align 4 .b8 tile[4];"), [np.zeros(1, np.uint32)], 64).findings
    assert kinds(found) == ({"race"} if told else {"deadlock"})


def test_lanes_of_a_warp_may_wait_for_each_other():
    """Threads are independent: lane 0 spins until lane 5, which takes the other branch, has written."""
    body = f"""
    mov.u32 %r2, %tid.x; mov.u32 %r1, 7; setp.ne.u32 %p1, %r2, 0; @%p1 bra other;
    again: ld.acquire.gpu.global.u32 %r3, [%d0]; setp.eq.u32 %p2, %r3, 0; @%p2 bra again;
    bra join;
    other: setp.ne.u32 %p3, %r2, 5; @%p3 bra join;
    st.release.gpu.global.u32 [%d0], 7;
    join: bar.warp.sync 0xffffffff; setp.eq.u32 %p4, %r2, 0; @%p4 ret; {STORE}"""
    out, findings = run(body)
    assert out.tolist() == [7] * 32
    assert findings == ()


def test_values_survive_where_lanes_wait_in_the_middle_of_a_block():
    """What a block has computed before a shuffle at which lanes from two sides meet."""
    body = f"""
    mov.u32 %r2, %laneid; mov.u32 %r4, 0; setp.lt.u32 %p1, %r2, 7; @%p1 bra twice;
    once: add.u32 %r4, %r4, 1; mul.lo.u32 %r5, %r2, 3; shfl.sync.idx.b32 %r6, %r5, 9, 31, -1;
    add.u32 %r7, %r5, %r6; mad.lo.u32 %r1, %r4, 1000, %r7; bra end;
    twice: add.u32 %r4, %r4, 10; bra once;
    end: {STORE}"""
    out, findings = run(body)
    assert out.tolist() == [1000 * (11 if n < 7 else 1) + 3 * n + 27 for n in range(32)]
    assert findings == ()


def test_a_divergent_condition_that_is_poison_is_found():
    body = f"""
    ld.shared.u32 %r2, [tile]; mov.u32 %r1, 1; setp.eq.u32 %p1, %r2, 0; @%p1 bra join;
    mov.u32 %r1, 2;
    join: {STORE}"""
    assert kinds(run(body, before=".shared .align 4 .b8 tile[128];")[1]) == {"uninitialised"}


def test_a_predicate_that_changes_ends_a_group_of_guarded_instructions() -> None:
    body = """
    mov.u32 %r0, %tid.x; mad.wide.u32 %d1, %r0, 4, %d0; mov.u32 %r1, 0;
    setp.lt.u32 %p1, %r0, 16;
    @%p1 setp.ge.u32 %p1|%p2, %r0, 8;
    @%p1 mov.u32 %r1, 7;
    st.global.u32 [%d1], %r1;"""
    out = np.ones(32, np.uint32)
    assert check(kernel(body), [out]).findings == ()
    np.testing.assert_array_equal(out, [7 * (8 <= i < 16) for i in range(32)])


@pytest.mark.parametrize(
    "body",
    [
        "again: bra again;",
        """mov.u32 %r1, 0;
    again: add.u32 %r1, %r1, 1; setp.ne.u32 %p1, %r1, 0; @%p1 bra again;""",
    ],
)
def test_a_loop_that_does_not_end_is_told(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    monkeypatch.setattr("warploom.emulate.control.tasks._MOST_PASSES", 1000)
    with pytest.raises(EmulationError, match=r"kernel.ptx:\d+: after 1000 passes"):
        check(kernel(body), [np.zeros(1, np.uint32)])


@pytest.mark.parametrize("source", [15, 16])
def test_a_lane_that_has_ended_gives_nothing(source: int) -> None:
    body = f"""mov.u32 %r2, %laneid; setp.ge.u32 %p1, %r2, 16; @%p1 bra end;
    shfl.sync.idx.b32 %r1, %r2, {source}, 31, -1; {STORE} end:"""
    out, findings = run(body)
    assert kinds(findings) == (set() if source == 15 else {"uninitialised"})
    assert source != 15 or out.tolist() == [15] * 16 + [0] * 16


@pytest.mark.parametrize("count", [0, 40, 96])
def test_a_barrier_counts_whole_warps_of_its_cta(count: int) -> None:
    assert run("mov.u32 %r1, 0; bar.sync 1, 64;", 64)[1] == ()
    assert kinds(run(f"mov.u32 %r1, 0; bar.sync 1, {count};", 64)[1]) == {"barrier"}
