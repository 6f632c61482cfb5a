"""mbarriers, whose states stand for the parity of a phase here, and addresses in a cluster.

Source: PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier", ``mapa``.
"""

from __future__ import annotations

from collections.abc import Sequence

from warploom.core.dtypes import pred, u32, u64
from warploom.ir.statements import Const
from warploom.isa import cluster
from warploom.isa.form import Formed
from warploom.isa.mbarrier import mbarrier_test, mbarrier_wait
from warploom.isa.operators import select
from warploom.isa.spaces import from_generic, to_generic
from warploom.ptx.builder import FlowBuilder, lowered
from warploom.ptx.syntax import Operand, PtxRegister
from warploom.ptx.types import constant


@lowered("mbarrier")
def mbarrier(b: FlowBuilder, made: Formed, targets: Sequence[Operand], sources: Sequence[Operand]) -> None:
    """``mbarrier``: waits become loops, and states the parity of their phase."""
    kind = made.words[1]
    if kind in ("try_wait", "test_wait"):
        _wait(b, made, targets[0], sources)
        return
    if kind in ("arrive", "arrive_drop"):
        _state(b, sources[0])
    b.declared(made, targets, sources)


def _state(b: FlowBuilder, address: Operand) -> None:
    """The state that an arrival returns stands for the phase: here, its parity. It cannot end before this arrival."""
    state = b.current.operands[0]
    if isinstance(state, PtxRegister) and state.name in b.usage.read:
        base, offset, within = b.address(address, "shared")
        odd = b.fresh(pred)
        test = mbarrier_test(relaxed=True).at(offset=offset)
        b.emit(test, (base, constant(0, u32)), (odd,), within)
        b.assign(state, b.op(select(u64), odd, constant(1, u64), constant(0, u64)))


def _wait(b: FlowBuilder, made: Formed, target: Operand, sources: Sequence[Operand]) -> None:
    base, offset, within = b.address(sources[0], "shared")
    scope, operands = made.fields.get("scope") or "cta", (base, b.read(sources[1], u32))
    if b.loops_until(target):
        b.emit(mbarrier_wait(scope).at(offset=offset), operands, within=within)
        b.assign(target, Const(pred, True))
    else:
        unread = isinstance(target, PtxRegister) and target.name not in b.usage.read  # what follows runs in any case
        relaxed = unread or "relaxed" in made.words
        b.set_all((target,), mbarrier_test(scope, relaxed).at(offset=offset), operands, within)


@lowered("mapa")
def map_shared(b: FlowBuilder, made: Formed, targets: Sequence[Operand], sources: Sequence[Operand]) -> None:
    """``mapa``: of an address in shared memory, or of a generic one."""
    generic = made.operand_types[0] is u64
    address = b.read(sources[0], made.operand_types[0])
    own = b.op(from_generic("shared"), address) if generic else address
    place = b.op(cluster.map_shared(), own, b.read(sources[1], u32))
    b.assign(targets[0], b.op(to_generic("shared"), place) if generic else place)
