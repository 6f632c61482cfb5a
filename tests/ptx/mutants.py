"""Mutants of PTX that other compilers wrote: synchronisation deleted, counts shifted, predicates flipped; who objects.

    python -m tests.ptx.mutants [--out benchmarks/results/static/ptx-mutants.json] [--only SUBJECT] [--flips 12]

compiles kernels with Triton (where it is installed) and NVRTC, changes one line of the PTX that runs at a time, and
runs each mutant in the emulator's own order and under adversarial seeds until the emulator objects or the result is not
NumPy's. What neither happens to is equivalent for the reason given, or unseen.
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

SEEDS: tuple[int | None, ...] = (None, 0, 1, 3)
SECONDS = 30  # of the processor, for one run: a flipped predicate may loop for ever

_DELETED = (
    "bar.sync",
    "barrier.sync",
    "bar.warp.sync",
    "cp.async.wait_group",
    "cp.async.commit_group",
    "cp.async.wait_all",
    "cp.async.bulk.commit_group",
    "cp.async.bulk.wait_group",
    "fence.",
    "membar.",
    "wgmma.fence",
    "wgmma.wait_group",
    "wgmma.commit_group",
    "mbarrier.init",
    "mbarrier.arrive",
    "cp.async.mbarrier.arrive",
    "tensormap.cp_fenceproxy",
)
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


@dataclass(frozen=True)
class Call:
    """A call of ``check_ptx``."""

    text: str
    grid: Any
    block: Any
    arguments: list[Any]
    options: dict[str, Any]

    def again(self, text: str, seed: int | None, arguments: list[Any]) -> Any:
        """The same with another text, order and arguments."""
        return warploom.check_ptx(text, self.grid, self.block, arguments, **{**self.options, "seed": seed})


@dataclass
class Subject:
    """A kernel's PTX and how it is run: ``run(text, seed)`` gives the findings and the error over the tolerance.

    ``known`` says what was found in the kernel as it is, and mended in ``text``.
    """

    name: str
    text: str
    run: Callable[[str, int | None], tuple[Any, float]]
    call: Call
    known: str = ""


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
        flipped = _GUARD.sub(lambda m: f"{m[1]}@{'' if m[2] else '!'}{m[3]}", lines[number], count=1)
        yield changed(number, flipped, "flipped predicate")


def _form(code: str) -> str:
    """The instruction's name without what differs from case to case."""
    return re.split(r"[\s;]", code, maxsplit=1)[0].removesuffix(".sync.aligned")


def _tail(code: str, wait: re.Match[str]) -> str:
    end = code.find(";", wait.end())
    return code[end + 1 :] if end >= 0 else ""


# Subjects


def captured(module: Any, check: Callable[[], Any]) -> Call:
    """What ``check`` hands to ``check_ptx`` in one of the modules that call it."""
    calls: list[Call] = []
    real = module.check_ptx

    def capture(text: str, *args: Any, **options: Any) -> Any:
        grid, block, arguments = args
        calls.append(Call(text, grid, block, arguments, options))
        return real(text, *args, **options)

    module.check_ptx = capture
    try:
        check()
    finally:
        module.check_ptx = real
    return calls[0]


def cuda_subject(name: str, case: CudaCase) -> Subject:
    """A kernel in CUDA C++, without the options of its compiler."""
    from warploom.cuda.ptx import header_options, ptx_of

    options = dict(case.options)
    compiled = ptx_of(
        case.source, "kernel.cu", case.target, [*options.pop("options", ()), *header_options()], kernel="k"
    )
    call = Call(compiled.text, case.grid, case.block, case.arguments(np.random.default_rng(1)), options)

    def run(mutant: str, seed: int | None) -> tuple[Any, float]:
        def check(_source: str, _name: str, _grid: Any, _block: Any, given: Any, **_: Any) -> Any:
            return call.again(mutant, seed, given)

        return case.run(check=check)

    return Subject(f"CUDA: {name}", call.text, run, call)


