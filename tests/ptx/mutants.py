"""Mutants of PTX that other compilers wrote: synchronisation deleted, counts shifted, predicates flipped; who objects.

    python -m tests.ptx.mutants [--out benchmarks/results/static/ptx-mutants.json] [--only SUBJECT] [--flips 12]

compiles kernels with Triton (where it is installed) and NVRTC, changes one line of the PTX at a time, and runs each
mutant in the emulator's own order and under adversarial seeds until the emulator objects or the result is not NumPy's.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import warploom
from tests.ptx.cuda_cases import HEADERS, PLAIN, CudaCase
from warploom.core.errors import WarploomError
from warploom.cuda.ptx import header_options

SEEDS: tuple[int | None, ...] = (None, 0, 1, 2, 3, 7)
SECONDS = 30  # of one run: a flipped predicate may loop for ever

_DELETED = (
    "bar.sync", "barrier.sync", "bar.warp.sync", "cp.async.wait_group", "cp.async.commit_group", "cp.async.wait_all",
    "cp.async.bulk.commit_group", "cp.async.bulk.wait_group", "fence.", "membar.", "wgmma.fence", "wgmma.wait_group",
    "wgmma.commit_group", "mbarrier.init", "mbarrier.arrive",
)  # fmt: skip
_WAIT = re.compile(r"mbarrier\.(?:try|test)_wait\S* +([^,]+),")
_COUNT = re.compile(
    r"((?:cp\.async\.wait_group|wgmma\.wait_group\.sync\.aligned|cp\.async\.bulk\.wait_group\S*) +)(\d+)"
)
_ARRIVALS = re.compile(r"(mbarrier\.init\S* +\[[^\]]+\], *)(\d+)")
_BYTES = re.compile(r"(expect_tx\S* +_, *\[[^\]]+\], *)(\d+)")
_THREADS = re.compile(r"((?:bar|barrier)\.(?:sync|arrive)\S* +\d+, *)(\d+)")
_GUARD = re.compile(r"(^|\s)@(!?)(%\w+|\w+)(?=\s)")


@dataclass(frozen=True)
class Mutant:
    """One changed line of a text: ``kind`` of change, what it changes, its line."""

    kind: str
    what: str
    line: int
    text: str


@dataclass
class Subject:
    """A kernel's PTX and how it is run: ``run(text, seed)`` gives the findings and the error over the tolerance.

    ``before`` are the messages of the kernel as it is.
    """

    name: str
    text: str
    run: Callable[[str, int | None], tuple[Any, float]]
    before: frozenset[str] = frozenset()


def mutants(text: str, flips: int = 12) -> Iterator[Mutant]:
    """Every mutant of a text; of flipped predicates at most so many, spread evenly."""
    lines = text.splitlines()

    def changed(number: int, new: str, kind: str) -> Mutant:
        return Mutant(
            kind, lines[number].strip()[:100], number + 1, "\n".join([*lines[:number], new, *lines[number + 1 :]])
        )

    guards: list[int] = []
    for number, line in enumerate(lines):
        code = line.split("//")[0]
        bare = _GUARD.sub("", code, count=1).strip() if code.lstrip().startswith("@") else code.strip()
        if bare.startswith(_DELETED):
            yield changed(number, "", f"without {_form(bare)}")
        if wait := _WAIT.search(code):
            passed = f"{code[: wait.start()]} setp.eq.u32 {wait[1].strip()}, 0, 0;{_tail(code, wait)}"
            yield changed(number, passed, f"without {_form(wait[0])}")
        for pattern, name in ((_COUNT, "pending"), (_ARRIVALS, "arrivals"), (_BYTES, "bytes"), (_THREADS, "threads")):
            if found := pattern.search(code):
                step = {"bytes": 16, "threads": 32}.get(name, 1)
                more = int(found[2]) + step
                yield changed(number, code.replace(found[0], f"{found[1]}{more}", 1), f"more {name}")
        if code.lstrip().startswith("@"):
            guards.append(number)
    for number in guards[:: max(1, -(-len(guards) // flips))] if flips else ():
        yield changed(
            number, _GUARD.sub(lambda m: f"{m[1]}@{'' if m[2] else '!'}{m[3]}", lines[number], count=1), "flipped"
        )


def _form(code: str) -> str:
    """The instruction's name without what differs from case to case."""
    return re.split(r"[\s;]", code, maxsplit=1)[0].removesuffix(".sync.aligned")


def _tail(code: str, wait: re.Match[str]) -> str:
    end = code.find(";", wait.end())
    return code[end + 1 :] if end >= 0 else ""


# Subjects


def _captured(module: Any, call: Callable[[Any], Any]) -> tuple[str, Callable[[str, int | None], Any]]:
    """The PTX that a check compiles, and a function that runs another text in its place, on the same arguments."""
    calls: list[tuple[Any, ...]] = []
    real = module.check_ptx

    def capture(text: str, *args: Any, **options: Any) -> Any:
        calls.append((text, args, options))
        return real(text, *args, **options)

    module.check_ptx = capture
    try:
        call(None)
    finally:
        module.check_ptx = real
    text, args, options = calls[0]
    return text, lambda mutant, seed: real(mutant, *args, **{**options, "seed": seed})


