"""``wgmma``: matrix products that a warpgroup starts now and that read and write at any time until they are waited for.

Every warp computes its 16 rows of D when it waits, the last moment the hardware may take. Until then its registers
are in flight, and shared operands count as being read by the warpgroup, an agent of its own.

Ordinary instructions may not touch a register between the ``wgmma`` that names it and the wait for its group, and what
they have touched must be fenced (``wgmma.fence``) before the next one. Instructions that follow each other without a
pause are checked at once, before the first of them. How many registers a warpgroup has is changed by ``setmaxnreg``.

Sources: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions", ``setmaxnreg``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from warploom.core.dtypes import DType
from warploom.emulate.barriers.barriers import Wait
from warploom.emulate.control.frames import Execution, Frame, Origin, read_by
from warploom.emulate.findings.findings import Kind
from warploom.emulate.findings.report import Reporter
from warploom.emulate.findings.traffic import TrafficCounter
from warploom.emulate.memory import shadows
from warploom.emulate.memory.shared_memory import SHARED_BASE, SharedMemory
from warploom.emulate.transactions.transaction import Groups, SharedRead, Transaction
from warploom.ir.program import Program
from warploom.ir.statements import Op, Operand, TileRegion, Value
from warploom.isa.effects import AsyncMatrix, RegisterBudget, WaitGroup, WarpgroupFence
from warploom.isa.matrix import M, WarpgroupProduct, element_values
from warploom.layout.wgmma import decode

Array = NDArray[Any]
Matrix: TypeAlias = tuple[Array, Array | None]
"""The values of a matrix's elements, and which of them are poison; None for none."""

_GROUPS = -2
"""Where a frame keeps its warpgroups among what has been worked out for it."""
WARPS = 4
"""Warps of a warpgroup."""


class Accumulator:
    """D of all warps of a frame as matrices (warps, 16, n), from registers and back."""

    def __init__(self, frame: Frame, op: Op, instruction: WarpgroupProduct) -> None:
        self.frame, self.first, self.registers, self.slot = frame, op, op.results, instruction.accumulator_slot
        registers = self.registers
        self.matrix, found = self.slot.matrix([frame.full(frame.env[r]) for r in registers]), frame.poison(registers)
        self.poison = None if found is None else shadows.elements(self.slot, [frame.full(x) for x in found[0]])

    def add(self, positions: Array, adds: Array, instruction: WarpgroupProduct, a: Matrix, b: Matrix) -> None:
        """D = A·B, or D += A·B where ``adds``, of some warps. Poison of A spoils its row of D, of B its column."""
        where, adds = slice(None) if positions.size == self.frame.n else positions, adds[:, None, None]
        old = self.matrix[where]
        summed = old if adds.all() else np.where(adds, old, old.dtype.type(0))
        found = instruction.multiply(
            a[0].reshape(1, -1, instruction.k), b[0][None], summed.reshape(1, -1, instruction.n)
        )
        self.matrix[where] = found.reshape(old.shape)
        if self.poison is None and (a[1] is not None or b[1] is not None):
            self.poison = np.zeros(self.matrix.shape, np.bool_)
        if self.poison is not None:
            mine = self.poison[where] & adds
            mine |= False if a[1] is None else a[1].any(axis=2, keepdims=True)
            mine |= False if b[1] is None else b[1].any(axis=1)
            self.poison[where] = mine

    def write(self, op: Op) -> None:
        """The registers of the frame from the matrices."""
        arrays, marks = self.slot.registers(self.matrix), None
        if self.poison is not None and self.poison.any():
            marks = shadows.registers(self.slot, self.poison)
        origin: Origin = (op.where, "an accumulator whose operands were poison")
        for i, (register, array) in enumerate(zip(self.registers, arrays, strict=True)):
            shadow = None if marks is None or not marks[i].any() else marks[i]
            mine = read_by(self.first, self.frame.origins.get(register, origin))
            self.frame.write(register, array.view(register.dtype.numpy), shadow, mine)


