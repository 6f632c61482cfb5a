"""Steps of ``wmma.load`` and ``wmma.store``: a warp's access to a matrix, element by element.

What the elements are, whether they may be read yet, and races are checked as for any other access. How the hardware
divides such an access is not documented. Wavefronts are those of what ptxas makes of it for sm_80 and sm_90a: matrices
A and B of 16-bit elements are read by ``ldmatrix`` (LDSM), accumulators pass two elements at a time (STS, LDS). Other
types and global memory are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.core.errors import EmulationError, LayoutError
from warploom.emulate.control.context import Context, Step
from warploom.emulate.control.frames import Frame, Origin
from warploom.emulate.memory.access import SharedAccess
from warploom.ir.statements import Op
from warploom.isa.effects import Access, MatrixAccess
from warploom.layout.fragments import FragmentLayout

Array = NDArray[Any]


class MatrixSteps:
    """Builds the steps of matrix accesses; ``put`` sets registers from the words read."""

    def __init__(self, context: Context, put: Callable[[Frame, Op, Array, Array | None, Origin | None], None]) -> None:
        self.run, self.put = context, put

    def step(self, op: Op, access: MatrixAccess) -> Step:
        """The step of a load or a store. Raises EmulationError for a fragment that was never traced on a GPU."""
        assert op.instruction.fragment is not None
        try:
            layout = op.instruction.fragment()
        except LayoutError as error:
            raise EmulationError(f"{op.where}: {error}") from None
        return self._load(op, access, layout) if access.mode == "load" else self._store(op, access, layout)

    def _addresses(self, frame: Frame, op: Op, access: MatrixAccess, layout: FragmentLayout) -> list[Array]:
        """For each element of a thread, its byte address, (warps, 32), in the address operand's own type."""
        keys = self.run.keys(op)
        for k in keys[:2]:
            self.run.observe(frame, k, op, "an address")
        base, stride = (frame.full(frame.env[k]) for k in keys[:2])
        for what, values in (("address", base), ("leading dimension", stride)):
            differs = (values != values[:, :1]).any(axis=1)
            if differs.any():
                row = int(np.nonzero(differs)[0][0])
                text = f"the {what} of {op.instruction.mnemonic} differs between lanes: it must be the same in all"
                self.run.report.add("divergence", op.where, text, int(frame.rows[row]), 0, count=int(differs.sum()))
        rows, cols = layout.element_coordinates()
        line, along = (rows, cols) if access.major == "row" else (cols, rows)
        start = base[:, :1].astype(np.int64) + access.offset
        found: list[Array] = []
        for e in range(layout.elements_per_thread):
            offset = line[:, e] * stride[:, :1].astype(np.int64) + along[:, e]
            found.append((start + offset * access.bytes).astype(base.dtype))
        return found

    def _places(self, frame: Frame, op: Op, access: MatrixAccess, layout: FragmentLayout) -> tuple[list[Any], Access]:
        """Where the elements of a thread lie, and what each of them is an access of."""
        each = Access(access.space, access.mode, access.address, access.bytes, collective=True)
        memory, addresses = self.run.memories[access.space], self._addresses(frame, op, access, layout)
        places = [memory.place(frame, address, op, each) for address in addresses]
        if access.space == "shared" and self.run.checks:
            self._count(op, access, layout, places)
        return places, each

    def _load(self, op: Op, access: MatrixAccess, layout: FragmentLayout) -> Step:
        run = self.run

        def step(frame: Frame) -> None:
            places, each = self._places(frame, op, access, layout)
            parts = [run.memories[access.space].load(place, each) for place in places]
            words, shadow = np.concatenate([words for words, _, _ in parts], axis=-1), None
            if any(mine is not None for _, mine, _ in parts):
                marks = [np.zeros_like(words) if mine is None else mine for words, mine, _ in parts]
                shadow = np.concatenate(marks, axis=-1)
            self.put(frame, op, words, shadow, next((x for _, _, x in parts if x is not None), None))

        return step

    def _store(self, op: Op, access: MatrixAccess, layout: FragmentLayout) -> Step:
        run = self.run
        values = run.keys(op)[2:]

        def step(frame: Frame) -> None:
            for k in values:
                run.observe(frame, k, op, "a value stored by wmma.store")
            words = op.instruction.meaning(*[frame.full(frame.env[k]) for k in values])[0]
            places, each = self._places(frame, op, access, layout)
            for e, place in enumerate(places):
                run.memories[access.space].store(place, each, np.ascontiguousarray(words[..., e : e + 1]))

        return step

    def _count(self, op: Op, access: MatrixAccess, layout: FragmentLayout, places: list[SharedAccess]) -> None:
        """Count the wavefronts of an access whose elements are at ``places``."""
        elements = np.stack([p.frame.full(p.addresses) for p in places], axis=-1)  # (warps, lanes, elements of a lane)
        active = places[0].active
        if active is not None:
            elements = elements[active.any(axis=-1)]
        if access.is_input:
            if access.bytes == 2:
                self._count_rows(op, access, layout, elements)
            return
        pair = 2 if access.major == "row" else 1
        name = "st.shared" if access.mode == "store" else "ld.shared"
        for e in range(0, elements.shape[-1], pair):
            self.run.counter.shared(name, op.where, elements[..., e], pair * access.bytes, None, 1)

    def _count_rows(self, op: Op, access: MatrixAccess, layout: FragmentLayout, elements: Array) -> None:
        """Count a load of A or B as ``ldmatrix``: lines of eight elements, those of eight lines in one wavefront."""
        rows, cols = layout.element_coordinates()
        line, along = (rows, cols) if access.major == "row" else (cols, rows)
        first: dict[tuple[int, int], tuple[int, int]] = {}
        for lane, e in np.argwhere(along % 8 == 0):
            first.setdefault((int(along[lane, e]), int(line[lane, e])), (int(lane), int(e)))
        lanes, which = np.array([first[key] for key in sorted(first)]).T
        self.run.counter.shared("ldmatrix", op.where, elements[:, lanes, which], 16, None, 1)
