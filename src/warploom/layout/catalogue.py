"""The catalogue of fragments: one linear atom per operand of each instruction, from the PTX ISA.

All of them share the pattern PTX words as ``groupID = lane >> 2`` and ``threadID_in_group = lane & 3``. Row and col are
those of the operand as the PTX ISA draws it: A is (m, k), B is (k, n), C and D are (m, n).
"""

from __future__ import annotations

from collections.abc import Sequence

from warploom.core.errors import LayoutError
from warploom.layout.fragments import FragmentLayout
from warploom.layout.linear import Coordinate, LinearMap

# Lanes of an operand whose rows are groups: pairs of columns (16-bit), or single columns (32-bit), within a row.
_ROW_PAIRS: tuple[Coordinate, ...] = ((0, 2), (0, 4), (1, 0), (2, 0), (4, 0))
_ROW_SINGLES: tuple[Coordinate, ...] = ((0, 1), (0, 2), (1, 0), (2, 0), (4, 0))
# Lanes of an operand of 8-bit elements: four columns in each register, within a row.
_ROW_QUADS: tuple[Coordinate, ...] = ((0, 4), (0, 8), (1, 0), (2, 0), (4, 0))
_PAIR: Coordinate = (0, 1)


def _turned(vectors: Sequence[Coordinate]) -> tuple[Coordinate, ...]:
    return tuple((col, row) for row, col in vectors)


def _atom(
    shape: tuple[int, int], register: Sequence[Coordinate], lane: Sequence[Coordinate], warps: bool = False
) -> LinearMap:
    bases = {"register": register, "lane": lane}
    if warps:
        bases["warp"] = ((16, 0), (32, 0))
    return LinearMap(bases, {"row": shape[0], "col": shape[1]})


_A16_K16 = _atom((16, 16), [_PAIR, (8, 0), (0, 8)], _ROW_PAIRS)
_ACCUMULATOR = _atom((16, 8), [_PAIR, (8, 0)], _ROW_PAIRS)
_ACCUMULATOR_8 = _atom((8, 8), [_PAIR], _ROW_PAIRS)
_QUAD: tuple[Coordinate, ...] = (_PAIR, (0, 2))

