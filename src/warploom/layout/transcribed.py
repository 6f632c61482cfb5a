"""The fragments once more, transcribed from the PTX ISA's own formulas, case distinctions and all.

The catalogue is written as basis vectors; this is what it is held against where there is no GPU to ask. Nothing else
uses it: no layout is computed from these formulas.
"""

from __future__ import annotations

from collections.abc import Callable

Formula = Callable[[int, int], tuple[int, int]]

PTX_FORMULAS: dict[str, Formula] = {
    "mma.m16n8k16.A.b16": lambda t, i: (
        t // 4 + (0 if i in (0, 1, 4, 5) else 8),
        (t % 4) * 2 + (i & 1) + (8 if i >= 4 else 0),
    ),
    "mma.m16n8k16.B.b16": lambda t, i: ((t % 4) * 2 + (i & 1) + (8 if i >= 2 else 0), t // 4),
    "mma.m16n8k16.C.b32": lambda t, i: (t // 4 + (8 if i >= 2 else 0), (t % 4) * 2 + (i & 1)),
    "mma.m16n8k16.C.b16": lambda t, i: (t // 4 + (8 if i >= 2 else 0), (t % 4) * 2 + (i & 1)),
    "mma.m16n8k8.A.b16": lambda t, i: (t // 4 + (8 if i >= 2 else 0), (t % 4) * 2 + (i & 1)),
    "mma.m16n8k8.B.b16": lambda t, i: ((t % 4) * 2 + i, t // 4),
    "mma.m16n8k8.A.b32": lambda t, i: (t // 4 + (8 if i in (1, 3) else 0), t % 4 + (4 if i >= 2 else 0)),
    "mma.m16n8k8.B.b32": lambda t, i: (t % 4 + 4 * i, t // 4),
    "mma.m16n8k8.C.b32": lambda t, i: (t // 4 + (8 if i >= 2 else 0), (t % 4) * 2 + (i & 1)),
    "mma.m16n8k8.C.b16": lambda t, i: (t // 4 + (8 if i >= 2 else 0), (t % 4) * 2 + (i & 1)),
    "mma.m16n8k4.A.b32": lambda t, i: (t // 4 + 8 * i, t % 4),
    "mma.m16n8k4.B.b32": lambda t, i: (t % 4, t // 4),
    "mma.m16n8k4.C.b32": lambda t, i: (t // 4 + (8 if i >= 2 else 0), (t % 4) * 2 + (i & 1)),
    "mma.m16n8k4.C.b64": lambda t, i: (t // 4 + (8 if i >= 2 else 0), (t % 4) * 2 + (i & 1)),
    "mma.m16n8k8.C.b64": lambda t, i: (t // 4 + (8 if i >= 2 else 0), (t % 4) * 2 + (i & 1)),
    "mma.m16n8k16.C.b64": lambda t, i: (t // 4 + (8 if i >= 2 else 0), (t % 4) * 2 + (i & 1)),
    "mma.m16n8k4.A.b64": lambda t, i: (t // 4 + (8 if i == 1 else 0), t % 4),
    "mma.m16n8k4.B.b64": lambda t, i: (t % 4, t // 4),
    "mma.m16n8k8.A.b64": lambda t, i: (t // 4 + (8 if i in (1, 3) else 0), t % 4 + (0 if i in (0, 1) else 4)),
    "mma.m16n8k8.B.b64": lambda t, i: (t % 4 + (4 if i == 1 else 0), t // 4),
    "mma.m16n8k16.A.b64": lambda t, i: (
        t // 4 + (8 if i % 2 else 0),
        i * 2 + t % 4 if i % 2 == 0 else i * 2 - 2 + t % 4,
    ),
    "mma.m16n8k16.B.b64": lambda t, i: (t % 4 + i * 4, t // 4),
    "mma.m8n8k4.A.b64": lambda t, i: (t // 4, t % 4),
    "mma.m8n8k4.B.b64": lambda t, i: (t % 4, t // 4),
    "mma.m8n8k4.C.b64": lambda t, i: (t // 4, (t % 4) * 2 + i),
    "mma.m8n8k16.A.b8": lambda t, i: (t // 4, (t % 4) * 4 + i),
    "mma.m8n8k16.B.b8": lambda t, i: ((t % 4) * 4 + i, t // 4),
    "mma.m8n8k16.C.b32": lambda t, i: (t // 4, (t % 4) * 2 + i),
    "mma.m16n8k16.A.b8": lambda t, i: (t // 4 + (8 if i >= 4 else 0), (t % 4) * 4 + (i & 3)),
    "mma.m16n8k16.B.b8": lambda t, i: ((t % 4) * 4 + i, t // 4),
    "mma.m16n8k32.A.b8": lambda t, i: (
        t // 4 + (0 if i < 4 or 8 <= i < 12 else 8),
        (t % 4) * 4 + (i & 3) + (0 if i < 8 else 16),
    ),
    "mma.m16n8k32.B.b8": lambda t, i: ((t % 4) * 4 + (i & 3) + (16 if i >= 4 else 0), t // 4),
    "mma.m16n8k32.C.b32": lambda t, i: (t // 4 + (8 if i >= 2 else 0), (t % 4) * 2 + (i & 1)),
    "movmatrix.b16": lambda t, i: (t // 4, 2 * (t % 4) + i),
    "movmatrix.trans.b16": lambda t, i: (2 * (t % 4) + i, t // 4),
    # Thread t of ldmatrix holds elements 2(t%4), 2(t%4)+1 of row t/4 of each matrix; .trans exchanges the roles.
    **{f"ldmatrix.x{count}.b16": lambda t, i: (8 * (i // 2) + t // 4, 2 * (t % 4) + i % 2) for count in (1, 2, 4)},
    **{
        f"ldmatrix.x{count}.trans.b16": lambda t, i: (8 * (i // 2) + 2 * (t % 4) + i % 2, t // 4) for count in (1, 2, 4)
    },
    # Equations (1) and (2) of the paper on in-register reduction.
    "wmma.m16n16k16.C.b32": lambda t, i: (
        t // 4 + ((i >> 1) & 1) * 8,
        (t % 4) * 2 + i % 2 + ((i >> 2) & 1) * 8,
    ),
    # wgmma: t counts the 128 threads of a warpgroup; warp w has rows 16w … 16w + 15.
    "wgmma.m64n8.D.b32": lambda t, i: (16 * (t // 32) + t % 32 // 4 + 8 * (i // 2), 2 * (t % 4) + i % 2),
    "wgmma.m64k16.A.b16": lambda t, i: (
        16 * (t // 32) + t % 32 // 4 + 8 * (i // 2 % 2),
        2 * (t % 4) + i % 2 + 8 * (i // 4),
    ),
}
"""Name of the fragment → (row, col) of element *i* of thread *t*; groupID is t / 4, threadID_in_group t % 4."""
