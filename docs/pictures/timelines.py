"""Draws ``overlap.svg``: which unit works on which block in the kernels of tutorials/attention-kernel.md, not to scale.

python docs/pictures/timelines.py
"""

from __future__ import annotations

from pathlib import Path

UNITS = ("copies", "tensor cores", "softmax")
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1")  # of blocks 0, 1, 2 and 3
STEP, ROW, LEFT, TOP = 22, 24, 110, 34

Work = tuple[str, int, int, int, int]
"""Label, row, block, begin, end."""


def in_turn(*, ahead: bool) -> list[Work]:
    """Copy, S, softmax and P·V of a block one after the other; ``ahead``: the next copies run meanwhile."""
    period = 7 if ahead else 9
    work: list[Work] = []
    for block in range(3):
        start = 2 + block * period
        copied = start if not ahead or block == 0 else start - period + 2
        work += [("K V", 0, block, copied - 2, copied)]
        work += [("S", 1, block, start, start + 2), ("P", 2, block, start + 2, start + 5)]
        work += [("P·V", 1, block, start + 5, start + 7)]
    return work


def overlapped(first: int = 2, begin: int = 7, row: int = 2, period: int = 5) -> list[Work]:
    """S of the next block and P·V of this one are started together; the softmax runs beside P·V."""
    work: list[Work] = [("S", 1, 0, first, first + 2), ("P", row, 0, first + 2, first + 5)]
    for block in range(1, 4):
        start = begin + (block - 1) * period
        work += [("S", 1, block, start, start + 2), ("P·V", 1, block - 1, start + 2, start + 4)]
        work += [("P", row, block, start + 2, start + 5)]
    return work


def copies(*ends: int) -> list[Work]:
    """The copies of blocks 0, 1 …"""
    return [("K V", 0, block, end - 2, end) for block, end in enumerate(ends)]


PANELS = (
    ("1 · simple: one after the other", UNITS, in_turn(ahead=False)),
    ("2 · ring, 3 · roles: the next block is on its way", UNITS, in_turn(ahead=True)),
    ("4 · overlap: P·V of a block runs beside the softmax of the next", UNITS, overlapped() + copies(2, 4, 11, 16)),
    ("5 · persistent: two consumers keep the tensor cores busy", (*UNITS[:2], "softmax, first", "softmax, second"),
     overlapped(2, 7, 2, 8) + overlapped(4, 11, 3, 8) + copies(2, 4, 15, 23)),
)  # fmt: skip


def panel(title: str, units: tuple[str, ...], work: list[Work], top: int) -> list[str]:
    """One kernel's rows."""
    lines = [f'<text x="8" y="{top + 16}" font-weight="bold">{title}</text>']
    for number, unit in enumerate(units):
        y = top + TOP + number * ROW
        lines.append(f'<text x="8" y="{y + 14}">{unit}</text>')
        lines.append(f'<line x1="{LEFT}" x2="{LEFT + 28 * STEP}" y1="{y + 19}" y2="{y + 19}" stroke="#bbb"/>')
    for label, row, block, begin, end in work:
        x, y, width = LEFT + begin * STEP, top + TOP + row * ROW, (min(end, 28) - begin) * STEP
        if width <= 0:
            continue
        lines.append(f'<rect x="{x}" y="{y}" width="{width - 2}" height="18" rx="3" fill="{COLOURS[block]}"/>')
        lines.append(f'<text x="{x + width / 2 - 1}" y="{y + 13}" fill="white" text-anchor="middle">{label}</text>')
    return lines


def picture() -> str:
    """All panels as SVG."""
    lines: list[str] = []
    top = 4
    for title, units, work in PANELS:
        lines += panel(title, units, work, top)
        top += TOP + ROW * len(units) + 10
    width = LEFT + 28 * STEP + 10
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" width="{width}" height="{top}"'
    style = 'font-family="sans-serif" font-size="12" fill="#222"'
    return "\n".join([f"{head} {style}>", '<rect width="100%" height="100%" fill="white"/>', *lines, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_name("overlap.svg").write_text(picture(), encoding="utf-8")
