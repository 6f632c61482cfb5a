"""``k.print``: what threads print on the emulator, in every order alike, and that NVRTC takes ``printf``."""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from warploom.core.errors import EmulationWarning, TraceError
from warploom.cuda.compile import compile_source
from warploom.cuda.names import entry_name
from warploom.cuda.printer import print_cuda
from warploom.emulate import emulate
from warploom.ir.program import Program
from warploom.lang import Global, Kernel, bf16, f16, f32, f64, kernel, s8, s32, s64, u32, u64
from warploom.layout import mma_fragment


def printing(body: Callable[[Kernel], None], threads: int = 32) -> Program:
    @kernel(threads=threads)
    def prints(k: Kernel, out: Global[f32]) -> None:
        body(k)
        out.store(1.0, k.cta_x * threads + k.thread)

    return prints.trace()


def printed(body: Callable[[Kernel], None], threads: int = 32, grid: Any = 1, seed: int | None = None) -> list[str]:
    out = np.zeros(1024, np.float32)
    return emulate(printing(body, threads), grid, [out], seed=seed).raise_if_found().printed.splitlines()


@pytest.mark.parametrize(
    ("text", "value", "wanted"),
    [
        ("{}", lambda k: k.value(1.5, f32), "1.5"),
        ("{:8.3f}|", lambda k: k.value(-2.0, f64), "  -2.000|"),
        ("{} {{}} 50%", lambda k: k.value(-7, s32), "-7 {} 50%"),
        ("{:d}", lambda k: k.value(2**32 - 1, u32), "4294967295"),
        ("{:#x}", lambda k: k.value(-1, s32), "0xffffffff"),
        ("{}", lambda k: k.value(2**63, u64), str(2**63)),
        ("{}", lambda k: k.value(-5, s64), "-5"),
        ("{}", lambda k: k.lane == 3, "1"),
        ("{}", lambda k: k.convert(k.value(0.25, f32), bf16), "0.25"),
        ("{}", lambda k: k.convert(k.value(0.25, f32), f16), "0.25"),
        ("{}", lambda k: k.convert(k.value(-3, s32), s8), "-3"),
        ("{}", lambda k: k.register(u32, 9), "9"),
        ("{}", lambda k: [k.lane, k.lane + 1], "[3 4]"),
        ("{:.1f}", lambda k: k.accumulator(mma_fragment("m16n8k16", "C"), 2.0), "[2.0 2.0 2.0 2.0]"),
        ("{}", lambda k: k.accumulator(mma_fragment("m16n8k16", "C"), 0.0).packed(f16), "[0 0 0 0]"),
        ("{} and {}", lambda k: k.lane, None),
        ("{:5.2f}%", lambda _: 3.14159, " 3.14%"),
        ("{}", lambda _: "100%", "100%"),
    ],
)
def test_values_of_every_type(text: str, value: Callable[[Kernel], Any], wanted: str | None) -> None:
    def body(k: Kernel) -> None:
        k.print(text, value(k), lane=3)

    if wanted is None:
        with pytest.raises(TraceError, match=r"test_printing\.py:\d+: k\.print takes a value for each"):
            printing(body)
        return
    assert printed(body) == [f"CTA 0,0,0 warp 0 lane 3: {wanted}"]


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_lines_come_warp_by_warp_in_every_order(seed: int | None) -> None:
    def body(k: Kernel) -> None:
        with k.loop(2) as i:
            k.print("i {}", i, lane=0)
            k.syncthreads()

    wanted = [f"CTA {x},{y},0 warp {w} lane 0: i {i}" for y in (0, 1) for x in (0, 1) for w in (0, 1) for i in (0, 1)]
    assert printed(body, 64, (2, 2), seed) == wanted


@pytest.mark.parametrize(
    ("filters", "who"),
    [
        ({}, [(c, w, t) for c in (0, 1) for w in (0, 1) for t in range(32)]),
        ({"warp": 1, "lane": 5}, [(0, 1, 5), (1, 1, 5)]),
        ({"cta": 1, "lane": 0}, [(1, 0, 0), (1, 1, 0)]),
        ({"cta": (1, 0, 0), "warp": 0, "lane": 31}, [(1, 0, 31)]),
        ({"cta": (1, 1)}, []),
    ],
)
def test_filters(filters: Any, who: list[tuple[int, int, int]]) -> None:
    wanted = [f"CTA {c},0,0 warp {w} lane {t}: here" for c, w, t in who]
    assert printed(lambda k: k.print("here", **filters), 64, 2) == wanted


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_nvrtc_takes_it(arch: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")

    def body(k: Kernel) -> None:
        part = k.accumulator(mma_fragment("m16n8k16", "C"), 1.0)
        k.print('100% "{}" {:x} {} {}\t{}', part, k.lane, k.lane < 3, k.value(-1, s64), k.value(1.0, f64), warp=0)

    program = printing(body)
    source = print_cuda(program)
    assert r'printf("CTA %u,%u,%u warp %u lane %u: 100%% \"[%g %g %g %g]\" %x %d %lld\t%g\n", ' in source
    compile_source(source, entry_name(program.name), arch=arch)


def test_what_was_never_written_is_a_finding() -> None:
    program = printing(lambda k: k.print("{}", k.shared(f32, 32).load(0, k.lane)))
    (found,) = emulate(program, 1, [np.zeros(32, np.float32)]).findings
    assert (found.kind, "printf" in found.message) == ("uninitialised", True)


def test_the_text_is_part_of_the_program() -> None:
    one, two = (printing(lambda k, text=text: k.print(text)) for text in ("a", "b"))
    assert one.digest != two.digest
    assert pickle.loads(pickle.dumps(one)).digest == one.digest


@pytest.mark.parametrize(
    ("text", "values", "says"),
    [
        ("m", (1,), "more values than"),
        ("{0}", (1,), "a value for each"),
        ("{:e}", ("lane",), "formats u32 by one of d, u, x"),
        ("{:<5}", ("lane",), "with a width, not by '<5'"),
        ("{}", (["lane"] * 28,), "at most 27 values, not 28"),
    ],
)
def test_refusals(text: str, values: tuple[Any, ...], says: str) -> None:
    def body(k: Kernel) -> None:
        of: Any = {"lane": k.lane}
        k.print(text, *([of[x] for x in v] if isinstance(v, list) else of.get(v, v) for v in values))

    with pytest.raises(TraceError, match=says):
        printing(body)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ({"lane": 32}, "no lane 32: .* to 31"),
        ({"lane": -1}, "no lane -1"),
        ({"warp": 32}, "warp"),
        ({"cta": -1}, "CTA"),
    ],
)
def test_what_no_thread_is_does_not_print(where: dict[str, int], says: str) -> None:
    with pytest.raises(TraceError, match=says):
        printing(lambda k: k.print("{}", k.lane, **where))


def test_a_value_is_no_text() -> None:
    text: Any = 1.5
    with pytest.raises(TraceError, match="begins with a text"):
        printing(lambda k: k.print(text))


@kernel(threads=32)
def prints_its_lane(k: Kernel, out: Global[f32]) -> None:
    k.print("lane", lane=7)
    out.store(1.0, k.lane)


def test_a_launch_without_a_gpu_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warploom.ops.launch.gpu_present", lambda: False)
    with pytest.warns(EmulationWarning):
        prints_its_lane[1](np.zeros(32, np.float32))
    assert capsys.readouterr().out == "CTA 0,0,0 warp 0 lane 7: lane\n"