# (shape, operand, bits) -> atom; comments name the subsection of the PTX ISA's chapter on mma that draws it
_MMA: dict[tuple[str, str, int], LinearMap] = {
    # mma.m16n8k16, .f16/.bf16: "Matrix Fragments for mma.m16n8k16 with floating point type"
    ("m16n8k16", "A", 16): _A16_K16,
    ("m16n8k16", "B", 16): _atom((16, 8), [(1, 0), (8, 0)], _turned(_ROW_PAIRS)),
    # mma.m16n8k8, .f16/.bf16/.tf32: "Matrix Fragments for mma.m16n8k8"
    ("m16n8k8", "A", 16): _atom((16, 8), [_PAIR, (8, 0)], _ROW_PAIRS),
    ("m16n8k8", "B", 16): _atom((8, 8), [(1, 0)], _turned(_ROW_PAIRS)),
    ("m16n8k8", "A", 32): _atom((16, 8), [(8, 0), (0, 4)], _ROW_SINGLES),
    ("m16n8k8", "B", 32): _atom((8, 8), [(4, 0)], _turned(_ROW_SINGLES)),
    # mma.m16n8k4, .tf32: "Matrix Fragments for mma.m16n8k4"
    ("m16n8k4", "A", 32): _atom((16, 4), [(8, 0)], _ROW_SINGLES),
    ("m16n8k4", "B", 32): _atom((4, 8), [], _turned(_ROW_SINGLES)),
    # mma.m8n8k16, .s8/.u8: "Matrix Fragments for mma.m8n8k16"
    ("m8n8k16", "A", 8): _atom((8, 16), _QUAD, _ROW_QUADS),
    ("m8n8k16", "B", 8): _atom((16, 8), _turned(_QUAD), _turned(_ROW_QUADS)),
    ("m8n8k16", "C", 32): _ACCUMULATOR_8,
    # mma.m16n8k16, .s8/.u8: "Matrix Fragments for mma.m16n8k16 with integer type"
    ("m16n8k16", "A", 8): _atom((16, 16), [*_QUAD, (8, 0)], _ROW_QUADS),
    ("m16n8k16", "B", 8): _atom((16, 8), _turned(_QUAD), _turned(_ROW_QUADS)),
    # mma.m16n8k32, .s8/.u8 (and the 8-bit floats): "Matrix Fragments for mma.m16n8k32"
    ("m16n8k32", "A", 8): _atom((16, 32), [*_QUAD, (8, 0), (0, 16)], _ROW_QUADS),
    ("m16n8k32", "B", 8): _atom((32, 8), [*_turned(_QUAD), (16, 0)], _turned(_ROW_QUADS)),
    # mma.m8n8k4 and, from sm_90 on, mma.m16n8k{4,8,16}, .f64: "Matrix Fragments for mma.m8n8k4 with .f64" and
    # "… for mma.m16n8k4 / k8 / k16 with .f64"
    ("m8n8k4", "A", 64): _atom((8, 4), [], _ROW_SINGLES),
    ("m8n8k4", "B", 64): _atom((4, 8), [], _turned(_ROW_SINGLES)),
    ("m8n8k4", "C", 64): _ACCUMULATOR_8,
    ("m16n8k4", "A", 64): _atom((16, 4), [(8, 0)], _ROW_SINGLES),
    ("m16n8k4", "B", 64): _atom((4, 8), [], _turned(_ROW_SINGLES)),
    ("m16n8k8", "A", 64): _atom((16, 8), [(8, 0), (0, 4)], _ROW_SINGLES),
    ("m16n8k8", "B", 64): _atom((8, 8), [(4, 0)], _turned(_ROW_SINGLES)),
    ("m16n8k16", "A", 64): _atom((16, 16), [(8, 0), (0, 4), (0, 8)], _ROW_SINGLES),
    ("m16n8k16", "B", 64): _atom((16, 8), [(4, 0), (8, 0)], _turned(_ROW_SINGLES)),
    **{(shape, "C", 64): _ACCUMULATOR for shape in ("m16n8k4", "m16n8k8", "m16n8k16")},
    # Every m16n8 accumulator, 32-bit or packed 16-bit, has one map.
    **{(shape, "C", bits): _ACCUMULATOR for shape in ("m16n8k8", "m16n8k16", "m16n8k32") for bits in (16, 32)},
    ("m16n8k4", "C", 32): _ACCUMULATOR,
}


def mma_fragment(shape: str, operand: str, bits: int | None = None) -> FragmentLayout:
    """The fragment of ``operand`` ("A", "B", "C" or "D") of ``mma.sync.<shape>`` with elements of ``bits``.

    ``bits`` defaults to 16 for A and B and to 32 for the accumulators C and D, which share one map. Source: PTX ISA,
    "Warp Level Matrix Multiply-Accumulate Instructions", the section on fragments of each ``mma`` shape. Raises
    LayoutError for a combination the catalogue does not hold.
    """
    role = "C" if operand == "D" else operand
    width = bits if bits is not None else (32 if role == "C" else 16)
    atom = _MMA.get((shape, role, width))
    if atom is None:
        known = ", ".join(f"{s}.{o}.b{b}" for s, o, b in _MMA)
        raise LayoutError(f"no fragment for operand {operand} of mma {shape} with {width}-bit elements; known: {known}")
    return FragmentLayout(f"mma.{shape}.{operand}.b{width}", atom, width)


