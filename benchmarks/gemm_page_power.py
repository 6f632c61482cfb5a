"""The parts of docs/evidence/ladder-gemm.md about power (see gemm_page.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from page_tables import markdown_table

HERE = Path(__file__).resolve().parent
KINDS = ("f16", "f32")
MULTIPROCESSORS = 132
TENSOR_CORES = 4
"""Of a multiprocessor."""
HMMA_FLOPS = 2 * 16 * 8 * 16
FULL_CLOCK = 1980
"""MHz of the H200's multiprocessors where power does not limit them."""
Row = Mapping[str, Any]


def sustained(evidence: Any) -> str:
    """TFLOP/s, watts, clock and TFLOP per joule of every rung alone, without a pause, at the last size."""
    body: list[list[str]] = []
    for kind in KINDS:
        for key in evidence.rows(kind):
            cell = evidence.cells(kind, key)[evidence.sizes(kind)[-1]]
            body.append([kind, key, *_power(cell["power"])])
        cublas = evidence.cells(kind, "02")[evidence.sizes(kind)[-1]]["peers"]["cublas"]
        body.append([kind, "00 cuBLAS", *_power(cublas["power"])])
    return markdown_table(["sums", "rung", "TFLOP/s", "W", "MHz", "TFLOP/J"], body)


def _power(row: Row | None) -> list[str]:
    return [_figure((row or {}).get(key)) for key in ("tflops", "watts", "sm_mhz", "tflop_per_joule")]


def power_table(rows: Mapping[str, Row]) -> str:
    """Watts, clock, TFLOP/s, TFLOP per joule and cycles per mma of each kernel under sustained load."""
    body = [
        [name, *(_figure(row.get(key)) for key in ("tflops", "watts", "sm_mhz", "tflop_per_joule", "cycles_per_mma"))]
        for name, row in rows.items()
        if "tflops" in row
    ]
    return markdown_table(["kernel", "TFLOP/s", "W", "MHz", "TFLOP/J", "cycles per mma and tensor core"], body)


def at_the_limit(evidence: Any) -> str:
    """What the sustained table says, in figures."""
    last = {kind: {k: c[evidence.sizes(kind)[-1]] for k in evidence.rows(kind) if (c := evidence.cells(kind, k))}
            for kind in KINDS}  # fmt: skip
    hot = [cell["power"] for kind in KINDS for key, cell in last[kind].items() if not key.startswith("01")]
    best16, best32 = (
        max((cell["power"] for key, cell in last[kind].items() if _by_mma(evidence.rows(kind)[key])),
            key=lambda power: power["tflops"])
        for kind in KINDS
    )  # fmt: skip
    cublas = last["f32"]["best32"]["peers"]["cublas"]["power"]
    clocks = [row["sm_mhz"] for row in hot]
    return (
        "From rung 02 on the GPU is at its power limit "
        f"({min(row['watts'] for row in hot):.0f} to {max(row['watts'] for row in hot):.0f} W), and the clock gives "
        f"way: {min(clocks):.0f} to {max(clocks):.0f} MHz, where the rungs with bank conflicts run at 1980. TFLOP/s "
        "is then TFLOP per joule times watts, and what a rung gains it gains in TFLOP per joule. cuBLAS has "
        f"{cublas['tflop_per_joule']:.2f}, the best `mma.sync` kernel {best16['tflop_per_joule']:.2f} with f16 and "
        f"{best32['tflop_per_joule']:.2f} with f32 accumulators: {best16['tflops'] / cublas['tflops']:.2f}× and "
        f"{best32['tflops'] / cublas['tflops']:.2f}× cuBLAS on large products under sustained load. Three quarters of "
        "cuBLAS with f32 sums would take "
        f"{0.75 * cublas['tflop_per_joule']:.2f} TFLOP/J."
    )


def layers(evidence: Any) -> str:
    """What the fastest ``mma.sync`` configuration reaches on the products of ``gemm_shapes.csv``, rested."""
    rows = evidence.products["shapes"]
    by_rows: dict[int, list[float]] = {}
    by_layout: dict[str, list[float]] = {}
    for row in rows:
        ratio = row["best mma.sync"] / row["cublas"]
        by_rows.setdefault(int(row["name"].rpartition(".m")[2]), []).append(ratio)
        by_layout.setdefault(row["weights"], []).append(ratio)
    (fewest, of_fewest), *others = [(m, _mean(ratios)) for m, ratios in sorted(by_rows.items())]
    parts = [f"{mean:.2f}× at {m}" for m, mean in others]
    (first, of_first), (second, of_second) = ((layout, _mean(ratios)) for layout, ratios in by_layout.items())
    return (
        "On the products of layers (geometric means, the fastest `mma.sync` configuration of each) it reaches "
        f"{of_fewest:.2f}× of cuBLAS at {fewest} rows, {', '.join(parts[:-1])} and {parts[-1]}; over all "
        f"{of_first:.2f}× with weights stored {first} and {of_second:.2f}× with {second}; the least is "
        f"{min(r for ratios in by_rows.values() for r in ratios):.2f}×. At {fewest} rows memory is the limit, which "
        "either instruction reaches; from 256 rows on the tensor cores are. [Every product](matmul-products.md)."
    )


def _mean(ratios: Sequence[float]) -> float:
    return math.prod(ratios) ** (1 / len(ratios))


def reading(evidence: Any) -> str:
    """What the power table says, in figures: the instruction alone, products at rest, products at the limit."""
    return "\n\n".join((_alone(evidence), _rested(evidence), _products_at_the_limit(evidence)))


