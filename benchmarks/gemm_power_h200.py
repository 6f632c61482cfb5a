"""What ``mma.sync`` can reach on one GPU: each kernel under sustained load, with its watts, clock and TFLOP per joule.

    PYTHONPATH=src python benchmarks/gemm_power_h200.py [--parts rate,f32,f16] [--size 8192] [--out DIR]

writes ``gemm-power.json`` to DIR ($OUT by default). ``rate`` is ``mma.sync`` alone, and with what feeds it in such
warp tiles: ``ldmatrix``, copies, barriers; ``f32`` and ``f16`` are configurations beside cuBLAS, on
random inputs. Each kernel runs alone and without a pause for about a second, so that it meets the power limit by
itself: the clock and the energy tell whether it is bound by power, and cycles per instruction whether by anything else.
Needs torch with CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mma_rate
import numpy as np
import torch
from mma_rate import Feeds
from scripts import log

from warploom.core.dtypes import DType, f16, f32
from warploom.core.errors import WarploomError
from warploom.core.targets import target
from warploom.kernels.matmul.problem import contiguous_problem
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.measure.timing import Candidate
from warploom.ops.backends import GpuCall
from warploom_lab.bench.cells import TorchGpu, compile_all, parser_of
from warploom_lab.bench.evidence import write
from warploom_lab.bench.gemm import GemmFamily, Square
from warploom_lab.kernels.ladder import Rung
from warploom_lab.kernels.matmul.ladder import BEST

HMMA_FLOPS = 2 * 16 * 8 * 16
TENSOR_CORES_PER_SM = 4
RATE_ROUNDS = 4000
CHECKED = 776
"""Extent of the product that a configuration is checked on: ragged for every tile."""


def sustained(gpu: TorchGpu, candidate: Candidate, calls: int, flops: int) -> dict[str, Any]:
    """A graph of calls under sustained load; with the tensor cores' cycles per ``mma.sync`` at the clock there."""
    row = gpu.power(gpu.graphed(candidate, calls), calls * flops)
    if row is None:
        return {"refused": "no power can be read on this GPU"}
    if row["sm_mhz"] is not None:
        at_once = HMMA_FLOPS * multiprocessors() * TENSOR_CORES_PER_SM
        row["cycles_per_mma"] = round(row["sm_mhz"] * at_once / row["tflops"] / 1e6, 2)
    return row


def multiprocessors() -> int:
    """Those of GPU 0."""
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


FEEDS = {
    "mma alone": Feeds(),
    "mma and ldmatrix": Feeds(loads=True),
    "mma, ldmatrix and barriers": Feeds(loads=True, barriers=True),
    "mma, ldmatrix and copies": Feeds(loads=True, copies=3),
    "mma, ldmatrix, copies and barriers": Feeds(loads=True, copies=3, barriers=True),
}
"""What runs beside mma.sync; three copies per thread and step are those of BM=128, BN=256 by eight warps."""
RATES = (
    (f32, 64, 64, tuple(FEEDS)),
    (f32, 96, 64, ("mma and ldmatrix",)),
    (f16, 64, 64, ("mma alone", "mma and ldmatrix")),
    (f16, 128, 64, ("mma and ldmatrix",)),
)
"""Accumulators, warp tile and what beside; held fragments of the larger tiles would take too many registers."""


def rates(gpu: TorchGpu) -> Iterator[tuple[str, dict[str, Any]]]:
    """``mma.sync`` alone and with what feeds it."""
    source = torch.randn(multiprocessors() * mma_rate.copied(copies=3), device="cuda").half()
    for accumulate, warp_m, warp_n, feeds in RATES:
        for feed in feeds:
            name = f"{accumulate.name} {warp_m}x{warp_n} {feed}"
            try:
                yield name, _rate(gpu, name, source, FEEDS[feed], (accumulate, warp_m, warp_n))
            except (WarploomError, RuntimeError) as failure:
                yield name, {"refused": str(failure)[:300]}


