"""``ldmatrix`` and ``stmatrix``, derived: which row of the memory tile each lane points to for a wanted fragment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from warploom.core.errors import LayoutError
from warploom.layout.catalogue import ldmatrix_fragment
from warploom.layout.fragments import FragmentLayout
from warploom.layout.linear import LinearMap

_CHUNK = 8  # 16-bit elements in the 16 bytes a lane points to


@dataclass(frozen=True)
class MatrixPlan:
    """One ``ldmatrix`` or ``stmatrix`` of ``count`` 8×8 matrices of 16-bit elements.

    ``address`` maps ``lane`` to the (row, col) of the memory tile where the 16 bytes begin that this lane points to
    (lanes from 8·count on repeat those below, as the ISA allows). The instruction's 32-bit register *i* is register
    ``register_order[i]`` of the fragment.
    """

    instruction: str
    count: int
    transposed: bool
    address: LinearMap
    register_order: tuple[int, ...]

    def __str__(self) -> str:
        trans = ".trans" if self.transposed else ""
        order = ", ".join(f"r{register}" for register in self.register_order)
        return f"{self.instruction}.x{self.count}{trans} {{{order}}} from lane → {list(self.address.bases('lane'))}"


LdmatrixPlan = MatrixPlan


def ldmatrix_plan(
    target: FragmentLayout | LinearMap, transposed: bool, bit_order: Sequence[int] | None = None
) -> MatrixPlan:
    """The ``ldmatrix`` that fills ``target``, whose row and col are those of the tile in memory.

    ``target`` holds 2, 4 or 8 16-bit elements per thread. Without ``transposed`` a register pair is two neighbouring
    columns of one row; with it (``.trans``) two neighbouring rows of one column. An operand whose memory holds the
    transpose (B from an (n, k) tile) is passed as ``fragment.transposed()``. Matrices are loaded in the order of the
    target's registers, or with ``bit_order`` in another: new register bit *i* (the first, 0, selects within a pair) is
    the target's bit ``bit_order[i]``. Raises LayoutError if no ``ldmatrix`` gives that fragment.
    """
    return _matrix_plan("ldmatrix", _linear(target), transposed, None if bit_order is None else tuple(bit_order))


def stmatrix_plan(
    source: FragmentLayout | LinearMap, transposed: bool, bit_order: Sequence[int] | None = None
) -> MatrixPlan:
    """The ``stmatrix`` (sm_90 and later) that writes fragment ``source`` to memory; see :func:`ldmatrix_plan`."""
    return _matrix_plan("stmatrix", _linear(source), transposed, None if bit_order is None else tuple(bit_order))


def _linear(fragment: FragmentLayout | LinearMap) -> LinearMap:
    if isinstance(fragment, LinearMap):
        return fragment.project("row", "col")
    if fragment.element_bits != 16:
        raise LayoutError(f"{fragment.name} has {fragment.element_bits}-bit elements; ldmatrix moves 16-bit ones")
    return fragment.map


@lru_cache(maxsize=512)
def _matrix_plan(
    instruction: str, target: LinearMap, transposed: bool, bit_order: tuple[int, ...] | None
) -> MatrixPlan:
    bits = target.in_bits("register")
    if not 1 <= bits <= 3 or set(target.in_dims) != {"register", "lane"}:
        raise LayoutError(
            f"{instruction} moves 2, 4 or 8 elements per lane of one warp, this fragment has {1 << bits}; "
            "plan it in parts"
        )
    order = bit_order or tuple(range(bits))
    if order[0] != 0:
        raise LayoutError(f"bit 0 selects within a packed register and must stay first in bit_order={order}")
    moved = target.permute_bits("register", order)
    count = 1 << (bits - 1)
    own = ldmatrix_fragment(count, transposed).map.rename({"row": "source_lane", "col": "element"})
    memory = moved.compose(own.invert())  # (lane that points, element of its 16 bytes) -> (row, col)
    _check_contiguous(instruction, memory, transposed)
    pointers = memory.bases("source_lane")
    zeros = ((0, 0),) * (5 - len(pointers))
    address = LinearMap({"lane": (*pointers, *zeros)}, dict(memory.outs))
    registers = tuple(
        sum(1 << (order[bit + 1] - 1) for bit in range(bits - 1) if index >> bit & 1) for index in range(count)
    )
    return MatrixPlan(instruction, count, transposed, address, registers)


def _check_contiguous(instruction: str, memory: LinearMap, transposed: bool) -> None:
    wanted = tuple((0, 1 << bit) for bit in range(_CHUNK.bit_length() - 1))
    other = "without" if transposed else "with"
    if memory.bases("element") != wanted:
        raise LayoutError(
            f"{instruction} reads eight neighbouring columns from each lane's address; this fragment would need "
            f"{memory.bases('element')}. Try {other} transposed, or the fragment's .transposed()"
        )
    if any(col % _CHUNK for _, col in memory.bases("source_lane")):
        raise LayoutError(f"{instruction} addresses must be 16-byte aligned; this fragment needs {memory}")
