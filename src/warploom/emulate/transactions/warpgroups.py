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
    ProductInFlight,
    SharedOperands,
    Warpgroup,
    register_a,
)
from warploom.emulate.transactions.registers import RegistersInFlight, WatchedRegisters
from warploom.emulate.transactions.transaction import Groups, SharedRead
from warploom.ir.program import Program
from warploom.ir.statements import Op, Value
from warploom.isa.effects import AsyncMatrix
from warploom.isa.matrix import WarpgroupProduct

Array = NDArray[Any]
_MEMBERS = -2
"""Where a frame keeps its warpgroups among what has been worked out for it."""


@dataclass(frozen=True, eq=False)
class _Members:
    """The warps of a warpgroup that a frame has: positions in the frame, rows of the batch, numbers in the group."""

    group: Warpgroup
    positions: Array
    rows: Array
    warps: Array

    def those(self, which: Array) -> _Members:
        """Some of them."""
        if which.all():
            return self
        return _Members(self.group, self.positions[which], self.rows[which], self.warps[which])


class Warpgroups(Groups[ProductInFlight]):
    """The ``wgmma`` of a batch."""

    def __init__(
        self, shared: SharedMemory, reporter: Reporter, counter: TrafficCounter, watched: WatchedRegisters
    ) -> None:
        rows = shared.clocks.known.shape[0]
        super().__init__(rows, reporter)
        self.shared, self.clocks, self.counter = shared, shared.clocks, counter
        self.warps = shared.clocks.warps_per_cta
        self.groups: dict[int, Warpgroup] = {}
        self.registers = RegistersInFlight(watched, rows, reporter, self._started_by)
        self.issued, self.completed = self.registers.issued, self.registers.completed
        self.together: dict[int, tuple[Op, Array]] = {}
        self.operands = SharedOperands(shared)

    def _started_by(self, row: int, number: int) -> Op:
        return self._group(row).products[number - 1].op

    def _group(self, row: int) -> Warpgroup:
        cta, warp = divmod(row, self.warps)
        first = row - warp % WARPS
        if first not in self.groups:
            queue = self.clocks.queue("wgmma", cta, warp // WARPS)
            self.groups[first] = Warpgroup(queue, warp // WARPS, first)
        return self.groups[first]

    def _members(self, frame: Frame) -> list[_Members]:
        """The warpgroups of a frame."""
        found: list[_Members] | None = frame.seen.get(_MEMBERS)
        if found is None:
            warps = frame.rows % self.warps % WARPS
            firsts = frame.rows - warps
            parts = [np.nonzero(firsts == first)[0] for first in dict.fromkeys(firsts.tolist())]
            found = [_Members(self._group(int(frame.rows[p[0]])), p, frame.rows[p], warps[p]) for p in parts]
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
            registers, found = (
                np.stack([frame.full(frame.env[k]) for k in keys[:count]], axis=-1),
                frame.poison(keys[:count]),
            )
            if found is not None:
                shadows = np.stack([frame.full(x) for x in found[0]], axis=-1)
        *descriptors, adds = (frame.full(frame.env[k])[:, 0] for k in keys[first : count + 2])
        if self.shared.checks:
            self.registers.start(frame, op, {id(product.op): product.op for product in self.open})
        self.issued[frame.span] += 1
        started: list[tuple[ProductInFlight, _Members]] = []
        for members in self._members(frame):
            numbers = self.issued[members.rows]
            for number in dict.fromkeys(numbers.tolist()):
                some = members.those(numbers == number)
                at = some.positions
                product = self._join(op, number, some, [x[at] for x in descriptors])
                mine = (None if x is None else x[at] for x in (registers, shadows))
                product.join(some.warps, adds[at], *mine)
                product.group[some.warps] = self.committed[some.rows]
                started.append((product, some))
        for product, members in started:
            if product.read is not None:
                product.read.begin(members.rows.tolist(), None)

    def _join(self, op: Op, number: int, members: _Members, descriptors: list[Array]) -> ProductInFlight:
        """The product that warps execute as their next one; a finding where they disagree on it."""
        products = members.group.products
        if number > len(products):
            products.append(self._product(op, number, members.group, tuple(int(x[0]) for x in descriptors)))
            self.add(products[-1])
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

    def _product(self, op: Op, number: int, group: Warpgroup, descriptors: tuple[int, ...]) -> ProductInFlight:
        found, read, stamp = self.operands.of(op, descriptors), None, self.clocks.stamp(op)
        for kind, message in found.wrong:
            self.report.add(kind, op.where, f"{op.instruction.mnemonic}: {message}", group.first, 0)
        for name, part in (("wgmma.b", found.b), ("wgmma.a", found.a)):
            if part is not None:
                self.counter.engine(name, part.size * ELEMENT_BYTES)
        cta, history = group.first // self.warps, self.shared.history
        if self.shared.checks and not found.outside:
            read = SharedRead(history, op, group.queue, found.cells + cta * history.cells, stamp)
        rows = np.minimum(group.first + np.arange(WARPS), self.issued.size - 1)
        return ProductInFlight(op, rows, np.zeros((WARPS, 32), np.bool_), number, descriptors, stamp, found, read)

    # -- groups --------------------------------------------------------------------------------------------------

    def wait(self, frame: Frame, pending: int, op: Op, registers: Array | None) -> Wait:
        """``wgmma.wait_group``: the results of all but the newest groups arrive, once all four warps have issued."""

        def then(frame: Frame) -> None:
            self._complete(frame, self.over(frame, pending), op)
            if registers is not None and self.shared.checks:
                self.registers.check_landed(frame, registers, op)

        wait, newest = Wait(op, set(), then=then), dict[int, ProductInFlight]()
        for product, done in self.over(frame, pending):
            newest.update(dict.fromkeys(product.rows[done.any(axis=1)].tolist(), product))
        for row, product in newest.items():
            if product.missing:
                wait.rows.add(row)
                product.waits.append((wait, row))
        return wait

    def _complete(self, frame: Frame, ended: list[tuple[ProductInFlight, Array]], op: Op) -> None:
        """Products of some warps of a frame end now."""
        accumulators: dict[tuple[Value, ...], Accumulator] = {}
        for product, done in ended:
            warps = np.nonzero(done.any(axis=1))[0]
            group, rows = self._group(int(product.rows[0])), product.rows[warps]
            d = product.op.results
            if d not in accumulators:
                accumulators[d] = Accumulator(frame, d, product.instruction)
            self._multiply(product, _Members(group, np.searchsorted(frame.rows, rows), rows, warps), accumulators[d])
            self.completed[rows] = product.number
            self.clocks.queue_done(rows, group.queue, product.stamp)
        self.close(ended)
        for product, _ in ended:
            product.free()
        self.clocks.refresh(frame.rows)
        for found in accumulators.values():
            found.write(op)

    def _multiply(self, product: ProductInFlight, members: _Members, d: Accumulator) -> None:
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

    def describe(self, row: int) -> str:
        """Whom a warp's ``wgmma`` waits for; '' for none."""
        waited = [product for product in self.open if product.missing and product.waits and row in product.rows]
        if not waited:
            return ""
        group = self._group(row)
        rows = range(group.first, group.first + WARPS)
        missing = [r for r in rows if r >= self.issued.size or self.issued[r] < waited[-1].number]
        named = ", ".join(str(r % self.warps) for r in missing)
        return f"warpgroup {group.number}: its wgmma has not been executed by warp {named}"

    # -- the end -------------------------------------------------------------------------------------------------

    def at_exit(self) -> None:
        """Products under way, and warpgroups of which only some warps came."""
        for product in self.open:
            self.leak(product, "is under way", "wait for its group")
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