def _rate(gpu: TorchGpu, name: str, source: Any, feeds: Feeds, tile: tuple[DType, int, int]) -> dict[str, Any]:
    """One kernel of :mod:`mma_rate` under sustained load."""
    (accumulate, warp_m, warp_n), sms = tile, multiprocessors()
    program = mma_rate.mma_rate.trace(warp_m=warp_m, warp_n=warp_n, accumulate=accumulate, feeds=feeds)
    words = torch.from_numpy(mma_rate.inputs(np.random.default_rng(0), warp_m, warp_n)).cuda()
    out = torch.full((sms * program.threads,), math.nan, device="cuda")
    call = GpuCall.prepare(program, (sms, 1, 1), {"rounds": RATE_ROUNDS}, 0)
    pointers = (words.data_ptr(), source.data_ptr(), out.data_ptr())
    flops = sms * RATE_ROUNDS * mma_rate.flops(program.threads // 32, warp_m, warp_n)
    row = sustained(gpu, Candidate(name, lambda _: call.launch_again(pointers, "torch")), 1, flops)
    if not bool(out.isfinite().all()):
        row["wrong"] = "not every sum is finite"
    return row


TILES = (
    (128, 128, 64, 64, 64, 3),
    (128, 128, 32, 64, 64, 4),
    (256, 128, 32, 64, 64, 4),
    (128, 256, 32, 64, 64, 4),
    (128, 256, 64, 64, 64, 4),
)
"""tile_m, tile_n, tile_k, warp_m, warp_n and stages."""
F16_TILES = ((192, 256, 32, 96, 64, 4), (128, 256, 32, 64, 128, 4), (256, 256, 32, 128, 64, 4))
"""Of f32 accumulators these do not fit beside whole sets of fragments."""


def configurations(accumulate: DType) -> dict[str, MatmulSm80]:
    """Tiles, stages and orders of CTAs around the best."""
    best, found = BEST[accumulate], dict[str, MatmulSm80]()
    for m, n, k, warp_m, warp_n, stages in (*TILES, *(F16_TILES if accumulate is f16 else ())):
        tile = {"tile_m": m, "tile_n": n, "tile_k": k, "warp_m": warp_m, "warp_n": warp_n, "stages": stages}
        found[f"{m}x{n}x{k} {warp_m}x{warp_n} s{stages}"] = replace(best, **tile)
    found |= {f"best, BLOCK_STRIDE={n}": replace(best, block_stride=n) for n in (0, 8)}
    sm90 = target("sm_90a")
    return {name: c for name, c in found.items() if not c.check(sm90)}


def products(gpu: TorchGpu, accumulate: DType, size: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every configuration and cuBLAS on square products, each alone."""
    configs = configurations(accumulate)
    problems = [contiguous_problem(n, n, n, f16, accumulate) for n in (size, CHECKED)]
    calls = (call for config in configs.values() for p in problems for call in config.calls(p, multiprocessors()))
    log("compiled", compile_all(calls, gpu.arch))
    checked, case = (GemmFamily().gpu_case(Square(n), 0, seed) for n, seed in ((CHECKED, 1), (size, 0)))
    (cublas,) = case.baselines
    yield "cublas", sustained(gpu, cublas, case.work.sets, case.flops)
    for name, config in configs.items():
        rung: Rung[Any] = Rung(name, name, "", config)
        try:
            error, row = checked.error(config), {"refused": "wrong"}
            if error.ok:
                row = sustained(gpu, case.candidate(rung), case.work.sets, case.flops)
        except (WarploomError, RuntimeError) as failure:
            yield name, {"refused": str(failure)[:300]}
            continue
        yield name, {"config": str(config), "error": round(error.value, 3), **row}


def main() -> None:
    """Measure the parts asked for; the file is written after each row."""
    parser = parser_of(__doc__)
    parser.add_argument("--parts", default="rate,f32,f16")
    parser.add_argument("--size", type=int, default=8192)
    options, gpu = parser.parse_args(), TorchGpu()
    result: dict[str, Any] = {"size": options.size}
    with gpu.working():
        for part in options.parts.split(","):
            rows = result[part] = {}
            found = rates(gpu) if part == "rate" else products(gpu, {"f32": f32, "f16": f16}[part], options.size)
            for name, row in found:
                rows[name] = row
                log(part, name, {key: row[key] for key in row if key != "config"})
                write(options.out / "gemm-power.json", result)


if __name__ == "__main__":
    main()
