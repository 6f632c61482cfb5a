"""Rules of ``wgmma`` and bulk stores that need no run: fences, groups, and registers that are in flight.

ptxas serialises a kernel that touches registers of a running ``wgmma``, and says so in a log that nobody reads; a group
that is never committed is waited for by nobody. Both are followed here along the program: a loop's body is passed
twice, and after a branch only that counts which holds on both sides, so that what is refused is wrong for certain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from warploom.core.targets import Target
from warploom.ir.program import Program
from warploom.ir.statements import Loop, Op, Roles, SourceLine, Statement, Value, Violation, When, label, walk
from warploom.isa.effects import BulkStore, BulkTensorCopy, CommitGroup, Effect, WaitGroup, WarpgroupFence
from warploom.isa.matrix import WarpgroupProduct

Flying = dict[Value, Op]
"""Registers in flight, and the ``wgmma`` that has them."""


@dataclass
class _State:
    """Products in flight at a place of the program; ``groups`` are the committed ones, the oldest first."""

    open: Flying = field(default_factory=lambda: Flying())
    groups: list[Flying] = field(default_factory=lambda: list[Flying]())
    touched: set[Value] = field(default_factory=lambda: set[Value]())
    fenced: bool = False
    unnamed: Flying = field(default_factory=lambda: Flying())  # complete by a wait that did not name them

    def copy(self) -> _State:
        groups = [dict(g) for g in self.groups]
        return _State(dict(self.open), groups, set(self.touched), self.fenced, dict(self.unnamed))

    def clear(self) -> None:
        """Forget everything: nothing is in flight."""
        self.open, self.groups, self.touched, self.unnamed = {}, [], set(), {}

    def meet(self, other: _State) -> None:
        """Only what holds on this path and on the other one."""
        self.open = _common(self.open, other.open)
        count = min(len(self.groups), len(other.groups))
        newest = zip(self.groups[len(self.groups) - count :], other.groups[len(other.groups) - count :], strict=True)
        self.groups = [_common(a, b) for a, b in newest]
        self.touched &= other.touched
        self.unnamed = _common(self.unnamed, other.unnamed)
        self.fenced |= other.fenced

    def holder(self, value: Value) -> Op | None:
        """The newest ``wgmma`` that has a register in flight."""
        for flying in (self.open, *reversed(self.groups)):
            if value in flying:
                return flying[value]
        return None


def _common(first: Flying, second: Flying) -> Flying:
    return {value: op for value, op in first.items() if second.get(value) is op}


class _Walk:
    """Follows a program; ``messages`` collects what is wrong."""

    def __init__(self, watched: set[Value], accumulators: set[Value]) -> None:
        self.watched, self.accumulators = watched, accumulators
        self._ordinary: dict[int, tuple[Value, ...]] = {}  # what an instruction that is none of these accesses
        self.messages: list[Violation] = []
        self._told: set[tuple[SourceLine, SourceLine]] = set()

    def block(self, body: tuple[Statement, ...], state: _State) -> None:
        for s in body:
            if isinstance(s, Op):
                self._op(s, state)
            elif isinstance(s, Loop):
                self.block(s.body, state)
                self.block(s.body, state)
            elif isinstance(s, When):
                other = state.copy()
                self.block(s.body, state)
                self.block(s.otherwise, other)
                state.meet(other)
            elif isinstance(s, Roles):
                self._roles(s, state)
            else:  # blocks of a flow, in an order that only a run knows
                state.clear()

    def _roles(self, roles: Roles, state: _State) -> None:
        for role in roles.branches:
            mine = state.copy()
            self.block(role.body, mine)
            self.end(mine)
        state.clear()

    def end(self, state: _State) -> None:
        """A role or the kernel ends."""
        for op in dict.fromkeys(state.open.values()):
            self.messages.append((op.where, "this wgmma is never committed: k.wgmma_commit(), then k.wgmma_wait"))
        for op in dict.fromkeys(op for group in state.groups for op in group.values()):
            self.messages.append(
                (
                    op.where,
                    "this wgmma is never waited for: call wait() of what start returned, or "
                    "k.wgmma_wait(0, its accumulator)",
                )
            )

    def _op(self, op: Op, state: _State) -> None:
        product = op.instruction.warpgroup_product
        if product is not None:
            self._issue(op, product, state)
            return
        wait: WaitGroup | None = None
        ordinary = self._ordinary.get(id(op))
        if ordinary is not None:
            for value in ordinary:
                self._touch(op, value, state)
            return
        concerned = False
        for effect in op.instruction.effects():
            concerned |= isinstance(effect, WarpgroupFence | CommitGroup | WaitGroup)
            if isinstance(effect, WarpgroupFence):
                state.touched.clear()
                state.fenced = True
            elif isinstance(effect, CommitGroup) and effect.queue == "wgmma":
                state.groups.append(state.open)
                state.open = {}
            elif isinstance(effect, WaitGroup) and effect.queue == "wgmma":
                wait = effect
        if wait is not None:
            self._wait(op, wait.pending, state)
        elif not concerned:
            # A loop's body is passed more than once: keep what there is to look at.
            watched = (x for x in (*op.operands, *op.results) if isinstance(x, Value) and x in self.watched)
            self._ordinary[id(op)] = tuple(watched)
            self._op(op, state)

    def _touch(self, op: Op, value: Value, state: _State) -> None:
        holder, wait = state.holder(value), state.unnamed.get(value)
        if holder is not None:
            self._once(
                op,
                holder,
                f"{op.instruction.mnemonic} accesses {label(value)}, which the wgmma of {holder.where} has in flight: "
                "commit it and wait for its group first, or ptxas serialises the kernel",
            )
        elif wait is not None:
            self._once(
                op,
                wait,
                f"{op.instruction.mnemonic} accesses {label(value)}, which the wait of {wait.where} completes without "
                "naming it, so that the compiler may move this above the wait: pass the accumulator to k.wgmma_wait",
            )
        state.touched.add(value)

    def _once(self, op: Op, cause: Op, message: str) -> None:
        """One message for all registers of a line."""
        if (op.where, cause.where) not in self._told:
            self._told.add((op.where, cause.where))
            self.messages.append((op.where, message))

    def _issue(self, op: Op, product: WarpgroupProduct, state: _State) -> None:
        from_registers = product.a_source == "registers"
        a = [x for x in op.operands[: product.a_count] if isinstance(x, Value)] if from_registers else []
        mine = [*a, *op.results]
        late = [x for x in mine if x in state.touched]
        if late or not state.fenced:
            what = f"since {label(late[0])} was last accessed" if late else "before it"
            self.messages.append((op.where, f"wgmma without a k.wgmma_fence() {what}: put one before it"))
        ahead = state.holder(op.results[0])
        same = ahead is not None and ahead.results == op.results and _continues(op, product, ahead, op.results[0])
        for value in a if same else mine:
            holder = state.holder(value)
            if holder is not None and not _continues(op, product, holder, value):
                self.messages.append(
                    (
                        op.where,
                        f"this wgmma uses {label(value)}, which the wgmma of {holder.where} has in flight "
                        "for something else: wait for its group first",
                    )
                )
                break
        state.open.update(dict.fromkeys(mine, op))
        if state.unnamed:
            for value in mine:
                state.unnamed.pop(value, None)

    def _wait(self, op: Op, pending: int, state: _State) -> None:
        finished = state.groups[: max(0, len(state.groups) - pending)]
        state.groups = state.groups[len(finished) :]
        for x in {x for group in finished for x in group if x in self.accumulators}.difference(op.results):
            if state.holder(x) is None:
                state.unnamed[x] = op
        for x in op.results:
            state.unnamed.pop(x, None)
        named = [x for x in op.results if state.holder(x) is not None]
        for holder in dict.fromkeys(h for x in named if (h := state.holder(x)) is not None):
            if any(h is holder for h in state.open.values()):
                why = "was not committed: k.wgmma_commit() comes before the wait"
            else:
                why = f"is in one of the {pending} newest groups, which this wait leaves pending: wait for more"
            self.messages.append((op.where, f"waits for accumulators whose wgmma ({holder.where}) {why}"))


def _continues(op: Op, product: WarpgroupProduct, holder: Op, value: Value) -> bool:
    """Whether a ``wgmma`` may use a register that another one has in flight: to go on adding, or to read A again."""
    other: WarpgroupProduct = holder.instruction.warpgroup_product
    if holder.results == op.results and (other == product or (other.n == product.n and value in op.results)):
        return True
    return value not in op.results and value not in holder.results


def wgmma_rules(program: Program, _: Target | None) -> Iterator[Violation]:
    """Fences, commits, waits and registers in flight."""
    watched: set[Value] = set()
    accumulators: set[Value] = set()
    for op in program.ops():
        product = op.instruction.warpgroup_product
        if product is not None:
            count = product.a_count if product.a_source == "registers" else 0
            watched.update(x for x in op.operands[:count] if isinstance(x, Value))
            accumulators.update(op.results)
    watched |= accumulators
    if not watched:
        return
    yield from _whole_warpgroups(program)
    follow, state = _Walk(watched, accumulators), _State()
    follow.block(program.body, state)
    follow.end(state)
    yield from follow.messages


def _whole_warpgroups(program: Program) -> Iterator[Violation]:
    """All four warps of a warpgroup execute a ``wgmma``."""
    for s in program.body:
        for role in s.branches if isinstance(s, Roles) else ():
            uses = any(isinstance(op, Op) and op.instruction.warpgroup_product is not None for op in walk(role.body))
            if uses and (role.first % 4 or role.last % 4):
                yield (
                    role.where,
                    f"the role of warps {role.first}..{role.last} executes wgmma, which is for whole "
                    "warpgroups: four warps from a multiple of four",
                )


def _stores(effect: Effect) -> bool:
    """Whether an effect is a bulk copy from shared to global memory."""
    return isinstance(effect, BulkStore) or (isinstance(effect, BulkTensorCopy) and effect.direction == "store")


def bulk_store_rules(program: Program, _: Target | None) -> Iterator[Violation]:
    """A bulk store must be committed and waited for by the threads that start it."""
    if not any(_stores(effect) for _, effect in program.effects):
        return
    roles = [role.body for s in program.body if isinstance(s, Roles) for role in s.branches]
    outside = tuple(s for s in program.body if not isinstance(s, Roles))
    for body in (*roles, outside):
        ops = [s for s in (*walk(body), *walk(outside)) if isinstance(s, Op)]
        effects = [(op, e) for op in ops for e in op.instruction.effects()]
        committed = any(isinstance(e, CommitGroup) and e.queue == "bulk" for _, e in effects)
        waited = any(isinstance(e, WaitGroup) and e.queue == "bulk" for _, e in effects)
        for op in (s for s in walk(body) if isinstance(s, Op)):
            if not any(_stores(e) for e in op.instruction.effects()):
                continue
            if not committed:
                yield op.where, "this bulk store is never committed to a group: k.commit_bulk() after it"
            elif not waited:
                yield (
                    op.where,
                    "nothing waits for this bulk store: k.wait_bulk(reads_only=True) before its shared "
                    "memory is used again or the kernel ends",
                )
