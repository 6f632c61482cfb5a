"""Forms of sm_90 by themselves: bulk copies of bytes, clusters that a kernel was compiled for."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx.text import check, kernel, kinds
from warploom.core.errors import PtxError

BULK = """mov.u32 %r0, %tid.x; setp.eq.u32 %p1, %r0, 0; mul.lo.u32 %r1, %r0, 4; mov.u32 %r2, s; add.u32 %r1, %r1, %r2;
cvt.rn.f32.u32 %f0, %r0; st.shared.f32 [%r1], %f0; fence.proxy.async.shared::cta; bar.sync 0;
@%p1 bra copy; bra done; copy: COPY; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; done:"""
STORE = "cp.async.bulk.global.shared::cta.bulk_group [%d0+16], [s], 128"
ADD = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d0+16], [s], 128"


@pytest.mark.parametrize("copy", [STORE, ADD])
def test_bulk_copies_to_global_memory(copy: str) -> None:
    before = ".shared .align 16 .b8 s[128];"
    text = kernel(BULK.replace("COPY", copy), before=before, target="sm_90")
    out = np.ones(36, np.float32)
    assert check(text, [out]).findings == ()
    assert np.array_equal(out, np.r_[np.ones(4), np.arange(32) + (copy == ADD)])
    found = check(text.replace("fence.proxy.async.shared::cta;", ""), [out]).findings
    assert kinds(found) == {"proxy"}


def test_the_cluster_that_a_kernel_was_compiled_for() -> None:
    body = """mov.u32 %r0, %cluster_ctarank; mov.u32 %r1, %ctaid.x; mul.wide.u32 %d2, %r1, 4; add.u64 %d3, %d0, %d2;
    mov.u32 %r2, %tid.x; setp.eq.u32 %p1, %r2, 0; @%p1 st.global.u32 [%d3], %r0;"""
    text = kernel(body, target="sm_90")
    out = np.zeros(8, np.uint32)
    check(text.replace(")\n{", ")\n.reqnctapercluster 4, 1, 1\n{"), [out], grid=8).raise_if_found()
    assert out.tolist() == [0, 1, 2, 3] * 2
    with pytest.raises(PtxError, match="compile it for a size"):
        check(text.replace(")\n{", ")\n.explicitcluster\n{"), [out], grid=8)
