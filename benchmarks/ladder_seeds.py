"""The seeds' printed figures held beside ours: verdicts for docs/evidence/ladder-attention.md."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from warploom.layout.catalogue import mma_fragment

SEEDS = Path(__file__).resolve().parent / "seeds"
Kernels = Mapping[str, Mapping[str, Any]]
NEAR = 0.15
"""Figures this close, relatively, count as reproduced."""
CHANGE = 2 / 3
"""A change is reproduced if ours is in the same direction and at least this share of the seed's, relatively."""
SEQ = 4096
"""The length of the seeds' shares of FlashAttention-2."""
TILE = (64, 64, 128, 4)
"""tile_m, tile_n, head_dim and warps of part 3's table."""


def seed_figures() -> dict[str, Any]:
    """What the texts and their authors' repositories print."""
    return json.loads((SEEDS / "attention.json").read_text(encoding="utf-8"))


def listings() -> dict[str, dict[str, int]]:
    """Counts of the published listings, by their names."""
    with (SEEDS / "attention_sass_counts.csv").open(encoding="utf-8", newline="") as file:
        return {row.pop("kernel"): {name: int(value) for name, value in row.items()} for row in csv.DictReader(file)}


def near(ours: float, theirs: float) -> bool:
    """Whether two figures agree (to :data:`NEAR`, or to 2 where they are small)."""
    return abs(ours - theirs) <= max(2, NEAR * abs(theirs))


