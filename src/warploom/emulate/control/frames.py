"""Frames: the registers and active lanes of a set of warps that execute together.

A register is an array that broadcasts to (warps, 32): values that all warps, or all lanes, agree on stay small.
Divergent control flow runs on a part of a frame: the warps that take part, with a lane mask only where lanes of one
warp disagree. What single threads execute asks which lanes of which warps act, and in which order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from warploom.core.dtypes import DType
from warploom.ir.statements import NOWHERE, Op, Register, SourceLine, Value
from warploom.isa.effects import Effect
from warploom.isa.instruction import Instruction

Array = NDArray[Any]


Origin = tuple[SourceLine, str]
Chosen: TypeAlias = Array | slice
"""Positions of warps in a frame."""
LANES = np.arange(32, dtype=np.int64)


def all_ones(dtype: np.dtype[Any]) -> Any:
    """A shadow of nothing but poison."""
    return np.True_ if dtype == np.bool_ else ~dtype.type(0)


def unmarked(array: Array) -> Array:
    """The shadow of a register that has no poison: as many bits, 1 where the bit is poison."""
    return np.zeros((1, 1), np.bool_ if array.dtype == np.bool_ else f"u{array.dtype.itemsize}")


def constant_array(dtype: DType, value: float) -> Array:
    """An immediate as a (1, 1) array; integers wrap to the type."""
    if dtype.is_integer:
        value = int(value) & ((1 << dtype.bits) - 1)
        return np.array([[value]], dtype=f"u{dtype.bits // 8}").view(dtype.numpy)
    return np.array([[value]], dtype=dtype.numpy)


def displaced(address: Array, offset: int) -> Array:
    """``address + offset`` as the hardware adds them: the sum wraps in the address's own type."""
    return address + address.dtype.type(offset % (1 << 8 * address.dtype.itemsize)) if offset else address


def widened(array: Array, shape: tuple[int, ...]) -> Array:
    """``array`` in a shape that it broadcasts to; faster than a view, of which the next step would make a copy."""
    if array.shape == shape:
        return array
    wide = np.empty(shape, array.dtype)
    wide[...] = array
    return wide


class Registers(dict[Value, Array]):
    """Value → array of a frame; what is missing comes from the parent frame's warps, or was never written."""

    def __init__(self, frame: Frame, constants: Mapping[Value, Array]) -> None:
        super().__init__()
        self._frame = frame
        self._constants = constants

    def __missing__(self, value: Value) -> Array:
        found = self._constants.get(value)
        if found is None:
            found = self._frame.inherited(value)
        self[value] = found
        return found


def read_by(op: Op, origin: Origin) -> Origin:
    """Where poison comes from: of a register that was never written, the first instruction that reads it."""
    line, text = origin
    return (op.where, f"{text}, read by {op.instruction.mnemonic}") if line == NOWHERE else origin


