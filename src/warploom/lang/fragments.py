"""Words of ``k`` for matrices in registers: fragments that carry their map, ``mma``, ``movmatrix``, ``wmma``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, TypeVar, get_args, overload

from warploom.core.dtypes import DType, bf16, f16, f32, f64, s8, s32, tf32, u32
from warploom.core.errors import TraceError, shown
from warploom.isa.conversion import FULL_MASK
from warploom.isa.instruction import Instruction
from warploom.isa.matrix import mma, wmma_load, wmma_mma, wmma_store
from warploom.lang.builder import word
from warploom.lang.memory import GlobalPointer, SharedTile
from warploom.lang.reducers import NAMED, Reducer, State, single
from warploom.lang.values import Mutable, Number, Traced, is_a
from warploom.lang.warp import WarpWords
from warploom.layout.conversion import operand_registers
from warploom.layout.displacement import lane_addresses, signed_strides, split_displacement
from warploom.layout.fragments import FragmentLayout
from warploom.layout.linear import LinearMap
from warploom.layout.matrix_access import MatrixPlan, ldmatrix_plan
from warploom.layout.reduction import reduction_plan
from warploom.layout.wmma import StorageOrder

Matrix = GlobalPointer | SharedTile | Traced
"""Where a matrix begins: a pointer, a shared tile, or an address in one (``tile.address(row, col)``)."""
Combine: TypeAlias = Callable[[Traced, Traced], Traced]
Arithmetical: TypeAlias = Literal["max", "min", "add", "mul"]
Stateful: TypeAlias = Literal["argmax", "logsumexp", "moments"]
Addressing: TypeAlias = Literal["recomputed", "strided"]
"""The way to form a swizzled address with a constant displacement: apply the swizzle anew, or add to the lane's base
and its signed strides (the seeds' kernel 8)."""


_Row = TypeVar("_Row")


@dataclass(frozen=True, eq=False)
class Fragment:
    """A matrix in the registers of a warp: ``registers`` in the order of ``layout``, elements of type ``dtype``.

    16-bit elements are packed in pairs; accumulators are mutable registers.
    """

    words: FragmentWords
    layout: FragmentLayout
    dtype: DType
    registers: tuple[Traced, ...]

    def __post_init__(self) -> None:
        if len(self.registers) != self.layout.registers:
            raise TraceError(
                f"{self.layout.name} has {self.layout.registers} registers a thread, got {len(self.registers)}"
            )

    def atom(self, i: int, j: int) -> tuple[Traced, ...]:
        """The registers of atom (i, j)."""
        return self.registers[self.layout.atom_registers(i, j)]

    @property
    def mutable(self) -> tuple[Mutable, ...]:
        """The registers of an accumulator. Raises TraceError for those of values."""
        found = tuple(r for r in self.registers if isinstance(r, Mutable))
        if len(found) != len(self.registers):
            raise TraceError("only an accumulator (k.accumulator) can be written in place")
        return found

    def mutable_atom(self, i: int, j: int) -> tuple[Mutable, ...]:
        """The registers of atom (i, j) of an accumulator."""
        return self.mutable[self.layout.atom_registers(i, j)]

    def map(self, function: Callable[[Traced], Traced]) -> Fragment:
        """``function`` of every f32 element."""
        self._need_f32("map")
        return replace(self, registers=tuple(function(x) for x in self.registers))

    def map_rows(
        self, function: Callable[[Traced, _Row], Traced], values: Sequence[_Row], axis: int | str = "col"
    ) -> Fragment:
        """``function`` of every f32 element and its row's value, of those that :meth:`reduce` along ``axis`` gives.

        ``scores.map_rows(lambda x, top: x - top, scores.reduce("max", "col"))`` takes each row's maximum away; with
        ``axis="row"`` values are those of columns. Raises TraceError where there are more or fewer of them.
        """
        self._need_f32("map_rows")
        groups = reduction_plan(self.layout, axis).groups
        if len(values) != len(groups):
            raise TraceError(
                f"map_rows takes the {len(groups)} values of a thread that reduce(…, {axis!r}) gives, not {len(values)}"
            )
        of = {e: value for group, value in zip(groups, values, strict=True) for e in group}
        return replace(self, registers=tuple([function(self._read(e), of[e]) for e in range(len(of))]))

    def scale(self, element: int, factor: Number) -> None:
        """Multiply one element of an accumulator in place."""
        register = self.mutable[element]
        register.set(register * factor)

    @overload
    def reduce(
        self, combine: Combine | Arithmetical, axis: int | str, *, member_mask: Number = FULL_MASK, spread: bool = False
    ) -> list[Traced]: ...

    @overload
    def reduce(
        self,
        combine: Reducer | Stateful,
        axis: int | str,
        *,
        member_mask: Number = FULL_MASK,
        spread: bool = False,
        origin: Number = 0,
    ) -> list[State]: ...

    def reduce(
        self,
        combine: Combine | Reducer | str,
        axis: int | str,
        *,
        member_mask: Number = FULL_MASK,
        spread: bool = False,
        origin: Number = 0,
    ) -> list[Traced] | list[State]:
        """Reduce along ``axis`` (1 or "col": one result per row): the paper's Algorithm 3, derived from the map.

        ``combine`` is "max", "min", "add", "mul" or an associative and commutative function of two traced values; or,
        with results that are states of several registers, "argmax" (maximum, position), "logsumexp" (maximum, sum),
        "moments" (count, mean, sum of squares) or a :class:`~warploom.lang.reducers.Reducer`. Positions along the axis
        count from ``origin``.

        Every lane gets the results of the rows (columns) it holds, in the order of the plan's groups. ``spread`` leaves
        each lane with its share of them alone, for fewer shuffles: ``reduction_plan(layout, axis).spread()`` tells
        which.
        """
        plan = reduction_plan(self.layout, axis)
        if plan.warp_masks:
            raise TraceError(f"{self.layout.name} spreads an axis over warps: combine those through shared memory")
        reducer, words, elements = self._reducer(combine), self.words, self.elements()
        dim = 1 if plan.axis == "col" else 0
        found: list[State] = []
        for group in plan.groups:
            ordered = sorted(group, key=lambda e: self.layout.coordinates(0, e)[dim])
            positions = [words.value(0, u32)] * len(ordered)
            if reducer.placed:
                positions = [self.layout.coordinates(words.lane, e)[dim] + origin for e in ordered]
            found.append(reducer.of_values(words, [elements[e] for e in ordered], positions))
            if not spread:  # a result at a time: fewer values are live
                found[-1:] = reducer.across(words, found[-1:], plan, member_mask)
        if spread:
            found = reducer.across(words, found, plan.spread(), member_mask)
        return found if isinstance(combine, Reducer) or combine in NAMED else [state[0] for state in found]

    def _reducer(self, combine: Combine | Reducer | str) -> Reducer:
        if isinstance(combine, Reducer):
            return combine
        if not isinstance(combine, str):
            return single(combine)
        words, known = self.words, (*get_args(Arithmetical), *NAMED)
        if combine not in known:
            raise TraceError(f"{combine!r} is no reduction: write {', '.join(known)}, a function or a Reducer")
        return NAMED.get(combine) or single(lambda a, b: words.binary(combine, a, b))

    @property
    def warp(self) -> Number:
        """The warp's index among those that share the fragment: its number in the CTA modulo theirs."""
        return self.words.warp & (self.layout.warps - 1) if self.layout.warps > 1 else 0

    def elements(self) -> list[Traced]:
        """Every element a thread holds, in the order of the layout; 16-bit floats unpacked to f32."""
        if self.layout.element_bits == 32:
            return [self._read(e) for e in range(self.layout.elements_per_thread)]
        if self.dtype not in (f16, bf16):
            raise TraceError(f"elements are 32 bits or 16-bit floats; {self.layout.name} holds {self.dtype}")
        pairs = [self._read(register) for register in range(self.layout.registers)]
        return [x for pair in pairs for x in self.words.unpack(pair, self.dtype)]

    def as_operand(self, operand: FragmentLayout, dtype: DType) -> Fragment:
        """Round the f32 elements to ``dtype`` and give them as the operand of the next ``mma``; no data changes lanes.

        Raises LayoutError when the two maps are not equal up to a renaming of registers.
        """
        self._need_f32("as_operand")
        source = operand_registers(self.layout, operand)
        values = [self._read(e) for e in source]
        return replace(self, layout=operand, dtype=dtype, registers=tuple(self.words.pack_all(values, dtype)))

    def packed(self, dtype: DType) -> Fragment:
        """Round the f32 elements to ``dtype`` and pack them in pairs; the map stays."""
        self._need_f32("packed")
        layout = replace(self.layout, element_bits=16)
        values = [self._read(e) for e in range(self.layout.elements_per_thread)]
        return replace(self, layout=layout, dtype=dtype, registers=tuple(self.words.pack_all(values, dtype)))

    def store_global(
        self, pointer: GlobalPointer, row_stride: Number, *, warp: Number | None = None, cache: str = ""
    ) -> None:
        """Store an f32 fragment to a row-major matrix through its forward map (the paper's Algorithm 2).

        ``warp`` is the warp's index among those that share the fragment (``wgmma``: 0 … 3), by default its number in
        the CTA modulo theirs.
        """
        self._need_f32("store_global")
        lane, warp = self.words.lane, self.warp if warp is None else warp
        for element in range(self.layout.elements_per_thread):
            row, col = self.layout.coordinates(lane, element, warp)
            pointer.store(self._read(element), row * row_stride + col, cache=cache)

    def _read(self, element: int) -> Traced:
        register = self.registers[element]
        return register.get() if isinstance(register, Mutable) else register

    def _need_f32(self, what: str) -> None:
        if self.dtype is not f32:
            raise TraceError(f"{what} works on f32 elements; this fragment holds {self.dtype}: unpack it first")


class TileAddresses:
    """Addresses of a set of positions in a shared tile, displaced by constants.

    ``lanes`` maps ``lane`` (the bits of the traced index ``who``: a lane or a thread) to the (row, col) of the tile
    where that lane starts; ``row`` is added to it (a warp's first row, a multiple of the swizzle's period).
    ``addressing`` says how displacements are formed; without a swizzle both give ``base + immediate``.
    """

    def __init__(
        self, words: FragmentWords, tile: SharedTile, lanes: LinearMap, who: Traced, row: Number, addressing: Addressing
    ) -> None:
        self._words, self.tile, self._lanes, self._who, self._row = words, tile, lanes, who, row
        self._addressing = addressing
        self._bases: dict[int, Traced] = {}

    def address(self, row: int, col: int) -> Traced:
        """The shared address of each lane's position displaced by (row, col)."""
        if self._addressing == "recomputed":
            at = self._lanes.apply(lane=self._who)
            return self.tile.address(at["row"] + self._row + row, at["col"] + col)
        immediate, varying = split_displacement(self.tile.layout, self._lanes, row, col)
        return self.tile.at(self._base(varying)) + immediate

    def prepare(self, displacements: Iterable[tuple[int, int]]) -> None:
        """Form the bases that the displacements need here, so that a loop that follows shares them."""
        if self._addressing == "strided":
            for row, col in displacements:
                self._base(split_displacement(self.tile.layout, self._lanes, row, col)[1])

    def _base(self, varying: int) -> Traced:
        """The lane's offset displaced by the varying bits: its base plus its own signed strides."""
        if varying not in self._bases:
            layout = self.tile.layout
            lane_offset: Traced = lane_addresses(layout, self._lanes).apply(lane=self._who)["byte"]
            total = lane_offset + self._row * layout.row_bytes
            for _, stride in signed_strides(varying, lane_offset, self._select_stride):
                total = total + stride
            self._bases[varying] = total
        return self._bases[varying]

    def _select_stride(self, bit: Traced, if_set: int, if_clear: int) -> Traced:
        return self._words.select(bit != 0, self._words.value(if_set, u32), self._words.value(if_clear, u32))

    def staged(self, stage: Number) -> TileAddresses:
        """Addresses of the positions in another pipeline stage of the tile; the lanes' bases are shared."""
        return self.on(self.tile.stage(stage))

    def on(self, tile: SharedTile) -> TileAddresses:
        """Addresses of the positions in another tile of the same layout; the lanes' bases are shared."""
        other = copy(self)
        other.tile = tile
        return other


class TileReader:
    """``ldmatrix`` of one shape from a shared tile, at constant displacements."""

    def __init__(self, words: FragmentWords, plan: MatrixPlan, addresses: TileAddresses) -> None:
        self._words, self._plan, self._addresses = words, plan, addresses

    def load(self, row: int, col: int) -> tuple[Traced, ...]:
        """The registers of the fragment at (row, col) of the tile, in the fragment's order.

        Row and column are known while tracing; what the warp adds to them is the ``row=`` of ``k.reader``.
        """
        for what, given in (("row", row), ("column", col)):
            if is_a(given, Traced):
                raise TraceError(
                    f"a reader's {what} is known while tracing, not {given!r}: give a warp's "
                    "first row to k.reader(tile, layout, row=…), or use k.load_fragment(tile, layout, row, col)"
                )
        address = self._addresses.address(row, col)
        loaded = self._words.ldmatrix(address, self._plan.count, transposed=self._plan.transposed)
        return _in_order(self._plan, loaded)

    def prepare(self, displacements: Iterable[tuple[int, int]]) -> None:
        """Form the lanes' bases before a loop; see :meth:`TileAddresses.prepare`."""
        self._addresses.prepare(displacements)

    def staged(self, stage: Number) -> TileReader:
        """A reader of another pipeline stage of the tile, with the lanes' bases of this one."""
        return TileReader(self._words, self._plan, self._addresses.staged(stage))

    def on(self, tile: SharedTile) -> TileReader:
        """A reader of another tile of the same layout, with the lanes' bases of this one."""
        return TileReader(self._words, self._plan, self._addresses.on(tile))


def _in_order(plan: MatrixPlan, loaded: Sequence[Traced]) -> tuple[Traced, ...]:
    """Results of ``ldmatrix`` in the order of the fragment's registers."""
    ordered: list[Traced] = list(loaded)
    for position, register in enumerate(plan.register_order):
        ordered[register] = loaded[position]
    return tuple(ordered)


def _plan(target: FragmentLayout, bit_order: Sequence[int] | None) -> MatrixPlan:
    """The ``ldmatrix`` for ``target``; ``.trans`` where a register pairs two rows instead of two columns."""
    pairs_rows = target.atom.bases("register")[0] != (0, 1)
    return ldmatrix_plan(target, pairs_rows, bit_order)


class FragmentWords(WarpWords):
    """Fragments, their reductions and products of matrices by one warp; PTX names the instructions."""

    def accumulator(self, layout: FragmentLayout, value: Number | None = 0.0, name: str = "") -> Fragment:
        """A mutable f32 (or packed f16) fragment, initialised unless ``value`` is None."""
        if is_a(value, DType):
            raise TraceError(
                f"k.accumulator takes the value to begin with, not {value}: sums are f32; fragment.packed({value}) or "
                f"fragment.as_operand(layout, {value}) rounds them"
            )
        if layout.element_bits == 16:
            packed = self.registers(u32, layout.registers, None if value is None else 0, name)
            return Fragment(self, layout, f16, tuple(packed))
        return Fragment(self, layout, f32, tuple(self.registers(f32, layout.registers, value, name)))

    def fragment(self, layout: FragmentLayout, dtype: DType, registers: Sequence[Traced]) -> Fragment:
        """Registers as a fragment of ``layout``: f32 values, or 32-bit words that hold ``dtype`` packed.

        Raises TraceError for another number of registers than the layout has, and for registers of another type.
        """
        if not (is_a(layout, FragmentLayout) and is_a(dtype, DType)):
            raise TraceError(
                "k.fragment takes a fragment's layout, a type of warploom.core.dtypes and registers, not "
                f"{shown(layout)} and {shown(dtype)}"
            )
        if dtype.bits != layout.element_bits:
            raise TraceError(f"{layout.name} holds elements of {layout.element_bits} bits, not {dtype}")
        kind = dtype if dtype.bits >= 32 and dtype is not tf32 else u32
        return Fragment(self, layout, dtype, tuple(self._of_type(x, kind) for x in registers))

    def _of_type(self, x: Number, kind: DType) -> Traced:
        """A register as it is, if it is of ``kind``; a Python number as one."""
        return x if isinstance(x, Mutable) and x.dtype is kind else self.value(x, kind)

    def pack_all(self, values: Sequence[Traced], dtype: DType) -> list[Traced]:
        """f32 values rounded to f16 or bf16 and packed in pairs; f32 stays as it is."""
        if dtype is f32:
            return list(values)
        return [self.pack(low, high, dtype) for low, high in zip(values[::2], values[1::2], strict=True)]

    def reader(
        self,
        tile: SharedTile,
        target: FragmentLayout,
        *,
        row: Number = 0,
        bit_order: Sequence[int] | None = None,
        addressing: Addressing = "strided",
    ) -> TileReader:
        """A reader of fragments ``target``, given in the tile's own rows and columns; see :class:`TileReader`.

        An operand of which the tile stores the transpose (B from an n×k tile) is passed as ``layout.transposed()``.
        """
        self._same_bits(tile, target)
        plan = _plan(target, bit_order)
        return TileReader(self, plan, TileAddresses(self, tile, plan.address, self.lane, row, addressing))

    def load_fragment(
        self, tile: SharedTile, target: FragmentLayout, row: Number = 0, col: Number = 0, *, transposed: bool = False
    ) -> Fragment:
        """One fragment from a shared tile by ``ldmatrix``; ``transposed``: the tile stores the operand's transpose.

        ``row`` and ``col``, its first in the tile, may be traced (a warp's part); the addresses are then formed for
        each fragment, where :meth:`reader` shares them.
        """
        self._same_bits(tile, target)
        plan = _plan(target.transposed() if transposed else target, None)
        if isinstance(row, Traced) or isinstance(col, Traced):
            at = plan.address.apply(lane=self.lane)
            address = tile.address(at["row"] + row, at["col"] + col)
            registers = _in_order(plan, self.ldmatrix(address, plan.count, transposed=plan.transposed))
        else:
            addresses = TileAddresses(self, tile, plan.address, self.lane, 0, "strided")
            registers = TileReader(self, plan, addresses).load(int(row), int(col))
        return Fragment(self, target, tile.dtype, registers)

    def _same_bits(self, tile: SharedTile, target: FragmentLayout) -> None:
        if 8 * tile.layout.element_bytes != target.element_bits:
            raise TraceError(f"{tile.name} holds {tile.dtype}, {target.name} elements of {target.element_bits} bits")

    def mma(
        self,
        a: Sequence[Traced],
        b: Sequence[Traced],
        c: Sequence[Number],
        *,
        inputs: DType = bf16,
        accumulate: DType = f32,
        shape: str = "m16n8k16",
        into: Sequence[Mutable] | None = None,
    ) -> tuple[Traced, ...]:
        """``mma.sync``: the registers of D = A·B + C. ``into`` writes D to mutable registers (in place if it is C)."""
        return self._multiply(mma(shape, inputs, accumulate), a, b, c, into)

    @word("movmatrix.sync.aligned.m8n8.trans.b16")
    def movmatrix(self, x: Traced) -> Traced:
        """``movmatrix``: transposes an 8×8 matrix of 16-bit elements, a register per lane as ``ldmatrix`` loads it."""
        ...

    def mma_integer(
        self,
        a: Sequence[Number],
        b: Sequence[Number],
        c: Sequence[Number],
        shape: str,
        types: tuple[DType, DType] = (s8, s8),
    ) -> tuple[Traced, ...]:
        """``mma.sync`` of s8 or u8 matrices: the s32 registers of D = A·B + C."""
        return self._multiply(mma(shape, types[0], s32, types[1]), a, b, c)

    def mma_double(
        self, a: Sequence[Number], b: Sequence[Number], c: Sequence[Number], shape: str = "m8n8k4"
    ) -> tuple[Traced, ...]:
        """``mma.sync`` of float64 matrices: the registers of D = A·B + C."""
        return self._multiply(mma(shape, f64, f64), a, b, c)

    def _multiply(
        self,
        instruction: Instruction,
        a: Sequence[Number],
        b: Sequence[Number],
        c: Sequence[Number],
        into: Sequence[Mutable] | None = None,
    ) -> tuple[Traced, ...]:
        """D = A·B + C in fresh registers, or ``into`` mutable ones: then mutable operands are read where they are."""
        counts = instruction.na, instruction.nb, instruction.nc, instruction.nc
        for name, given, count in zip("ABCD", (a, b, c, c if into is None else into), counts, strict=True):
            if len(given) != count:
                raise TraceError(f"{instruction.mnemonic} takes {count} registers for {name}, got {len(given)}")
        if into is None:
            return self.issue(instruction, *a, *b, *c)
        typed = zip((*a, *b, *c), instruction.operand_types, strict=True)
        operands = [x if isinstance(x, Mutable) else self.operand(x, t) for x, t in typed]
        self.emit_into(instruction, operands, into)
        return tuple(into)

    # -- wmma
    def wmma_load(
        self,
        operand: Literal["A", "B", "C"],
        matrix: Matrix,
        leading: Number,
        *,
        shape: str = "m16n16k16",
        dtype: DType = bf16,
        order: StorageOrder = "row",
    ) -> tuple[Traced, ...]:
        """``wmma.load``: the registers of operand A, B or C from a matrix in ``order``, ``leading`` elements a line."""
        space, address = _where(matrix)
        return self.issue(wmma_load(operand, shape, dtype, order, space), address, leading)

    def wmma_store(
        self,
        matrix: Matrix,
        leading: Number,
        registers: Sequence[Traced],
        *,
        shape: str = "m16n16k16",
        dtype: DType = f32,
        order: StorageOrder = "row",
    ) -> None:
        """``wmma.store``: an accumulator to a matrix in ``order``, ``leading`` elements a line."""
        space, address = _where(matrix)
        self.issue(wmma_store(shape, dtype, order, space), address, leading, *registers)

    def wmma_mma(
        self,
        a: Sequence[Traced],
        b: Sequence[Traced],
        c: Sequence[Number],
        *,
        shape: str = "m16n16k16",
        inputs: DType = bf16,
        accumulate: DType = f32,
        orders: tuple[StorageOrder, StorageOrder] = ("row", "col"),
        into: Sequence[Mutable] | None = None,
    ) -> tuple[Traced, ...]:
        """``wmma.mma``: the registers of D = A·B + C; ``orders`` are those that A and B were loaded in.

        ``into`` writes D to mutable registers (in place if it is C).
        """
        return self._multiply(wmma_mma(shape, inputs, accumulate, *orders), a, b, c, into)


def _where(matrix: Matrix) -> tuple[Literal["shared", "global"], Traced]:
    if isinstance(matrix, GlobalPointer):
        return "global", matrix.address
    return "shared", matrix.base if isinstance(matrix, SharedTile) else matrix
