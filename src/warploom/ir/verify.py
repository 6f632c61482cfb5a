"""Checks of a Program that need no run: types, scopes, shared memory, roles, barriers, copy groups, architecture.

Each rule is a generator of the author's lines and messages; :func:`verify` runs them all and reports everything at
once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from warploom.core.dtypes import DType
from warploom.core.errors import VerifyError
from warploom.core.targets import TARGETS, Target
from warploom.ir.program import Program
from warploom.ir.statements import (
    Branch,
    Const,
    Flow,
    Loop,
    Op,
    Operand,
    Register,
    Roles,
    Statement,
    Value,
    Violation,
    When,
    blocks,
    label,
    operands_of,
    results_of,
    walk,
)
from warploom.ir.verify_sync import SYNCHRONISATION
from warploom.isa.effects import AsyncMatrix, WaitGroup

_NUMBERED = re.compile(r"\d+'")
_ARCHITECTURE = re.compile(r"sm_(\d+)(\d)(a?)")


def verify(program: Program, target: Target | None = None) -> None:
    """Checks ``program``, for ``target`` if given. Raises VerifyError that lists every violation with its line."""
    violations = [message for rule in _RULES for message in rule(program, target)]
    alike: dict[Violation, list[str]] = {}
    for where, message in dict.fromkeys(violations):  # one of the registers 'p0', 'p1' … stands for all
        alike.setdefault((where, _NUMBERED.sub("'", message)), []).append(message)
    if not alike:
        return
    more = (f" (and {len(x) - 1} more)" if len(x) > 1 else "" for x in alike.values())
    listed = [f"{first}{others}" for (first, *_), others in zip(alike.values(), more, strict=True)]
    lines = [where for where, _ in alike]
    if len(listed) == 1:
        raise VerifyError(f"kernel {program.name}: {listed[0]}").at(lines[0])
    said = (f"{where.stack}: {text}" if where.line else text for where, text in zip(lines, listed, strict=True))
    head = f"kernel {program.name} breaks {len(listed)} rules:"
    raise VerifyError("\n  ".join((head, *said))).at(replace(lines[0], callers=()))


def verify_target(program: Program, target: Target) -> None:
    """Raise VerifyError where ``target`` cannot run ``program``, which is already verified."""
    for where, message in _architecture(program, target):
        raise VerifyError(f"kernel {program.name}: {message}").at(where)


def _generation(architecture: str) -> tuple[int, bool]:
    """Orders architectures: ``sm_90`` < ``sm_90a`` < ``sm_100a``."""
    return int(architecture[3:].rstrip("a")), architecture.endswith("a")


# Types


def _types(program: Program, _: Target | None) -> Iterator[Violation]:
    for op in program.ops():
        name = op.instruction.mnemonic
        pairs = (
            ("operand", op.operands, op.instruction.operand_types),
            ("result", op.results, op.instruction.result_types),
        )
        for kind, given, expected in pairs:
            if len(given) != len(expected):
                yield op.where, f"{name} has {len(expected)} {kind}s, not {len(given)}"
                continue
            for position, (x, dtype) in enumerate(zip(given, expected, strict=True)):
                if x.dtype is not dtype:
                    what = f"{kind} {position} of {name}"
                    yield op.where, f"{what} is {label(x)} of type {x.dtype}, it must be {dtype}"
    for s in program.statements():
        yield from _statement_types(s)
        for x in operands_of(s):
            if isinstance(x, Const) and not _representable(x):
                yield s.where, f"{label(x)} does not fit into {x.dtype}"


def _in_place(program: Program, _: Target | None) -> Iterator[Violation]:
    """The hardware writes the accumulators of ``wgmma`` while the program goes on: they cannot be copies."""
    for op, effect in program.effects:
        late = isinstance(effect, AsyncMatrix) or (isinstance(effect, WaitGroup) and effect.queue == "wgmma")
        count = len(op.results)
        if late and (op.results != op.operands[len(op.operands) - count :] or not _all_registers(op)):
            yield op.where, f"{op.instruction.mnemonic} must overwrite its accumulator registers in place"


def _used(program: Program, _: Target | None) -> Iterator[Violation]:
    """A product costs too much to be made for nothing: whoever forgets its result has forgotten to add it up."""
    used = {x for s in program.statements() for x in operands_of(s)}
    for op in program.ops():
        new = not any(isinstance(x, Register) for x in op.results)
        if op.instruction.slots is not None and op.results and new and used.isdisjoint(op.results):
            name = op.instruction.mnemonic
            yield op.where, f"nothing uses the result of {name}: name what it goes to (into=), or leave it out"


def _all_registers(op: Op) -> bool:
    return all(isinstance(r, Register) for r in op.results)


def _statement_types(s: Statement) -> Iterator[Violation]:
    if isinstance(s, When) and s.condition.dtype.name != "pred":
        yield s.where, f"the condition is {label(s.condition)} of type {s.condition.dtype}, it must be pred"
    if isinstance(s, Loop):
        if not s.index.dtype.is_integer or isinstance(s.index, Register):
            yield s.where, f"a loop's index is a single-assignment integer, not {label(s.index)}"
        for what, x in (("start", s.start), ("stop", s.stop), ("step", s.step)):
            if x.dtype is not s.index.dtype:
                yield s.where, f"the loop's {what} is {x.dtype}, its index {s.index.dtype}: they must agree"
        if isinstance(s.step, Const) and s.step.value <= 0:
            yield s.where, f"the loop's step is {s.step.value}: it must be positive, or the loop never ends"


def _representable(const: Const) -> bool:
    """Unsigned constants may be written negative: they wrap."""
    dtype: DType = const.dtype
    if not dtype.is_integer:
        return True
    return isinstance(const.value, int) and -(1 << dtype.bits - 1) <= const.value < 1 << (
        dtype.bits - (dtype.kind == "signed")
    )


# Definitions


@dataclass
class _Scopes:
    """Walks in program order with the values in scope and the registers written so far."""

    messages: list[Violation] = field(default_factory=lambda: list[Violation]())
    ever: set[Value] = field(default_factory=lambda: set[Value]())

    def block(self, body: tuple[Statement, ...], scope: set[Value], written: set[Value]) -> None:
        """Adds to ``written``; ``scope`` is the caller's and is not changed beyond this block."""
        scope = set(scope)
        for s in body:
            optional = s.instruction.optional_operands if isinstance(s, Op) else range(0)
            for position, x in enumerate(operands_of(s)):
                # Whether an optional operand is read is known when it runs: the emulator's to judge.
                if position in optional and isinstance(x, Register):
                    continue
                self._read(x, s, scope, written)
            if isinstance(s, Loop):
                self._bounds_stay(s)
                self._define(s.index, s, inner := set(scope))
                self.block(s.body, inner, written)
            elif isinstance(s, Roles):
                self._roles(s, scope, written)
            elif isinstance(s, Flow):
                self._flow(s, scope, written)
            else:
                for block in blocks(s):
                    self.block(block, scope, written)
                for r in results_of(s):
                    if isinstance(r, Register):
                        written.add(r)
                    else:
                        self._define(r, s, scope)

    def _roles(self, roles: Roles, scope: set[Value], written: set[Value]) -> None:
        """Each role sees the registers written before the roles, not those that another role writes."""
        after = [set(written) for _ in roles.branches]
        for role, seen in zip(roles.branches, after, strict=True):
            self.block(role.body, scope, seen)
        written.update(*after)

    def _flow(self, flow: Flow, scope: set[Value], written: set[Value]) -> None:
        """A block may read a register that any block of the flow writes: which ran before is known when it runs."""
        written |= {r for s in walk((flow,)) for r in results_of(s) if isinstance(r, Register)}
        for block in flow.blocks:
            self.block(block, scope, written)

    def _read(self, x: Operand, s: Statement, scope: set[Value], written: set[Value]) -> None:
        if isinstance(x, Const):
            return
        if isinstance(x, Register):
            if x not in written:
                written.add(x)  # tell it once
                self.messages.append((s.where, f"register {label(x)} is read before anything is written to it"))
        elif x not in scope:
            why = (
                "was defined inside a loop, condition or role that has ended: keep it in a register to use it outside"
                if x in self.ever
                else "is used before it is defined"
            )
            self.messages.append((s.where, f"{label(x)} {why}"))

    def _define(self, value: Value, s: Statement, scope: set[Value]) -> None:
        if value in self.ever:
            self.messages.append((s.where, f"{label(value)} is assigned twice: only registers can be"))
        self.ever.add(value)
        scope.add(value)

    def _bounds_stay(self, loop: Loop) -> None:
        changed = {r for s in walk(loop.body) for r in results_of(s)}
        for x in (loop.stop, loop.step):
            if isinstance(x, Register) and x in changed:
                self.messages.append((loop.where, f"the loop changes its own bound {label(x)}: copy it before"))


