"""Where ``wmma.load`` and ``wmma.store`` go: a warp's access to a matrix, element by element.

What the elements are, whether they may be read yet, and races are checked as for any other access. How the hardware
divides such an access is not documented. Wavefronts are those of what ptxas makes of it for sm_80 and sm_90a: matrices
A and B of 16-bit elements are read by ``ldmatrix`` (LDSM), accumulators pass two elements at a time (STS, LDS). Other
types and global memory are not counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.core.errors import EmulationError, LayoutError
from warploom.emulate.control.context import Context
from warploom.emulate.control.frames import Frame
from warploom.emulate.memory.access import SharedAccess
from warploom.ir.statements import Op
from warploom.isa.effects import Access, MatrixAccess

Array = NDArray[Any]


class MatrixPlaces:
    """Where the elements of a matrix lie in memory that the lanes of a frame access.

    Raises EmulationError for a fragment that was never traced on a GPU.
    """

    def __init__(self, context: Context, op: Op, access: MatrixAccess) -> None:
        assert op.instruction.fragment is not None
        self.run, self.op, self.access = context, op, access
        try:
            self.layout = op.instruction.fragment()
        except LayoutError as error:
            raise EmulationError(f"{op.where}: {error}") from None
        rows, cols = self.layout.element_coordinates()
        self._lines = (rows, cols) if access.major == "row" else (cols, rows)
        self.each = Access(access.space, access.mode, access.address, access.bytes, collective=True)

    def __call__(self, frame: Frame) -> list[Any]:
        """The place of each element of a thread; wavefronts of shared memory are counted."""
        memory = self.run.memories[self.access.space]
        places = [memory.place(frame, address, self.op, self.each) for address in self._addresses(frame)]
        if self.access.space == "shared" and self.run.checks:
            self._count(places)
        return places

    def _addresses(self, frame: Frame) -> list[Array]:
        """For each element of a thread, its byte address, (warps, 32), in the address operand's own type."""
        op, access, layout, keys = self.op, self.access, self.layout, self.run.keys(self.op)
        for k in keys[:2]:
            self.run.observe(frame, k, op, "an address")
        base, stride = (frame.full(frame.env[k]) for k in keys[:2])
        for what, values in (("address", base), ("leading dimension", stride)):
            differs = (values != values[:, :1]).any(axis=1)
            if differs.any():
                row = int(np.nonzero(differs)[0][0])
                text = f"the {what} of {op.instruction.mnemonic} differs between lanes: it must be the same in all"
                self.run.report.add("divergence", op.where, text, int(frame.rows[row]), 0, count=int(differs.sum()))
        line, along = self._lines
        start = base[:, :1].astype(np.int64) + access.offset
        found: list[Array] = []
        for e in range(layout.elements_per_thread):
            offset = line[:, e] * stride[:, :1].astype(np.int64) + along[:, e]
            found.append((start + offset * access.bytes).astype(base.dtype))
        return found

    def _count(self, places: list[SharedAccess]) -> None:
        """Count the wavefronts of an access whose elements are at ``places``."""
        op, access = self.op, self.access
        elements = np.stack([p.frame.full(p.addresses) for p in places], axis=-1)  # (warps, lanes, elements of a lane)
        active = places[0].active
        if active is not None:
            elements = elements[active.any(axis=-1)]
        if access.is_input:
            if access.bytes == 2:
                self._count_rows(elements)
            return
        pair = 2 if access.major == "row" else 1
        name = "st.shared" if access.mode == "store" else "ld.shared"
        for e in range(0, elements.shape[-1], pair):
            self.run.counter.shared(name, op.where, elements[..., e], pair * access.bytes, None, 1)

    def _count_rows(self, elements: Array) -> None:
        """Count a load of A or B as ``ldmatrix``: lines of eight elements, those of eight lines in one wavefront."""
        line, along = self._lines
        first: dict[tuple[int, int], tuple[int, int]] = {}
        for lane, e in np.argwhere(along % 8 == 0):
            first.setdefault((int(along[lane, e]), int(line[lane, e])), (int(lane), int(e)))
        lanes, which = np.array([first[key] for key in sorted(first)]).T
        self.run.counter.shared("ldmatrix", self.op.where, elements[:, lanes, which], 16, None, 1)
