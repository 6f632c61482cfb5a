"""Rungs with one of their ideas taken away, timed beside the rungs they come from and PyTorch's kernels.

    python benchmarks/ablations.py [--only heads_first] [--out DIR]

writes ablations.json to ``$OUT`` (else to the folder out), in the form of a ladder: every row has its errors, findings,
wavefronts, registers and, at lengths 4096 and 16384, TFLOP/s. About a minute on an H200; ``--only`` takes words of the
ablations' flags, with commas between.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from warploom.core.dtypes import bf16
from warploom.kernels.attention.problem import AttentionConfig
from warploom_lab.bench.attention import AttentionFamily, settled
from warploom_lab.bench.cells import parser_of
from warploom_lab.bench.evidence import write
from warploom_lab.bench.ladder import run_ladder
from warploom_lab.kernels.attention.ladder import FULL_LADDER
from warploom_lab.kernels.ladder import Rung

ABLATIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("1", ("async_copy=off",)),
    ("2", ("async_copy=off",)),
    ("7", ("swizzle=off",)),
    ("8", ("swizzle=off",)),
    ("8", ("tile_m=64",)),
    ("8", ("tile_m=64", "swizzle=off")),
    ("8", ("k_slices=off",)),
    ("8", ("opt_level=1",)),
    ("8", ("k_slices=off", "opt_level=1")),
    ("9", ("k_slices=off",)),
    ("1", ("heads_first=on",)),
    ("16", ("heads_first=on",)),
)
"""(rung, flags): what a rung would be without one of its ideas."""
LENGTHS = (4096, 16384)


def name(key: str, flags: tuple[str, ...]) -> str:
    """How an ablation is called in results: ``8 swizzle=off``."""
    return " ".join((key, *flags))


def ablated(key: str, flags: tuple[str, ...]) -> Rung[AttentionConfig]:
    """The rung with its flags set."""
    rung = settled(FULL_LADDER.rung(key), 128, bf16, dict(flag.split("=", 1) for flag in flags))
    return replace(rung, key=name(key, flags), name=f"{rung.name}, {' '.join(flags)}")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="words of their flags, with commas between")
    options = parser.parse_args()
    words = options.only.split(",")
    chosen = [(key, flags) for key, flags in ABLATIONS if any(word in " ".join(flags) for word in words)]
    whole = [FULL_LADDER.rung(key) for key in dict.fromkeys(key for key, _ in chosen)]
    rungs = [*whole, *(ablated(*one) for one in chosen)]
    result = run_ladder(AttentionFamily(), rungs, gpu_sizes=LENGTHS)
    write(options.out / "ablations.json", result.json())
    for row in result.rows:
        cells = {cell["seq"]: (round(cell["tflops"]["median"]), cell["ratio"]) for cell in row["gpu"]["cells"]}
        print(f"{row['rung']:>28}  {cells}  error {row['error']['value']:.2f}  findings {len(row['findings'])}")
    for text in (*result.notes, *result.problems):
        print(text)
    return int(bool(result.problems))


if __name__ == "__main__":
    sys.exit(main())
