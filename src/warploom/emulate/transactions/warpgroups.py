"""``wgmma``: matrix products that a warpgroup starts now and that read and write at any time until they are waited for.

Every warp computes its 16 rows of D when it waits, the last moment the hardware may take. Until then its registers
are in flight, and shared operands count as being read by the warpgroup, an agent of its own.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.barriers.barriers import Wait
from warploom.emulate.control.frames import Frame
from warploom.emulate.findings.report import Reporter
from warploom.emulate.findings.traffic import TrafficCounter
from warploom.emulate.memory.shared_memory import SharedMemory
from warploom.emulate.transactions.products import (
    ELEMENT_BYTES,
    WARP_ROWS,
    WARPS,
    Accumulator,
    Group,
    Product,
    SharedOperands,
    register_a,
)
from warploom.emulate.transactions.registers import RegistersInFlight, WatchedRegisters
from warploom.emulate.transactions.transaction import SharedRead, leak
from warploom.ir.program import Program
from warploom.ir.statements import Op, Value
from warploom.isa.effects import AsyncMatrix
from warploom.isa.wgmma import WarpgroupProduct

Array = NDArray[Any]
_MEMBERS = -2
"""Where a frame keeps its warpgroups among what has been worked out for it."""


@dataclass(frozen=True, eq=False)
class _Members:
    """The warps of a warpgroup that a frame has: positions in the frame, rows of the batch, numbers in the group."""

    group: Group
    positions: Array
    rows: Array
    warps: Array

    def those(self, which: Array) -> _Members:
        """Some of them."""
        if which.all():
            return self
        return _Members(self.group, self.positions[which], self.rows[which], self.warps[which])


class Warpgroups:
    """The ``wgmma`` of a batch."""

    def __init__(
        self, shared: SharedMemory, reporter: Reporter, counter: TrafficCounter, watched: WatchedRegisters
    ) -> None:
        self.shared, self.clocks, self.report, self.counter = shared, shared.clocks, reporter, counter
        self.warps, rows = shared.clocks.warps_per_cta, shared.clocks.known.shape[0]
        self.groups: dict[int, Group] = {}
        self.registers = RegistersInFlight(watched, rows, reporter, self._started_by)
        self.issued, self.completed = self.registers.issued, self.registers.completed
        self.commits: dict[int, list[int]] = {}
        self.together: dict[int, tuple[Op, Array]] = {}
        self.operands = SharedOperands(shared)

    def _started_by(self, row: int, number: int) -> Op:
        return self._group(row).products[number - 1].op

    def _group(self, row: int) -> Group:
        warp = row % self.warps
        first = row - warp % WARPS
        if first not in self.groups:
            self.groups[first] = Group(warp // WARPS, first)
        return self.groups[first]

    def _members(self, frame: Frame) -> list[_Members]:
        """The warpgroups of a frame."""
        found: list[_Members] | None = frame.seen.get(_MEMBERS)
        if found is None:
            warps = frame.flat % self.warps % WARPS
            firsts = frame.flat - warps
            parts = [np.nonzero(firsts == first)[0] for first in dict.fromkeys(firsts.tolist())]
            found = [_Members(self._group(int(frame.flat[p[0]])), p, frame.flat[p], warps[p]) for p in parts]
            frame.seen[_MEMBERS] = found
        return found

    def meet(self, frame: Frame, op: Op) -> None:
        """Count an instruction that whole warpgroups execute; compared at exit."""
        counts = self.together.setdefault(id(op), (op, np.zeros(self.issued.size, np.int64)))[1]
        counts[frame.span] += 1

    # -- issue ---------------------------------------------------------------------------------------------------

    def issue(self, frame: Frame, op: Op, keys: tuple[Value, ...]) -> None:
        """Warps of a frame start a product."""
        instruction: WarpgroupProduct = op.instruction.warpgroup_product
        count, first, registers, shadows = instruction.a_count, 0, None, None
        if instruction.a_source == "registers":
            first = count
            registers = np.stack([frame.full(frame.env[k]) for k in keys[:count]], axis=-1)
            if any(k in frame.shadows for k in keys[:count]):
                none = np.zeros((1, 1, 1), np.uint32)
                shadows = np.stack([frame.full(frame.shadows.get(k, none)) for k in keys[:count]], axis=-1)
        *descriptors, adds = (frame.full(frame.env[k])[:, 0] for k in keys[first : count + 2])
        if self.shared.checks:
            self.registers.start(frame, op, self._in_flight(frame))
        self.issued[frame.span] += 1
        started: list[tuple[Product, _Members]] = []
        for members in self._members(frame):
            numbers = self.issued[members.rows]
            for number in dict.fromkeys(numbers.tolist()):
                some = members.those(numbers == number)
                at = some.positions
                product = self._join(op, number, some, [x[at] for x in descriptors])
                mine = (None if x is None else x[at] for x in (registers, shadows))
                product.join(some.warps, adds[at], *mine)
                started.append((product, some))
        for product, members in started:
            if product.read is not None:
                product.read.begin(members.rows.tolist(), None)
            self._wake(members.group)

    def _queue(self, group: Group) -> int:
        """The column of the products of a warpgroup."""
        return self.clocks.queue("wgmma", group.first // self.warps, group.number)

    def _in_flight(self, frame: Frame) -> dict[int, Op]:
        """The operations of which warps of a frame have products in flight, by their identities."""
        found: dict[int, Op] = {}
        for members in self._members(frame):
            first, last = int(self.completed[members.rows].min()), int(self.issued[members.rows].max())
            found.update((id(product.op), product.op) for product in members.group.products[first:last])
        return found

    def _join(self, op: Op, number: int, members: _Members, descriptors: list[Array]) -> Product:
        """The product that warps execute as their next one; a finding where they disagree on it."""
        products = members.group.products
        if number > len(products):
            products.append(self._product(op, number, members.group, tuple(int(x[0]) for x in descriptors)))
        product = products[number - 1]
        differ = np.full(members.rows.shape, product.op is not op)
        for mine, first in zip(descriptors, product.descriptors, strict=False):
            differ |= mine != first
        for row in members.rows[differ].tolist():
            message = (
                f"the warps of a warpgroup disagree on {op.instruction.mnemonic} (another line, or other descriptors): "
                "all four execute the same ones"
            )
            self.report.add("divergence", op.where, message, row, 0, other=product.op.where)
        return product

    def _product(self, op: Op, number: int, group: Group, descriptors: tuple[int, ...]) -> Product:
        found, read, stamp = self.operands.of(op, descriptors), None, self.clocks.stamp(op)
        for kind, message in found.wrong:
            self.report.add(kind, op.where, f"{op.instruction.mnemonic}: {message}", group.first, 0)
        for name, part in (("wgmma.b", found.b), ("wgmma.a", found.a)):
            if part is not None:
                self.counter.engine(name, part.size * ELEMENT_BYTES)
        cta, history = group.first // self.warps, self.shared.history
        if self.shared.checks and not found.outside:
            read = SharedRead(history, op, self._queue(group), found.cells + cta * history.cells, stamp)
        return Product(op, number, cta, descriptors, stamp, found, read)

    # -- groups --------------------------------------------------------------------------------------------------

    def commit(self, frame: Frame) -> None:
        """``wgmma.commit_group``."""
        for row, issued in zip(frame.flat.tolist(), self.issued[frame.flat].tolist(), strict=True):
            self.commits.setdefault(row, []).append(issued)

    def wait(self, frame: Frame, pending: int, op: Op, registers: Array | None) -> Wait:
        """``wgmma.wait_group``: the results of all but the newest groups arrive, once all four warps have issued."""
        commits = [self.commits.get(row, []) for row in frame.flat.tolist()]
        needs = np.array([mine[-1 - pending] if len(mine) > pending else 0 for mine in commits])
        everyone = frame.flat

        def then(frame: Frame) -> None:
            self._complete(frame, needs[np.searchsorted(everyone, frame.flat)], op)
            if registers is not None and self.shared.checks:
                self.registers.check_landed(frame, registers, op)

        wait = Wait(op, set(), then=then)
        for members in self._members(frame):
            issued = self._all_issued(members.group)
            for row, number in zip(members.rows.tolist(), needs[members.positions].tolist(), strict=True):
                if number > issued:
                    wait.rows.add(row)
                    members.group.waits.append((wait, row, number))
        return wait

    def _all_issued(self, group: Group) -> int:
        return int(self.issued[group.first : group.first + WARPS].min())

    def _wake(self, group: Group) -> None:
        if group.waits:
            issued = self._all_issued(group)
            for wait, row, number in group.waits:
                if number <= issued:
                    wait.rows.discard(row)
            group.waits = [w for w in group.waits if w[2] > issued]

    def _complete(self, frame: Frame, needs: Array, op: Op) -> None:
        """The products of each warp up to a number end now."""
        accumulators: dict[tuple[Value, ...], Accumulator] = {}
        for members in self._members(frame):
            ranges = [*zip(self.completed[members.rows].tolist(), needs[members.positions].tolist(), strict=True)]
            for done, until in set(ranges):
                if done >= until:
                    continue
                some = members.those(np.array([r == (done, until) for r in ranges]))
                for product in members.group.products[done:until]:
                    d = product.op.results
                    if d not in accumulators:
                        accumulators[d] = Accumulator(frame, d, product.instruction)
                    self._multiply(product, some, accumulators[d])
                self.completed[some.rows] = until
                stamp = members.group.products[until - 1].stamp
                for row in some.rows.tolist():
                    self.clocks.queue_done(row, self._queue(members.group), stamp)
        self.clocks.refresh(frame.flat)
        for found in accumulators.values():
            found.write(op)

    def _multiply(self, product: Product, members: _Members, d: Accumulator) -> None:
        """D of some warps of a warpgroup, from what their operands hold now."""
        if product.read is not None:
            product.read.end(int(members.rows[0]), 0)
        operands, instruction, warps, a_poison = product.operands, product.instruction, members.warps, None
        if operands.outside:
            return
        b, b_poison = self.operands.matrix(product, operands.b)
        if operands.a is None:
            assert product.registers is not None
            a = register_a(instruction, product.registers[warps])
            if product.shadows is not None:
                a_poison = register_a(instruction, product.shadows[warps], poison=True)
        else:
            a, a_poison = (
                None if x is None else x.reshape(WARPS, WARP_ROWS, -1)[warps]
                for x in self.operands.matrix(product, operands.a)
            )
            assert a is not None
        adds = product.added[warps]
        d.add(members.positions, adds, instruction, a, b)
        d.spoil(members.positions, adds, a_poison, b_poison)
        product.end(warps.size)

    def describe(self, row: int) -> str:
        """Whom a warp's ``wgmma`` waits for; '' for none."""
        group = self.groups.get(row - row % self.warps % WARPS)
        if group is None or not group.waits:
            return ""
        needs = max(number for _, _, number in group.waits)
        missing = [
            r for r in range(group.first, group.first + WARPS) if r >= self.issued.size or self.issued[r] < needs
        ]
        named = ", ".join(str(r % self.warps) for r in missing)
        return f"warpgroup {group.number}: its wgmma has not been executed by warp {named}"

    # -- the end -------------------------------------------------------------------------------------------------

    def at_exit(self) -> None:
        """Products under way, and warpgroups of which only some warps came."""
        for group in self.groups.values():
            for product in group.products:
                if product.number <= int(self.completed[group.first : group.first + WARPS].max()):
                    continue
                mine = range(group.first, group.first + WARPS)
                committed = max((c[-1] for r in mine if (c := self.commits.get(r))), default=0)
                who, waits = (group.first, 0), product.number <= committed
                leak(self.report, product.op, "is under way; it was", "wait for its group", who, waits)
        self.check_together()

    def check_together(self, waiting: Collection[int] = ()) -> None:
        """All four warps of a warpgroup must have executed what they execute together; not those rows that wait."""
        for op, counts in self.together.values():
            # The warps that a CTA has beyond a multiple of four make a warpgroup that is never complete.
            missing = -self.warps % WARPS
            by_group = np.pad(counts.reshape(-1, self.warps), ((0, 0), (0, missing))).reshape(-1, WARPS)
            apart = np.nonzero(by_group.min(axis=1) != by_group.max(axis=1))[0]
            if apart.size:
                cta, group = divmod(int(apart[0]), (self.warps + missing) // WARPS)
                warp = group * WARPS + int(by_group[apart[0]].argmin())
                row = cta * self.warps + min(warp, self.warps - 1)
                if row in waiting:
                    continue
                message = f"{op.instruction.mnemonic} is for whole warpgroups, four warps from a multiple of four: "
                message += "here some warps of one do not execute it"
                self.report.add("divergence", op.where, message, row, 0, count=int(apart.size), since=0)


def has_wgmma(program: Program) -> bool:
    """Whether a program multiplies by warpgroups."""
    return any(isinstance(e, AsyncMatrix) for _, e in program.effects)
