"""``wgmma``: matrix products that a warpgroup starts now and that read and write at any time until they are waited for.

Every warp computes its 16 rows of D when it waits, the last moment the hardware may take. Until then its registers
are in flight, and shared operands count as being read by the warpgroup, an agent of its own.

A CTA is launched with as many registers for each thread. ``setmaxnreg.dec`` gives some of a warpgroup's back, ``inc``
waits until there are enough.

Sources: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions", ``setmaxnreg``.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.barriers.barriers import Wait
from warploom.emulate.control.frames import Frame
from warploom.emulate.findings.report import Reporter
from warploom.emulate.transactions.async_proxy import AsyncProxy
from warploom.emulate.transactions.products import (
    ELEMENT_BYTES,
    WARP_ROWS,
    WARPS,
    Accumulator,
    Group,
    Part,
    Product,
    SharedOperands,
    WatchedRegisters,
    register_a,
)
from warploom.ir.program import Program
from warploom.ir.statements import Op, Value
from warploom.isa.effects import AsyncMatrix, RegisterBudget
from warploom.isa.wgmma import Wgmma

Array = NDArray[Any]


class RegisterPools:
    """The registers of the CTAs of a batch: ``held`` per thread of each warp, ``free`` of each CTA."""

    def __init__(self, program: Program, rows: int, reporter: Reporter) -> None:
        self.report, self.warps = reporter, program.warps
        self.held = np.full(rows, -(-program.launch_registers // 8) * 8, np.int64)
        self.free = np.zeros(rows // program.warps, np.int64)
        self._waiting: list[tuple[Wait, int, int]] = []  # (wait, row, registers)

    def change(self, frame: Frame, budget: RegisterBudget, op: Op) -> Wait | None:
        """The warps of a frame change their budgets. Returns what they wait for."""
        wait = Wait(op, set())
        for row in frame.flat.tolist():
            held = int(self.held[row])
            if (budget.registers < held) if budget.direction == "inc" else (budget.registers > held):
                message = f"{op.instruction.mnemonic} {budget.registers} by a warp that has {held} registers a thread: "
                message += "inc raises the budget, dec lowers it"
                self.report.add("undefined", op.where, message, row, 0)
            elif not self._take(row, budget.registers):
                wait.rows.add(row)
                self._waiting.append((wait, row, budget.registers))
        for earlier, row, registers in self._waiting.copy():
            if self._take(row, registers):
                self._waiting.remove((earlier, row, registers))
                earlier.rows.discard(row)
        return None if wait.ready else wait

    def _take(self, row: int, registers: int) -> bool:
        cta, more = row // self.warps, 32 * (registers - int(self.held[row]))
        if more > self.free[cta]:
            return False
        self.free[cta] -= more
        self.held[row] = registers
        return True

    def describe(self, row: int) -> str:
        """What is left for the warps of a CTA that wait for registers; '' where none does."""
        mine = [r for _, r, _ in self._waiting if r // self.warps == row // self.warps]
        return f"its CTA has {self.free[row // self.warps]} registers to give" if mine else ""


class Warpgroups:
    """The ``wgmma`` of a batch."""

    def __init__(self, rows: int, proxy: AsyncProxy, reporter: Reporter, watched: WatchedRegisters) -> None:
        self.proxy, self.report, self.watched = proxy, reporter, watched
        self.warps = proxy.clocks.warps_per_cta
        self.groups: dict[int, Group] = {}
        self.issued = np.zeros(rows, np.int64)
        self.completed = np.zeros(rows, np.int64)
        self.commits: dict[int, list[int]] = {}
        count = len(watched.numbers)
        self.last = np.zeros((count, rows), np.int64)  # the newest product that has the register in flight
        self.touched = np.zeros((count, rows), np.int64)  # when an ordinary instruction last accessed it
        self.fenced = np.full(rows, -1, np.int64)
        self.clock = 0
        self.values = list(watched.numbers)
        self.together: dict[int, tuple[Op, Array]] = {}
        self.operands = SharedOperands(proxy)
        self._clashes: dict[tuple[int, int], Array | None] = {}

    def _group(self, row: int) -> Group:
        warp = row % self.warps
        first = row - warp % WARPS
        if first not in self.groups:
            self.groups[first] = Group(warp // WARPS, first)
        return self.groups[first]

    # -- ordinary instructions -----------------------------------------------------------------------------------

    def access(self, frame: Frame, registers: Array, op: Op) -> None:
        """An instruction that is no ``wgmma`` reads or writes registers that some ``wgmma`` uses."""
        rows = frame.span
        completed = self.completed[rows]
        self.clock += 1
        for register in registers.tolist():
            flying = self.last[register, rows] > completed
            if np.count_nonzero(flying):
                self._report_flying(frame, registers, self.last[registers[:, None], frame.flat] > completed, op)
                completed = self.issued[rows]  # said once
            self.touched[register, rows] = self.clock

    def _report_flying(self, frame: Frame, registers: Array, flying: Array, op: Op) -> None:
        which, position = (int(x[0]) for x in np.nonzero(flying))
        row, value = int(frame.flat[position]), self.values[int(registers[which])]
        product = self._group(row).products[int(self.last[registers[which], row]) - 1]
        verb = "writes" if value in op.results and value not in op.operands else "accesses"
        name = f"register {value.name}" if value.name else "a register"
        message = (
            f"{op.instruction.mnemonic} {verb} {name} of {product.op.instruction.mnemonic}, which is still in flight: "
            "commit the wgmma and wait for its group first"
        )
        self.report.add("in_flight", op.where, message, row, 0, other=product.op.where, count=32 * int(flying.sum()))

    def fence(self, frame: Frame) -> None:
        """``wgmma.fence``."""
        self.clock += 1
        self.fenced[frame.flat] = self.clock

    def meet(self, frame: Frame, op: Op) -> None:
        """Count an instruction that whole warpgroups execute; compared at exit."""
        counts = self.together.setdefault(id(op), (op, np.zeros(self.issued.size, np.int64)))[1]
        counts[frame.flat] += 1

    # -- issue ---------------------------------------------------------------------------------------------------

    def issue(self, frame: Frame, op: Op, keys: tuple[Value, ...]) -> None:
        """Warps of a frame start a product."""
        instruction = op.instruction
        assert isinstance(instruction, Wgmma)
        from_registers = instruction.a_source == "registers"
        count = instruction.a_count
        b, adds = (frame.full(frame.env[k])[:, 0] for k in keys[count : count + 2])
        a = None if from_registers else frame.full(frame.env[keys[0]])[:, 0]
        registers = np.stack([frame.full(frame.env[k]) for k in keys[:count]], axis=-1) if from_registers else None
        shadows = self._shadows(frame, keys[:count]) if from_registers else None
        if self.proxy.checks:
            self._check_registers(frame, op, keys)
        rows = frame.flat.tolist()
        fresh: dict[int, tuple[Product, list[int]]] = {}
        for i, row in enumerate(rows):
            group = self._group(row)
            number = int(self.issued[row]) + 1
            self.issued[row] = number
            descriptors = None if a is None else int(a[i]), int(b[i])
            if number > len(group.products):
                group.products.append(self._product(op, instruction, number, row, *descriptors))
            product = group.products[number - 1]
            if product.op is not op or (product.a, product.b) != descriptors:
                self._disagree(row, op, product)
            mine = None if registers is None else registers[i]
            product.parts[row] = Part(mine, None if shadows is None else shadows[i], bool(adds[i]))
            fresh.setdefault(group.first, (product, []))[1].append(row)
        for product, members in fresh.values():
            if self.proxy.checks and product.cells.size:
                self.proxy.check((members, None), product.cells, "read", op)
                queue = self._queue(members[0])
                self.proxy.record_read(queue, product.cells, product.stamp)
            self._wake(self.groups[members[0] - members[0] % self.warps % WARPS])

    def _queue(self, row: int) -> int:
        """The column of the products of a warp's warpgroup."""
        return self.proxy.clocks.queue("wgmma", row // self.warps, row % self.warps // WARPS)

    @staticmethod
    def _shadows(frame: Frame, keys: tuple[Value, ...]) -> Array | None:
        if not any(k in frame.shadows for k in keys):
            return None
        none = np.zeros((1, 1, 1), np.uint32)
        return np.stack([frame.full(frame.shadows.get(k, none)) for k in keys], axis=-1)

    def _product(self, op: Op, instruction: Wgmma, number: int, row: int, a: int | None, b: int) -> Product:
        cta = row // self.warps
        stamp = self.proxy.clocks.stamp(op)
        parts = [self.operands.operand(instruction, "b", b)]
        if a is not None:
            parts.append(self.operands.operand(instruction, "a", a))
        if self.proxy.checks:
            for position, which, descriptor in ((0, "a", a), (instruction.a_count, "b", b)):
                tile = op.tile(position)
                message = self.operands.misplaced(instruction, which, descriptor, tile) if tile is not None else None
                if message is not None:
                    self.report.add(message[0], op.where, f"{op.instruction.mnemonic}: {message[1]}", row, 0)
        for name, part in zip(("wgmma.b", "wgmma.a"), parts, strict=False):
            self.proxy.counter.engine(name, part.index.size * ELEMENT_BYTES)
        outside = any(part.first < 0 or part.end > self.proxy.shared.size for part in parts)
        cells, before = np.zeros(0, np.int64), np.zeros(0, np.int32)
        if outside:
            message = f"{op.instruction.mnemonic}: an operand lies outside the {self.proxy.shared.size} bytes of "
            message += "shared memory: correct the descriptor's address, stride or leading offset"
            self.report.add("bounds", op.where, message, row, 0)
        elif self.proxy.checks:
            cells = self.operands.cells(parts, cta)
            before = self.proxy.state(cells)
        return Product(op, instruction, number, cta, a, b, stamp, cells, before, outside)

    def _disagree(self, row: int, op: Op, product: Product) -> None:
        message = (
            f"the warps of a warpgroup disagree on {op.instruction.mnemonic} (another line, or other descriptors): "
            "all four execute the same ones"
        )
        self.report.add("divergence", op.where, message, row, 0, other=product.op.where)

    def _check_registers(self, frame: Frame, op: Op, keys: tuple[Value, ...]) -> None:
        """Registers must be fenced since ordinary accesses; in flight, only the same shape may continue them."""
        numbers, rows = self.watched.of(op), frame.flat
        assert numbers is not None
        late = (self.touched[numbers[:, None], rows] > self.fenced[rows]) | (self.fenced[rows] < 0)
        if late.any():
            row = int(rows[np.nonzero(late)[1][0]])
            message = (
                f"{op.instruction.mnemonic} without a wgmma.fence since ordinary instructions last accessed its "
                "registers (or at all): put one before it"
            )
            self.report.add("race", op.where, message, row, 0)
        flying = self.last[numbers[:, None], rows] > self.completed[rows]
        if flying.any():
            self._check_continues(frame, op, numbers, flying)
        self.last[numbers[:, None], rows] = self.issued[rows] + 1

    def _check_continues(self, frame: Frame, op: Op, numbers: Array, flying: Array) -> None:
        """In flight, an operand A may be read again, and D continued by the same shape on the same registers."""
        newest = np.where(flying, self.last[numbers[:, None], frame.flat], 0)
        for position, row in enumerate(frame.flat.tolist()):
            products = self._group(row).products
            for number in set(newest[:, position].tolist()) - {0}:
                other = products[number - 1].op
                key = (id(op), id(other))
                if key not in self._clashes:
                    self._clashes[key] = self._clash(op, other, numbers)
                clash = self._clashes[key]
                if clash is not None and (clash & (newest[:, position] == number)).any():
                    only = np.zeros_like(flying)
                    only[clash & (newest[:, position] == number), position] = True
                    self._report_flying(frame, numbers, only, op)

    def _clash(self, op: Op, other: Op, numbers: Array) -> Array | None:
        """Which of the registers of a product another one in flight may not have; None for none."""
        if other.results == op.results and other.instruction == op.instruction:
            return None
        both = (*op.results, *other.results)
        if other.results == op.results and other.instruction.n == op.instruction.n:  # type: ignore[attr-defined]
            return None
        return np.array([self.values[int(n)] in both for n in numbers])

    # -- groups --------------------------------------------------------------------------------------------------

    def commit(self, frame: Frame) -> None:
        """``wgmma.commit_group``."""
        for row in frame.flat.tolist():
            self.commits.setdefault(row, []).append(int(self.issued[row]))

    def wait(self, frame: Frame, pending: int, op: Op, registers: Array | None) -> Generator[Wait | None, None, None]:
        """``wgmma.wait_group``: the results of all but the newest groups arrive, once all four warps have issued."""
        needs: dict[int, int] = {}
        for row in frame.flat.tolist():
            commits = self.commits.get(row, [])
            needs[row] = commits[-1 - pending] if len(commits) > pending else 0
        wait = Wait(op, set())
        for row, number in needs.items():
            group = self._group(row)
            if number > self._all_issued(group):
                wait.rows.add(row)
                group.waits.append((wait, row, number))
        while not wait.ready:
            yield wait
        self._complete(frame, needs, op)
        if registers is not None and self.proxy.checks:
            flying = self.last[registers[:, None], frame.flat] > self.completed[frame.flat]
            if flying.any():
                self._report_flying(frame, registers, flying, op)

    def _all_issued(self, group: Group) -> int:
        return int(self.issued[group.first : group.first + WARPS].min())

    def _wake(self, group: Group) -> None:
        if group.waits:
            issued = self._all_issued(group)
            for wait, row, number in group.waits:
                if number <= issued:
                    wait.rows.discard(row)
            group.waits = [w for w in group.waits if w[2] > issued]

    def _complete(self, frame: Frame, needs: dict[int, int], op: Op) -> None:
        accumulators: dict[tuple[Value, ...], Accumulator] = {}
        positions: dict[int, list[int]] = {}
        for i, row in enumerate(frame.flat.tolist()):
            positions.setdefault(row - row % self.warps % WARPS, []).append(i)
        for first, mine in positions.items():
            group = self.groups.get(first)
            rows = [int(frame.flat[i]) for i in mine]
            ranges = [(int(self.completed[r]), needs[r]) for r in rows]
            for done, until in set(ranges):
                taking = [i for i, r in zip(mine, ranges, strict=True) if r == (done, until)]
                for product in group.products[done:until] if group is not None else ():
                    d = product.op.results
                    found = accumulators.get(d)
                    if found is None:
                        found = accumulators[d] = Accumulator(frame, d, product.instruction)
                    self._multiply(product, frame, taking, found)
        clocks = self.proxy.clocks
        for row, number in needs.items():
            if number > self.completed[row]:
                self.completed[row] = number
                clocks.queue_done(row, self._queue(row), self._group(row).products[number - 1].stamp)
        clocks.refresh(frame.flat)
        for found in accumulators.values():
            found.write(op)

    def _multiply(self, product: Product, frame: Frame, positions: list[int], d: Accumulator) -> None:
        """D of some warps of a warpgroup, from what their operands hold now."""
        rows = [int(frame.flat[i]) for i in positions]
        if self.proxy.checks:
            self.proxy.unchanged(rows[0], 0, product.cells, product.before, product.op)
        if product.outside:
            return
        instruction = product.instruction
        b, b_poison = self.operands.shared_matrix(product, "b")
        parts = [product.parts.pop(row) for row in rows]
        if product.a is None:
            a = register_a(instruction, [p.a for p in parts if p.a is not None])
            shadows, a_poison = [p.a_shadow for p in parts], None
            if any(shadow is not None for shadow in shadows):
                zero = np.zeros((32, instruction.a_count), np.uint32)
                a_poison = register_a(instruction, [zero if s is None else s for s in shadows], poison=True)
        else:
            whole, a_poison = self.operands.shared_matrix(product, "a")
            quarter = [row % self.warps % WARPS for row in rows]
            a = whole.reshape(WARPS, WARP_ROWS, -1)[quarter]
            a_poison = None if a_poison is None else a_poison.reshape(WARPS, WARP_ROWS, -1)[quarter]
        adds = np.array([p.accumulate for p in parts])
        d.add(positions, adds, instruction, a, b)
        d.spoil(positions, adds, a_poison, b_poison)

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
                late = product.number > committed
                what, cure = (
                    ("never committed", "commit it and wait for its group")
                    if late
                    else ("never waited for", "wait for its group")
                )
                message = f"the kernel ends while {product.op.instruction.mnemonic} is under way; it was {what}: {cure}"
                self.report.add("leak", product.op.where, message, group.first, 0)
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
