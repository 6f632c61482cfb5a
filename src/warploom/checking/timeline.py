"""A recorded run as a timeline: trace events, which Perfetto and Chrome open, and a picture.

A track for the warps of each role of a CTA, and one for each asynchronous engine; where slices of a track would cross,
another one beneath it. One step of the emulator is drawn as a microsecond.

Source: "Trace Event Format" (Google), of JSON that https://ui.perfetto.dev and chrome://tracing read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from warploom.checking.kernel_file import Checked
from warploom.emulate import Recording
from warploom.emulate.launch.recording import RUNS, WAITS, Arrow, Slice
from warploom.ir.program import Program
from warploom.ir.statements import NOWHERE, Roles
from warploom.layout.draw import FAINT, INK, Drawing, Label, Rectangle, Stroke, tone

UNIT = "steps of the emulator, in the order in which it ran the kernel: no time of a GPU"
_PROCESSES = 1 << 16  # numbers of processes that a kernel has
_ENGINES = ("TMA", "cp.async", "st.async", "wgmma")
_COLOURS = {RUNS: tone(4), WAITS: tone(0, 1), "TMA": tone(5, 2), "cp.async": tone(5, 2), "wgmma": tone(3, 2)}
_LEFT, _ROW, _WIDE = 124, 26, 900


@dataclass(eq=False)
class Track:
    """A row of the timeline: the slices of one role of a CTA's warps, or the copies that one engine had in flight."""

    cta: int
    name: str
    slices: list[Slice] = field(default_factory=list[Slice])


def tracks_of(program: Program, recording: Recording) -> list[Track]:
    """The tracks of a run, CTA by CTA."""
    found: list[Track] = []
    roles = [range(r.first, r.last) for s in program.statements() if isinstance(s, Roles) for r in s.branches]
    roles.sort(key=lambda role: role.start)
    for cta in sorted({s.cta for s in recording.slices}):
        mine = [s for s in recording.slices if s.cta == cta]
        ran = [s for s in mine if s.kind in (RUNS, WAITS)]
        for part in (part for role in roles or [range(program.warps)] for part in _parts(role, ran)):
            found += _placed(cta, _warps(part), [s for s in ran if not set(part).isdisjoint(s.warps)], nests=True)
        for engine in _ENGINES:
            found += _placed(cta, engine, [s for s in mine if s.kind == engine], nests=False)
    return found


def _parts(role: range, ran: Sequence[Slice]) -> list[range]:
    """The warpgroups of a role that do not go on together, or the role."""
    alone = any(0 < len(set(role).intersection(s.warps)) < len(role) for s in ran)
    return [role[i : i + 4] for i in range(0, len(role), 4)] if alone else [role]


def _warps(role: range) -> str:
    return f"warp {role.start}" if len(role) == 1 else f"warps {role.start} to {role.stop - 1}"


def _placed(cta: int, name: str, slices: Sequence[Slice], *, nests: bool) -> list[Track]:
    """Tracks on which slices lie one behind the other, or one within the other where it ``nests``."""
    tracks: list[Track] = []
    ends: list[list[int]] = []
    for one in sorted(slices, key=lambda s: (s.begin, -s.end)):
        for open_ends in ends:
            while open_ends and open_ends[-1] <= one.begin:
                open_ends.pop()
        free = [i for i, e in enumerate(ends) if not e or (nests and one.end <= e[-1])]
        if not free:
            free = [len(tracks)]
            tracks.append(Track(cta, f"{name} ({len(tracks) + 1})" if tracks else name))
            ends.append([])
        tracks[free[0]].slices.append(one)
        ends[free[0]].append(one.end)
    return tracks


def _shown(tracks: Sequence[Track], arrows: Iterable[Arrow]) -> Iterator[tuple[Arrow, int, int]]:
    """Yield the arrows between tracks, with the numbers of the tracks that they lead from and to."""
    of = {one: number for number, track in reversed([*enumerate(tracks)]) for one in track.slices}
    for arrow in arrows:
        if arrow.source in of and arrow.target in of:
            yield arrow, of[arrow.source], of[arrow.target]