def ldmatrix_fragment(count: int, transposed: bool = False) -> FragmentLayout:
    """The fragment that ``ldmatrix.m8n8.x<count>[.trans].b16`` loads and ``stmatrix`` stores.

    The 8×8 matrices are stacked: row *r* of the fragment is the 16 bytes that lane *r* points to, col the 16-bit
    element within them. Source: PTX ISA, ``ldmatrix`` and ``stmatrix``.
    """
    if count not in (1, 2, 4):
        raise LayoutError(f"ldmatrix and stmatrix move 1, 2 or 4 matrices, not {count}")
    stacked = [(8, 0), (16, 0)][: count.bit_length() - 1]
    pair, lanes = ((1, 0), _turned(_ROW_PAIRS)) if transposed else (_PAIR, _ROW_PAIRS)
    name = f"ldmatrix.x{count}{'.trans' if transposed else ''}.b16"
    return FragmentLayout(name, _atom((8 * count, 8), [pair, *stacked], lanes), 16)


def movmatrix_fragment(transposed: bool = False) -> FragmentLayout:
    """The 8×8 matrix of 16-bit elements that ``movmatrix.sync.aligned.m8n8.trans.b16`` takes, and what it gives.

    The source holds rows as ``ldmatrix`` loads them; with ``transposed`` this is the result, in the source's rows and
    columns. Source: PTX ISA, ``movmatrix``.
    """
    source = FragmentLayout("movmatrix.b16", _atom((8, 8), [_PAIR], _ROW_PAIRS), 16)
    if not transposed:
        return source
    return FragmentLayout("movmatrix.trans.b16", _atom((8, 8), [(1, 0)], _turned(_ROW_PAIRS)), 16)


def wmma_accumulator(bits: int = 32) -> FragmentLayout:
    """The 16×16 accumulator of ``wmma.m16n16k16``: two m16n8 accumulators side by side.

    The PTX ISA leaves this map open; it is what the hardware of compute capability 9.0 was observed to use:
    ``row = lane/4 + 8·(i>>1 & 1)``, ``col = 2·(lane%4) + i%2 + 8·(i>>2 & 1)`` for element *i*.
    """
    return FragmentLayout(f"wmma.m16n16k16.C.b{bits}", _ACCUMULATOR, bits, (1, 2))


def wgmma_accumulator(n: int, bits: int = 32) -> FragmentLayout:
    """The accumulator D of ``wgmma.mma_async.m64n<n>k*``: a 64×8 atom over four warps, n/8 times.

    Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate", register fragments, matrix D.
    ``n`` is a multiple of 8 from 8 to 256; LayoutError otherwise.
    """
    if n % 8 or not 8 <= n <= 256:
        raise LayoutError(f"wgmma takes n = 8, 16, … 256, not {n}")
    atom = _atom((64, 8), [_PAIR, (8, 0)], _ROW_PAIRS, warps=True)
    return FragmentLayout(f"wgmma.m64n{n}.D.b{bits}", atom, bits, (1, n // 8))


def wgmma_operand(bits: int = 16) -> FragmentLayout:
    """The register operand A of ``wgmma.mma_async.m64n*k16`` with 16-bit elements: 64×16 over four warps.

    Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate", register fragments, matrix A.
    """
    if bits != 16:
        raise LayoutError(f"the catalogue holds wgmma's register operand A for 16-bit elements, not {bits}")
    atom = _atom((64, 16), [_PAIR, (8, 0), (0, 8)], _ROW_PAIRS, warps=True)
    return FragmentLayout("wgmma.m64k16.A.b16", atom, 16)


def _catalogue() -> dict[str, FragmentLayout]:
    found = [mma_fragment(shape, operand, bits) for shape, operand, bits in _MMA]
    for count in (1, 2, 4):
        found += [ldmatrix_fragment(count), ldmatrix_fragment(count, transposed=True)]
    found += [movmatrix_fragment(), movmatrix_fragment(transposed=True)]
    found += [wmma_accumulator(), wgmma_accumulator(8), wgmma_operand()]
    return {layout.name: layout for layout in found}


FRAGMENTS: dict[str, FragmentLayout] = _catalogue()
"""Every atom by name: ``mma.m16n8k16.A.b16``, ``ldmatrix.x4.trans.b16``, ``wgmma.m64n8.D.b32`` …"""
