"""Hardware counters of every matmul rung, and the emulator's wavefronts beside ncu's, in one run.

    PYTHONPATH=src python benchmarks/profile_gemm_h200.py [--rung 01b,02] [--size 4096] [--out DIR]

writes profile-gemm.json to DIR ($OUT by default): the wavefronts of shared memory from both sides on small
products that the emulator runs as well, then counters and samples of every rung on a square product. What ncu refuses
is written with the reason. Exit code 1 if something was refused, or if ncu and the emulator count differently where
``gemm_page_counters.reason`` has no reason.
"""

from __future__ import annotations

import sys
from typing import Any

from gemm_page_counters import RAGGED, UNALIGNED, WHOLE, reason
from profile_h200 import beside_emulator, together

from warploom_lab.bench.cells import parser_of
from warploom_lab.bench.evidence import environment, write
from warploom_lab.bench.gemm import GemmFamily
from warploom_lab.bench.ncu import ncu_version
from warploom_lab.bench.profile import GemmLaunch
from warploom_lab.kernels.matmul.ladder import LADDER

SMALL = {WHOLE: (256, 256, 256), RAGGED: (328, 320, 192), UNALIGNED: (328, 264, 200)}
"""m, n and k of the products that both count."""
RUNGS = [rung.key for rung in LADDER.rungs]
UNHINTED = ("04", "05", "06")
"""Rungs with rows of 128 bytes: at -O1 ptxas gives their copies no prefetch hint, and both sides must agree."""


def both_sides(launches: dict[tuple[str, str], GemmLaunch]) -> dict[str, dict[str, Any]]:
    """{rung: {product: {class of access: {"emulator", "ncu"}}, or {"refused": why}}} of {(rung, product): launch}."""
    counted = (
        together({" ".join(key): one for key, one in launches.items()}, tables=("wavefronts",), samples=False)
        if launches
        else {}
    )
    found: dict[str, dict[str, Any]] = {}
    for (rung, product), one in launches.items():
        profile = counted[f"{rung} {product}"]
        found.setdefault(rung, {})[product] = (
            {"refused": profile}
            if isinstance(profile, str)
            else beside_emulator(profile, GemmFamily(one.m, one.n, one.k), one.config)
        )
    return found


def unexplained(rung: str, products: dict[str, Any], *, hinted: bool = True) -> list[str]:
    """Where the two sides differ without a reason, or nothing was counted; without the hint nothing is a reason."""
    return [
        f"{product}: {kind} {pair}"
        for product, counted in products.items()
        for kind, pair in counted.items()
        if kind == "refused" or (pair["emulator"] != pair["ncu"] and not (hinted and reason(rung, product, kind)))
    ]


def main() -> int:
    """Measure, write, and say where the two sides differ."""
    parser = parser_of(__doc__)
    parser.add_argument("--rung", default=",".join(RUNGS), help="with commas between")
    parser.add_argument("--size", type=int, default=4096)
    options = parser.parse_args()
    file = options.out / "profile-gemm.json"
    rungs, failed = options.rung.split(","), False
    made = environment(None) | {"ncu": ncu_version()}
    launches = {(key, name): GemmLaunch(key, *size) for key in rungs for name, size in SMALL.items()}
    unhinted = {
        (key, name): GemmLaunch(key, *SMALL[name], settings=("opt_level=1",))
        for key in UNHINTED
        if key in rungs
        for name in (WHOLE, RAGGED)
    }
    rows: dict[str, Any] = {key: {"wavefronts": counted} for key, counted in both_sides(launches).items()}
    result: dict[str, Any] = {"environment": made, "size": options.size, "small": SMALL, "rungs": rows}
    result["without the hint"] = both_sides(unhinted)
    write(file, result)
    apart = {key: unexplained(key, row["wavefronts"]) for key, row in rows.items()}
    apart |= {f"{key} at -O1": unexplained(key, row, hinted=False) for key, row in result["without the hint"].items()}
    for key, texts in apart.items():
        failed |= bool(texts)
        print(f"{key}: wavefronts {f'differ: {texts}' if texts else 'equal, or different for a known reason'}")
    large = together({key: GemmLaunch(key, *(3 * [options.size])) for key in rungs})
    for key, profile in large.items():
        if isinstance(profile, str):
            rows[key]["refused"], failed = profile, True
        else:
            rows[key]["counters"] = counters = profile.json()
            print(f"{key}: pipes {counters.get('pipes, %')}, memory {counters.get('memory, %')}")
    write(file, result)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
