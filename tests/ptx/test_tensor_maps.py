"""Tensor maps that a kernel makes: in shared memory and published, or in global memory itself."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx.text import check, kernel, kinds
from warploom.core.dtypes import f32
from warploom.core.errors import PtxError
from warploom.layout.tensor_map import TensorMapSpec

FIELDS = """
    tensormap.replace.tile.global_address.SPACE.b1024.b64 [MAP], %d0;
    tensormap.replace.tile.rank.SPACE.b1024.b32 [MAP], 1;
    tensormap.replace.tile.box_dim.SPACE.b1024.b32 [MAP], 0, 8;
    tensormap.replace.tile.box_dim.SPACE.b1024.b32 [MAP], 1, 4;
    tensormap.replace.tile.global_dim.SPACE.b1024.b32 [MAP], 0, 16;
    tensormap.replace.tile.global_dim.SPACE.b1024.b32 [MAP], 1, 6;
    tensormap.replace.tile.global_stride.SPACE.b1024.b64 [MAP], 0, 64;
    tensormap.replace.tile.element_stride.SPACE.b1024.b32 [MAP], 0, 1;
    tensormap.replace.tile.element_stride.SPACE.b1024.b32 [MAP], 1, 1;
    tensormap.replace.tile.elemtype.SPACE.b1024.b32 [MAP], 7;
    tensormap.replace.tile.swizzle_mode.SPACE.b1024.b32 [MAP], 0;
