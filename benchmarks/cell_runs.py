"""What the scripts of cells share: their options, where they run, and a run that keeps what it has after each cell."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from warploom.bench.environment import environment

Cell = TypeVar("Cell")
Job = TypeVar("Job")
Found = dict[str, Any]


def parser_of(doc: str | None, rounds: int) -> argparse.ArgumentParser:
    """A parser with ``--out``, ``--rounds`` and ``--compile-only``."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--compile-only", action="store_true", help="for sm_90a, without a GPU")
    return parser


def architecture(options: argparse.Namespace) -> str:
    """That of the GPU, or what kernels are compiled for without one."""
    from warploom.ops.backends import gpu_target

    return "sm_90a" if options.compile_only else gpu_target(0).name


def in_processes(work: Callable[[Job], object], jobs: Iterable[Job]) -> None:
    """In as many processes as there are cores: afterwards nothing waits for a compiler."""
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        list(pool.map(work, jobs))


def on_one_stream(timed: Callable[[Any], Found]) -> Callable[[Any], Found]:
    """``timed`` on a stream that graphs are captured on too: autograd runs where the forward pass ran."""
    import torch

    stream = torch.cuda.Stream()
    torch.cuda.graph.default_capture_stream = stream

    def run(cell: Any) -> Found:
        with torch.cuda.stream(stream):
            return timed(cell)

    return run


def measured(
    todo: Iterable[Cell],
    timed: Callable[[Cell], Found],
    line: Callable[[Found], str],
    missed: Callable[[list[Found]], list[str]],
    file: Path,
    head: Found | None = None,
    *,
    otherwise: str = "every figure is reached",
) -> int:
    """Time all cells: print each, write what there is to ``file`` after each, and at the end what was missed.

    ``head``: what the environment says besides. Returns 1 where something was missed, else 0.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    found: list[Found] = []
    result = {"environment": environment() | (head or {}), "cells": found, "missed": list[str]()}
    for cell in todo:
        found.append(timed(cell))
        print(line(found[-1]), flush=True)
        result["missed"] = missed(found)
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("\n".join(result["missed"]) or otherwise)
    return 1 if result["missed"] else 0