def cuda_subject(name: str, case: CudaCase) -> Subject:
    """A kernel in CUDA C++."""
    from warploom.ops import cuda as bridge

    text, _ = _captured(bridge, lambda _: case.run())

    def run(mutant: str, seed: int | None) -> tuple[Any, float]:
        def check(_source: str, _name: str, grid: Any, block: Any, given: Any, **options: Any) -> Any:
            shared = options.get("shared_bytes", 0)
            return warploom.check_ptx(mutant, grid, block, given, shared_bytes=shared, seed=seed)

        return case.run(check=check)

    return Subject(f"CUDA: {name}", text, run)


def triton_subject(name: str, target: str) -> Subject:
    """A Triton kernel for an architecture."""
    from tests.with_triton.cases import CASES, descriptors
    from warploom.ops import triton as bridge

    case = {**CASES, "descriptors": descriptors}[name](np.random.default_rng(1))
    owners = [x.base if hasattr(x, "block_shape") else x for x in case.arguments]
    arrays = [x for x in owners if isinstance(x, np.ndarray)]
    first = [np.copy(x) for x in arrays]

    def check(_: Any) -> Any:
        return warploom.check_triton(case.kernel, case.grid, case.arguments, target=target, **case.meta)

    text, again = _captured(bridge, check)

    def run(mutant: str, seed: int | None) -> tuple[Any, float]:
        for x, before in zip(arrays, first, strict=True):
            x[...] = before
        return again(mutant, seed), case.error()

    return Subject(f"Triton: {name}, {target}", text, run)


_TRITON = (("softmax", "sm_80"), ("matmul", "sm_80"), ("layer_norm", "sm_80"), ("locks", "sm_80"),
           ("attention", "sm_80"), ("matmul", "sm_90"), ("attention", "sm_90"), ("descriptors", "sm_90"))  # fmt: skip
_CUDA = ("generic pointers", "histogram", "two-dimensional blocks", "volatile", "atomics")
_HEADERS = ("BlockReduce", "BlockScan", "BlockRadixSort", "pipeline", "barrier, sm_80", "barrier, sm_90")


def subjects() -> Iterator[tuple[str, Callable[[], Subject]]]:
    """Name → what makes the subject, of all that can be compiled here."""
    for name in _CUDA:
        yield f"CUDA: {name}", lambda name=name: cuda_subject(name, PLAIN[name])
    if len(header_options()) == 2:
        for name in _HEADERS:
            yield f"CUDA: {name}", lambda name=name: cuda_subject(name, HEADERS[name])
    try:
        import triton  # type: ignore[import-not-found] # noqa: F401
    except ImportError:
        return
    for name, target in _TRITON:
        yield f"Triton: {name}, {target}", lambda name=name, target=target: triton_subject(name, target)


# Judging


class _TooLongError(Exception):
    pass


def _alarm(*_: Any) -> None:
    raise _TooLongError


def judged(subject: Subject, mutant: Mutant) -> dict[str, Any]:
    """Who objects to a mutant: ``found`` by the emulator (kinds), a ``wrong result``, ``refused``, or ``unseen``."""
    signal.signal(signal.SIGALRM, _alarm)
    verdict, kinds = "unseen", list[str]()
    for seed in SEEDS:
        signal.alarm(SECONDS)
        try:
            found, error = subject.run(mutant.text, seed)
        except _TooLongError:
            verdict = "endless"
            break
        except WarploomError as refusal:
            verdict, kinds = "refused", [str(refusal)[:200]]
            break
        finally:
            signal.alarm(0)
        new = [f for f in found.findings if f.message not in subject.before]
        if new:
            verdict, kinds = "found", sorted({f.kind for f in new})
            break
        if error > 1:
            verdict = "wrong result"
            break
    return {"kernel": subject.name, "change": mutant.kind, "line": mutant.line, "code": mutant.what,
            "verdict": verdict, "kinds": kinds}  # fmt: skip


def main() -> None:
    """Write what became of every mutant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    parser.add_argument("--only", default="", help="subjects whose name contains this")
    parser.add_argument("--flips", type=int, default=12, help="flipped predicates of each kernel, at most")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, make in subjects():
        if options.only not in name:
            continue
        start, subject = time.perf_counter(), make()
        subject.before = frozenset(f.message for f in subject.run(subject.text, None)[0].findings)
        for message in subject.before:
            print(f"{name} as it is: {message}")
        mine = [judged(subject, mutant) for mutant in mutants(subject.text, options.flips)]
        rows += mine
        print(
            f"{name}: {dict(Counter(row['verdict'] for row in mine))}, {time.perf_counter() - start:.0f} s", flush=True
        )
        for row in (r for r in mine if r["verdict"] in ("unseen", "refused", "endless")):
            print(
                f"  {row['verdict']}: {row['change']} at PTX line {row['line']}: {row['code']} {row['kinds']}",
                flush=True,
            )
        if options.out:
            options.out.write_text(json.dumps({"mutants": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