@dataclass(frozen=True, eq=False)
class ProductOperands:
    """The shared memory that a ``wgmma`` reads in its CTA: elements of A and B in units of their size, and their cells.

    ``wrong`` are findings, kind and message; there is nothing to multiply if an operand lies ``outside``.
    """

    a: Array | None
    b: Array
    cells: Array
    wrong: tuple[tuple[Kind, str], ...]
    outside: bool


@dataclass(eq=False)
class ProductInFlight(Transaction):
    """One ``wgmma`` of the warpgroup whose first warp is ``first``. ``number`` counts its products from 1.

    The descriptors are those of A and B, or of B alone. Of each of the four warps: A's registers (warps, lanes,
    registers), their shadows if any has one, and whether D is ``added`` to. So many warps are ``missing``, which have
    not executed it; meanwhile rows of others wait for it.
    """

    first: int
    number: int
    descriptors: tuple[int, ...]
    stamp: int
    operands: ProductOperands
    read: SharedRead | None  # None without checks
    added: Array = field(default_factory=lambda: np.zeros(WARPS, np.bool_))
    registers: Array | None = None
    marks: Array | None = None
    missing: int = WARPS
    waits: list[tuple[Wait, int]] = field(default_factory=list[tuple[Wait, int]])

    @property
    def instruction(self) -> WarpgroupProduct:
        """The instruction that multiplies."""
        return self.op.instruction.warpgroup_product

    def join(self, warps: Array, added: Array, registers: Array | None, marks: Array | None) -> None:
        """Some warps of the warpgroup execute it. After the last of them nobody waits for others any more."""
        self.added[warps], self.under_way[warps] = added, True
        self.missing -= warps.size
        for wait, row in () if self.missing else self.waits:
            wait.rows.discard(row)
        if registers is not None and self.registers is None:
            self.registers = np.zeros((WARPS, *registers.shape[1:]), registers.dtype)
        if marks is not None and self.marks is None:
            self.marks = np.zeros((WARPS, *marks.shape[1:]), np.uint32)
        for mine, given in ((self.registers, registers), (self.marks, marks)):
            if mine is not None and given is not None:
                mine[warps] = given

    def a(self, shared: SharedMemory, warps: Array) -> Matrix:
        """A of some warps, (warps, 16, k)."""
        if self.operands.a is not None:
            words, marks = self._elements(shared, self.operands.a, self.instruction.a)
            shape = WARPS, -1, self.instruction.k
            return words.reshape(shape)[warps], None if marks is None else marks.reshape(shape)[warps]
        assert self.registers is not None
        slot, marks = self.instruction.a_slot, None
        if self.marks is not None:
            marks = shadows.elements(slot, list(np.moveaxis(self.marks[warps], 2, 0)))
        return slot.matrix(list(np.moveaxis(self.registers[warps], 2, 0))), marks

    def b(self, shared: SharedMemory) -> Matrix:
        """B, (n, k)."""
        return self._elements(shared, self.operands.b, self.instruction.b)

    def _elements(self, shared: SharedMemory, elements: Array, dtype: DType) -> Matrix:
        """Elements of an operand in shared memory as they are now."""
        word = np.dtype(f"u{dtype.bits // 8}")
        index = elements + self.first // shared.clocks.warps_per_cta * shared.stride // word.itemsize
        words, poison = shared.data.view(word)[index], None
        if shared.shadow is not None:
            poison = shared.shadow.view(word)[index] != 0
        return element_values(words, dtype), poison if poison is not None and poison.any() else None

    def free(self) -> None:
        """After the last warp has waited for it, it holds no data."""
        if not self.missing and not self.under_way.any():
            self.registers = self.marks = self.read = None


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


