"""The fragments once more, transcribed from the PTX ISA's own formulas, case distinctions and all.

The catalogue is written as basis vectors, and that of ``wmma`` as what a GPU showed; this is what both are held against
where there is no GPU to ask. Nothing else uses it: no layout is computed from these formulas.
"""

from __future__ import annotations

from collections.abc import Callable

Formula = Callable[[int, int], tuple[int, int]]

_SUMS = ("mma.m16n8k16", "mma.m16n8k8", "mma.m16n8k4")

PTX_FORMULAS: dict[str, Formula] = {
    "mma.m16n8k16.A.b16": lambda t, i: (
        t // 4 + (0 if i in (0, 1, 4, 5) else 8),
        (t % 4) * 2 + (i & 1) + (8 if i >= 4 else 0),
    ),
    "mma.m16n8k16.B.b16": lambda t, i: ((t % 4) * 2 + (i & 1) + (8 if i >= 2 else 0), t // 4),
    **dict.fromkeys(
        (
            *(f"{shape}.C.{bits}" for shape in _SUMS for bits in ("b32", "b64")),
            *(f"{shape}.C.b16" for shape in _SUMS[:2]),
            "mma.m16n8k8.A.b16",
            "mma.m16n8k32.C.b16",
            "mma.m16n8k32.C.b32",
        ),
        lambda t, i: (t // 4 + (8 if i >= 2 else 0), (t % 4) * 2 + (i & 1)),
    ),
    **dict.fromkeys(("mma.m16n8k8.B.b16", "movmatrix.trans.b16"), lambda t, i: ((t % 4) * 2 + i, t // 4)),
    **dict.fromkeys(
        ("mma.m16n8k8.A.b32", "mma.m16n8k8.A.b64"),
        lambda t, i: (t // 4 + (8 if i in (1, 3) else 0), t % 4 + (4 if i >= 2 else 0)),
    ),
    **dict.fromkeys(
        ("mma.m16n8k8.B.b32", "mma.m16n8k8.B.b64", "mma.m16n8k16.B.b64"), lambda t, i: (t % 4 + 4 * i, t // 4)
    ),
    **dict.fromkeys(("mma.m16n8k4.A.b32", "mma.m16n8k4.A.b64"), lambda t, i: (t // 4 + 8 * i, t % 4)),
    **dict.fromkeys(("mma.m16n8k4.B.b32", "mma.m16n8k4.B.b64", "mma.m8n8k4.B.b64"), lambda t, i: (t % 4, t // 4)),
    "mma.m16n8k16.A.b64": lambda t, i: (
        t // 4 + (8 if i % 2 else 0),
        i * 2 + t % 4 if i % 2 == 0 else i * 2 - 2 + t % 4,
    ),
    "mma.m8n8k4.A.b64": lambda t, i: (t // 4, t % 4),
    **dict.fromkeys(("mma.m8n8k4.C.b64", "mma.m8n8k16.C.b32", "movmatrix.b16"), lambda t, i: (t // 4, (t % 4) * 2 + i)),
    "mma.m8n8k16.A.b8": lambda t, i: (t // 4, (t % 4) * 4 + i),
    **dict.fromkeys(("mma.m8n8k16.B.b8", "mma.m16n8k16.B.b8"), lambda t, i: ((t % 4) * 4 + i, t // 4)),
    "mma.m16n8k16.A.b8": lambda t, i: (t // 4 + (8 if i >= 4 else 0), (t % 4) * 4 + (i & 3)),
    "mma.m16n8k32.A.b8": lambda t, i: (
        t // 4 + (0 if i < 4 or 8 <= i < 12 else 8),
        (t % 4) * 4 + (i & 3) + (0 if i < 8 else 16),
    ),
    "mma.m16n8k32.B.b8": lambda t, i: ((t % 4) * 4 + (i & 3) + (16 if i >= 4 else 0), t // 4),
    # Thread t of ldmatrix holds elements 2(t%4), 2(t%4)+1 of row t/4 of each matrix; .trans exchanges the roles.
    **{f"ldmatrix.x{count}.b16": lambda t, i: (8 * (i // 2) + t // 4, 2 * (t % 4) + i % 2) for count in (1, 2, 4)},
    **{
        f"ldmatrix.x{count}.trans.b16": lambda t, i: (8 * (i // 2) + 2 * (t % 4) + i % 2, t // 4) for count in (1, 2, 4)
    },
    # Equations (1) and (2) of the paper on in-register reduction.
    "wmma.m16n16k16.C.b32": lambda t, i: (t // 4 + ((i >> 1) & 1) * 8, (t % 4) * 2 + i % 2 + ((i >> 2) & 1) * 8),
    # wgmma: t counts the 128 threads of a warpgroup; warp w has rows 16w … 16w + 15.
    "wgmma.m64n8.D.b32": lambda t, i: (16 * (t // 32) + t % 32 // 4 + 8 * (i // 2), 2 * (t % 4) + i % 2),
    "wgmma.m64k16.A.b16": lambda t, i: (
        16 * (t // 32) + t % 32 // 4 + 8 * (i // 2 % 2),
        2 * (t % 4) + i % 2 + 8 * (i // 4),
    ),
}
"""Name of the fragment → (row, col) of element *i* of thread *t*; groupID is t / 4, threadID_in_group t % 4."""


def _beside(formula: Formula, elements: int, row_step: int, col_step: int) -> Formula:
    """Two fragments, the second so many rows and columns on; further elements repeat the first."""

    def both(thread: int, element: int) -> tuple[int, int]:
        number, inside = divmod(element % (2 * elements), elements)
        row, col = formula(thread, inside)
        return row + number * row_step, col + number * col_step

    return both


def _repeated(formula: Formula, elements: int) -> Formula:
    return lambda thread, element: formula(thread, element % elements)


def _turned(formula: Formula) -> Formula:
    def turned(thread: int, element: int) -> tuple[int, int]:
        row, col = formula(thread, element)
        return col, row

    return turned


_WMMA: tuple[tuple[tuple[str, ...], str, tuple[str, ...], int, dict[str, int]], ...] = (
    (("m16n16k16", "m32n8k16", "m8n32k16"), "m16n8k16", ("f16", "bf16"), 16, {"f16": 16, "f32": 32}),
    (("m16n16k16", "m32n8k16", "m8n32k16"), "m16n8k16", ("s8", "u8"), 8, {"s32": 32}),
    (("m16n16k8",), "m16n8k8", ("tf32",), 32, {"f32": 32}),
    (("m8n8k4",), "m8n8k4", ("f64",), 64, {"f64": 64}),
)
"""Shapes of ``wmma``, the ``mma.sync`` they become, types of A and B with their bits, types of C with theirs."""


def _wmma(shape: str, mma: str, operand: str, bits: int) -> Formula:
    """One operand of ``wmma``: two of ``mma.sync`` side by side, or one where both products share it."""
    if shape.startswith("m8n32"):  # the transposed product of m32n8: Bᵀ·Aᵀ
        return _turned(_wmma("m32n8k16", mma, {"A": "B", "B": "A", "C": "C"}[operand], bits))
    formula = PTX_FORMULAS[f"mma.{mma}.{operand}.b{bits}"]
    if shape == mma:
        return formula
    m, n, k = (int(size) for size in mma[1:].replace("n", "k").split("k"))
    elements = {"A": m * k, "B": k * n, "C": m * n}[operand] // 32
    doubled, step = ("A", (m, 0)) if shape.startswith("m32") else ("B", (0, n))
    return _beside(formula, elements, *step) if operand in (doubled, "C") else _repeated(formula, elements)


WMMA_FORMULAS: dict[str, Formula] = {
    **{
        f"wmma.{shape}.{operand}.{dtype}.{order}": _wmma(shape, mma, operand, bits)
        for shapes, mma, types, bits, _ in _WMMA
        for shape in shapes
        for dtype in types
        for operand in "AB"
        for order in ("row", "col")
    },
    **{
        f"wmma.{shape}.C.{dtype}": _wmma(shape, mma, "C", bits)
        for shapes, mma, _, _, sums in _WMMA
        for shape in shapes
        for dtype, bits in sums.items()
    },
}
"""The same of ``wmma``, whose fragments the ISA leaves open: those of the ``mma.sync`` that ptxas makes of it.

A ``wmma.mma`` becomes two ``mma.sync`` (one for f64) that share A or B, m8n32k16 those of the transposed product. f16
operands have more registers than that takes; what is in them is the same once more.
"""