def _definitions(program: Program, _: Target | None) -> Iterator[Violation]:
    scopes = _Scopes(ever={p.value for p in program.parameters})
    scopes.block(program.body, set(scopes.ever), set())
    yield from scopes.messages


# Flow


def _flows(program: Program, _: Target | None) -> Iterator[Violation]:
    """A Flow is the end of a kernel; each of its blocks ends with its only Branch, to blocks that there are."""
    ends: set[int] = set()
    for flow in (s for s in program.statements() if isinstance(s, Flow)):
        if flow is not program.body[-1]:
            yield flow.where, "a flow is the last statement of a kernel: its threads end in it"
        for number, block in enumerate(flow.blocks):
            branch = block[-1] if block else None
            if not isinstance(branch, Branch):
                yield flow.where, f"block {number} of a flow does not end with a branch"
                continue
            ends.add(id(branch))
            if not all(0 <= target < len(flow.blocks) for target in branch.targets):
                yield branch.where, f"a branch to a block that the flow does not have: it has {len(flow.blocks)}"
            if not _chooses(branch):
                yield branch.where, f"a branch with {len(branch.targets)} targets and another kind of condition"
    for s in program.statements():
        if isinstance(s, Branch) and id(s) not in ends:
            yield s.where, "a branch stands at the end of a block of a flow, nowhere else"


