"""Mutants of the ``wgmma`` attention kernels: each synchronisation deleted or shifted, and who objects.

    python -m tests.hopper.attention_mutants [--out benchmarks/results/static/hopper-mutants.json]

enumerates every mutant of every rung and of the flags beside them, runs each until the emulator objects (in its own
order and under 20 seeds), and writes what was caught and what survived with the reason. ``pytest -m mutation`` does the
same and fails where a survivor has no reason.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from tests.hopper.mutants import Rewrite, index_edits, rewritten
from tests.hopper.mutants import edits as synchronisation_edits
from tests.kernels.attention_cases import Case
from tests.kernels.mutate import objection as first_objection
from warploom.core.errors import WarploomError
from warploom.cuda.compile import available_cores
from warploom.ir.program import Program
from warploom.ir.statements import Op, Value
from warploom.kernels.attention.forward_sm90 import ForwardSm90
from warploom_lab.kernels.attention.ladder_sm90 import RungSm90

SEEDS: tuple[int | None, ...] = (None, *range(20))
SIZES = ((1, 1), (1, 5), (5, 5))
"""(key blocks, tiles of one CTA): 5 blocks wrap a ring of two stages twice, a single one takes a path of its own, and
so does a single tile. Kernels that are not persistent have one tile. The quickest come first."""

PRODUCTION = ForwardSm90(head_dim=64, tile_n=64)
H1 = RungSm90(
    head_dim=64, tile_n=64, overlap=False, turns=False, persistent=False, q_in_registers=False, lazy_rescale=False
)
H5 = replace(H1, overlap=True, turns=True, q_in_registers=True, lazy_rescale=True)
CONFIGS: dict[str, ForwardSm90] = {
    "h1": H1,
    "h2": replace(H1, overlap=True),
    "h3": replace(H1, overlap=True, turns=True),
    "h5": H5,
    "h6": replace(H5, persistent=True),
    "h7": replace(H5, persistent=True, hold=True),
    "h8": PRODUCTION,
    "sum column": replace(PRODUCTION, sum_column=True, q_in_registers=False),
    "no turns": replace(PRODUCTION, turns=False),
    "three consumers": replace(PRODUCTION, consumers=3, persistent=False, turns=False),
    "masked blocks": replace(PRODUCTION, consumers=3, turns=False, q_in_registers=False, skip_masked=True),
}
"""Every rung whose synchronisation differs from the one before, and flags that calls choose besides.

Keys grow, so that stale maxima are outgrown. Where blocks are passed over the mask is causal, and two CTAs share the
tiles of three heads, in rounds of alternating direction; turns would keep a consumer that skips in step.
"""
GROWTH = 20.0

EQUIVALENT: dict[str, tuple[tuple[int, ...], str]] = {
    "without wgmma.fence.sync.aligned in _add_values": (
        tuple(range(1, 20)),
        "of the second product: the fence before Q·Kᵀ covers P and O too, which nothing accesses in between. "
        "ptxas wants it nevertheless: without it it injects one and reports C7519, which is an error here",
    ),
    "without wgmma.fence.sync.aligned in _blocks": (
        (2,),
        "the same without overlap, where P·V comes first and its fence covers the scores",
    ),
    "without mbarrier.try_wait.parity in hold": (
        (1,),
        "the wait is satisfied whenever it is reached; the flag exists for the block boundary it puts between the "
        "exponentials and wgmma.wait_group, which ptxas does not move instructions across",
    ),
    "without bar.warp.sync in _store": (
        (1, 3),
        "where Q stays in shared memory: the last to read it is wgmma, which has been waited for, or a recomputation, "
        "which ends with a bar.warp.sync of its own",
    ),
    "parity kept in _take_up": (
        (1,),
        "of a CTA's first block: the ring does not wrap behind its first stage, so that the flipped parity is not "
        "taken",
    ),
    "without cp.async.bulk.commit_group in exchange": (
        (1,),
        "where one thread stores the tiles of two consumers and loads no others: both are in the second group",
    ),
    "without cp.async.bulk.wait_group.read in exchange": ((1,), "the same: the second wait is for both"),
}
"""Mutants that behave as the kernel does: which ones of a name (as in :func:`mutants`) may, and the reason.

