"""Rules of roles and synchronisation that need no run: warps and their registers, barriers, groups, clusters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

from warploom.core.targets import Target
from warploom.ir.program import Program
from warploom.ir.statements import Const, Flow, Loop, Op, Role, Roles, Statement, Violation, blocks, label, walk
from warploom.ir.verify_mbarriers import mbarrier_rules
from warploom.ir.verify_wgmma import bulk_store_rules, wgmma_rules
from warploom.isa.effects import Barrier, BulkTensorCopy, CommitGroup, WaitGroup


def role_rules(program: Program, _: Target | None) -> Iterator[Violation]:
    """Roles stand at the top, and no warp has two at once."""
    top = {id(s) for s in program.body}
    for s in program.statements():
        if isinstance(s, Roles):
            if id(s) not in top:
                yield s.where, "warp roles stand at the top of a kernel, not inside a loop, condition or role"
            for role in s.branches:
                yield from _role(role, program)
            ordered = sorted(s.branches, key=lambda role: role.first)
            for one, other in pairwise(ordered):
                if other.first < one.last:
                    yield (
                        other.where,
                        (f"warps {other.first}..{other.last} overlap the role of warps {one.first}..{one.last}"),
                    )


def register_rules(program: Program, _: Target | None) -> Iterator[Violation]:
    """A warpgroup gets what others of its CTA have given back: where that is not enough, it waits for ever."""
    budgets: dict[int, int] = {}
    roles = [role for s in program.body if isinstance(s, Roles) for role in s.branches if role.registers is not None]
    launched = program.launch_registers
    for role in roles:
        for warp in range(role.first, role.last):
            if budgets.setdefault(warp, role.registers or launched) != role.registers:
                yield role.where, f"warp {warp} already has a budget of {budgets[warp]} registers: give it one"
                break
    needed = 32 * sum(-(-budgets.get(warp, launched) // 8) * 8 for warp in range(program.warps))
    pool = -(-launched // 8) * 8 * program.threads
    if budgets and needed > pool:
        yield (
            roles[0].where,
            f"the roles, and the warps that have no budget, need {needed} registers; a CTA is "
            f"launched with {pool} ({launched} a thread), so that setmaxnreg waits for ever: lower the budgets or "
            "min_ctas, or give one to the roles that need few",
        )


def _role(role: Role, program: Program) -> Iterator[Violation]:
    who = f"the role of warps {role.first}..{role.last}"
    if not 0 <= role.first < role.last <= program.warps:
        yield role.where, f"{who} is not a range of the CTA's {program.warps} warps"
    if role.registers is None:
        return
    if role.first % 4 or role.last % 4:
        yield role.where, f"{who} has a register budget, which only whole warpgroups (multiples of 4 warps) can have"
    if role.registers % 8 or not 24 <= role.registers <= 256:
        yield role.where, f"{who} asks for {role.registers} registers: setmaxnreg takes a multiple of 8, from 24 to 256"
    if not program.requires.endswith("a"):
        yield (
            role.where,
            f"{who} has a register budget: setmaxnreg needs sm_90a, the kernel requires only {program.requires}",
        )


_BARRIERS = 16
_LARGEST_CLUSTER = 8  # what every GPU with clusters runs; more is a property of the device


def _barriers(program: Program, _: Target | None) -> Iterator[Violation]:
    for op, effect in program.effects:
        if not isinstance(effect, Barrier) or effect.barrier >= len(op.operands):
            continue
        number = op.operands[effect.barrier]
        # A number known only when running (a warpgroup's own barrier) is the emulator's to judge.
        if isinstance(number, Const) and not 0 <= number.value < _BARRIERS:
            yield op.where, f"the barrier is {label(number)}: its number must be from 0 to {_BARRIERS - 1}"
        if effect.threads is not None and (effect.threads % 32 or not 0 < effect.threads <= program.threads):
            yield (
                op.where,
                f"a barrier of {effect.threads} threads: it must be a multiple of 32, at most the "
                f"CTA's {program.threads}",
            )


def _copy_groups(program: Program, _: Target | None) -> Iterator[Violation]:
    yield from _groups(program.body, set())


def _groups(body: tuple[Statement, ...], committed: set[str]) -> Iterator[Violation]:
    """Check groups in program order; ``committed`` grows. A role does not see the groups of another."""
    for s in body:
        if isinstance(s, Roles):
            after = [set(committed) for _ in s.branches]
            for role, seen in zip(s.branches, after, strict=True):
                yield from _groups(role.body, seen)
            committed.update(*after)
            continue
        for effect in s.instruction.effects() if isinstance(s, Op) else ():
            if isinstance(effect, CommitGroup):
                committed.add(effect.queue)
            elif isinstance(effect, WaitGroup) and effect.queue not in committed:
                yield s.where, f"waits for a {effect.queue} group that was never committed: commit it before"
        if isinstance(s, Loop | Flow):  # a wait may be for a group of an earlier pass
            committed.update(
                effect.queue
                for op in walk((s,))
                if isinstance(op, Op)
                for effect in op.instruction.effects()
                if isinstance(effect, CommitGroup)
            )
        for block in blocks(s):
            yield from _groups(block, committed)


def _cluster(program: Program, target: Target | None) -> Iterator[Violation]:
    size = program.cluster_ctas
    if min(program.cluster) < 1 or size > _LARGEST_CLUSTER:
        yield program.where, f"a cluster of {program.cluster} CTAs: it has 1 to {_LARGEST_CLUSTER} CTAs in all"
    for op, effect in program.effects:
        mask = effect.multicast if isinstance(effect, BulkTensorCopy) else None
        mask = None if mask is None else op.operands[mask]
        if isinstance(mask, Const) and not 0 < mask.value < 1 << size:
            yield (
                op.where,
                f"a multicast to the CTAs of mask {int(mask.value):#b}: the cluster has {size} CTAs, "
                f"so that masks are 1 to {(1 << size) - 1:#b}",
            )
    for op in program.ops():
        rank = op.operands[op.instruction.cta_rank] if op.instruction.cta_rank is not None else None
        if isinstance(rank, Const) and rank.value >= size:
            yield op.where, f"a shared address in the CTA of rank {rank.value}: the cluster has {size} CTAs"


SYNCHRONISATION: tuple[Callable[[Program, Target | None], Iterator[Violation]], ...] = (
    role_rules,
    register_rules,
    _cluster,
    _barriers,
    _copy_groups,
    mbarrier_rules,
    wgmma_rules,
    bulk_store_rules,
)
"""The rules, in the form that :mod:`warploom.ir.verify` runs."""
