"""A warpgroup's accumulator: registers of lanes as rows of a matrix, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.frames import Frame, Origin, shadow_dtype
from warploom.ir.statements import Op, Value
from warploom.isa.wgmma import Wgmma

Array = NDArray[Any]
WARP_ROWS = 16
"""Rows of D, and of A, that one warp of the warpgroup holds."""


class Accumulator:
    """D of all warps of a frame as matrices (warps, 16, n), from registers and back."""

    def __init__(self, frame: Frame, registers: tuple[Value, ...], instruction: Wgmma) -> None:
        self.frame, self.registers = frame, registers
        self.slot = instruction.accumulator_slot
        self.n = instruction.n
        self.matrix: Array | None = None
        self.poison: Array | None = None

    def _load(self) -> Array:
        if self.matrix is None:
            frame = self.frame
            values = [frame.full(frame.env[r]) for r in self.registers]
            self.matrix = self._matrix(values)
            if any(r in frame.shadows for r in self.registers):
                none = np.zeros((1, 1, 1), shadow_dtype(values[0].dtype))
                shadows = [frame.full(frame.shadows.get(r, none)) for r in self.registers]
                self.poison = self._matrix(shadows).astype(np.bool_)
        return self.matrix

    def _matrix(self, values: list[Array]) -> Array:
        owner = self.slot.layout.owner_index()[: WARP_ROWS * self.n]
        stacked = np.ascontiguousarray(np.stack(values, axis=-1))
        return stacked.reshape(self.frame.n, -1)[:, owner].reshape(self.frame.n, WARP_ROWS, self.n)

    def add(self, positions: list[int], adds: Array, instruction: Wgmma, a: Array, b: Array) -> None:
        """D = A·B, or D += A·B where ``adds``."""
        matrix = self._load()
        old = matrix[positions]
        if not adds.all():
            old[~adds] = 0
        matrix[positions] = instruction.multiply(
            a.reshape(1, -1, a.shape[2]), b[None], old.reshape(1, -1, self.n)
        ).reshape(len(positions), WARP_ROWS, self.n)

    def spoil(self, positions: list[int], adds: Array, a: Array | None, b: Array | None) -> None:
        """Poison: a row of A spoils its row of D, a row of B its column."""
        if self.poison is None and a is None and b is None:
            return
        if self.poison is None:
            assert self.matrix is not None
            self.poison = np.zeros(self.matrix.shape, np.bool_)
        poison = self.poison
        mine = poison[positions]
        mine[~adds] = False
        if a is not None:
            mine |= a.any(axis=2, keepdims=True)
        if b is not None:
            mine |= b.any(axis=1).reshape(1, 1, -1)
        poison[positions] = mine

    def write(self, op: Op) -> None:
        """The registers of the frame from the matrices."""
        frame, matrix = self.frame, self.matrix
        if matrix is None:  # all of its products read outside their tiles, which was reported
            return
        index = self.slot.layout.gather_index()[:32]
        values = matrix.reshape(frame.n, -1)[:, index.reshape(-1)].reshape(frame.n, *index.shape)
        poison: Array | None = None
        if self.poison is not None and self.poison.any():
            poison = self.poison.reshape(frame.n, -1)[:, index.reshape(-1)].reshape(values.shape)
        origin: Origin = (op.where, "an accumulator whose operands were poison")
        for i, register in enumerate(self.registers):
            shadow = None
            if poison is not None and poison[..., i].any():
                shadow = frame.shaped(np.where(poison[..., i], np.uint32(0xFFFFFFFF), np.uint32(0)))
            known = frame.origins.get(register, origin)
            frame.write(register, frame.shaped(np.ascontiguousarray(values[..., i])), shadow, known, True)
