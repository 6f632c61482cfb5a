"""Products of ``wgmma`` that were issued, where and what their operands are, and accumulators as matrices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.barriers.barriers import Wait
from warploom.emulate.control.frames import Frame, Origin, shadow_dtype
from warploom.emulate.memory.shared_memory import SHARED_BASE
from warploom.emulate.transactions.async_proxy import AsyncProxy
from warploom.ir.statements import Op, Tile, Value
from warploom.isa.conversion import half_to_f32
from warploom.isa.wgmma import K, M, WarpgroupProduct
from warploom.layout.wgmma import MatrixDescriptor, decode

Array = NDArray[Any]


WARP_ROWS = 16
"""Rows of D, and of A, that one warp of the warpgroup holds."""


class Accumulator:
    """D of all warps of a frame as matrices (warps, 16, n), from registers and back."""

    def __init__(self, frame: Frame, registers: tuple[Value, ...], instruction: WarpgroupProduct) -> None:
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

    def add(self, positions: Array, adds: Array, instruction: WarpgroupProduct, a: Array, b: Array) -> None:
        """D = A·B, or D += A·B where ``adds``, of some warps of the frame."""
        matrix = self._load()
        everyone = positions.size == self.frame.n
        old = matrix if everyone else matrix[positions]
        if not adds.all():
            old = np.where(adds[:, None, None], old, np.float32(0))
        found = instruction.multiply(a.reshape(1, -1, a.shape[2]), b[None], old.reshape(1, -1, self.n))
        if everyone:
            self.matrix = found.reshape(old.shape)
        else:
            matrix[positions] = found.reshape(old.shape)

    def spoil(self, positions: Array, adds: Array, a: Array | None, b: Array | None) -> None:
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


WARPS = 4
"""Warps of a warpgroup."""
ELEMENT_BYTES = 2
"""Of an operand in shared memory."""


@dataclass(eq=False)
class Product:
    """One ``wgmma`` of one warpgroup, a transaction that reads ``cells`` of shared memory. ``number`` counts from 1.

    ``a`` and ``b`` are descriptors. Of each of the four warps: A's registers (warps, lanes, registers), their shadows
    if any has one, and whether D is ``added`` to.
    """

    op: Op
    instruction: WarpgroupProduct
    number: int
    cta: int
    a: int | None
    b: int
    stamp: int
    cells: Array
    before: Array
    outside: bool
    added: Array = field(default_factory=lambda: np.zeros(WARPS, np.bool_))
    registers: Array | None = None
    shadows: Array | None = None

    def join(self, warps: Array, added: Array, registers: Array | None, shadows: Array | None) -> None:
        """Some warps of the warpgroup execute it."""
        self.added[warps] = added
        if registers is None or self.a is not None:
            return
        if self.registers is None:
            self.registers = np.zeros((WARPS, *registers.shape[1:]), registers.dtype)
        self.registers[warps] = registers
        if shadows is not None:
            if self.shadows is None:
                self.shadows = np.zeros(self.registers.shape, np.uint32)
            self.shadows[warps] = shadows


@dataclass(eq=False)
class Group:
    """One warpgroup of one CTA."""

    number: int
    first: int
    products: list[Product] = field(default_factory=list[Product])
    waits: list[tuple[Wait, int, int]] = field(default_factory=list[tuple[Wait, int, int]])  # (wait, row, needs)


@dataclass(frozen=True, eq=False)
class Operand:
    """Where an operand lies in the shared memory of its CTA: its elements, in units of 16 bits, and their cells.

    Its bytes are from ``first`` to ``end`` - 1.
    """

    index: Array
    cells: Array
    first: int
    end: int


class SharedOperands:
    """Operands that descriptors name in the shared memory of a batch, each worked out once."""

    def __init__(self, proxy: AsyncProxy) -> None:
        self.proxy = proxy
        self._operands: dict[tuple[Any, ...], Operand] = {}
        self._unions: dict[tuple[int, ...], Array] = {}
        self._misplaced: dict[tuple[Any, ...], tuple[Literal["bounds", "layout"], str] | None] = {}

    def operand(self, instruction: WarpgroupProduct, which: str, descriptor: int) -> Operand:
        """The operand A or B of an instruction at a descriptor."""
        transposed = instruction.transposed_b if which == "b" else instruction.transposed_a
        key = (which, instruction.n if which == "b" else 0, transposed, descriptor)
        found = self._operands.get(key)
        if found is None:
            addresses = instruction.a_addresses if which == "a" else instruction.b_addresses
            local = addresses(descriptor) - SHARED_BASE
            first, end = int(local.min()), int(local.max()) + ELEMENT_BYTES
            cells = np.unique(local // self.proxy.shared.granule)
            found = self._operands[key] = Operand(local >> 1, cells, first, end)
        return found

    def cells(self, operands: list[Operand], cta: int) -> Array:
        """The cells of all these operands of a CTA."""
        key = tuple(map(id, operands))
        if key not in self._unions:
            self._unions[key] = np.unique(np.concatenate([o.cells for o in operands]))
        return self._unions[key] + cta * self.proxy.shared.stride // self.proxy.shared.granule

    def misplaced(
        self, instruction: WarpgroupProduct, which: str, descriptor: int | None, tile: Tile
    ) -> tuple[Literal["bounds", "layout"], str] | None:
        """How an operand's descriptor contradicts the tile that it was made for; None if it does not."""
        if descriptor is None:
            return None
        key = (instruction, which, descriptor, id(tile))
        if key not in self._misplaced:
            self._misplaced[key] = self._contradicts(instruction, which, descriptor, tile)
        return self._misplaced[key]

    def _contradicts(
        self, instruction: WarpgroupProduct, which: str, descriptor: int, tile: Tile
    ) -> tuple[Literal["bounds", "layout"], str] | None:
        operand = self.operand(instruction, which, descriptor)
        if operand.first < tile.offset or operand.end > tile.offset + tile.bytes:
            last = tile.offset + tile.bytes - 1
            return "bounds", (
                f"operand {which.upper()} takes bytes {operand.first} to {operand.end - 1} of shared memory, outside "
                f"the tile {tile.name} (bytes {tile.offset} to {last}): correct the descriptor's start, stride or "
                "leading offset"
            )
        shape = decode(descriptor)[1]
        if tile.swizzle_bytes != shape.row_bytes:
            has = "no swizzle" if tile.swizzle_bytes == 0 else f"swizzled rows of {tile.swizzle_bytes} bytes"
            has = "a swizzle that wgmma does not have" if tile.swizzle_bytes is None else has
            return "layout", (
                f"the tile {tile.name} has {has}, the descriptor of operand {which.upper()} says {shape.row_bytes}: "
                "make it with k.wgmma_operand, or give both one swizzle"
            )
        return self._wrong_steps(instruction, which, shape, tile)

    @staticmethod
    def _wrong_steps(
        instruction: WarpgroupProduct, which: str, shape: MatrixDescriptor, tile: Tile
    ) -> tuple[Literal["layout"], str] | None:
        """Distances between groups of rows, and between panels, that are not the tile's."""
        transposed = instruction.transposed_b if which == "b" else instruction.transposed_a
        extent = instruction.n if which == "b" else M
        lines, along = (K, extent) if transposed else (extent, K)
        for what, says, is_, needed in (
            ("stride", shape.stride, 8 * tile.row_bytes, shape.row_bytes and lines > 8),
            ("leading", shape.leading, tile.panel_bytes, shape.row_bytes and ELEMENT_BYTES * along > shape.row_bytes),
        ):
            if needed and says != is_:
                return "layout", (
                    f"the {what} offset of operand {which.upper()} is {says} bytes, in the tile {tile.name} it is "
                    f"{is_}: make the descriptor with k.wgmma_operand"
                )
        return None

    def shared_matrix(self, product: Product, which: str) -> tuple[Array, Array | None]:
        """What operand A or B holds now, f32, and which elements are poison (None: none)."""
        descriptor = product.a if which == "a" else product.b
        assert descriptor is not None
        index = self.operand(product.instruction, which, descriptor).index
        shared = self.proxy.shared
        first = product.cta * shared.stride >> 1
        words = shared.data.view(np.uint16)[first + index]
        poison = None
        if shared.shadow is not None:
            poison = shared.shadow.view(np.uint16)[first + index] != 0
            poison = poison if poison.any() else None
        return half_to_f32(words, product.instruction.inputs), poison


def register_a(instruction: WarpgroupProduct, registers: Array, *, poison: bool = False) -> Array:
    """A of some warps (warps, 16, 16) from their registers (warps, lanes, registers)."""
    slot = instruction.a_slot
    words = registers.view(np.uint16)
    elements = words != 0 if poison else half_to_f32(words, instruction.inputs)
    owner = slot.layout.owner_index()[: WARP_ROWS * slot.layout.shape[1]]
    return elements.reshape(len(registers), -1)[:, owner].reshape(len(registers), WARP_ROWS, -1)