class Frame:
    """See the module's docstring. ``rows`` are the rising numbers of its warps within the batch, CTA-major.

    ``active`` are the lanes (warps, 32) that take part; None: all of every warp.
    """

    def __init__(self, rows: Array, warps_per_cta: int, constants: Mapping[Value, Array]) -> None:
        self.rows, self.n, self.shape = rows, rows.size, (rows.size, 32)
        # Rows without gaps are a slice, which NumPy need not gather.
        first, last = (int(rows[0]), int(rows[-1])) if rows.size else (0, -1)
        self.span: Chosen = slice(first, last + 1) if last - first == rows.size - 1 else rows
        self.warps_per_cta = warps_per_cta
        self.cta, self.local = np.divmod(rows, warps_per_cta)
        self.active: Array | None = None
        self.constants = constants
        self.env: Registers = Registers(self, constants)
        self.shadows: dict[Value, Array] = {}
        self.origins: dict[Value, Origin] = {}
        self.parent: Frame | None = None
        self._select: Chosen = slice(None)
        self.gone: Array | None = None  # lanes that have ended, of a frame without a parent
        self.seen: dict[int, Any] = {}
        heads = rows[::warps_per_cta, None]  # of each CTA, if they are whole
        self.whole_ctas = np.array_equal((heads - heads % warps_per_cta + np.arange(warps_per_cta)).ravel(), rows)

    # -- values ------------------------------------------------------------------------------------------------

    def full(self, array: Array) -> Array:
        """Return an array of values, one for all lanes or for each, broadcast to (warps, 32)."""
        return widened(array, self.shape)

    def acting(self, among: Array | None = None) -> Array:
        """The active lanes, (warps, 32), of those that ``among`` has."""
        lanes = np.ones(self.shape, np.bool_) if among is None else self.full(among)
        return lanes if self.active is None else lanes & self.active

    def inherited(self, value: Value) -> Array:
        """A value this frame has not written: the parent's, or poison if nobody has."""
        if self.parent is None:
            zero = np.zeros((1, 1), value.dtype.numpy)
            self.shadows[value] = unmarked(zero) | all_ones(unmarked(zero).dtype)
            name = f"register {value.name}" if value.name else "a register"
            self.origins[value] = (NOWHERE, f"{name} that was never written")
            return zero
        array = taken(self.parent.env[value], self._select)
        if value in self.parent.shadows:
            self.shadows[value] = taken(self.parent.shadows[value], self._select)
            self.origins[value] = self.parent.origins[value]
        return array

    def write(self, value: Value, array: Array, shadow: Array | None = None, origin: Origin | None = None) -> None:
        """Write a register of all warps of the frame, with the poison of its bits where the checks follow it."""
        self.env[value] = array
        if shadow is not None:
            self.shadows[value], self.origins[value] = shadow, origin or (NOWHERE, "a value")
        elif self.shadows:
            self.shadows.pop(value, None)

    def poison(self, keys: Sequence[Value]) -> tuple[list[Array], Origin] | None:
        """The shadows of values of which some have poison, and where that of the first comes from; None for none."""
        poisoned = [k for k in keys if k in self.shadows] if self.shadows else []
        if not poisoned:
            return None
        return [self.shadows.get(k, unmarked(self.env[k])) for k in keys], self.origins[poisoned[0]]

    def write_all(
        self,
        results: Sequence[Value],
        arrays: Sequence[Array],
        keys: Sequence[Value],
        shadow: Callable[[list[Array]], Sequence[Array]],
        product: Op | None = None,
    ) -> None:
        """Set the results of an instruction; ``shadow`` works out their poison from that of its operands.

        A ``product`` is where poison comes from, if nobody has written its sums.
        """
        found = self.poison(keys)
        marks = [None] * len(arrays) if found is None else [m if m.any() else None for m in shadow(found[0])]
        for value, array, mark in zip(results, arrays, marks, strict=True):
            origin = None if found is None else found[1]
            self.write(value, array, mark, origin if origin is None or product is None else read_by(product, origin))

    # -- control flow --------------------------------------------------------------------------------------------

    def part(self, select: Array) -> Frame:
        """The frame of the lanes in ``select`` (warps, 32), with registers of its own. Warps with none are left out."""
        chosen = chosen_of(np.asarray(select.any(axis=1)))
        if isinstance(chosen, slice):
            frame = Frame.__new__(Frame)
            frame.__dict__.update(self.__dict__)
            frame.env, frame.shadows, frame.origins, frame.seen = Registers(frame, self.constants), {}, {}, {}
        else:
            frame = Frame(self.rows[chosen], self.warps_per_cta, self.constants)
        frame.parent, frame._select = self, chosen
        inner = select[chosen]
        frame.active = None if inner.all() else np.ascontiguousarray(inner)
        return frame

    def only(self, chosen: Chosen) -> Frame:
        """The frame of some of its warps, which goes on with their registers instead of this one."""
        frame = Frame(self.rows[chosen], self.warps_per_cta, self.constants)
        for old, new in ((self.env, frame.env), (self.shadows, frame.shadows)):
            new.update({value: taken(array, chosen) for value, array in old.items()})
        frame.origins.update(self.origins)
        frame.gone = None if self.gone is None else self.gone[chosen]
        return frame

    @property
    def ended(self) -> Array | None:
        """Lanes that have ended, (warps, 32); None for none."""
        if self.parent is None:
            return self.gone
        gone = self.parent.ended
        return None if gone is None else gone[self._select]

    @property
    def absent(self) -> Array | None:
        """Lanes of these warps that are elsewhere, neither active here nor at their end, (warps, 32); None for none."""
        if self.active is None:
            return None
        ended = self.ended
        here = self.active if ended is None else self.active | ended
        return None if here.all() else ~here

    def merge_into_parent(self, written: Iterable[Value]) -> None:
        """Give the parent what this frame has of values that it may have written."""
        parent = self.parent
        assert parent is not None
        for value in written:
            if value not in self.env:
                continue
            mine = self.env[value]
            has = isinstance(value, Register) or value in parent.env
            parent.env[value] = self.in_parent(mine, parent.env[value] if has else np.zeros((1, 1), mine.dtype))
            shadow, others, none = self.shadows.get(value), parent.shadows.get(value), unmarked(mine)
            if shadow is None and others is None:
                continue
            merged = self.in_parent(none if shadow is None else shadow, none if others is None else others)
            if merged.any():
                parent.shadows[value] = merged
                parent.origins.setdefault(value, self.origins.get(value, (NOWHERE, "a value")))
            else:
                parent.shadows.pop(value, None)

    def in_parent(self, mine: Array, theirs: Array) -> Array:
        """The parent's array with what this frame's lanes have in it."""
        if isinstance(self._select, slice):
            return mine if self.active is None else np.where(self.active, mine, theirs)
        assert self.parent is not None
        width = 32 if self.active is not None else max(theirs.shape[1], mine.shape[1])
        merged = np.broadcast_to(theirs, (self.parent.n, width)).copy()
        merged[self._select] = mine if self.active is None else np.where(self.active, mine, merged[self._select])
        return merged


