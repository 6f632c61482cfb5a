"""What the scripts of cells share: options, kernels compiled ahead, the kernels of others, and cells checked and timed.

A set of inputs is a dictionary of tensors, ``q``, ``k``, ``v`` … in (batch, sequence, heads, head_dim) or packed rows.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean
from typing import Any, TypeVar

import scripts

from warploom.core.errors import CompileError
from warploom.kernels.source import KernelCall
from warploom.measure.timing import Candidate, EventClock, Measured, graphed, input_sets, measure, paired_spread
from warploom.tune.build import build_all
from warploom_lab.bench import baselines
from warploom_lab.bench.environment import environment

Cell = TypeVar("Cell")
Found = dict[str, Any]
Inputs = dict[str, Any]
Run = Callable[[Inputs], Any]
"""One call on a set of inputs."""
SMALLEST_SAMPLE = 0.010


def parser_of(doc: str | None, rounds: int) -> argparse.ArgumentParser:
    """A parser with ``--out``, ``--rounds`` and ``--compile-only``."""
    parser = scripts.parser_of(doc)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--compile-only", action="store_true", help="for sm_90a, without a GPU")
    return parser


def architecture(options: argparse.Namespace) -> str:
    """That of the GPU, or what kernels are compiled for without one."""
    from warploom.ops.backends import gpu_target

    return "sm_90a" if options.compile_only else gpu_target(0).name


def compile_all(calls: Iterable[KernelCall], arch: str) -> int:
    """Compile the kernels of calls on all cores, so that nothing waits for a compiler afterwards; how many there are.

    Raises CompileError for the first that is none.
    """
    sources = list(dict.fromkeys(call.source for call in calls))
    for source, found in zip(sources, build_all(sources, arch), strict=True):
        if isinstance(found, str):
            raise CompileError(f"{source.name}: {found}")
    return len(sources)


def on_one_stream(timed: Callable[[Any], Found]) -> Callable[[Any], Found]:
    """``timed`` on a stream that graphs are captured on too: autograd runs where the forward pass ran."""
    import torch

    stream = torch.cuda.Stream()
    torch.cuda.graph.default_capture_stream = stream

    def run(cell: Any) -> Found:
        with torch.cuda.stream(stream):
            return timed(cell)

    return run


# -- the kernels of others


def sdpa(name: str, **options: Any) -> Callable[[Any, Any, Any], Any]:
    """One of PyTorch's backends on (batch, sequence, heads, head_dim) tensors."""
    run = baselines.sdpa(name, **options)
    return lambda q, k, v: run(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def of_qkv(run: Callable[[Any, Any, Any], Any]) -> Run:
    """A call of q, k and v on a set of inputs."""
    return lambda x: run(x["q"], x["k"], x["v"])


def through_autograd(forward: Callable[[Any, Any, Any], Any]) -> Run:
    """The gradients of a baseline, by PyTorch's autograd; its forward pass runs once for each set of inputs."""
    import torch

    kept: dict[int, tuple[Any, Any]] = {}

    def run(x: Inputs) -> tuple[Any, ...]:
        if id(x) not in kept:
            leaves = [x[name].detach().requires_grad_() for name in "qkv"]
            kept[id(x)] = forward(*leaves), leaves
        out, leaves = kept[id(x)]
        return torch.autograd.grad(out, leaves, x["dout"], retain_graph=True)

    return run


def flash_attention_2(where: Callable[[Inputs], tuple[Any, ...]], *, gradients: bool, **sides: int) -> Run:
    """PyTorch's copy of FlashAttention-2, by its operators, which have windows and align the last query.

    ``where``: starts and longest lengths of queries and keys, dropout and whether the mask is causal.
    """
    import torch

    aten, kept = torch.ops.aten, dict[int, tuple[Any, ...]]()

    def run(x: Inputs) -> Any:
        qkv = [x[name] for name in "qkv"]
        if not gradients:
            return aten._flash_attention_forward(*qkv, *where(x), False, **sides)[0]
        if id(x) not in kept:
            kept[id(x)] = aten._flash_attention_forward(*qkv, *where(x), False, **sides)[:4]
        out, lse, seed, offset = kept[id(x)]
        return aten._flash_attention_backward(x["dout"], *qkv, out, lse, *where(x), seed, offset, **sides)

    return run


# -- cells


def said(error: Exception) -> str:
    """An exception in a line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def sets_of(bytes_per_set: int) -> int:
    """How many sets of inputs rotate past this GPU's L2."""
    import torch

    return input_sets(bytes_per_set, torch.cuda.get_device_properties(0).L2_cache_size)


def clock() -> EventClock:
    """Of PyTorch's current stream."""
    import torch

    return EventClock(int(torch.cuda.current_stream().cuda_stream))


@dataclass(frozen=True)
class Turns:
    """Calls that were checked, then timed in turns as replays of ``calls`` calls; why some ``failed``."""

    found: Mapping[str, Measured]
    error: dict[str, float]
    failed: dict[str, str]
    calls: int

    def tflops(self, flops: float | Mapping[str, float]) -> Found:
        """Rates of calls of so many FLOPs."""
        work = dict.fromkeys(self.found, flops) if not isinstance(flops, Mapping) else flops
        return {n: m.seconds.rate(self.calls * work[n] / 1e12).json() for n, m in self.found.items()}

    def ratio(self, of: str = "warploom") -> Found:
        """How many times as fast as each other one it is."""
        return {n: paired_spread(self.found[of], m).json() for n, m in self.found.items() if n != of}

    def over(self, baseline: str) -> Found:
        """How many times as fast as a baseline each other one is."""
        return {n: paired_spread(m, self.found[baseline]).json() for n, m in self.found.items() if n != baseline}


def in_turns(
    runs: Mapping[str, tuple[Run, Sequence[Inputs]]],
    error: Callable[[str, Any], float | None],
    rounds: int,
    sample: float = SMALLEST_SAMPLE,
    warm_up: float = 0.05,
    others: Iterable[str] = (),
    beside: Iterable[Candidate] = (),
) -> Turns:
    """Each checked on the first of its sets of inputs, where its results' memory is likely to hold NaN, then timed.

    ``error`` of a name and a result is at most 1 where it is right, None where it is not checked. Of ``others`` one may
    fail. What is ``beside`` is timed as it is.
    """
    import torch

    errors, failed, candidates, others = dict[str, float](), dict[str, str](), list[Candidate](), set(others)
    (calls,) = {len(sets) for _, sets in runs.values()}
    for name, (run, sets) in runs.items():
        for like in (sets[0][key] for key in ("q", "k", "v", "out") if key in sets[0]):
            torch.full_like(like, math.nan)
        try:
            if (off := error(name, run(sets[0]))) is not None:
                errors[name] = off
            for x in sets:  # forward passes of baselines are no part of a graph
                run(x)
            candidates.append(graphed(Candidate(name, lambda i, run=run, sets=sets: run(sets[i])), calls, torch))
            torch.cuda.synchronize()
        except Exception as refusal:
            if name not in others:
                raise
            failed[name] = said(refusal)
            torch.cuda.synchronize()  # raises where the GPU refused: nothing can be timed behind that
    found = measure([*beside, *candidates], 1, clock(), rounds=rounds, sample_seconds=sample, warm_up_seconds=warm_up)
    return Turns(found, errors, failed, calls)


def wrong(cells: Iterable[Found], bounds: Mapping[str, float] | None = None) -> list[str]:
    """Every wrong result, a baseline's included; what may be off by more than 1 has its bound."""
    return [
        f"{name} is wrong at {c['cell']}: {off:.2f}"
        for c in cells
        for name, off in c["error"].items()
        if not off <= (bounds or {}).get(name, 1.0)
    ]


@dataclass(frozen=True)
class Figure:
    """What ratios to a baseline must be: in each cell ``where`` fields have these values, or in the geometric mean.

    ``mean``: from how many cells on there is one.
    """

    baseline: str
    at_least: float
    where: Mapping[str, Collection[Any]] = field(default_factory=dict[str, Collection[Any]])
    mean: int = 0


def below(cells: Sequence[Found], figures: Iterable[Figure]) -> list[str]:
    """Every figure that is not reached; cells without its baseline are passed over."""
    said: list[str] = []
    for figure in figures:
        mine = [c for c in cells if figure.baseline in c["ratio"] and all(c[k] in of for k, of in figure.where.items())]
        ratios = [c["ratio"][figure.baseline]["median"] for c in mine]
        wanted = f"× {figure.baseline}, wanted {figure.at_least}"
        if not figure.mean:
            short = ((c, r) for c, r in zip(mine, ratios, strict=True) if not r >= figure.at_least)
            said += [f"{c['cell']}: {r} {wanted}" for c, r in short]
        elif len(ratios) >= figure.mean and not (mean := geometric_mean(ratios)) >= figure.at_least:
            said.append(f"{mean:.3f} {wanted} in the mean of {dict(figure.where)}")
    return said


def speeds(tflops: Mapping[str, Found], ratio: Mapping[str, Found]) -> str:
    """TFLOP/s of each, and ratios, in a line."""
    return "  ".join(
        f"{n} {s['median']:.0f}" + (f" ×{ratio[n]['median']:.3f}" if n in ratio else "") for n, s in tflops.items()
    )


def line_of(c: Found, more: str = "") -> str:
    """A cell as a line of text."""
    refused = f"  {c['not_run']}" if c.get("not_run") else ""
    return f"{c['cell']:32} error {max(c['error'].values()):.2f}  {more}{speeds(c['tflops'], c['ratio'])}{refused}"


def measured(
    todo: Iterable[Cell],
    timed: Callable[[Cell], Found],
    line: Callable[[Found], str],
    missed: Callable[[list[Found]], list[str]],
    file: Path,
    head: Found | None = None,
    *,
    otherwise: str = "every figure is reached",
    more: Callable[[list[Found]], Found] = lambda _: {},
) -> int:
    """Time all cells: print each, write what there is to ``file`` after each, and at the end what was missed.

    ``head``: what the environment says besides; ``more``: what is written beside the cells. Returns 1 where something
    was missed, else 0.
    """
    found: list[Found] = []
    result = {"environment": environment() | (head or {}), "cells": found, "missed": list[str]()}
    for cell in todo:
        found.append(timed(cell))
        print(line(found[-1]), flush=True)
        result |= {"missed": missed(found)} | more(found)
        scripts.write(file, result)
    print("\n".join(result["missed"]) or otherwise)
    return 1 if result["missed"] else 0
