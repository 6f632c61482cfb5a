"""Linear maps over bits (GF(2)): the one representation from which every layout in warploom is derived.

A map takes named inputs (``register``, ``lane``, ``warp``, ``row`` …) to named outputs (``row``, ``col``, ``byte`` …).
Each bit of each input has a *basis vector*: the output coordinate reached when only that bit is set. The image of
any input is the XOR of the basis vectors of its set bits. All sizes are therefore powers of two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from warploom.core.errors import LayoutError
from warploom.layout.formula import Term, evaluate, is_integer, wide_array
from warploom.layout.gf2 import Subspace, rank

Coordinate = tuple[int, ...]


def log2_exact(size: int, what: str) -> int:
    """The exponent of ``size``, a power of two; raises LayoutError naming ``what`` otherwise."""
    if size < 1 or size & (size - 1):
        raise LayoutError(f"{what} is {size}; linear maps act on bits, so it must be a power of two (tile an atom)")
    return size.bit_length() - 1


@dataclass(frozen=True, init=False, eq=False, repr=False)
class LinearMap:
    """A linear map over GF(2) between named bit vectors; immutable and hashable.

    >>> a = LinearMap({"register": [(0, 1), (8, 0), (0, 8)],
    ...                "lane": [(0, 2), (0, 4), (1, 0), (2, 0), (4, 0)]}, {"row": 16, "col": 16})
    >>> a.apply(register=3, lane=5)
    {'row': 9, 'col': 3}

    ``bases`` gives each input one output coordinate per bit, least significant bit first; ``outs`` the outputs and
    their sizes, in the order of the coordinates. Zero vectors are allowed: that input bit replicates. Raises
    LayoutError for sizes that are not powers of two and coordinates outside them.
    """

    ins: tuple[tuple[str, tuple[Coordinate, ...]], ...]
    outs: tuple[tuple[str, int], ...]

    def __init__(self, bases: Mapping[str, Iterable[Sequence[int]]], outs: Mapping[str, int]) -> None:
        sizes = {dim: int(size) for dim, size in outs.items()}
        for dim, size in sizes.items():
            log2_exact(size, f"the size of output {dim!r}")
        ins: list[tuple[str, tuple[Coordinate, ...]]] = []
        for dim, vectors in bases.items():
            checked = tuple(tuple(int(part) for part in vector) for vector in vectors)
            for bit, vector in enumerate(checked):
                if len(vector) != len(sizes):
                    raise LayoutError(
                        f"bit {bit} of {dim!r} goes to {vector}, which has {len(vector)} coordinates; the outputs are "
                        f"{tuple(sizes)}"
                    )
                for part, (out, size) in zip(vector, sizes.items(), strict=True):
                    if not 0 <= part < size:
                        raise LayoutError(f"bit {bit} of {dim!r} goes to {out}={part}, outside 0..{size - 1}")
            ins.append((dim, checked))
        object.__setattr__(self, "ins", tuple(ins))
        object.__setattr__(self, "outs", tuple(sizes.items()))

    # ---------------------------------------------------------------- making

    @classmethod
    def identity(cls, sizes: Mapping[str, int]) -> LinearMap:
        """Each input to the output of the same name: ``identity({"row": 16, "col": 8})``."""
        dims = list(sizes)
        bases = {
            dim: [tuple(1 << bit if other == dim else 0 for other in dims) for bit in range(log2_exact(size, dim))]
            for dim, size in sizes.items()
        }
        return cls(bases, sizes)

    @classmethod
    def _from_columns(cls, columns: Mapping[str, Sequence[int]], outs: Sequence[tuple[str, int]]) -> LinearMap:
        """From packed output vectors (first output in the lowest bits) per input bit."""

        def unpack(packed: int) -> Coordinate:
            parts: list[int] = []
            for _, size in outs:
                parts.append(packed & (size - 1))
                packed >>= size.bit_length() - 1
            return tuple(parts)

        return cls({dim: [unpack(c) for c in packed] for dim, packed in columns.items()}, dict(outs))

    # ---------------------------------------------------------------- looking

    @property
    def in_dims(self) -> tuple[str, ...]:
        """Names of the inputs, in order."""
        return tuple(dim for dim, _ in self.ins)

    @property
    def out_dims(self) -> tuple[str, ...]:
        """Names of the outputs, in order."""
        return tuple(dim for dim, _ in self.outs)

    def bases(self, dim: str) -> tuple[Coordinate, ...]:
        """The basis vectors of input ``dim``, least significant bit first."""
        for name, vectors in self.ins:
            if name == dim:
                return vectors
        raise LayoutError(f"this map has no input {dim!r}; it has {', '.join(self.in_dims)}")

    def has_input(self, dim: str) -> bool:
        """Whether there is an input ``dim``."""
        return dim in self.in_dims

    def in_bits(self, dim: str) -> int:
        """Return the number of bits of input ``dim``."""
        return len(self.bases(dim))

    def in_size(self, dim: str) -> int:
        """Return the number of values of input ``dim``: 2^:meth:`in_bits`."""
        return 1 << self.in_bits(dim)

    def out_size(self, dim: str) -> int:
        """The size of output ``dim``."""
        for name, size in self.outs:
            if name == dim:
                return size
        raise LayoutError(f"this map has no output {dim!r}; it has {', '.join(self.out_dims)}")

    def out_mask(self, dim: str) -> int:
        """The bits of output ``dim`` that some input can set."""
        self.out_size(dim)  # names the dimensions there are, if this is none of them
        mask = 0
        for term in self._terms[dim]:
            mask |= term.out_mask
        return mask

    def packed(self, dim: str) -> list[int]:
        """The basis vectors of input ``dim`` with all outputs packed into one int, first output lowest."""
        return [self._pack(vector) for vector in self.bases(dim)]

    def _pack(self, vector: Coordinate) -> int:
        total = shift = 0
        for part, (_, size) in zip(vector, self.outs, strict=True):
            total |= part << shift
            shift += size.bit_length() - 1
        return total

    @cached_property
    def _columns(self) -> tuple[int, ...]:
        return tuple(column for dim in self.in_dims for column in self.packed(dim))

    @property
    def out_bits(self) -> int:
        """Bits of all outputs together."""
        return sum(size.bit_length() - 1 for _, size in self.outs)

    def matrix(self) -> NDArray[np.uint8]:
        """The map as a bit matrix [output bits, input bits]; inputs and outputs in order, low bits first."""
        columns = self._columns
        bits = [[column >> row & 1 for column in columns] for row in range(self.out_bits)]
        return np.array(bits, dtype=np.uint8).reshape(self.out_bits, len(columns))

    @cached_property
    def rank(self) -> int:
        """The number of independent basis vectors: the map reaches 2^rank coordinates."""
        return rank(self._columns)

    @property
    def is_surjective(self) -> bool:
        """Whether every output coordinate is reached."""
        return self.rank == self.out_bits

    # ---------------------------------------------------------------- applying

    def terms(self, dim: str) -> tuple[Term, ...]:
        """Output ``dim`` as masked shifts of the inputs, whose XOR it is."""
        self.out_size(dim)  # names the dimensions there are, if this is none of them
        return self._terms[dim]

    @cached_property
    def _terms(self) -> dict[str, tuple[Term, ...]]:
        """Per output, the masked shifts whose XOR it is: input bits that move by the same distance share one."""
        terms: dict[str, tuple[Term, ...]] = {}
        for position, (out, _) in enumerate(self.outs):
            masks: dict[tuple[str, int], int] = {}
            for dim, vectors in self.ins:
                for bit, vector in enumerate(vectors):
                    part = vector[position]
                    for target in range(part.bit_length()):
                        if part >> target & 1:
                            key = (dim, target - bit)
                            masks[key] = masks.get(key, 0) | 1 << bit
            terms[out] = tuple(Term(d, mask, shift, self.in_size(d) - 1) for (d, shift), mask in masks.items())
        return terms

    def apply(self, **inputs: Any) -> dict[str, Any]:
        """The output coordinates of ``inputs``, as ``{output: value}``; an input left out is 0.

        Inputs are Python integers (the outputs are then integers too), NumPy integer arrays (outputs have their
        broadcast shape) or any values with ``& ^ << >> +`` against integers, such as traced kernel values, for which
        the formula uses as few operations as it can: one mask and one shift per group of bits that moves by the same
        distance, ``+`` where groups cannot overlap, constants last. Raises LayoutError for unknown inputs and integers
        out of range; arrays and traced values are taken to be in range.
        """
        constants: dict[str, int] = {}
        values: dict[str, Any] = {}
        arrays: list[NDArray[Any]] = []
        for dim, value in inputs.items():
            size = self.in_size(dim)
            if is_integer(value):
                constants[dim] = int(value)
                if not 0 <= value < size:
                    raise LayoutError(f"{dim}={value} is outside 0..{size - 1}")
            elif isinstance(value, np.ndarray):
                array = wide_array(dim, cast("NDArray[Any]", value))
                arrays.append(array)
                values[dim] = array
            else:
                values[dim] = value
        found = {out: evaluate(terms, constants, values) for out, terms in self._terms.items()}
        if arrays:
            shape = np.broadcast_shapes(*(array.shape for array in arrays))
            found = {out: np.broadcast_to(np.asarray(value), shape) for out, value in found.items()}
        return found

    # ---------------------------------------------------------------- algebra

    def compose(self, inner: LinearMap) -> LinearMap:
        """``self`` after ``inner``: ``compose(inner).apply(x) == self.apply(**inner.apply(x))``.

        The outputs of ``inner`` must be the inputs of ``self`` by name, and no larger.
        """
        if set(inner.out_dims) != set(self.in_dims):
            raise LayoutError(f"cannot compose: the inner map gives {inner.out_dims}, the outer takes {self.in_dims}")
        for dim, size in inner.outs:
            if size > self.in_size(dim):
                raise LayoutError(
                    f"cannot compose: the inner {dim} reaches {size}, the outer takes {self.in_size(dim)}"
                )
        bases: dict[str, list[Coordinate]] = {}
        for dim, vectors in inner.ins:
            images = [self.apply(**dict(zip(inner.out_dims, vector, strict=True))) for vector in vectors]
            bases[dim] = [tuple(image[out] for out in self.out_dims) for image in images]
        return LinearMap(bases, dict(self.outs))

    def product(self, outer: LinearMap) -> LinearMap:
        """The direct product: ``self`` repeated as ``outer`` says.

        Bits of ``outer`` are appended above ``self``'s bits of the same input, and its coordinates count whole copies
        of ``self``: the output sizes multiply.
        """
        mine = dict(self.outs)
        sizes = {dim: mine.get(dim, 1) for dim in (*self.out_dims, *(d for d in outer.out_dims if d not in mine))}
        theirs = dict(outer.outs)
        bases: dict[str, list[Coordinate]] = {}
        for dim, vectors in self.ins:
            named = [dict(zip(self.out_dims, vector, strict=True)) for vector in vectors]
            bases[dim] = [tuple(vector.get(out, 0) for out in sizes) for vector in named]
        for dim, vectors in outer.ins:
            named = [dict(zip(outer.out_dims, vector, strict=True)) for vector in vectors]
            scaled = [tuple(vector.get(out, 0) * size for out, size in sizes.items()) for vector in named]
            bases[dim] = [*bases.get(dim, []), *scaled]
        return LinearMap(bases, {out: size * theirs.get(out, 1) for out, size in sizes.items()})

    def invert(self) -> LinearMap:
        """A map back from outputs to inputs, so that ``self.compose(self.invert())`` is the identity.

        Where several inputs share an output (replication) it picks the one that leaves the later redundant bits zero.
        Raises LayoutError when some output is never reached.
        """
        if not self.is_surjective:
            raise LayoutError(f"cannot invert: the map reaches 2^{self.rank} of 2^{self.out_bits} coordinates")
        span = Subspace(self._columns)
        sizes = tuple((dim, self.in_size(dim)) for dim in self.in_dims)
        columns: dict[str, list[int]] = {}
        position = 0
        for out, size in self.outs:
            bits = size.bit_length() - 1
            columns[out] = [span.reduce(1 << (position + bit))[1] for bit in range(bits)]
            position += bits
        return LinearMap._from_columns(columns, sizes)

    def restrict(self, *dims: str) -> LinearMap:
        """The map of the inputs ``dims`` alone, the others held at 0."""
        return LinearMap({dim: self.bases(dim) for dim in dims}, dict(self.outs))

    def project(self, *dims: str) -> LinearMap:
        """The outputs ``dims`` alone, in that order."""
        places = [self.out_dims.index(dim) if dim in self.out_dims else self.out_size(dim) for dim in dims]
        bases = {dim: [tuple(vector[place] for place in places) for vector in vectors] for dim, vectors in self.ins}
        return LinearMap(bases, {dim: self.out_size(dim) for dim in dims})

    def rename(self, names: Mapping[str, str]) -> LinearMap:
        """Return this map with inputs and outputs renamed; ``rename({"row": "col", "col": "row"})`` transposes."""
        bases = {names.get(dim, dim): vectors for dim, vectors in self.ins}
        outs = {names.get(dim, dim): size for dim, size in self.outs}
        if len(bases) != len(self.ins) or len(outs) != len(self.outs):
            raise LayoutError(f"renaming by {dict(names)} gives two dimensions one name")
        return LinearMap(bases, outs)

    def permute_bits(self, dim: str, order: Sequence[int]) -> LinearMap:
        """The map with the bits of input ``dim`` reordered: new bit *i* is old bit ``order[i]``."""
        vectors = self.bases(dim)
        if sorted(order) != list(range(len(vectors))):
            raise LayoutError(f"{tuple(order)} is not an order of the {len(vectors)} bits of {dim!r}")
        bases = dict(self.ins) | {dim: tuple(vectors[bit] for bit in order)}
        return LinearMap(bases, dict(self.outs))

    # ---------------------------------------------------------------- identity and text

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        def named(vector: Coordinate) -> tuple[tuple[str, int], ...]:
            return tuple(sorted(zip(self.out_dims, vector, strict=True)))

        ins = sorted((dim, tuple(named(vector) for vector in vectors)) for dim, vectors in self.ins)
        return tuple(ins), tuple(sorted(self.outs))

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, LinearMap) else NotImplemented

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def _repr_svg_(self) -> str | None:
        """The picture that notebooks show of a map from registers and lanes to rows and columns; None of others."""
        from warploom.layout.draw import draw_map

        grid = draw_map(self)
        return None if grid is None else grid.svg()

    def __repr__(self) -> str:
        bases = {dim: list(vectors) for dim, vectors in self.ins}
        return f"LinearMap({bases}, {dict(self.outs)})"

    def __str__(self) -> str:
        outs = ", ".join(f"{dim}:{size}" for dim, size in self.outs)
        lines = [f"{dim} → {' '.join(map(str, vectors)) or '—'}" for dim, vectors in self.ins]
        return f"({outs})\n" + "\n".join(f"  {line}" for line in lines)