def chosen_of(warps: Array) -> Chosen:
    """The positions of some warps (a bool for each); all of them as a slice."""
    return slice(None) if warps.all() else np.nonzero(warps)[0]


def taken(array: Array, chosen: Chosen) -> Array:
    """The chosen warps' part of a register."""
    return array if array.shape[0] == 1 else array[chosen]


Lanes = list[int] | None
"""Lanes of one warp; None: all of them."""
Turns: TypeAlias = Sequence[int]
"""The order in which the lanes of a warp take turns where an instruction lets them act one by one."""
ASCENDING: Turns = range(32)


def lanes_of(frame: Frame, guard: Array | None) -> Iterator[tuple[int, int, Lanes]]:
    """(position in the frame, row, acting lanes) of each warp with any."""
    if guard is None and frame.active is None:
        for i, row in enumerate(frame.rows.tolist()):
            yield i, row, None
        return
    acting = frame.acting(guard)
    for i, row in enumerate(frame.rows.tolist()):
        lanes = np.nonzero(acting[i])[0].tolist()
        if lanes:
            yield i, row, None if len(lanes) == 32 else lanes


def in_turn(lanes: Array, turns: Turns) -> Array:
    """The order in which lanes of a frame, by their numbers in it, take turns at an atomic: warp by warp."""
    return np.arange(lanes.size) if turns is ASCENDING else np.lexsort((np.argsort(turns)[lanes % 32], lanes // 32))


def apply_in_turn(instruction: Instruction, view: Array, index: Array, values: list[Array], acting: Array) -> Array:
    """Apply the lanes of an atomic in the order of ``acting``. Returns the old values in the shape of ``index``."""
    assert instruction.combine is not None
    flat = np.ascontiguousarray(index).reshape(-1)
    operands = [v.reshape(-1) for v in values]
    old = np.zeros(flat.size, view.dtype)
    # Lanes that hit one address take turns: turn t serves the t-th lane of every address.
    order = acting[np.argsort(flat[acting], kind="stable")]
    places = flat[order]
    begins = np.ones(places.size, np.bool_)
    begins[1:] = places[1:] != places[:-1]
    (first,) = np.nonzero(begins)
    turn = np.arange(places.size) - np.repeat(first, np.diff(first, append=places.size))
    served, start = order[np.argsort(turn, kind="stable")], 0
    for end in np.cumsum(np.bincount(turn)).tolist():
        lanes, start = served[start:end], end
        at = flat[lanes]
        before = old[lanes] = view[at]
        view[at] = instruction.combine(before, *[v[lanes] for v in operands])
    return old.reshape(index.shape)


def split(values: Array, lanes: Lanes) -> list[tuple[Any, Lanes]]:
    """The acting lanes by the value they give (one row of 32, or of one entry per value)."""
    mine = (values if lanes is None else values[lanes]).tolist()
    if mine.count(mine[0]) == len(mine):
        return [(mine[0], lanes)]
    found: dict[Any, list[int]] = {}
    for lane, value in zip(ASCENDING if lanes is None else lanes, mine, strict=True):
        found.setdefault(value, []).append(lane)
    return list(found.items())


@dataclass(frozen=True)
class Actor:
    """Lanes of a warp (a row of the batch) that execute an operation together; None: all of them."""

    op: Op
    row: int
    lanes: Lanes

    @property
    def lane(self) -> int:
        """The lowest of the lanes, which findings name."""
        return 0 if self.lanes is None else self.lanes[0]

    @property
    def each(self) -> Sequence[int]:
        """The numbers of the lanes."""
        return ASCENDING if self.lanes is None else self.lanes

    @property
    def name(self) -> str:
        """The operation as messages name it."""
        return self.op.instruction.mnemonic


E = TypeVar("E", bound=Effect, covariant=True)


@dataclass(frozen=True, eq=False)
class Execution(Generic[E]):
    """A frame carries out an effect of an operation. ``given`` are operands, by the names that the effect has for them.

    A ``guard`` among them says which of the active lanes act.
    """

    frame: Frame
    op: Op
    effect: E
    given: Mapping[str, Array]

    def actors(self, *names: str) -> Iterator[tuple[Actor, list[int]]]:
        """The acting lanes of each warp by what they give for some operands, with the values that they agree on."""
        wide = [self.frame.full(self.given[name]) for name in names]
        for i, row, lanes in lanes_of(self.frame, self.given.get("guard")):
            groups: list[tuple[Lanes, list[int]]] = [(lanes, [])]
            for array in wide:
                groups = [(part, [*values, int(x)]) for group, values in groups for x, part in split(array[i], group)]
            for group, values in groups:
                yield Actor(self.op, row, group), values
