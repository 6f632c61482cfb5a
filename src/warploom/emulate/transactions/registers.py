"""Registers of a warpgroup: those that a ``wgmma`` has in flight, and how many a warp may have.

Ordinary instructions may not touch a register between the ``wgmma`` that names it and the wait for its group, and what
they have touched must be fenced (``wgmma.fence``) before the next one. Instructions that follow each other without a
pause are checked at once, before the first of them.

Sources: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions", ``setmaxnreg``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.barriers.barriers import Wait
from warploom.emulate.control.frames import Execution, Frame
from warploom.emulate.findings.report import Reporter
from warploom.ir.program import Program
from warploom.ir.statements import Op, Operand, Value
from warploom.isa.effects import RegisterBudget, WaitGroup, WarpgroupFence

Array = NDArray[Any]


class WatchedRegisters:
    """The registers that any ``wgmma`` of a program names, numbered; made once for a program.

    ``of`` has those that each operation names, by its identity, and ``sums`` the accumulator that each of a product's
    is part of, numbered from 1; 0 for an operand A.
    """

    def __init__(self, program: Program) -> None:
        self.of: dict[int, Array] = {}
        self.sums: dict[int, Array] = {}
        numbers, accumulators = dict[Operand, int](), dict[tuple[Value, ...], int]()
        products = [op for op in program.ops() if op.instruction.warpgroup_product is not None]
        for op in products:
            product = op.instruction.warpgroup_product
            for value in (*op.operands[: 0 if product.a_source == "shared" else product.a_count], *op.results):
                if isinstance(value, Value):
                    numbers.setdefault(value, len(numbers))
        self.values = [value for value in numbers if isinstance(value, Value)]
        for op in program.ops() if numbers else ():
            mine = sorted({numbers[x] for x in (*op.operands, *op.results) if x in numbers})
            if mine:
                self.of[id(op)] = np.array(mine)
        for op in products:
            which = accumulators.setdefault(op.results, len(accumulators) + 1)
            self.sums[id(op)] = np.array([which if self.values[n] in op.results else 0 for n in self.of[id(op)]])

    def touched_by(self, ops: Sequence[Op]) -> list[tuple[Op, Array]]:
        """The ordinary instructions among some that access watched registers, and which."""
        return [(op, self.of[id(op)]) for op in ops if id(op) in self.of and not _is_of_wgmma(op)]


def _is_of_wgmma(op: Op) -> bool:
    """Whether it is a product of a warpgroup, or waits for one."""
    waits = any(isinstance(e, WaitGroup) and e.queue == "wgmma" for e in op.instruction.effects())
    return waits or op.instruction.warpgroup_product is not None


class RegistersInFlight:
    """The watched registers of all warps of a batch. A warp's products are numbered from 1 in the order of issue.

    ``issued`` and ``completed`` are the newest products of each row; ``started_by(row, number)`` is one's operation.
    """

    def __init__(
        self, watched: WatchedRegisters, rows: int, report: Reporter, started_by: Callable[[int, int], Op]
    ) -> None:
        self.watched, self.report, self.started_by = watched, report, started_by
        shape = len(watched.values), rows
        self.issued, self.completed = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self.last, self.sums = np.zeros(shape, np.int64), np.zeros(shape, np.int64)  # the newest product, and its D
        self.touched = np.zeros(shape, np.bool_)  # by an ordinary instruction, since the last fence
        self.fenced = np.zeros(rows, np.bool_)

    def touch(self, frame: Frame, ops: list[tuple[Op, Array]], registers: Array) -> None:
        """Ordinary instructions that follow each other without a pause access some, and together all, ``registers``."""
        rows = frame.span
        if np.count_nonzero(self.issued[rows] > self.completed[rows]) and self._flying(frame, registers).any():
            for op, mine in ops:
                self.check_landed(frame, mine, op)
        self.touched[registers[:, None], frame.rows] = True

    def check_landed(self, frame: Frame, registers: Array, op: Op) -> None:
        """Registers that an instruction takes for complete must not be in flight."""
        self._refuse(frame, registers, self._flying(frame, registers), op)

    def _flying(self, frame: Frame, registers: Array) -> Array:
        """Which registers are in flight in which warps of a frame, (registers, warps)."""
        return self.last[registers[:, None], frame.rows] > self.completed[frame.rows]

    def _refuse(self, frame: Frame, registers: Array, flying: Array, op: Op) -> None:
        """Report an access to registers in flight, if there are any."""
        if not flying.any():
            return
        which, position = (int(x[0]) for x in np.nonzero(flying))
        row, value = int(frame.rows[position]), self.watched.values[int(registers[which])]
        product = self.started_by(row, int(self.last[registers[which], row]))
        verb = "writes" if value in op.results and value not in op.operands else "accesses"
        name = f"register {value.name}" if value.name else "a register"
        message = (
            f"{op.instruction.mnemonic} {verb} {name} of {product.instruction.mnemonic}, which is still in flight: "
            "commit the wgmma and wait for its group first"
        )
        self.report.add("in_flight", op.where, message, row, 0, other=product.where, count=32 * int(flying.sum()))

    def fence(self, call: Execution[WarpgroupFence]) -> None:
        """Note that the warps of a frame execute ``wgmma.fence``."""
        self.touched[:, call.frame.span] = False
        self.fenced[call.frame.span] = True

    def start(self, frame: Frame, op: Op) -> None:
        """A product starts: its registers must be fenced since ordinary accesses, and are in flight from now on.

        In flight, an operand A may be read again, and D continued by the same shape on the same registers.
        """
        registers, sums, rows = self.watched.of[id(op)], self.watched.sums[id(op)][:, None], frame.rows
        mine = registers[:, None], rows
        late = self.touched[mine] | ~self.fenced[rows]
        if np.count_nonzero(late):
            row = int(rows[np.nonzero(late)[1][0]])
            message = (
                f"{op.instruction.mnemonic} without a wgmma.fence since ordinary instructions last accessed its "
                "registers (or at all): put one before it"
            )
            self.report.add("race", op.where, message, row, 0)
        self._refuse(frame, registers, self._flying(frame, registers) & (self.sums[mine] != sums), op)
        self.last[mine], self.sums[mine] = self.issued[rows] + 1, sums


class RegisterPools:
    """The registers of the CTAs of a batch: ``held`` per thread of each warp, ``free`` of each CTA.

    A CTA is launched with as many for each thread. ``setmaxnreg.dec`` gives some of a warpgroup's back, ``inc`` waits
    until there are enough.
    """

    def __init__(self, program: Program, rows: int, reporter: Reporter) -> None:
        self.report, self.warps = reporter, program.warps
        self.held = np.full(rows, -(-program.launch_registers // 8) * 8, np.int64)
        self.free = np.zeros(rows // program.warps, np.int64)
        self._waiting: list[tuple[Wait, int, int]] = []  # (wait, row, registers)

    def change(self, call: Execution[RegisterBudget]) -> Wait | None:
        """The warps of a frame change their budgets. Returns what they wait for."""
        op, budget = call.op, call.effect
        wait = Wait(op, set())
        for row in call.frame.rows.tolist():
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
        """Say how many registers are left for the warps of a CTA that wait for some; '' where none waits."""
        mine = [r for _, r, _ in self._waiting if r // self.warps == row // self.warps]
        return f"its CTA has {self.free[row // self.warps]} registers to give" if mine else ""