def _chooses(branch: Branch) -> bool:
    """Whether a branch's condition is one for its targets."""
    if branch.condition is None:
        return len(branch.targets) <= 1
    return branch.condition.dtype.kind == "unsigned" or (
        branch.condition.dtype.kind == "pred" and len(branch.targets) == 2
    )


# Launch, shared memory, architecture


def _launch(program: Program, target: Target | None) -> Iterator[Violation]:
    if program.threads % 32 or not 32 <= program.threads <= 1024:
        yield program.where, f"{program.threads} threads: a CTA has a multiple of 32, from 32 to 1024"
    if program.cluster_ctas > 1 and _generation(program.requires) < _generation("sm_90"):
        yield program.where, f"clusters need sm_90, the kernel requires only {program.requires}"
    if program.opt_level not in (0, 1, 2, 3):
        yield program.where, f"opt_level is {program.opt_level}: ptxas knows 0 to 3"
    if program.min_ctas < 1:
        yield program.where, f"min_ctas is {program.min_ctas}: it must be at least 1"
    limits = target or max(TARGETS.values(), key=lambda t: (t.threads_per_sm, t.blocks_per_sm))
    if program.threads * program.min_ctas > limits.threads_per_sm or program.min_ctas > limits.blocks_per_sm:
        yield (
            program.where,
            f"{program.min_ctas} CTAs of {program.threads} threads do not fit an SM of "
            f"{limits.name}, which has {limits.threads_per_sm} threads and {limits.blocks_per_sm} CTAs: lower min_ctas",
        )


def _shared(program: Program, target: Target | None) -> Iterator[Violation]:
    for region in program.shared:
        if region.offset < 0 or region.bytes < 0 or region.offset + region.bytes > program.shared_bytes:
            yield (
                program.where,
                f"shared region '{region.name}' takes bytes {region.offset} to "
                f"{region.offset + region.bytes}, the kernel has {program.shared_bytes}",
            )
    limits = target or max(TARGETS.values(), key=lambda t: t.shared_per_block)
    if program.shared_bytes > limits.shared_per_block:
        who = limits.name if target is not None else f"the largest target ({limits.name})"
        yield (
            program.where,
            f"the kernel needs {program.shared_bytes} bytes of shared memory, {who} has "
            f"{limits.shared_per_block} per CTA: use smaller tiles or fewer stages",
        )


def _architecture(program: Program, target: Target | None) -> Iterator[Violation]:
    required = _ARCHITECTURE.fullmatch(program.requires)
    if required is None:
        yield program.where, f"requires {program.requires!r}: write an architecture, such as 'sm_80' or 'sm_90a'"
        return
    least = (int(required[1]), int(required[2]))
    if least < (8, 0):
        yield program.where, f"requires {program.requires!r}: kernels need sm_80 or later"
        return
    if target is not None:
        if required[3] and target.name != program.requires:
            yield program.where, f"the kernel runs on {program.requires} alone, not on {target.name}"
        elif target.compute_capability < least:
            yield program.where, f"the kernel requires {program.requires}, the target is {target.name}"
    newest = max(program.ops(), key=lambda op: _generation(op.instruction.since), default=None)
    if newest is not None and _generation(needs := newest.instruction.since) > _generation(program.requires):
        yield (
            newest.where,
            (
                f"{newest.instruction.mnemonic} needs {needs}, the kernel requires only "
                f'{program.requires}: write @kernel(requires="{needs}")'
            ),
        )


_RULES: tuple[Callable[[Program, Target | None], Iterator[Violation]], ...] = (
    _types,
    _in_place,
    _used,
    _definitions,
    _flows,
    _launch,
    _shared,
    _architecture,
    *SYNCHRONISATION,
)