def same_change(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether a figure that falls (or rises) from first to second in the seeds does so here, about as much."""
    wanted, found = (1 - pair[1] / pair[0] if pair[0] else 0.0 for pair in (theirs, ours))
    return (found == wanted == 0.0) or (wanted != 0 and found / wanted >= CHANGE)


def verdict(reproduced: bool, reason: str) -> str:
    """``reproduced``, or ``different`` with the reason."""
    return "reproduced" if reproduced else f"different: {reason}"


def register_need(published: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """Part 3's table: registers per thread for each tensor held whole, the seed's and derived from our layouts."""
    rows, columns, depth, warps = TILE
    per_warp = rows // warps
    operands = {
        "Q": ("A", per_warp, depth),
        "K": ("B", depth, columns),
        "V": ("B", columns, depth),
        "S": ("C", per_warp, columns),
        "P": ("A", per_warp, columns),
        "O": ("C", per_warp, depth),
    }
    need: dict[str, int] = {}
    for name, (operand, tall, wide) in operands.items():
        fragment = mma_fragment("m16n8k16", operand)
        need[name] = fragment.registers * (tall // fragment.shape[0]) * (wide // fragment.shape[1])
    # A lane of a 16-row accumulator holds two rows: one maximum and one sum for each.
    need |= {"m": per_warp // 8, "l": per_warp // 8}
    theirs = published["register_need_part3"]
    found = [(name, theirs[name], count) for name, count in need.items()]
    return [*found, ("all", sum(theirs.values()), sum(need.values()))]


LDMATRIX_SHAPES = ((16, 16), (32, 8), (8, 32))
"""Rows and columns of the four 8×8 matrices that one ldmatrix.x4 may load (part 8)."""
SWIZZLED_COLUMNS = 64
"""Elements of a row of a region that the XOR permutes: 128 bytes."""
OPERANDS = {
    "Q, an A operand": [(0, 0), (1, 0), (0, 1), (1, 1)],
    "K, a B operand": [(0, 0), (0, 1)],
    "V, a transposed B operand": [(0, 0), (1, 0)],
}
"""8×8 matrices (row, column) of an mma's operand in memory, in the order of its registers."""


def ldmatrix_shapes() -> Iterator[tuple[str, int, list[str]]]:
    """Each shape: its places along a swizzled row; of each operand loads before its first mma and registers to move.

    The matrices of a load come in any order, but its registers lie side by side and belong to what it has loaded.
    """
    for rows, cols in LDMATRIX_SHAPES:
        found: list[str] = []
        for matrices in OPERANDS.values():
            loads = Counter((row // (rows // 8), col // (cols // 8)) for row, col in matrices)
            found.append(f"{len(loads)}, {len(matrices) - max(loads.values())}")
        yield f"{rows}×{cols}", SWIZZLED_COLUMNS // cols, found


def buffered(search: Mapping[str, Any]) -> list[float]:
    """How much a double buffer of fragments changes each configuration of a search that has both."""
    glance: Mapping[str, float] = search.get("glance", {})
    pairs = ((rate, glance.get(name.replace("+buffer", ""))) for name, rate in glance.items() if "+buffer" in name)
    return [rate / plain - 1 for rate, plain in pairs if plain]


def types_apart(kernels: Kernels, others: Kernels) -> str:
    """How far the same kernels of another type are apart, in instructions of an iteration."""
    changes = [row["loop_instructions"] / others[name]["loop_instructions"] - 1 for name, row in kernels.items()]
    return f"{min(changes):+.1%} to {max(changes):+.1%}".replace("-", "−")


def shares(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Shares of FlashAttention-2 at length 4096."""
    cells = {key: (c for c in row["gpu"]["cells"] if c["seq"] == SEQ) for key, row in rows.items()}
    return {key: float(next(of)["ratio"]["torch_flash"]) for key, of in cells.items()}


def spilled_at(kernels: Kernels, published: Mapping[str, Any], tile: str) -> dict[str, list[int]]:
    """Part 5's table: stack, spill stores and loads (bytes) and registers of rungs 3 and 4 at a tile."""
    return {key: [kernels[f"{key} {tile} sm_80 -O3"][c] for c in published["spill_columns"]] for key in ("3", "4")}


def spill_verdict(ours: Mapping[str, Sequence[int]], theirs: Mapping[str, Sequence[int]]) -> str:
    """Whether the spills are the seed's; else how much the step from rung 3 to 4 saves on either side."""
    fits = all(near(a, b) for key in ("3", "4") for a, b in zip(ours[key], theirs[key], strict=True))
    spills = [(of["3"][1], of["4"][1]) for of in (theirs, ours)]
    if any(map(any, spills)):
        seed, here = (f"{1 - after / before:.0%}" for before, after in spills)
        reason = f"this ptxas spills less; the step from 3 to 4 saves {here} of the spill stores, there {seed}"
    else:
        less = ", ".join(f"{theirs[k][3] - ours[k][3]}" for k in ("3", "4"))
        reason = f"no spills on either side; this ptxas needs {less} registers fewer"
    return verdict(fits, reason)


GROUPS: dict[str, tuple[str, ...]] = {
    "HMMA": ("HMMA",),
    "LDSM": ("LDSM",),
    "LDGSTS": ("LDGSTS",),
    "LOP3+SHF+SHL": ("LOP3", "SHF", "IMAD.SHL"),
    "moves": ("MOV", "IMAD.MOV"),
    "CS2R": ("CS2R",),
    "STL+LDL": ("STL", "LDL"),
}


def counts(kernels: Kernels) -> Iterator[list[str]]:
    """Registers, instructions, addresses, address arithmetic and copies of every rung beside the seeds' SASS."""
    published = listings()
    names = {str(n): str(n) for n in range(1, 7)} | {"7": "7_64_64_swizzling"}  # in the tile that this ladder has
    for rung, listing in (names | {str(n): f"{n}_A100" for n in range(8, 17)}).items():
        kernel, seed = kernels[f"{rung} sm_80 -O3"], published[listing]
        ours, theirs = _figures(kernel, kernel["counts"]), _figures(seed, seed)
        apart = [name for name in ours if not near(ours[name], theirs[name])]
        reasons = "; ".join(_reason(name, rung, kernel) for name in apart)
        yield [rung, *(f"{theirs[name]} → {ours[name]}" for name in ours), verdict(not apart, reasons)]


def _figures(kernel: Mapping[str, Any], opcodes: Mapping[str, int]) -> dict[str, int]:
    return {
        "registers": kernel["registers"],
        "instructions": kernel["instructions"],
        "LDSM addr.": kernel["ldsm_address_registers"],
        "LDGSTS addr.": kernel["ldgsts_address_registers"],
        **_groups(opcodes),
    }


def _groups(opcodes: Mapping[str, int]) -> dict[str, int]:
    return {name: sum(opcodes.get(opcode, 0) for opcode in of) for name, of in GROUPS.items()}


def _reason(name: str, rung: str, kernel: Mapping[str, Any]) -> str:
    """What in our SASS makes a figure another than the seed's."""
    counts, loop = _groups(kernel["counts"]), _groups(kernel["loop_counts"])
    if name == "LOP3+SHF+SHL":
        return f"{counts[name] - loop[name]} of the {counts[name]} shifts and logic stand outside of the main loop"
    if name == "moves":
        return f"{loop[name]} of {counts[name]} moves in the loop: another register allocation"
    if name == "registers":
        return "this ptxas allocates fewer registers" if int(rung) < 8 else "register allocation"
    if name == "STL+LDL":
        return f"{counts[name]} spill instructions, {loop[name]} of them in the loop"
    if name == "LDGSTS addr.":
        return f"this ptxas keeps {kernel['ldgsts_address_registers']} LDGSTS destinations"
    if name == "LDSM addr.":
        held = f"this ptxas keeps {kernel['ldsm_address_registers']} LDSM bases"
        return f"{held}: the unswizzled layout is linear, the rest are immediate offsets" if rung == "1" else held
    if name == "CS2R":
        return f"{counts[name]} CS2R stand before the loop"
    return f"{counts[name] if name in counts else kernel['instructions']} here"


def claims(kernels: Kernels, published: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[int], Sequence[int], str]]:
    """The sentences of part 8 with figures: what, the seed's pair, ours, and why ours is another where it is."""
    seven, eight, nine, ten = (kernels[f"{key} sm_80 -O3"] for key in ("7", "8", "9", "10"))
    small = kernels["8 (64,64,4) sm_80 -O3"]
    for name, key in (("LDSM", "ldsm_address_registers"), ("LDGSTS", "ldgsts_address_registers")):
        pair = published["address_registers_part8"][name]
        yield f"address registers of {name} at (64,64,4), rungs 7 → 8", pair, [seven[key], small[key]], ""
    for other, note in (("7 (128,64,4)", "Q held whole"), ("7 (128,64,4) load_2_2_2", "Q in slices, as in rung 8")):
        before = kernels[f"{other} sm_80 -O3"]
        for index, column in enumerate(published["spill_columns"][:3]):
            pair = [published["spills_part8"][key][index] for key in ("7", "8")]
            what = f"{column.replace('_', ' ')} at (128,64,4), rungs 7 → 8 ({note})"
            yield what, pair, [before[column], eight[column]], "this ptxas spills less already before the step"
    for name, pair in published["copies_part8"].items():
        yield f"{name} at (128,64,4), rungs 8 → 9", pair, [k["counts"].get(name, 0) for k in (eight, nine)], ""
    zeroing = [published["zeroing_part8"][key] for key in ("9", "10")]
    yield "CS2R, rungs 9 → 10", zeroing, [kernel["counts"].get("CS2R", 0) for kernel in (nine, ten)], ""
