"""Rules of warp roles: ranges of warps that do not overlap, and the registers that they share."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from warploom.core.targets import Target
from warploom.ir.messages import at
from warploom.ir.program import Program
from warploom.ir.statements import Role, Roles


def role_rules(program: Program, _: Target | None) -> Iterator[str]:
    """Roles stand at the top, and no warp has two at once."""
    top = {id(s) for s in program.body}
    for s in program.statements():
        if isinstance(s, Roles):
            if id(s) not in top:
                yield f"{at(s.where)}warp roles stand at the top of a kernel, not inside a loop, condition or role"
            for role in s.branches:
                yield from _role(role, program)
            ordered = sorted(s.branches, key=lambda role: role.first)
            for one, other in pairwise(ordered):
                if other.first < one.last:
                    yield (
                        f"{at(other.where)}warps {other.first}..{other.last} overlap the role of warps "
                        f"{one.first}..{one.last}"
                    )


def register_rules(program: Program, _: Target | None) -> Iterator[str]:
    """A warpgroup gets what others of its CTA have given back: where that is not enough, it waits for ever."""
    budgets: dict[int, int] = {}
    roles = [role for s in program.body if isinstance(s, Roles) for role in s.branches if role.registers is not None]
    launched = program.launch_registers
    for role in roles:
        for warp in range(role.first, role.last):
            if budgets.setdefault(warp, role.registers or launched) != role.registers:
                yield f"{at(role.where)}warp {warp} already has a budget of {budgets[warp]} registers: give it one"
                break
    needed = 32 * sum(-(-budgets.get(warp, launched) // 8) * 8 for warp in range(program.warps))
    pool = -(-launched // 8) * 8 * program.threads
    if budgets and needed > pool:
        yield (
            f"{at(roles[0].where)}the roles, and the warps that have no budget, need {needed} registers; a CTA is "
            f"launched with {pool} ({launched} a thread), so that setmaxnreg waits for ever: lower the budgets or "
            "min_ctas, or give one to the roles that need few"
        )


def _role(role: Role, program: Program) -> Iterator[str]:
    who = f"{at(role.where)}the role of warps {role.first}..{role.last}"
    if not 0 <= role.first < role.last <= program.warps:
        yield f"{who} is not a range of the CTA's {program.warps} warps"
    if role.registers is None:
        return
    if role.first % 4 or role.last % 4:
        yield f"{who} has a register budget, which only whole warpgroups (multiples of 4 warps) can have"
    if role.registers % 8 or not 24 <= role.registers <= 256:
        yield f"{who} asks for {role.registers} registers: setmaxnreg takes a multiple of 8, from 24 to 256"
    if not program.requires.endswith("a"):
        yield f"{who} has a register budget: setmaxnreg needs sm_90a, the kernel requires only {program.requires}"