def triton_subject(name: str, target: str) -> Subject:
    """A Triton kernel for an architecture."""
    from tests.with_triton.cases import CASES, attention, descriptors, own_descriptors
    from warploom.checking import foreign as bridge

    makes = {
        **CASES,
        "descriptors": descriptors,
        "own descriptors": own_descriptors,
        "attention": lambda rng: attention(rng, heads=1),
    }
    case = makes[name](np.random.default_rng(1))
    owners = [x.base if hasattr(x, "block_shape") else x for x in case.arguments]
    arrays = [x for x in owners if isinstance(x, np.ndarray)]
    first = [np.copy(x) for x in arrays]
    meta = {"target": target, **case.meta}
    call = captured(bridge, lambda: warploom.check_triton(case.kernel, case.grid, case.arguments, **meta))

    given = [x for x in call.arguments if isinstance(x, np.ndarray)]
    scratch = [x for x in given if not any(np.shares_memory(x, own) for own in arrays)]

    def run(mutant: str, seed: int | None) -> tuple[Any, float]:
        for x, before in zip((*arrays, *scratch), (*first, *(0 for _ in scratch)), strict=True):
            x[...] = before
        return call.again(mutant, seed, call.arguments), case.error()

    text = call.text
    known = sorted({f.message for f in run(text, None)[0].findings})
    if known:  # its fence of mbarriers
        text = re.sub(r"(mbarrier\.init[^;]*;)", r"\1 fence.mbarrier_init.release.cluster;", text)
    return Subject(f"Triton: {name}, {target}", text, run, call, "; ".join(known))


_TRITON = (
    ("softmax", "sm_80"),
    ("matmul", "sm_80"),
    ("layer_norm", "sm_80"),
    ("locks", "sm_80"),
    ("attention", "sm_80"),
    ("matmul", "sm_90"),
    ("attention", "sm_90"),
    ("descriptors", "sm_90"),
    ("own descriptors", "sm_90"),
)
_CUDA = ("generic pointers", "histogram", "two-dimensional blocks", "volatile", "atomics")
_HEADERS = (
    "BlockReduce",
    "BlockScan",
    "BlockRadixSort",
    "pipeline",
    "copies on a barrier",
    "barrier, sm_80",
    "barrier, sm_90",
)


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
    signal.signal(signal.SIGVTALRM, _alarm)
    verdict, kinds = "unseen", list[str]()
    for seed in SEEDS:
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        try:
            found, error = subject.run(mutant.text, seed)
        except _TooLongError:
            verdict = "does not end"
            break
        except WarploomError as refusal:
            verdict, kinds = "refused", [str(refusal)[:200]]
            break
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if found.findings:
            verdict, kinds = "found", sorted({f.kind for f in found.findings})
            break
        if error > 1:
            verdict = "wrong result"
            break
    reason = equivalent(subject, mutant) if verdict == "unseen" else ""
    return {
        "kernel": subject.name,
        "change": mutant.kind,
        "line": mutant.line,
        "code": mutant.what,
        "verdict": "equivalent" if reason else verdict,
        "kinds": kinds,
        "reason": reason,
    }


_ACCESS = re.compile(r"\b(?:ld|st|atom|red|cp|ldmatrix|stmatrix|wgmma|mbarrier|fence)\.")
_END = re.compile(r"^\s*(?:ret|exit)\b")
_BRANCH = re.compile(r"\bbra\b|^\s*\$?\w+:")


def equivalent(subject: Subject, mutant: Mutant) -> str:
    """Why a mutant is the kernel itself, as the text around it shows, or :data:`REASONS` say; '' if neither does."""
    lines = [line.split("//")[0] for line in subject.text.splitlines()]
    after, before = lines[mutant.line :], lines[: mutant.line - 1][::-1]
    if mutant.kind in ("without bar.sync", "without barrier.sync"):
        for way, around in (("follows", after), ("stands before it", before)):
            for line in around:
                if _ACCESS.search(line) or _BRANCH.search(line):
                    break
                if "bar.sync" in line or "barrier.sync" in line:
                    return f"another barrier {way}, with no access between"
                if _END.search(line):
                    return "no access follows it"
    if mutant.kind == "without cp.async.commit_group":
        for line in after:
            if "cp.async.commit_group" in line:
                return "its copies join the next group, which is committed before anything is waited for"
            if "wait_group" in line or _BRANCH.search(line):
                break
    if "wait_group" in mutant.what:
        for around in (after, before):
            for line in around:
                if "commit_group" in line or _BRANCH.search(line) or _ACCESS.search(line.replace("cp.async.wait", "")):
                    break
                if line.strip() == mutant.what.split("//")[0].strip():
                    return "another wait for as much stands beside it"
    return REASONS.get((subject.name, mutant.kind), "")


