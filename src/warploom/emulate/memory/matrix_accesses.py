"""Steps of ``wmma.load`` and ``wmma.store``: a warp's access to a matrix, element by element.

How the hardware divides such an access is not documented, so no wavefronts and no sectors are counted for it; what the
elements are, whether they may be read yet, and races are checked as for any other access.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.core.errors import EmulationError, LayoutError
from warploom.emulate.control.context import Context, Step
from warploom.emulate.control.frames import Frame, Origin, shadow_dtype
from warploom.ir.statements import Op
from warploom.isa.effects import MatrixAccess
from warploom.isa.wmma import WmmaLoad, WmmaStore
from warploom.layout.fragments import FragmentLayout

Array = NDArray[Any]


class MatrixSteps:
    """Builds the steps of matrix accesses."""

    def __init__(self, context: Context) -> None:
        self.run = context

    def step(self, op: Op, access: MatrixAccess) -> Step:
        """The step of a load or a store. Raises EmulationError for a fragment that was never traced on a GPU."""
        assert isinstance(op.instruction, (WmmaLoad, WmmaStore))
        try:
            layout = op.instruction.layout
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
                self.run.report.add("divergence", op.where, text, int(frame.flat[row]), 0, count=int(differs.sum()))
        rows, cols = layout.element_coordinates()
        line, along = (rows, cols) if access.major == "row" else (cols, rows)
        start = base[:, :1].astype(np.int64) + access.offset
        found: list[Array] = []
        for e in range(layout.elements_per_thread):
            offset = line[:, e] * stride[:, :1].astype(np.int64) + along[:, e]
            found.append((start + offset * access.bytes).astype(base.dtype))
        return found

    def _load(self, op: Op, access: MatrixAccess, layout: FragmentLayout) -> Step:
        run = self.run
        word = np.dtype(f"u{access.bytes}")

        def step(frame: Frame) -> None:
            parts: list[Array] = []
            shadows: list[Array] = []
            origin: Origin | None = None
            for address in self._addresses(frame, op, access, layout):
                if access.space == "shared":
                    place = run.shared.locate(frame, frame.shaped(address), 0, access.bytes, 32, op, collective=True)
                    words, shadow, found = run.shared.load(place, 1)
                    origin = origin or found
                else:
                    targets = run.memory.resolve(frame, address, access.bytes, op, frame.active, access.bytes)
                    if run.checks:
                        run.memory.track(frame, targets, access.bytes, op, "read")
                    words, shadow = run.memory.load(frame, targets, word, 1), None
                parts.append(words)
                shadows.append(np.zeros_like(words) if shadow is None else shadow)
            results = op.instruction.meaning(np.concatenate(parts, axis=-1))
            poison = np.concatenate(shadows, axis=-1)
            marks = op.instruction.meaning(poison) if poison.any() else None
            for i, (value, array) in enumerate(zip(op.results, results, strict=True)):
                mine = None if marks is None else frame.shaped(marks[i].view(shadow_dtype(marks[i].dtype)))
                run.put(frame, value, frame.shaped(array), mine, origin)

        return step

    def _store(self, op: Op, access: MatrixAccess, layout: FragmentLayout) -> Step:
        run = self.run
        values = run.keys(op)[2:]

        def step(frame: Frame) -> None:
            for k in values:
                run.observe(frame, k, op, "a value stored by wmma.store")
            words = op.instruction.meaning(*[frame.full(frame.env[k]) for k in values])[0]
            for e, address in enumerate(self._addresses(frame, op, access, layout)):
                data = np.ascontiguousarray(words[..., e : e + 1])
                if access.space == "shared":
                    place = run.shared.locate(frame, frame.shaped(address), 0, access.bytes, 32, op, collective=True)
                    run.shared.store(place, data)
                    continue
                targets = run.memory.resolve(frame, address, access.bytes, op, frame.active, access.bytes)
                if run.checks:
                    run.memory.track(frame, targets, access.bytes, op, "write", data=data)
                run.memory.store(frame, targets, data, op)

        return step
