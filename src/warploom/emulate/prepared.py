"""A Program made ready to run: its steps, and what every launch asks of it. Kept for the next run of the same Program.

To make the steps takes as long as a small grid takes to run, and one call may run several times: a coarser division of
the warps first, or the same kernel in several orders.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

from warploom.emulate.arguments import granules, written_parameters
from warploom.emulate.engines import fences_globally, mbarriers_of, uses_engines
from warploom.emulate.execute import Executor
from warploom.emulate.warpgroups import has_wgmma
from warploom.ir.program import Program
from warploom.ir.statements import Const, Op
from warploom.isa.effects import Access, Effect, Fence, GlobalWait, WarpSync
from warploom.isa.warp import FULL_MASK

_MOST_OPS = 100_000
"""Of all Programs that are kept."""


class Prepared:
    """One launch at a time runs on it. ``large``: with an array that cannot be addressed in 32 bits."""

    def __init__(self, program: Program, checks: bool, seeded: bool, large: bool) -> None:
        effects = program.effects
        self.program, self.ops = program, sum(1 for _ in program.ops())
        self.written = written_parameters(program)
        self.shared_granule, self.global_granule = granules(program)
        self.meets_in_part = any(_meets_in_part(op, e) for op, e in effects)
        self.distributed = any(isinstance(e, Access) and e.remote for _, e in effects)
        self.across = checks and any(_orders(e) for _, e in effects)
        self.waits_for_ctas = any(isinstance(e, GlobalWait) for _, e in effects)
        self.uses_engines = uses_engines(program)
        self.fences = checks and fences_globally(program)
        self.multiplies_by_warpgroups = has_wgmma(program)
        self.mbarriers = mbarriers_of(program)
        self.executor = Executor(program, checks, self.across, seeded, large)
        self.block = self.executor.block(program.body)


_kept: dict[tuple[int, bool, bool, bool], Prepared] = {}
"""By the Program's identity: equal ones may have other lines. Whoever runs one has taken it out."""
_of_kept = RLock()


@contextmanager
def prepared(program: Program, checks: bool, seeded: bool, large: bool) -> Iterator[Prepared]:
    """The Program made ready, for one caller alone."""
    key = (id(program), checks, seeded, large)
    with _of_kept:
        found = _kept.pop(key, None)
    found = found or Prepared(program, checks, seeded, large)
    try:
        yield found
    finally:
        found.executor.leave()
        with _of_kept:
            _kept[key] = found
            ops = 0
            for old, one in reversed(list(_kept.items())):
                ops += one.ops
                if ops > _MOST_OPS:
                    del _kept[old]


def _meets_in_part(op: Op, effect: Effect) -> bool:
    """Whether an instruction lets part of a warp meet."""
    if not isinstance(effect, WarpSync) or not effect.orders_memory or effect.mask is None:
        return False
    mask = op.operands[effect.mask]
    return not (isinstance(mask, Const) and int(mask.value) % 2**32 == FULL_MASK)


def _orders(effect: Effect) -> bool:
    """Whether an effect can order accesses of different CTAs."""
    return isinstance(effect, Fence | GlobalWait) or (
        isinstance(effect, Access) and effect.order not in ("weak", "relaxed")
    )
