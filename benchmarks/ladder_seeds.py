"""The seeds' printed figures held beside ours: tables and verdicts for docs/evidence/ladder-attention.md."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from page_tables import markdown_table

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


def published(name: str) -> dict[str, int]:
    """Counts of one published listing, by its name in attention_sass_counts.csv."""
    return _listings()[name]


def seed_counts() -> dict[str, dict[str, int]]:
    """Counts of the seeds' published SASS by rung, in the tile that this ladder has (from rung 8 on the A100's)."""
    rows = _listings()
    names = {str(n): str(n) for n in range(1, 7)} | {"7": "7_64_64_swizzling"}
    names |= {str(n): f"{n}_A100" for n in range(8, 17)}
    return {rung: rows[name] for rung, name in names.items()}


def _listings() -> dict[str, dict[str, int]]:
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


def register_need() -> str:
    """Part 3's table: registers per thread for each tensor held whole, derived from the fragments' layouts."""
    rows, columns, depth, warps = TILE
    per_warp = rows // warps
    operands = {
        "Q": ("A", per_warp, depth), "K": ("B", depth, columns), "V": ("B", columns, depth),
        "S": ("C", per_warp, columns), "P": ("A", per_warp, columns), "O": ("C", per_warp, depth),
    }  # fmt: skip
    need = {name: _registers(operand, *shape) for name, (operand, *shape) in operands.items()}
    # A lane of a 16-row accumulator holds two rows: one maximum and one sum for each.
    need |= {"m": per_warp // 8, "l": per_warp // 8}
    seeds = seed_figures()["register_need_part3"]
    body = [[n, str(seeds[n]), str(count), verdict(seeds[n] == count, "see above")] for n, count in need.items()]
    total = sum(need.values())
    body.append(["all", str(sum(seeds.values())), str(total), verdict(sum(seeds.values()) == total, "see above")])
    return markdown_table(["tensor", "seed", "from our layouts", ""], body)


def _registers(operand: str, rows: int, columns: int) -> int:
    """32-bit registers per thread of a (rows, columns) tile as fragments of m16n8k16, 16-bit operands."""
    fragment = mma_fragment("m16n8k16", operand)
    tall, wide = fragment.shape
    return fragment.registers * (rows // tall) * (columns // wide)


def types_apart(kernels: Kernels, others: Kernels) -> str:
    """How far the same kernels of another type are apart, in instructions of an iteration."""
    changes = [row["loop_instructions"] / others[name]["loop_instructions"] - 1 for name, row in kernels.items()]
    return f"{min(changes):+.1%} to {max(changes):+.1%}".replace("-", "−")


def shares_table(rows: Mapping[str, Mapping[str, Any]], bf16_rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Shares of FlashAttention-2 at length 4096, and each rung's step from the one before: the seed's A100 and ours."""
    seed = {key: share / 100 for key, share in seed_figures()["percent_of_flash"]["a100"].items()}
    ours, bf16 = ({key: _flash_share(row) for key, row in of_type.items()} for of_type in (rows, bf16_rows))
    body = [
        [key, *(f"{share[key]:.2f}" if key in share else "–" for share in (seed, ours, bf16)),
         *(f"{share[key] / share[before]:.2f}×" if before in share else "–" for share in (seed, ours))]
        for before, key in zip(["", *seed], seed, strict=False) if key in ours
    ]  # fmt: skip
    return markdown_table(
        ["rung", "seed, fp16", "here, fp16", "here, bf16", "seed, over the rung before", "here"], body
    )


def _flash_share(row: Mapping[str, Any]) -> float:
    (cell,) = (cell for cell in row["gpu"]["cells"] if cell["seq"] == SEQ)
    return float(cell["ratio"]["torch_flash"])


def spill_table(kernels: Kernels) -> str:
    """Part 5's table: stack, spill stores and loads (bytes) and registers of rungs 3 and 4 at five tiles."""
    seeds = seed_figures()
    body: list[list[str]] = []
    for tile, of_tile in seeds["spills_part5"].items():
        ours = {key: [kernels[f"{key} {tile} sm_80 -O3"][c] for c in seeds["spill_columns"]] for key in ("3", "4")}
        spills = [(of_tile["3"][1], of_tile["4"][1]), (ours["3"][1], ours["4"][1])]
        close = all(near(a, b) for key in ("3", "4") for a, b in zip(ours[key][:3], of_tile[key][:3], strict=True))
        fits = close and all(near(ours[key][3], of_tile[key][3]) for key in ("3", "4"))
        body.append([tile, *(_four(of_tile[k]) for k in ("3", "4")), *(_four(ours[k]) for k in ("3", "4")),
                     verdict(fits, _spill_reason(spills, ours, of_tile))])  # fmt: skip
    header = ["tile", "seed, rung 3", "seed, rung 4", "here, rung 3", "here, rung 4", ""]
    return markdown_table(header, body)