In another configuration the same mutant may be caught.
"""


@cache
def cases(name: str) -> list[Case]:
    """The SIZES that differ for one of CONFIGS; under a causal mask, as many keys as queries."""
    config = CONFIGS[name]
    if config.skip_masked:
        return [Case(config, n, n, (None, 0), GROWTH, heads=3, ctas=2) for n in (config.tile_m, 2 * config.tile_m)]
    sizes = dict.fromkeys((blocks, tiles if config.persistent else 1) for blocks, tiles in SIZES)
    return [Case.of_blocks(config, *size, growth=GROWTH) for size in sizes]


def edits(op: Op) -> Iterator[tuple[str, Rewrite]]:
    """What is done to one instruction: synchronisation deleted or miscounted, and indices shifted."""
    yield from synchronisation_edits(op)
    yield from index_edits(op)


@dataclass(frozen=True)
class Mutant:
    """One edit of one instruction of a config's Program: the ``nth`` of its name."""

    config: str
    number: int
    edit: int
    label: str
    nth: int

    @property
    def may_survive(self) -> bool:
        """Whether there is a reason why nothing need object."""
        return self.label in EQUIVALENT and self.nth in EQUIVALENT[self.label][0]


def program(name: str) -> Program:
    """The Program of one of CONFIGS."""
    return cases(name)[0].program


def mutants(name: str) -> list[Mutant]:
    """Every mutant of a config."""
    found: list[Mutant] = []
    held = _hold_waits(name)
    ops = list(program(name).ops())
    for number, op in enumerate(ops):
        function = "hold" if number in held else op.where.function
        for e, (what, _) in enumerate(edits(op)):
            of = f" of {_user(ops, number)}" if what == "another stage" else ""
            label = f"{what}{of} in {function}"
            found.append(Mutant(name, number, e, label, 1 + sum(m.label == label for m in found)))
    return found


def _user(ops: Sequence[Op], number: int) -> str:
    """The first instruction that an index made by instruction ``number`` reaches through integer arithmetic."""
    reached: set[Value] = set(ops[number].results)
    for op in ops[number + 1 :]:
        if reached.intersection(op.operands):
            if not (op.instruction.operator or op.instruction.copies or op.instruction.mnemonic.startswith("cvt.")):
                return op.instruction.mnemonic
            reached.update(op.results)
    return "nothing"


def _hold_waits(name: str) -> set[int]:
    """The waits that the flag ``hold`` adds: those of the function that takes the scores up."""
    ops = enumerate(program(name).ops())
    return {
        i
        for i, op in ops
        if op.instruction.mnemonic.startswith("mbarrier.try_wait") and op.where.function == "_take_up"
    }


def timed_objection(mutant: Mutant) -> tuple[str | None, float]:
    """:func:`objection`, and the seconds it took of this core."""
    start = time.process_time()
    return objection(mutant), time.process_time() - start


def objection(mutant: Mutant) -> str | None:
    """What the emulator says first (the kind of finding), or None. Where nothing can differ, few seeds are enough."""
    seeds = SEEDS[:3] if mutant.may_survive else SEEDS
    op = list(program(mutant.config).ops())[mutant.number]
    rewrite = list(edits(op))[mutant.edit][1]
    try:
        changed = rewritten(program(mutant.config), mutant.number, rewrite)
    except WarploomError as error:
        return type(error).__name__
    for seed in seeds:
        for case in cases(mutant.config):
            if (said := first_objection(partial(case.run, seed=seed, program=changed, stop=True))) is not None:
                return said
    return None


def result(names: Sequence[str] = tuple(CONFIGS)) -> dict[str, Any]:
    """Every mutant of these configs: how many were caught and by which finding, and who survived."""
    todo = [m for name in names for m in mutants(name)]
    with ProcessPoolExecutor(available_cores()) as pool:
        timed = list(pool.map(timed_objection, todo, chunksize=4))
    said = [kind for kind, _ in timed]
    configs: dict[str, Any] = {}
    for name in names:
        mine = [(m, kind) for m, kind in zip(todo, said, strict=True) if m.config == name]
        kinds = [kind for _, kind in mine if kind is not None]
        configs[name] = {
            "config": str(CONFIGS[name]),
            "mutants": len(mine),
            "caught": len(kinds),
            "by": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
            "equivalent": sorted(m.label for m, kind in mine if kind is None and m.may_survive),
            "survivors": sorted(m.label for m, kind in mine if kind is None and not m.may_survive),
        }
    reasons = {label: reason for label, (_, reason) in EQUIVALENT.items()}
    return {"core_seconds": round(sum(seconds for _, seconds in timed)), "reasons": reasons, "configs": configs}


def main() -> None:
    """Enumerate, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--config", nargs="+", choices=tuple(CONFIGS), default=list(CONFIGS))
    options = parser.parse_args()
    found = result(options.config)
    text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
