"""The pictures of the pages: which unit works on which block in each step of the tutorial, not to scale, and layouts.

python docs/pictures/steps.py

The site's build draws them too. Each is a grid or a drawing of :mod:`warploom.layout.draw`.
"""

from __future__ import annotations

from pathlib import Path

from warploom.checking.kernel_file import check_kernel, one_kernel
from warploom.checking.timeline import drawing
from warploom.emulate import recorded
from warploom.layout import SharedLayout, Swizzle, mma_fragment
from warploom.layout.catalogue import wgmma_accumulator
from warploom.layout.draw import Cell, Drawing, Grid, draw_banks, draw_elements, tone

UNITS = ("copies", "tensor cores", "softmax")

LAST = 24
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


def timeline(title: str, units: tuple[str, ...], work: list[Work]) -> Grid:
    """A row for each unit and a column for each unit of time; a colour for each block."""
    cells = [[Cell("") for _ in range(LAST)] for _ in units]
    for label, row, block, begin, end in work:
        for time in range(begin, min(end, LAST)):
            cells[row][time] = Cell(label, str(block), tone(3 * block), f"{label} of block {block}")
    times = tuple(str(time) for time in range(LAST))
    return Grid(title, times, units, tuple(map(tuple, cells)), gap=(0, 0), cell_size=(34, 32), corner="time")


ROLES = ("producer: copies", "consumer: tensor cores", "consumer: softmax")
TWO_CONSUMERS = ("producer: copies", "tensor cores", "consumer 1: softmax", "consumer 2: softmax")
KEYS = SharedLayout(64, 64, 2, Swizzle.for_row_bytes(128))


STEPS = Path(__file__).parents[2] / "examples" / "attention_steps.py"


def run_of(name: str) -> Drawing:
    """What a step of the tutorial did on the emulator."""
    with recorded():
        checked = check_kernel(one_kernel(f"{STEPS}:{name}"))
    assert checked.emulation.recording is not None
    return drawing(f"{name}: a run on the emulator", checked.program, checked.emulation.recording)


def pictures() -> dict[str, Grid | Drawing]:
    """Each picture by the name of its file."""
    persistent = overlapped(2, 7, 2, 8) + overlapped(4, 11, 3, 8) + copies(2, 4, 15, 23)
    return {
        "step-1-simple": timeline("simple: one after the other", UNITS, in_turn(ahead=False)),
        "step-1-keys": draw_banks(KEYS, rows=8),
        "step-2-ring": timeline("ring: the next block is on its way", UNITS, in_turn(ahead=True)),
        "step-3-roles": timeline("roles: another thread copies", ROLES, in_turn(ahead=True)),
        "step-3-accumulator": draw_elements(wgmma_accumulator(8)),
        "step-3-run": run_of("roles"),
        "step-4-overlap": timeline("overlap: P·V beside the next softmax", ROLES, overlapped() + copies(2, 4, 11, 16)),
        "step-5-persistent": timeline("persistent: consumers fill gaps", TWO_CONSUMERS, persistent),
        "mma-accumulator": draw_elements(mma_fragment("m16n8k16", "C")),
    }


def draw(folder: Path) -> None:
    """Write them as SVG."""
    for name, picture in pictures().items():
        (folder / f"{name}.svg").write_text(picture.svg(), encoding="utf-8")


if __name__ == "__main__":
    draw(Path(__file__).parent)