def _four(figures: Sequence[int]) -> str:
    return " / ".join(map(str, figures))


def _spill_reason(
    spills: Sequence[Sequence[int]], ours: Mapping[str, Sequence[int]], theirs: Mapping[str, Sequence[int]]
) -> str:
    if any(spills[0]) or any(spills[1]):
        seed, here = (f"{1 - after / before:.0%}" for before, after in spills)
        return f"this ptxas spills less; the step from 3 to 4 saves {here} of the spill stores, there {seed}"
    less = ", ".join(f"{theirs[k][3] - ours[k][3]}" for k in ("3", "4"))
    return f"no spills on either side; this ptxas needs {less} registers fewer"


def counts_table(kernels: Kernels) -> str:
    """Registers, instructions, addresses, address arithmetic and copies of every rung beside the seeds' SASS."""
    body: list[list[str]] = []
    for rung, seed in seed_counts().items():
        kernel = kernels[f"{rung} sm_80 -O3"]
        ours = _figures(kernel["counts"]) | {
            "registers": kernel["registers"], "instructions": kernel["instructions"],
            "LDSM addr.": kernel["ldsm_address_registers"], "LDGSTS addr.": kernel["ldgsts_address_registers"],
        }  # fmt: skip
        theirs = _figures(seed) | {
            "registers": seed["registers"], "instructions": seed["instructions"],
            "LDSM addr.": seed["ldsm_address_registers"], "LDGSTS addr.": seed["ldgsts_address_registers"],
        }  # fmt: skip
        names = ("registers", "instructions", "LDSM addr.", "LDGSTS addr.", *_GROUPS)
        apart = [name for name in names if not near(ours[name], theirs[name])]
        reasons = "; ".join(_reason(name, rung, kernel) for name in apart)
        cells = [f"{theirs[name]} → {ours[name]}" for name in names]
        body.append([rung, *cells, verdict(not apart, reasons)])
    header = ["rung", "registers", "instructions", "LDSM addresses", "LDGSTS addresses", *_GROUPS, ""]
    return markdown_table(header, body)


_GROUPS: dict[str, tuple[str, ...]] = {
    "HMMA": ("HMMA",),
    "LDSM": ("LDSM",),
    "LDGSTS": ("LDGSTS",),
    "LOP3+SHF+SHL": ("LOP3", "SHF", "IMAD.SHL"),
    "moves": ("MOV", "IMAD.MOV"),
    "CS2R": ("CS2R",),
    "STL+LDL": ("STL", "LDL"),
}


def _figures(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: sum(counts.get(opcode, 0) for opcode in opcodes) for name, opcodes in _GROUPS.items()}


def _reason(name: str, rung: str, kernel: Mapping[str, Any]) -> str:
    """What in our SASS makes a figure another than the seed's."""
    counts, loop = _figures(kernel["counts"]), _figures(kernel["loop_counts"])
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


def claims_table(kernels: Kernels) -> str:
    """The sentences of part 8 with figures, one row each."""
    seeds = seed_figures()
    seven, eight, nine, ten = (kernels[f"{key} sm_80 -O3"] for key in ("7", "8", "9", "10"))
    small = kernels["8 (64,64,4) sm_80 -O3"]
    body: list[list[str]] = []

    def add(what: str, theirs: Sequence[int], ours: Sequence[int], reason: str) -> None:
        body.append([what, _arrow(theirs), _arrow(ours), verdict(same_change(ours, theirs), reason)])

    for name, key in (("LDSM", "ldsm_address_registers"), ("LDGSTS", "ldgsts_address_registers")):
        pair = seeds["address_registers_part8"][name]
        add(f"address registers of {name} at (64,64,4), rungs 7 → 8", pair, [seven[key], small[key]], "")
    columns = seeds["spill_columns"][:3]
    for other, note in (("7 (128,64,4)", "Q held whole"), ("7 (128,64,4) load_2_2_2", "Q in slices, as in rung 8")):
        before = kernels[f"{other} sm_80 -O3"]
        for index, column in enumerate(columns):
            pair = [seeds["spills_part8"][key][index] for key in ("7", "8")]
            what = f"{column.replace('_', ' ')} at (128,64,4), rungs 7 → 8 ({note})"
            add(what, pair, [before[column], eight[column]], "this ptxas spills less already before the step")
    for name, pair in seeds["copies_part8"].items():
        ours = [kernel["counts"].get(name, 0) for kernel in (eight, nine)]
        add(f"{name} at (128,64,4), rungs 8 → 9", pair, ours, "")
    zeroing = [seeds["zeroing_part8"][key] for key in ("9", "10")]
    add("CS2R, rungs 9 → 10", zeroing, [kernel["counts"].get("CS2R", 0) for kernel in (nine, ten)], "")
    return markdown_table(["figure", "seed", "here", ""], body)


def _arrow(pair: Sequence[int]) -> str:
    return " → ".join(map(str, pair))