def trace_events(kernel: str, program: Program, recording: Recording, first: int = 0) -> list[dict[str, Any]]:
    """The events of a run; its processes, one for each CTA, are numbered from ``first`` on."""
    tracks = tracks_of(program, recording)
    events: list[dict[str, Any]] = []
    where = [{"pid": first + track.cta, "tid": i} for i, track in enumerate(tracks)]
    for at, track in zip(where, tracks, strict=True):
        events.append({"ph": "M", "name": "process_name", **at, "args": {"name": f"{kernel}: CTA {track.cta}"}})
        events.append({"ph": "M", "name": "thread_name", **at, "args": {"name": track.name}})
        events.append({"ph": "M", "name": "thread_sort_index", **at, "args": {"sort_index": at["tid"]}})
        events += [_event(s) | at for s in track.slices]
    for number, (arrow, source, target) in enumerate(_shown(tracks, recording.arrows)):
        arrival = {"name": "arrival", "cat": "arrival", "id": f"{first}.{number}"}
        events.append({"ph": "s", "ts": min(arrow.at, arrow.source.end - 1) + 0.5, **arrival, **where[source]})
        events.append({"ph": "f", "bp": "e", "ts": arrow.target.end - 0.25, **arrival, **where[target]})
    for mark in recording.marks:
        cta, warp = mark.place
        on = (at for at, track in zip(where, tracks, strict=True) if track.cta == cta and _has(track, warp))
        args = {"message": mark.finding.message, "lines": mark.finding.lines}
        shown = {"ph": "i", "s": "t", "cat": "finding", "ts": mark.at, "name": mark.finding.kind, "args": args}
        events += [shown | at for at in [next(on, None)] if at is not None]
    return events


def _has(track: Track, warp: int) -> bool:
    return any(warp in s.warps and s.kind in (RUNS, WAITS) for s in track.slices)


def _event(one: Slice) -> dict[str, Any]:
    args = {"warps": list(one.warps), **({} if one.where == NOWHERE else {"line": one.where.stack})}
    cat = "warps" if one.kind in (RUNS, WAITS) else "in flight"
    return {"ph": "X", "name": _text(one), "cat": cat, "ts": one.begin, "dur": one.end - one.begin, "args": args}


def _text(one: Slice) -> str:
    if one.kind == WAITS:
        return f"waits: {one.text}"
    return one.kind if one.kind == RUNS else f"{one.text} ×{one.count}" if one.count > 1 else one.text


def trace_of(checked: Iterable[tuple[str, Checked]]) -> dict[str, Any]:
    """The file that Perfetto and Chrome open, of kernels by their names that were recorded as they ran."""
    events: list[dict[str, Any]] = []
    for number, (name, one) in enumerate(checked):
        if one.emulation.recording is not None:
            events += trace_events(name, one.program, one.emulation.recording, number * _PROCESSES)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"time": UNIT}}


def drawing(title: str, program: Program, recording: Recording, until: int | None = None) -> Drawing:
    """The tracks of the first CTA, with what its warps waited for, up to a step."""
    last = min(until or recording.steps, recording.steps)
    first = min((s.cta for s in recording.slices), default=0)
    tracks = [track for track in tracks_of(program, recording) if track.cta == first]
    scale, boxes, labels, strokes = _WIDE / max(1, last), list[Rectangle](), list[Label](), list[Stroke]()
    labels.append(Label(18, 22, title, 15, INK, "start", bold=True))
    labels.append(Label(18, 42, f"CTA {first}, {last} {UNIT}", 12, FAINT, "start"))

    def place(track: int, step: float) -> tuple[float, float]:
        return _LEFT + min(step, last) * scale, 62 + _ROW * track

    for number, track in enumerate(tracks):
        labels.append(Label(_LEFT - 8, place(number, 0)[1] + 10, track.name, 10.5, FAINT, "end"))
        for one in track.slices:
            (x, y), width = place(number, one.begin), (min(one.end, last) - one.begin) * scale
            if width <= 0:
                continue
            hint = f"{_text(one)}, steps {one.begin} to {one.end}" + ("" if one.where == NOWHERE else f", {one.where}")
            boxes.append(Rectangle(x, y, width, _ROW - 6, _COLOURS.get(one.kind, tone(6)), hint))
            if one.kind != RUNS and 6.2 * len(_text(one)) < width:
                labels.append(Label(x + width / 2, y + 10, _text(one), 10))
    for arrow, source, target in _shown(tracks, recording.arrows):
        if source != target and arrow.target.end <= last:
            (x, y), (to_x, to_y) = place(source, min(arrow.at + 1, arrow.source.end)), place(target, arrow.target.end)
            strokes.append(Stroke(x, y + 10, to_x, to_y + 10))
    return Drawing(_LEFT + _WIDE + 18, 62 + _ROW * len(tracks) + 8, tuple(boxes), tuple(labels), title, tuple(strokes))
