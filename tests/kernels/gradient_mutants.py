"""Mutants of the backward kernels of attention: each synchronisation deleted or shifted, and who objects.

    python -m tests.kernels.gradient_mutants [NAME …]

tries every mutant of every case in several orders of warps, and prints those that nothing objected to.
``pytest -m mutation tests/kernels`` does the same and fails where a survivor has no reason.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from tests.hopper.mutants import Rewrite, edits, index_edits, rewritten
from tests.kernels.gradient_cases import GradientCase
from tests.kernels.mutate import objection as first_objection
from warploom.core.errors import WarploomError
from warploom.cuda.compile import available_cores
from warploom.ir.program import Program
from warploom.ir.statements import Op
from warploom.kernels.attention.backward_sm80 import BackwardSm80
from warploom.kernels.attention.backward_sm90 import BackwardSm90
from warploom.kernels.attention.backward_wide import BackwardWideSm90

SEEDS: tuple[int | None, ...] = (None, *range(8))
CAUSAL = (None, 0)
SM90 = BackwardSm90(head_dim=8, tile_m=32)
WIDE = BackwardWideSm90(head_dim=8, tile_m=32, tile_n=16)
SM80 = BackwardSm80(head_dim=8, tile_m=16, num_warps=4, warp_keys=16)
CASES = {
    "sm_90 in turn": GradientCase(replace(SM90, in_turn=True), 160, 200),
    "sm_90": GradientCase(SM90, 160, 400, CAUSAL),
    "sm_90 tile after tile": GradientCase(replace(SM90, persistent=True), 128, 1240, (600, 0)),
    "sm_90 alternating": GradientCase(replace(SM90, alternating=True), 160, 400, CAUSAL),
    "sm_90 in turn, tile after tile": GradientCase(
        replace(SM90, in_turn=True, alternating=True, persistent=True), 96, 560, (130, 0), batch=2
    ),
    "wide": GradientCase(WIDE, 160, 100, CAUSAL),
    "wide, three stages": GradientCase(replace(WIDE, stages=3, held=1), 230, 70),
    "wide, dQ": GradientCase(replace(WIDE, held_queries=1), 130, 100, CAUSAL),
    "sm_80": GradientCase(SM80, 80, 100, (20, 0)),
    "sm_80 in turn": GradientCase(replace(SM80, in_turn=True), 80, 100, CAUSAL),
    "sm_80 groups": GradientCase(BackwardSm80(head_dim=72, tile_m=32, num_warps=4, held=1), 160, 100, (20, 0)),
    "sm_80, keys nobody sees": GradientCase(SM80, 20, 100, (10, 0)),
}
"""Two tiles of keys or more; the first, or all of a CTA, visit so many blocks of rows that every ring wraps twice."""

_MEETING = "the wait for the products is a meeting of the lanes as well"
_FENCED = "the fence of the product before covers this one's accumulator"
_CROSSED = "P has crossed, for which the other consumer has waited for the same stage"
EQUIVALENT = {
    "without bar.warp.sync in _block": _MEETING,
    "without bar.warp.sync in _step": _MEETING,
    "without wgmma.fence.sync.aligned in _block": _FENCED,
    "without wgmma.fence.sync.aligned in _step": _FENCED,
    "without mbarrier.try_wait.parity in _step": _CROSSED,
    "without mbarrier.try_wait.parity in run": _CROSSED,
    "without mbarrier.try_wait.parity in _hand_over": "a stage of Q is filled again only after P of it was read",
    "without bar.warp.sync in hold": _MEETING,
    "without cp.async.wait_group in _store": "nothing is left, but where nobody sees the keys",
    "without bar.sync in _store": "of sums in turn the last barrier stands behind all reads of K",
    "without mbarrier.try_wait.parity in _block": "nobody has filled the stage of dS that the first block claims",
    "without fence.proxy.async.shared::cta in _block": "who reads dS of the first block has fenced its own of the next",
    "without wgmma.fence.sync.aligned in _start_dq": "the fences of the products around it cover its accumulator",
    "without mbarrier.arrive in run": "a CTA with one tile fills its last stage of dS no more",
    "without cp.async.bulk.commit_group in _store": "dK's group takes dV's copies along",
}
"""Labels of mutants of which some behave as the kernel does, with the reason; as :func:`mutants` gives them."""


@dataclass(frozen=True)
class Mutant:
    """One edit of one instruction of a case's kernel."""

    case: str
    number: int
    edit: int
    label: str


def all_edits(op: Op) -> Iterator[tuple[str, Rewrite]]:
    """What is done to one instruction."""
    yield from edits(op)
    yield from index_edits(op)
    i = op.instruction
    fence = i.mnemonic.startswith("fence.acq_rel")
    if fence or i.mnemonic == "ld.acquire.gpu.global.u32" or (i.mnemonic.startswith("atom") and ".add." in i.mnemonic):
        yield f"without {op.instruction.mnemonic}", lambda _: []


def gradient(name: str) -> str:
    """Which kernel of a case is changed: the one for dK, or that for dQ where they are two."""
    return "dq" if name.endswith("dQ") else "dk"


@cache
def program(name: str) -> Program:
    """The kernel that multiplies of one of CASES."""
    return next(call.source.program for call in CASES[name].calls if {"q", gradient(name)} <= {*call.arrays})


def mutants(name: str) -> list[Mutant]:
    """Every mutant of a case."""
    return [
        Mutant(name, number, e, f"{what} in {op.where.function}")
        for number, op in enumerate(program(name).ops())
        for e, (what, _) in enumerate(all_edits(op))
    ]


def objection(mutant: Mutant) -> str | None:
    """What the emulator says first (the kind of finding), or None."""
    op = list(program(mutant.case).ops())[mutant.number]
    try:
        changed = rewritten(program(mutant.case), mutant.number, list(all_edits(op))[mutant.edit][1])
    except WarploomError as error:
        return type(error).__name__
    for seed in SEEDS:
        run = partial(CASES[mutant.case].run, seed, changed, gradient(mutant.case), stop=True)
        if (said := first_objection(run)) is not None:
            return said
    return None


def survivors(name: str) -> list[Mutant]:
    """The mutants of a case that nothing objects to."""
    todo = mutants(name)
    with ProcessPoolExecutor(available_cores()) as pool:
        said = list(pool.map(objection, todo, chunksize=2))
    return [m for m, kind in zip(todo, said, strict=True) if kind is None]


def main(names: Any) -> None:
    """Print the survivors."""
    for name in names or CASES:
        found = survivors(name)
        print(f"{name}: {len(mutants(name))} mutants, {len(found)} survive", flush=True)
        for mutant in found:
            print("  ", mutant.number, mutant.label, list(program(name).ops())[mutant.number].where, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