class Warpgroups(Groups[ProductInFlight]):
    """The ``wgmma`` of a batch. ``products`` are those of each warpgroup, by the row of its first warp."""

    def __init__(
        self, shared: SharedMemory, reporter: Reporter, counter: TrafficCounter, watched: WatchedRegisters
    ) -> None:
        rows = shared.clocks.known.shape[0]
        super().__init__(rows, reporter)
        self.shared, self.clocks, self.counter = shared, shared.clocks, counter
        self.warps = shared.clocks.warps_per_cta
        self.products = defaultdict[int, list[ProductInFlight]](list)
        self.registers = RegistersInFlight(watched, rows, reporter, self._started_by)
        self.issued, self.completed = self.registers.issued, self.registers.completed
        self.together: dict[int, tuple[Op, Array]] = {}
        self._operands: dict[tuple[int, tuple[int, ...]], ProductOperands] = {}

    def _first(self, rows: Any) -> Any:
        """The rows of the first warps of the warpgroups that rows are in."""
        return rows - rows % self.warps % WARPS

    def _started_by(self, row: int, number: int) -> Op:
        return self.products[self._first(row)][number - 1].op

    def _queue(self, first: int) -> int:
        """The column of what a warpgroup does."""
        return self.clocks.queue("wgmma", first // self.warps, first % self.warps // WARPS)

    def _groups(self, frame: Frame) -> list[tuple[int, Array]]:
        """The warpgroups of a frame, and the rows of each that it has."""
        if _GROUPS not in frame.seen:
            firsts = self._first(frame.rows)
            frame.seen[_GROUPS] = [(first, frame.rows[firsts == first]) for first in dict.fromkeys(firsts.tolist())]
        return frame.seen[_GROUPS]

    def meet(self, frame: Frame, op: Op) -> None:
        """Count an instruction that whole warpgroups execute; compared at exit."""
        counts = self.together.setdefault(id(op), (op, np.zeros(self.issued.size, np.int64)))[1]
        counts[frame.span] += 1

    # -- issue ---------------------------------------------------------------------------------------------------

    def issue(self, frame: Frame, op: Op, keys: tuple[Value, ...]) -> None:
        """Warps of a frame start a product."""
        instruction: WarpgroupProduct = op.instruction.warpgroup_product
        first, registers, marks = 0, None, None
        if instruction.a_source == "registers":
            first, of_a = instruction.a_count, keys[: instruction.a_count]
            registers, found = np.stack([frame.full(frame.env[k]) for k in of_a], axis=-1), frame.poison(of_a)
            marks = None if found is None else np.stack([frame.full(x) for x in found[0]], axis=-1)
        *descriptors, adds = (frame.full(frame.env[k])[:, 0] for k in keys[first:])
        self._check_agreed(frame, op, [frame.env[k] for k in keys[first:]])
        if self.shared.checks:
            self.registers.start(frame, op)
        self.issued[frame.span] += 1
        started: list[tuple[ProductInFlight, Array]] = []
        for group, rows in self._groups(frame):
            numbers = self.issued[rows]
            for number in dict.fromkeys(numbers.tolist()):
                mine = rows[numbers == number]
                at, warps = np.searchsorted(frame.rows, mine), mine - group
                product = self._product(op, group, number, mine, [x[at] for x in descriptors])
                product.join(warps, adds[at], *(None if x is None else x[at] for x in (registers, marks)))
                product.group[warps] = self.committed[mine]
                started.append((product, mine))
        for product, mine in started:
            if product.read is not None:
                product.read.begin(mine.tolist(), None)

    def _check_agreed(self, frame: Frame, op: Op, operands: list[Array]) -> None:
        """Report lanes of a warp that give other descriptors than its first one, or another predicate."""
        for given in operands:
            if given.shape[1] > 1 and (differ := given != given[:, :1]).any():
                message = f"the lanes of a warp disagree on {op.instruction.mnemonic} (its descriptors, or whether it "
                message += "adds to D): all of a warpgroup give the same"
                self.report.of_lanes("divergence", frame, op.where, frame.full(differ), message)

    def _product(self, op: Op, first: int, number: int, rows: Array, descriptors: list[Array]) -> ProductInFlight:
        """The product that warps of a group execute as their next one; a finding where they disagree on it."""
        products = self.products[first]
        if number > len(products):
            products.append(self._begin(op, first, number, tuple(int(x[0]) for x in descriptors)))
            self.add(products[-1])
        product = products[number - 1]
        differ = np.full(rows.shape, product.op is not op)
        for mine, given in zip(descriptors, product.descriptors, strict=False):
            differ |= mine != given
        for row in rows[differ].tolist():
            message = (
                f"the warps of a warpgroup disagree on {op.instruction.mnemonic} (another line, or other descriptors): "
                "all four execute the same ones"
            )
            self.report.add("divergence", op.where, message, row, 0, other=product.op.where)
        return product

    def _begin(self, op: Op, first: int, number: int, descriptors: tuple[int, ...]) -> ProductInFlight:
        """A warpgroup's next product, which none of its warps has joined."""
        read, stamp, history = None, self.clocks.stamp(op), self.shared.history
        found = self._operands.get((id(op), descriptors))
        if found is None:
            found = self._operands[id(op), descriptors] = operands_of(self.shared, op, descriptors)
        for kind, message in found.wrong:
            self.report.add(kind, op.where, f"{op.instruction.mnemonic}: {message}", first, 0)
        for name, part in (("wgmma.b", found.b), ("wgmma.a", found.a)):
            if part is not None:
                self.counter.engine(name, part.size * op.instruction.warpgroup_product.element_bytes)
        if self.shared.checks and not found.outside:
            cells = found.cells + first // self.warps * history.cells
            read = SharedRead(history, op, self._queue(first), cells, stamp)
        rows = np.minimum(first + np.arange(WARPS), self.issued.size - 1)
        return ProductInFlight(
            op, rows, np.zeros((WARPS, 32), np.bool_), first, number, descriptors, stamp, found, read
        )

    # -- groups --------------------------------------------------------------------------------------------------

    def wait(self, call: Execution[WaitGroup]) -> Wait:
        """``wgmma.wait_group``: the results of all but the newest groups arrive, once all four warps have issued."""
        op, pending, registers = call.op, call.effect.pending, self.registers.watched.of.get(id(call.op))

        def then(frame: Frame) -> None:
            self._complete(frame, self.over(frame, pending), op)
            if registers is not None and self.shared.checks:
                self.registers.check_landed(frame, registers, op)

        wait, newest = Wait(op, set(), then=then), dict[int, ProductInFlight]()
        for product, done in self.over(call.frame, pending):
            newest.update(dict.fromkeys(product.rows[done.any(axis=1)].tolist(), product))
        for row, product in newest.items():
            if product.missing:
                wait.rows.add(row)
                product.waits.append((wait, row))
        return wait

    def _complete(self, frame: Frame, ended: list[tuple[ProductInFlight, Array]], op: Op) -> None:
        """Products of some warps of a frame end now: D, from what their operands hold now."""
        sums: dict[tuple[Value, ...], Accumulator] = {}
        for product, done in ended:
            warps = np.nonzero(done.any(axis=1))[0]
            rows, instruction, results = product.rows[warps], product.instruction, product.op.results
            if product.read is not None:
                product.read.end(int(rows[0]), 0)
            if not product.operands.outside:
                if results not in sums:
                    sums[results] = Accumulator(frame, product.op, instruction)
                a, b = product.a(self.shared, warps), product.b(self.shared)
                sums[results].add(np.searchsorted(frame.rows, rows), product.added[warps], instruction, a, b)
            self.completed[rows] = product.number
            self.clocks.queue_done(rows, self._queue(product.first), product.stamp)
        self.close(ended, op)
        for product, _ in ended:
            product.free()
        self.clocks.refresh(frame.rows)
        for found in sums.values():
            found.write(op)

    def describe(self, row: int) -> str:
        """Whom a warp's ``wgmma`` waits for; '' for none."""
        waited = [product for product in self.open if product.missing and product.waits and row in product.rows]
        if not waited:
            return ""
        first = self._first(row)
        rows = range(first, first + WARPS)
        missing = [r for r in rows if r >= self.issued.size or self.issued[r] < waited[-1].number]
        named = ", ".join(str(r % self.warps) for r in missing)
        return f"warpgroup {first % self.warps // WARPS}: its wgmma has not been executed by warp {named}"

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


def operands_of(shared: SharedMemory, op: Op, descriptors: tuple[int, ...]) -> ProductOperands:
    """The shared memory of a CTA that a product with these descriptors reads."""
    instruction: WarpgroupProduct = op.instruction.warpgroup_product
    wrong, outside = list[tuple[Kind, str]](), False
    kinds = [(0, instruction.a_addresses), (instruction.a_count, instruction.b_addresses)][-len(descriptors) :]
    elements: list[Array] = []
    cells: list[Array] = []
    for (position, addresses), descriptor in zip(kinds, descriptors, strict=True):
        places = addresses(descriptor) - SHARED_BASE
        elements.append(places // instruction.element_bytes)
        first, end = int(places.min()), int(places.max()) + instruction.element_bytes
        outside |= first < 0 or end > shared.size
        cells.append(places.reshape(-1) // shared.granule)
        tile = op.tile(position)
        found = None if tile is None else _misplaced(instruction, position > 0, descriptor, (first, end), tile)
        wrong += [] if found is None else [found]
    if outside:
        message = f"an operand lies outside the {shared.size} bytes of shared memory: correct the descriptor's "
        wrong.append(("bounds", message + "address, stride or leading offset"))
    a = elements[0] if len(elements) > 1 else None
    return ProductOperands(a, elements[-1], np.unique(np.concatenate(cells)), tuple(wrong), outside)


def _misplaced(
    instruction: WarpgroupProduct, is_b: bool, descriptor: int, extent: tuple[int, int], tile: TileRegion
) -> tuple[Kind, str] | None:
    """Return how an operand's descriptor, for bytes from the first to the end, contradicts the tile it was made for."""
    (first, end), which, shape = extent, "AB"[is_b], decode(descriptor)[1]
    if first < tile.offset or end > tile.offset + tile.bytes:
        return "bounds", (
            f"operand {which} takes bytes {first} to {end - 1} of shared memory, outside the tile {tile.name} (bytes "
            f"{tile.offset} to {tile.offset + tile.bytes - 1}): correct the descriptor's start, stride or leading "
            "offset"
        )
    if tile.swizzle_bytes != shape.row_bytes:
        has = "no swizzle" if tile.swizzle_bytes == 0 else f"swizzled rows of {tile.swizzle_bytes} bytes"
        has = "a swizzle that wgmma does not have" if tile.swizzle_bytes is None else has
        return "layout", (
            f"the tile {tile.name} has {has}, the descriptor of operand {which} says {shape.row_bytes}: "
            "make it with k.wgmma_operand, or give both one swizzle"
        )
    transposed, size = (instruction.transposed_b, instruction.n) if is_b else (instruction.transposed_a, M)
    lines, along = (instruction.k, size) if transposed else (size, instruction.k)
    row_bytes = along * instruction.element_bytes
    for what, says, is_, needed in (
        ("stride", shape.stride, 8 * tile.row_bytes, shape.row_bytes and lines > 8),
        ("leading", shape.leading, tile.panel_bytes, shape.row_bytes and row_bytes > shape.row_bytes),
    ):
        if needed and says != is_:
            return "layout", (
                f"the {what} offset of operand {which} is {says} bytes, in the tile {tile.name} it is {is_}: make the "
                "descriptor with k.wgmma_operand"
            )
    return None