"""
START = """mov.u32 %r0, %tid.x; setp.eq.u32 %p1, %r0, 0; setp.lt.u32 %p2, %r0, 32; mov.u32 %r1, 0;
    @%p1 mbarrier.init.shared::cta.b64 [bar], 1; fence.mbarrier_init.release.cluster;
    mov.u32 %r2, map; shl.b32 %r3, %r0, 2; add.u32 %r4, %r2, %r3; cvt.u64.u32 %d6, %r3; add.u64 %d7, %d2, %d6;"""
SHARED = f"""{START} @%p2 st.shared.u32 [%r4], %r1; bar.warp.sync -1;
    @!%p1 bra made; {FIELDS.replace("SPACE", "shared::cta").replace("MAP", "map")} made: bar.warp.sync -1;
    @%p2 tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%d2], [map], 128;
    @%p2 fence.proxy.tensormap::generic.acquire.gpu [%d2], 128;"""
GLOBAL = f"""{START} @%p2 st.global.u32 [%d7], %r1; bar.warp.sync -1;
    @!%p1 bra made; {FIELDS.replace("SPACE", "global").replace("MAP", "%d2")}
    fence.proxy.tensormap::generic.release.gpu; made: bar.warp.sync -1;
    fence.proxy.tensormap::generic.acquire.gpu [%d2], 128;"""
USE = """bar.sync 0; @!%p1 bra wait; mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 128;
    cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [box], [%d2, {12, 4}], [bar];
    wait: { .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [bar], 0; @!done bra again; }
    setp.ge.u32 %p3, %r0, 32; @%p3 bra end;
    mov.u32 %r6, box; add.u32 %r6, %r6, %r3; ld.shared.u32 %r7, [%r6]; add.u64 %d8, %d1, %d6; st.global.u32 [%d8], %r7;
    end:"""
BEFORE = ".shared .align 128 .b8 map[128]; .shared .align 128 .b8 box[128]; .shared .align 8 .b8 bar[8];"


def run(make: str, block: int = 64, use: str = USE):
    """The box at column 12 and row 4 of a 6x16 matrix."""
    x, out, place = np.arange(96, dtype=np.float32), np.full((4, 8), np.nan, np.float32), np.zeros(128, np.uint8)
    text = kernel(make + use, ["u64"] * 3, BEFORE, "sm_90a")
    return out, check(text, [x, out, place], block).findings


@pytest.mark.parametrize("make", [SHARED, GLOBAL])
def test_a_map_that_is_published_and_taken_in(make: str) -> None:
    out, findings = run(make)
    wanted = np.zeros((4, 8), np.float32)
    wanted[:2, :4] = np.arange(96).reshape(6, 16)[4:, 12:]
    assert findings == ()
    assert np.array_equal(out, wanted)


def test_a_map_has_up_to_five_dimensions() -> None:
    """The same matrix with three more dimensions of size 1."""
    one = "tensormap.replace.tile.{0}.shared::cta.b1024.b{2} [map], {1}, {3};"
    more = " ".join(
        one.format(name, d - (name == "global_stride"), bits, value)
        for d in (2, 3, 4)
        for name, bits, value in (
            ("box_dim", 32, 1),
            ("global_dim", 32, 1),
            ("element_stride", 32, 1),
            ("global_stride", 64, 384),
        )
    )
    make = SHARED.replace("rank.shared::cta.b1024.b32 [map], 1;", f"rank.shared::cta.b1024.b32 [map], 4; {more}")
    use = USE.replace("tensor.2d", "tensor.5d").replace("{12, 4}", "{12, 4, 0, 0, 0}")
    out, findings = run(make, use=use)
    assert findings == ()
    assert np.array_equal(out, run(SHARED)[0])


@pytest.mark.parametrize(
    ("make", "line", "kind"),
    [
        (SHARED, "bar.warp.sync -1;", "race"),
        (SHARED, "made: bar.warp.sync -1;", "race"),
        (GLOBAL, "bar.warp.sync -1;", "race"),
        (SHARED, "@%p2 fence.proxy.tensormap::generic.acquire.gpu [%d2], 128;", "proxy"),
        (GLOBAL, "fence.proxy.tensormap::generic.acquire.gpu [%d2], 128;", "proxy"),
        (GLOBAL, "fence.proxy.tensormap::generic.release.gpu;", "proxy"),
        (SHARED, "@%p2 st.shared.u32 [%r4], %r1;", "uninitialised"),
        (SHARED, "tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [map], 0, 1;", "layout"),
        (SHARED, "tensormap.replace.tile.global_address.shared::cta.b1024.b64 [map], %d0;", "layout"),
    ],
)
def test_what_a_map_needs(make: str, line: str, kind: str) -> None:
    assert line in make
    assert kind in kinds(run(make.replace(line, line.split(" ")[0] if line.startswith("made:") else "", 1))[1])


def test_a_map_that_reaches_beyond_its_array() -> None:
    found = run(SHARED.replace("[map], 1, 6;", "[map], 1, 7;"))[1]
    assert "layout" in kinds(found)
    assert "reaches byte 448 of an array of 384" in found[0].message


@pytest.mark.parametrize("change", ["interleave_layout", "fill_mode"])
def test_fields_that_are_refused(change: str) -> None:
    with pytest.raises(PtxError, match=rf"{change} other than 0 is not supported"):
        run(SHARED.replace("swizzle_mode.shared::cta.b1024.b32 [map], 0", f"{change}.shared::cta.b1024.b32 [map], 1"))


def swizzled(swizzle: int, at: int):
    """256 threads read a box of 1024 bytes that lies ``at`` bytes behind a multiple of 1024, and hand it out."""
    cols = swizzle // 4
    x, out = np.arange(1, 257, dtype=np.float32).reshape(-1, cols), np.zeros(256, np.float32)
    source = x, TensorMapSpec(f32, x.shape[::-1], (swizzle,), (cols, 256 // cols), swizzle)
    body = f"""mov.u32 %r0, %tid.x; setp.eq.u32 %p1, %r0, 0; mov.u32 %r2, box; add.u32 %r2, %r2, {at};
    mov.b64 %d2, p1; cvta.param.u64 %d3, %d2;
    @%p1 mbarrier.init.shared::cta.b64 [bar], 1; fence.mbarrier_init.release.cluster; bar.sync 0; @!%p1 bra wait;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 1024;
    cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%d3, {{0, 0}}], [bar];
    wait: {{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [bar], 0; @!done bra again; }}
    shl.b32 %r3, %r0, 2; add.u32 %r3, %r3, %r2; shr.u32 %r4, %r3, 7; and.b32 %r4, %r4, {swizzle // 16 - 1};
    shl.b32 %r4, %r4, 4; xor.b32 %r3, %r3, %r4; ld.shared.u32 %r5, [%r3];
    mul.wide.u32 %d1, %r0, 4; add.u64 %d1, %d1, %d0; st.global.u32 [%d1], %r5;"""
    text = kernel(body, before=".shared .align 1024 .b8 box[2048]; .shared .align 8 .b8 bar[8];", target="sm_90a")
    text = text.replace(".param .u64 p0)", ".param .u64 p0, .param .align 64 .b8 p1[128])")
    return x.ravel(), out, check(text, [out, source], 256).findings


@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize("at", [0, 128, 256, 896])
def test_a_swizzled_box_lies_at_any_multiple_of_128_bytes(swizzle: int, at: int) -> None:
    """The swizzle goes by bits of the address, so that the first chunk of such a box is not at its start."""
    x, out, findings = swizzled(swizzle, at)
    assert findings == ()
    assert np.array_equal(out, x)


@pytest.mark.parametrize("at", [16, 64, 144])
def test_a_box_off_128_bytes_is_misaligned(at: int) -> None:
    """At 144 the swizzle takes the first chunk to 128, which helps nothing."""
    assert "misaligned" in kinds(swizzled(128, at)[2])