_EARLIER = "the barrier at the end of the loop, or before it, orders the same accesses"
_EMPTY = "a group without copies: tensormap.cp_fenceproxy is none"
_OWN = "Triton: own descriptors, sm_90"
_FA4 = "FlashAttention-4, head_dim 64"
_TOGETHER = (
    "the barrier of the loop, or the next product, which all four warps start together, orders the same accesses"
)
_COVERED = "the copies that it reads were waited for before the fence of the product before, which covers them"
REASONS: dict[tuple[str, str], str] = {
    ("CUDA: volatile", "without bar.warp.sync"): "each thread overwrites only what it alone has read",
    ("CUDA: BlockReduce", "flipped predicate"): "all lanes hold the sum that redux gives, and write it to one place",
    ("CUDA: pipeline", "without cp.async.commit_group"): "the last group, which is empty",
    ("CUDA: pipeline", "flipped predicate"): "a way that this run does not take",
    ("CUDA: barrier, sm_80", "without mbarrier.test_wait.shared.b64"): "the last wait: nothing follows it",
    ("CUDA: barrier, sm_90", "without mbarrier.try_wait.shared::cta.b64"): "the last wait: nothing follows it",
    ("CUDA: barrier, sm_90", "without mbarrier.try_wait.shared.b64"): "the last wait: nothing follows it",
    ("Triton: matmul, sm_80", "without bar.sync"): _EARLIER,
    ("Triton: matmul, sm_80", "without cp.async.wait_group"): "the wait at the end of the loop has waited for as much",
    ("Triton: matmul, sm_90", "without bar.sync"): _TOGETHER,
    ("Triton: attention, sm_80", "without bar.sync"): _EARLIER,
    ("Triton: attention, sm_80", "flipped predicate"): "the other half of the threads holds the same values",
    ("Triton: attention, sm_90", "without bar.sync"): _TOGETHER,
    ("Triton: attention, sm_90", "without fence.proxy.async.shared::cta"): _COVERED,
    ("Triton: descriptors, sm_90", "without bar.sync"): (
        "one thread raises the expected bytes and starts the copies, each warp waits for them itself, and barriers "
        "before or after it order the rest"
    ),
    (_OWN, "without cp.async.bulk.commit_group"): _EMPTY,
    (_OWN, "without cp.async.bulk.wait_group.read"): _EMPTY,
    (_OWN, "more pending"): _EMPTY,
    (_OWN, "without bar.sync"): (
        "one warp makes the maps and starts the copies, each warp waits for them itself, and barriers before or after "
        "it order the rest"
    ),
    (_FA4, "without mbarrier.try_wait.parity.shared.b64"): (
        "a stage that is free from the start, or the producer's last wait: nothing follows it"
    ),
    (_FA4, "without wgmma.fence"): "the fence of the product before, after which no register of this one is touched",
    (_FA4, "without mbarrier.arrive.shared.b64"): "nobody waits for the memory of Q again: a CTA has one tile",
    (_FA4, "without bar.sync"): "each warpgroup overwrites rows of Q that its own products alone have read",
    (_FA4, "flipped predicate"): "it chooses who prefetches tensor maps",
    ("Triton: attention, sm_90", "flipped predicate"): "the other half of the threads holds the same values",
}
"""(Kernel, change) → why what is left unseen of this change is equivalent, found by reading the code."""


def main() -> None:
    """Write what became of every mutant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    parser.add_argument("--only", default="", help="subjects whose name contains this")
    parser.add_argument("--flips", type=int, default=12, help="flipped predicates of each kernel, at most")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    known: dict[str, str] = {}
    for name, make in subjects():
        if options.only not in name:
            continue
        start, subject = time.perf_counter(), make()
        base, error = subject.run(subject.text, None)
        assert not base.findings, f"{name}: {base.findings}"
        assert error <= 1, name
        ran = {op.where.ptx or op.where.line for op, count in base.emulation.counts if count}
        near = 8  # lines before a predicate, of which some instruction has run
        changed = [
            m
            for m in mutants(subject.text, options.flips)
            if ran & {*range(m.line - near * m.kind.startswith("flipped"), m.line + 1)}
        ]
        mine = [judged(subject, mutant) for mutant in changed]
        if subject.known:
            known[name] = subject.known
        rows += mine
        print(
            f"{name}: {dict(Counter(row['verdict'] for row in mine))}, {time.perf_counter() - start:.0f} s", flush=True
        )
        for row in (r for r in mine if r["verdict"] in ("unseen", "refused", "does not end")):
            print(
                f"  {row['verdict']}: {row['change']} at PTX line {row['line']}: {row['code']} {row['kinds']}",
                flush=True,
            )
        if options.out:
            options.out.write_text(
                json.dumps({"mutants": rows, "mended before": known}, indent=1) + "\n", encoding="utf-8"
            )


if __name__ == "__main__":
    main()
