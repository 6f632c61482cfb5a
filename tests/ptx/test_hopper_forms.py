"""Forms of sm_90 by themselves: bulk copies of bytes, clusters that a kernel was compiled for."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx.text import check, kernel, kinds
from warploom.core.dtypes import dtype_of
from warploom.core.errors import PtxError
from warploom.layout.tensor_map import TensorMapSpec

BULK = """mov.u32 %r0, %tid.x; setp.eq.u32 %p1, %r0, 0; mul.lo.u32 %r1, %r0, 4; mov.u32 %r2, s; add.u32 %r1, %r1, %r2;
cvt.rn.f32.u32 %f0, %r0; st.shared.f32 [%r1], %f0; fence.proxy.async.shared::cta; bar.sync 0;
@%p1 bra copy; bra done; copy: COPY; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; done:"""
STORE = "cp.async.bulk.global.shared::cta.bulk_group [%d0+16], [s], 128"
SHARED_ALONE = "fence.proxy.async.shared::cta;"
ADD = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d0+16], [s], 128"


@pytest.mark.parametrize("size", ["128", "%r51"])
@pytest.mark.parametrize("copy", [STORE, ADD])
def test_bulk_copies_to_global_memory(copy: str, size: str) -> None:
    """Their size may stand in a register."""
    before = ".shared .align 16 .b8 s[128];"
    text = kernel(BULK.replace("COPY", copy.replace("128", size)), ["u64", "u32"], before, "sm_90")
    out = np.ones(36, np.float32)
    assert check(text, [out, np.uint32(128)]).findings == ()
    assert np.array_equal(out, np.r_[np.ones(4), np.arange(32) + (copy == ADD)])
    found = check(text.replace("fence.proxy.async.shared::cta;", ""), [out, np.uint32(128)]).findings
    assert kinds(found) == {"proxy"}
    if size != "128":
        assert kinds(check(text, [out, np.uint32(24)]).findings) >= {"misaligned"}


def test_the_cluster_that_a_kernel_was_compiled_for() -> None:
    body = """mov.u32 %r0, %cluster_ctarank; mov.u32 %r1, %ctaid.x; mul.wide.u32 %d2, %r1, 4; add.u64 %d3, %d0, %d2;
    mov.u32 %r2, %tid.x; setp.eq.u32 %p1, %r2, 0; @%p1 st.global.u32 [%d3], %r0;"""
    text = kernel(body, target="sm_90")
    out = np.zeros(8, np.uint32)
    check(text.replace(")\n{", ")\n.reqnctapercluster 4, 1, 1\n{"), [out], grid=8).raise_if_found()
    assert out.tolist() == [0, 1, 2, 3] * 2
    counted = text.replace(")\n{", ")\n.explicitcluster\n{")
    with pytest.raises(PtxError, match="pass cluster="):
        check(counted, [out], grid=8)
    check(counted, [out], grid=8, cluster=2).raise_if_found()
    assert out.tolist() == [0, 1] * 4
    with pytest.raises(PtxError, match="compiled for clusters of"):
        check(text.replace(")\n{", ")\n.reqnctapercluster 4, 1, 1\n{"), [out], grid=8, cluster=2)


ARRIVALS = """mov.u32 %r0, %tid.x; mov.u32 %r9, %cluster_ctarank; setp.eq.u32 %p1, %r0, 0;
    @%p1 mbarrier.init.shared::cta.b64 [bar], 1; FENCE barrier.cluster.arrive.relaxed.aligned;
    barrier.cluster.wait.acquire.aligned; mov.u32 %r1, bar; xor.b32 %r2, %r9, 1; mapa.shared::cluster.u32 %r3, %r1, %r2;
    @%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3];
    { .reg .pred done; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [bar], 0;
    @!done bra again; }
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    mul.wide.u32 %d2, %r9, 4; add.u64 %d3, %d0, %d2; @%p1 st.global.u32 [%d3], %r2;"""


@pytest.mark.parametrize("fence", ["fence.mbarrier_init.release.cluster;", "", "fence.proxy.async.shared::cta;"])
def test_a_relaxed_arrival_publishes_fenced_mbarriers_alone(fence: str) -> None:
    text = kernel(ARRIVALS.replace("FENCE", fence), before=".shared .align 8 .b8 bar[8];", target="sm_90")
    out = np.zeros(2, np.uint32)
    findings = check(text, [out], grid=2, cluster=2).findings
    assert kinds(findings) == (set() if "init" in fence else {"mbarrier"})
    assert out.tolist() == [1, 0]


PHASES = """mov.u32 %r0, %tid.x; setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [bar], 32;
    fence.mbarrier_init.release.cluster; bar.sync 0; setp.lt.u32 %p2, %r0, 31; @%p2 bra stays;
    mbarrier.arrive_drop.shared::cta.b64 _, [bar]; bra rest; stays: mbarrier.arrive.shared::cta.b64 _, [bar]; rest:
    { .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [bar], 0; @!done bra again; } bar.sync 0;
    @%p2 mbarrier.arrive.shared::cta.b64 _, [bar];
    { .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [bar], 1; @!done bra again; }
    mov.u32 %r1, 7; mul.wide.u32 %d2, %r0, 4; add.u64 %d3, %d0, %d2; st.global.u32 [%d3], %r1;"""


def test_who_drops_out_of_an_mbarrier_takes_no_part_in_later_phases() -> None:
    text = kernel(PHASES, before=".shared .align 8 .b8 bar[8];", target="sm_90")
    out = np.zeros(32, np.uint32)
    assert check(text, [out]).findings == ()
    assert out.tolist() == [7] * 32
    assert "deadlock" in kinds(check(text.replace("arrive_drop", "arrive"), [out]).findings)


BOX = """mov.u32 %r0, %tid.x; setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [bar], 1;
    fence.mbarrier_init.release.cluster; bar.sync 0; mov.b64 %d1, p1; cvta.param.u64 %d2, %d1; @!%p1 bra wait;
    mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 128; mbarrier.arrive.shared::cta.b64 _, [bar];
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [box], [%d2, {8, 2}], [bar]; wait:
    { .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [bar], 0; @!done bra again; }
    @!%p1 bra end; REDUCE; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; end:"""


@pytest.mark.parametrize(("operation", "combine"), [("add", np.add), ("min", np.minimum), ("max", np.maximum)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32])
def test_a_box_is_combined_with_the_tensor(operation: str, combine: np.ufunc, dtype: type) -> None:
    kind = dtype_of(np.dtype(dtype).name)
    columns = 32 // kind.bytes
    reduce = f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{operation}.tile.bulk_group [%d2, {{0, 0}}], [box]"
    text = kernel(
        BOX.replace("REDUCE", reduce).replace("p1; cvta", "map; cvta"),
        [],
        target="sm_90",
        before=".shared .align 128 .b8 box[128]; .shared .align 8 .b8 bar[8];",
    )
    text = text.replace("k()", "k(.param .align 64 .b8 map[128])")
    rng = np.random.default_rng(3)
    x = rng.integers(-9, 9, (6, 8 + columns)).astype(dtype)
    wanted = x.copy()
    wanted[:4, :columns] = combine(x[:4, :columns], x[2:6, 8 : 8 + columns])
    spec = TensorMapSpec(kind, x.shape[::-1], (x.strides[0],), (columns, 4))
    found = check(text, [(x, spec)]).findings
    assert np.array_equal(x, wanted)
    assert kinds(found) <= {"race", "proxy"}  # it reads what it writes: two boxes that overlap


SPAN = """mov.u32 %r0, %tid.x; setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [bar], 1;
    fence.mbarrier_init.release.cluster; bar.sync 0; @!%p1 bra wait; mov.u32 %r1, 112;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 112;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [box], [%d0+16], %r1, [bar]; wait:
    { .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [bar], 0; @!done bra again; }
    mul.lo.u32 %r2, %r0, 4; mov.u32 %r3, box; add.u32 %r3, %r3, %r2; ld.shared.u32 %r4, [%r3];
    cvt.u64.u32 %d2, %r2; add.u64 %d3, %d1, %d2; setp.lt.u32 %p2, %r0, 28; @%p2 st.global.u32 [%d3], %r4;"""


def test_consecutive_bytes_arrive_on_an_mbarrier() -> None:
    before = ".shared .align 128 .b8 box[128]; .shared .align 8 .b8 bar[8];"
    x, out = np.arange(40, dtype=np.uint32), np.zeros(28, np.uint32)
    text = kernel(SPAN, ["u64", "u64"], before, "sm_90")
    assert kinds(check(text, [x, out]).findings) == set()
    assert out.tolist() == list(range(4, 32))
    wait = "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [bar], 0; @!done bra again; }"
    assert "in_flight" in kinds(check(text.replace(wait, ""), [x, out]).findings)
    assert "misaligned" in kinds(check(text.replace("%r1, 112;", "%r1, 100;"), [x, out]).findings)
    assert "bounds" in kinds(check(text, [x[:28].copy(), out]).findings)


@pytest.mark.parametrize("fence", ["fence.proxy.async.global;", "fence.proxy.async;", SHARED_ALONE, ""])
@pytest.mark.parametrize("write", ["red.global.add.u32 [%d3], 1;", "st.relaxed.gpu.global.u32 [%d3], 1;"])
@pytest.mark.parametrize("copy", [SPAN, "STORE"])
def test_what_atomics_wrote_is_fenced_against_the_async_proxy(copy: str, write: str, fence: str) -> None:
    before = ".shared .align 128 .b8 box[128]; .shared .align 128 .b8 s[128]; .shared .align 8 .b8 bar[8];"
    first = f"""mov.u32 %r0, %tid.x; mul.wide.u32 %d2, %r0, 4; add.u64 %d3, %d0, %d2; {write} {fence} bar.sync 0;"""
    copy = copy if copy == SPAN else BULK.replace("COPY", STORE)
    text = kernel(first + copy, ["u64", "u64"], before, "sm_90")
    found = kinds(check(text, [np.zeros(40, np.uint32), np.zeros(28, np.uint32)]).findings)
    assert found == ({"proxy"} if fence in ("", SHARED_ALONE) else set())


@pytest.mark.parametrize("count", [0, 1, (1 << 20) - 1, 1 << 20])
def test_an_mbarrier_counts_what_its_field_holds(count: int) -> None:
    body = f"mov.u32 %r0, %tid.x; setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [bar], {count};"
    text = kernel(body, before=".shared .align 8 .b8 bar[8];", target="sm_90")
    if 0 < count < 1 << 20:
        assert check(text, [np.zeros(1, np.uint32)]).findings == ()
    else:
        with pytest.raises(PtxError, match="arrivals"):
            check(text, [np.zeros(1, np.uint32)])