def _alone(evidence: Any) -> str:
    rate, of32 = evidence.power["rate"], evidence.power["f32"]
    cycles = {name: rate[f"f32 64x64 mma{name}"]["cycles_per_mma"] for name in _FEEDS}
    alone, fragments = (_at_full_clock(rate[f"f32 64x64 mma{name}"]) for name in _FEEDS[:2])
    return (
        "**Alone**, with its operands in registers, an `mma.sync` keeps a tensor core busy for "
        f"{cycles[_FEEDS[0]]:.2f} cycles, and with the `ldmatrix` of 64×64 warp tiles for {cycles[_FEEDS[1]]:.2f}: "
        f"{alone:.0f} and {fragments:.0f} TFLOP/s at {FULL_CLOCK} MHz, if nothing else took time. Barriers as often as "
        f"the best product with `cp.async` has them make it {cycles[_FEEDS[2]]:.2f}, as many copies "
        f"{cycles[_FEEDS[3]]:.2f}, both {cycles[_FEEDS[4]]:.2f}; that product itself takes "
        f"{_best(of32)['cycles_per_mma']:.2f}. So it is neither fragments nor tensor cores: copies that threads "
        "issue and barriers of the whole CTA take the time. cuBLAS's take "
        f"{of32['cublas']['cycles_per_mma']:.2f} for as much, by `wgmma`, which reads B from shared memory once "
        "for 64 rows and keeps no fragments of it."
    )


_FEEDS = (" alone", " and ldmatrix", ", ldmatrix and barriers", ", ldmatrix and copies",
          ", ldmatrix, copies and barriers")  # fmt: skip
"""Of the kernels of ``gemm_power_h200.FEEDS``, behind "mma"."""


def _rested(evidence: Any) -> str:
    fragments = _at_full_clock(evidence.power["rate"]["f32 64x64 mma and ldmatrix"])
    best = {
        kind: max((evidence.cells(kind, key)[8192] for key, row in evidence.rows(kind).items() if _by_mma(row)),
                  key=_median)
        for kind in KINDS
    }  # fmt: skip
    cublas, reached = best["f32"]["peers"]["cublas"]["tflops"]["median"], _median(best["f32"])
    return (
        f"**Rested**, at N = 8192, three quarters of cuBLAS are {0.75 * cublas:.0f} TFLOP/s, "
        f"{0.75 * cublas / fragments:.0%} of what `mma.sync` and `ldmatrix` alone reach at the full clock. The best "
        f"product with f32 accumulators reaches {reached:.0f}, {reached / fragments:.0%} of it and "
        f"{reached / cublas:.2f}× cuBLAS; with f16 {_median(best['f16']):.0f}."
    )


def _by_mma(row: Row) -> bool:
    """Whether a rung's kernel multiplies by ``mma.sync``."""
    return "consumers" not in row["config"]


def _median(cell: Row) -> float:
    return cell["tflops"]["median"]


def _products_at_the_limit(evidence: Any) -> str:
    rate, of16, of32 = (evidence.power[part] for part in ("rate", "f16", "f32"))
    cublas = of32["cublas"]
    best = {"f16": _best(of16), "f32": _best(of32)}
    over = {kind: row["tflops"] / cublas["tflops"] for kind, row in best.items()}
    watts = [row["watts"] for part in (of16, of32) for row in part.values() if "watts" in row]
    clocks = [row["sm_mhz"] for part in (of16, of32) for row in part.values() if "watts" in row]
    alone, fragments = (rate[f"f32 64x64 mma {what}"] for what in ("alone", "and ldmatrix"))
    joules = [1.0 / row["tflop_per_joule"] for row in (alone, fragments, best["f32"])]
    shares = [joules[0] / joules[2], (joules[1] - joules[0]) / joules[2], (joules[2] - joules[1]) / joules[2]]
    return (
        f"**Under sustained load** all products run at the power limit: {min(watts):.0f} to {max(watts):.0f} W, at "
        f"{min(clocks):.0f} to {max(clocks):.0f} MHz. So TFLOP/s is TFLOP per joule times watts, and a kernel is "
        "slower among hot neighbours than among the ladder's slow rungs. Three quarters of cuBLAS would take "
        f"{0.75 * cublas['tflop_per_joule']:.2f} TFLOP/J. `mma.sync` with its fragments alone has "
        f"{fragments['tflop_per_joule']:.2f}, the best kernel here {best['f32']['tflop_per_joule']:.2f} with f32 "
        f"accumulators and {best['f16']['tflop_per_joule']:.2f} with f16: {over['f32']:.2f}× and {over['f16']:.2f}× "
        f"cuBLAS. Of the energy of the best product with f32 accumulators, {shares[0]:.0%} is what `mma.sync` alone "
        f"takes, {shares[1]:.0%} its fragments, and {shares[2]:.0%} the rest: tiles on their way from memory to shared "
        "memory, epilogues, waiting. The rest is what larger tiles lower."
    )


def _at_full_clock(row: Row) -> float:
    """TFLOP/s of so many cycles per mma, were the clock :data:`FULL_CLOCK`."""
    return MULTIPROCESSORS * TENSOR_CORES * HMMA_FLOPS / row["cycles_per_mma"] * FULL_CLOCK / 1e6


def _best(rows: Mapping[str, Row]) -> Row:
    """The fastest of our kernels."""
    return max((row for name, row in rows.items() if name != "cublas" and "tflops" in row), key=lambda r: r["tflops"])


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"
