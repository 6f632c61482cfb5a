"""Products of ``wgmma`` that were issued, where and what their operands are, and accumulators as matrices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.barriers.barriers import Wait
from warploom.emulate.control.frames import Frame, Origin
from warploom.emulate.findings.findings import Kind
from warploom.emulate.memory.shared_memory import SHARED_BASE, SharedMemory
from warploom.emulate.transactions.transaction import SharedRead, Transaction
from warploom.ir.statements import Op, TileRegion, Value
from warploom.isa.matrix import K, M, WarpgroupProduct
from warploom.isa.meanings import half_to_f32
from warploom.layout.wgmma import decode

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
            self.matrix, found = self._matrix([frame.env[r] for r in self.registers]), frame.poison(self.registers)
            if found is not None:
                self.poison = self._matrix(found[0]).astype(np.bool_)
        return self.matrix

    def _matrix(self, values: list[Array]) -> Array:
        owner = self.slot.layout.owner_index()[: WARP_ROWS * self.n]
        stacked = np.ascontiguousarray(np.stack([self.frame.full(x) for x in values], axis=-1))
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
                shadow = np.where(poison[..., i], np.uint32(0xFFFFFFFF), np.uint32(0))
            known = frame.origins.get(register, origin)
            frame.write(register, np.ascontiguousarray(values[..., i]), shadow, known)


WARPS = 4
"""Warps of a warpgroup."""
ELEMENT_BYTES = 2
"""Of an operand in shared memory."""


@dataclass(frozen=True, eq=False)
class ProductOperands:
    """The shared memory that a ``wgmma`` reads in its CTA: elements of A and B in units of 16 bits, and their cells.

    ``wrong`` are findings, kind and message; there is nothing to multiply if an operand lies ``outside``.
    """

    a: Array | None
    b: Array
    cells: Array
    wrong: tuple[tuple[Kind, str], ...]
    outside: bool


@dataclass(eq=False)
class ProductInFlight(Transaction):
    """One ``wgmma`` of one warpgroup, a transaction that may ``read`` shared memory. ``number`` counts from 1.

    The descriptors are those of A and B, or of B alone. Of each of the four warps: A's registers (warps, lanes,
    registers), their shadows if any has one, and whether D is ``added`` to. So many warps are ``missing``, which have
    not executed it; meanwhile rows of others wait for it.
    """

    number: int
    descriptors: tuple[int, ...]
    stamp: int
    operands: ProductOperands
    read: SharedRead | None  # None without checks
    added: Array = field(default_factory=lambda: np.zeros(WARPS, np.bool_))
    registers: Array | None = None
    shadows: Array | None = None
    missing: int = WARPS
    waits: list[tuple[Wait, int]] = field(default_factory=list[tuple[Wait, int]])

    @property
    def instruction(self) -> WarpgroupProduct:
        """The instruction that multiplies."""
        return self.op.instruction.warpgroup_product

    def join(self, warps: Array, added: Array, registers: Array | None, shadows: Array | None) -> None:
        """Some warps of the warpgroup execute it. After the last of them nobody waits for others any more."""
        self.added[warps], self.under_way[warps] = added, True
        self.missing -= warps.size
        for wait, row in () if self.missing else self.waits:
            wait.rows.discard(row)
        if registers is None or self.operands.a is not None:
            return
        if self.registers is None:
            self.registers = np.zeros((WARPS, *registers.shape[1:]), registers.dtype)
        self.registers[warps] = registers
        if shadows is not None:
            if self.shadows is None:
                self.shadows = np.zeros(self.registers.shape, np.uint32)
            self.shadows[warps] = shadows

    def free(self) -> None:
        """After the last warp has waited for it, it holds no data."""
        if not self.missing and not self.under_way.any():
            self.registers = self.shadows = self.read = None


@dataclass(eq=False)
class Warpgroup:
    """One warpgroup of one CTA: the column of what it does, its number in the CTA, its first row, and its products."""

    queue: int
    number: int
    first: int
    products: list[ProductInFlight] = field(default_factory=list[ProductInFlight])


class SharedOperands:
    """Finds operands in the shared memory of a batch by their descriptors, once for each pair of descriptors."""

    def __init__(self, shared: SharedMemory) -> None:
        self.shared = shared
        self._found: dict[tuple[int, tuple[int, ...]], ProductOperands] = {}

    def of(self, op: Op, descriptors: tuple[int, ...]) -> ProductOperands:
        """The shared memory that an operation with these descriptors reads."""
        key = id(op), descriptors
        if key not in self._found:
            self._found[key] = self._find(op, descriptors)
        return self._found[key]

    def _find(self, op: Op, descriptors: tuple[int, ...]) -> ProductOperands:
        instruction: WarpgroupProduct = op.instruction.warpgroup_product
        wrong, outside = list[tuple[Kind, str]](), False
        kinds = [(0, instruction.a_addresses), (instruction.a_count, instruction.b_addresses)][-len(descriptors) :]
        elements: list[Array] = []
        cells: list[Array] = []
        for (position, addresses), descriptor in zip(kinds, descriptors, strict=True):
            places = addresses(descriptor) - SHARED_BASE
            elements.append(places >> 1)
            first, end = int(places.min()), int(places.max()) + ELEMENT_BYTES
            outside |= first < 0 or end > self.shared.size
            cells.append(places.reshape(-1) // self.shared.granule)
            tile = op.tile(position)
            found = None if tile is None else _misplaced(instruction, position > 0, descriptor, (first, end), tile)
            wrong += [] if found is None else [found]
        if outside:
            message = (
                f"an operand lies outside the {self.shared.size} bytes of shared memory: correct the descriptor's "
            )
            wrong.append(("bounds", message + "address, stride or leading offset"))
        a = elements[0] if len(elements) > 1 else None
        return ProductOperands(a, elements[-1], np.unique(np.concatenate(cells)), tuple(wrong), outside)

    def matrix(self, product: ProductInFlight, elements: Array) -> tuple[Array, Array | None]:
        """Return elements of an operand as they are now, f32, and which of them are poison (None: none)."""
        shared = self.shared
        first = int(product.rows[0]) // shared.clocks.warps_per_cta * shared.stride >> 1
        words = shared.data.view(np.uint16)[first + elements]
        poison = None
        if shared.shadow is not None:
            poison = shared.shadow.view(np.uint16)[first + elements] != 0
            poison = poison if poison.any() else None
        return half_to_f32(words, product.instruction.inputs), poison


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
    lines, along = (K, size) if transposed else (size, K)
    for what, says, is_, needed in (
        ("stride", shape.stride, 8 * tile.row_bytes, shape.row_bytes and lines > 8),
        ("leading", shape.leading, tile.panel_bytes, shape.row_bytes and ELEMENT_BYTES * along > shape.row_bytes),
    ):
        if needed and says != is_:
            return "layout", (
                f"the {what} offset of operand {which} is {says} bytes, in the tile {tile.name} it is {is_}: make the "
                "descriptor with k.wgmma_operand"
            )
    return None


def register_a(instruction: WarpgroupProduct, registers: Array, *, poison: bool = False) -> Array:
    """A of some warps (warps, 16, 16) from their registers (warps, lanes, registers)."""
    slot = instruction.a_slot
    words = registers.view(np.uint16)
    elements = words != 0 if poison else half_to_f32(words, instruction.inputs)
    owner = slot.layout.owner_index()[: WARP_ROWS * slot.layout.shape[1]]
    return elements.reshape(len(registers), -1)[:, owner].reshape(len(registers), WARP_ROWS, -1)
