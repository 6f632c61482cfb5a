"""``warploom check --timeline`` and ``--html``: trace events by the rules of their format, and a page by line."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.project import ROOT
from tests.ptx.text import kernel as text_of

import warploom
from warploom.checking.kernel_file import check_kernel, one_kernel
from warploom.checking.timeline import tracks_of
from warploom.emulate import emulate, recorded
from warploom.lang import Global, Kernel, f32, kernel

Invoke = Callable[..., Any]
TMA, CP_ASYNC = "examples/wgmma_pipeline.py", "examples/attention_steps.py:ring"


def events_of(invoke: Invoke, file: Path, *arguments: str) -> list[dict[str, Any]]:
    invoke("check", *arguments, "--timeline", str(file))
    return json.loads(file.read_text(encoding="utf-8"))["traceEvents"]


@pytest.mark.parametrize("arguments", [(TMA,), (TMA, "--seed", "3"), (CP_ASYNC,), ("examples/multicast_gemm.py",)])
def test_the_trace_keeps_the_rules_of_the_format(invoke: Invoke, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    events = events_of(invoke, tmp_path / "run.json", str(ROOT / arguments[0]), *arguments[1:])
    named = {
        name: {(e["pid"], e["tid"]) for e in events if e["name"] == name} for name in ("process_name", "thread_name")
    }
    slices = defaultdict[tuple[int, int], list[tuple[float, float]]](list)
    for event in events:
        assert event["ph"] in "MXsfi"
        assert (event["pid"], event["tid"]) in named["thread_name"] & named["process_name"]
        if event["ph"] == "X":
            assert event["dur"] > 0
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for track in slices.values():  # slices of a track lie one behind the other, or one within the other
        open_ends: list[float] = []
        for begin, end in sorted(track, key=lambda s: (s[0], -s[1])):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)
    starts, ends = ({e["id"]: e for e in events if e["ph"] == kind} for kind in "sf")
    assert starts.keys() == ends.keys()
    assert starts
    assert max(Counter(e["id"] for e in events if e["ph"] in "sf").values()) == 2
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] <= end["ts"]
        for at in (start, end):
            assert any(begin <= at["ts"] < last for begin, last in slices[at["pid"], at["tid"]])


def test_copies_products_and_waits_of_a_pipeline(invoke: Invoke, tmp_path: Path) -> None:
    events = events_of(invoke, tmp_path / "run.json", str(ROOT / TMA))
    mine = [e for e in events if e["pid"] == 0]
    name = {e["tid"]: e["args"]["name"] for e in mine if e["name"] == "thread_name"}
    assert {n.partition(" (")[0] for n in name.values()} == {"warps 0 to 3", "warp 4", "TMA", "wgmma"}
    shown = Counter((name[e["tid"]].partition(" (")[0], e["name"]) for e in mine if e["ph"] == "X")
    assert shown["TMA", "a_tile, full"] == shown["TMA", "b_tile, full"] == shown["wgmma", "a_tile, b_tile ×4"] == 5
    assert shown["warp 4", "waits: empty"] == 3
    arrows = Counter(
        (name[a["tid"]].partition(" (")[0], name[b["tid"]])
        for a, b in zip((e for e in mine if e["ph"] == "s"), (e for e in mine if e["ph"] == "f"), strict=True)
    )
    assert arrows["TMA", "warps 0 to 3"] >= 5
    assert arrows["wgmma", "warps 0 to 3"] == 5
    assert arrows["warps 0 to 3", "warp 4"] == 3
    assert any("wgmma_pipeline.py:" in e["args"].get("line", "") for e in mine if e["ph"] == "X")


STUCK = """
from warploom.lang import Global, Kernel, Launch, f32, kernel
import numpy as np

@kernel(threads=64)
def stuck(k: Kernel, x: Global[f32]) -> None:
    tile = k.shared(f32, (32, 32))
    x.store(tile.load(k.lane, 0), k.lane * 32)
    with k.when(k.warp == 0, uniform=True):
        k.bar_sync(1, 64)

@stuck.example
def _(rng):
    return Launch(1, [np.zeros(1024, np.float32)])
"""


def test_findings_and_waits_without_an_end_are_shown(invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "stuck.py"
    file.write_text(STUCK)
    events = events_of(invoke, tmp_path / "run.json", str(file), "--html", str(tmp_path / "run.html"))
    assert {e["name"] for e in events if e["ph"] == "i"} >= {"uninitialised", "deadlock"}
    assert any(e["name"].startswith("waits: bar.sync") for e in events)
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    line = next(n for n, text in enumerate(STUCK.splitlines(), 1) if "tile.load" in text)
    row = page.partition(f'id="stuck-stuck.py-{line}"')[2].partition("</tr>")[0]
    for text in (
        'class="wrong"',
        "x.store(tile.load(k.lane, 0)",
        "<b>uninitialised</b>",
        "<td class=cost>64</td><td>2</td>",
    ):
        assert text in row
    assert "<td class=cost>2048</td><td>256</td>" in row
    assert "<svg" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


@kernel(threads=32)
def twice(k: Kernel, x: Global[f32]) -> None:
    x.store(x.load(k.lane) * 2.0, k.lane)


def test_nothing_is_recorded_unasked() -> None:
    x = np.ones(32, np.float32)
    assert emulate(twice.trace(), 1, [x]).recording is None
    with recorded():
        found = emulate(twice.trace(), 1, [x]).recording
    assert found is not None
    assert [(s.kind, s.begin, s.end, s.warps) for s in found.slices] == [("runs", 0, found.steps, (0,))]
    assert (found.arrows, found.marks) == ((), ())
    assert emulate(twice.trace(), 1, [x]).recording is None


def test_a_kernel_as_ptx_is_recorded() -> None:
    """Its first block holds nothing to run."""
    text = text_of("mov.u32 %r0, %tid.x; mul.wide.u32 %d1, %r0, 4; add.s64 %d2, %d0, %d1; st.global.u32 [%d2], %r0;")
    with recorded():
        found = warploom.check_ptx(text, 1, 32, [np.zeros(32, np.uint32)]).emulation.recording
    assert found is not None
    assert [(s.kind, s.begin, s.end, s.warps) for s in found.slices] == [("runs", 0, found.steps, (0,))]


def test_eight_ctas_are_recorded() -> None:
    with recorded():
        run = emulate(twice.trace(), 12, [np.ones(32, np.float32)])
    assert run.recording is not None
    assert {s.cta for s in run.recording.slices} == set(range(8))


def test_roles_have_a_track_each() -> None:
    with recorded():
        one = check_kernel(one_kernel(f"{ROOT}/examples/attention_steps.py:roles"))
    assert one.emulation.recording is not None
    names = [track.name for track in tracks_of(one.program, one.emulation.recording) if track.cta == 0]
    assert names[:3] == ["warps 0 to 3", "warps 4 to 7", "TMA"]
