"""``setmaxnreg``: the registers of a CTA, which its warpgroups give back and take.

A CTA is launched with as many registers for each thread. ``dec`` gives some back, ``inc`` waits until there are enough.
Source: PTX ISA, ``setmaxnreg``.
"""

from __future__ import annotations

import numpy as np

from warploom.emulate.barriers import Wait
from warploom.emulate.frames import Frame
from warploom.emulate.report import Reporter
from warploom.ir.program import Program
from warploom.ir.statements import Op
from warploom.isa.effects import RegisterBudget


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
