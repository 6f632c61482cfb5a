"""The search of a matmul ladder: which tile, warps and stages win for every rung and size, as the seed's tuner does it.

A rung's idea stays as it is. What is searched is how much a CTA and a warp take, and how far copies run ahead
(:data:`FREE`). Candidates are compiled first, and the cubins tell which are worth a GPU's time.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from warploom.core.errors import WarploomError
from warploom.core.targets import Target
from warploom.kernels.matmul.problem import MatmulConfig, MatmulProblem, contiguous_problem
from warploom.kernels.source import KernelSource
from warploom.measure.matmul import MatmulOnGpu
from warploom.measure.timing import Candidate, measure
from warploom.tune.build import Built, build_all
from warploom.tune.matmul import spare_registers, violations
from warploom.tune.tuner import BuildAll, Report, TuningGpu
from warploom_lab.bench.gemm import Square
from warploom_lab.kernels.ladder import Rung

FREE = ("tile_m", "tile_n", "tile_k", "warp_m", "warp_n", "stages", "block_stride", "opt_level")
"""The flags that are searched; those of one stage keep it, and those that walk a plain grid."""
TILES = ((128, 128), (256, 128), (128, 256), (256, 256))
WARP_TILES = ((64, 64), (64, 32), (32, 64), (32, 32), (128, 64), (64, 128))
STAGES = {32: (3, 4, 5), 64: (2, 3, 4)}
"""By tile_k."""
STRIDES = (8, 16)
WARPS = (4, 8, 16)
CROWDED = 48
"""Registers beside the fragments below which ptxas spills at -O3, which reorders, and may not at -O1."""
MOST_SPILLED_BYTES = 256

Key = tuple[str, int]
"""A rung's key, and N."""


@dataclass(frozen=True)
class Effort:
    """How long to measure: a glance at every candidate, then ``rounds`` of the finalists of all rungs, interleaved."""

    sample_seconds: float = 0.004
    warm_up_seconds: float = 0.002
    final_seconds: float = 0.01
    rounds: int = 5
    finalists: int = 4
    kept: int = 2
    """Candidates of each tile and warp tile that go on to the next size, the fastest."""
    most_behind: float = 1.3
    """A candidate that is slower than its rung's fastest by more does not."""


@dataclass(frozen=True)
class Won:
    """What a search found for a rung at a size: TFLOP/s of the finalists, fastest first, without rests."""

    config: MatmulConfig
    finalists: Mapping[str, float]
    timed: int
    dropped: Mapping[str, int]

    def json(self) -> dict[str, Any]:
        """As it stands in a result."""
        rates = {name: float(f"{rate:.4g}") for name, rate in self.finalists.items()}
        return {"timed": self.timed, "dropped": dict(self.dropped), "finalists": rates}


@dataclass(frozen=True)
class Searched:
    """The rungs that a search tells apart, what became of the others, and what won at each size."""

    rungs: list[Rung[MatmulConfig]]
    notes: list[str]
    won: dict[Key, Won]

    def at_size(self, rung: Rung[MatmulConfig], place: Square) -> Rung[MatmulConfig]:
        """The rung with what won at a size; as it is where nothing did."""
        found = self.won.get((rung.key, place.n))
        return rung if found is None else replace(rung, config=found.config)

    def json(self, key: str) -> dict[str, Any]:
        """What was searched for a rung, by size."""
        return {str(n): found.json() for (rung, n), found in self.won.items() if rung == key}


def _portable(config: MatmulConfig) -> bool:
    """Whether it is an ``mma.sync`` kernel's: the others have a tile of their own each."""
    return config.requires == "sm_80"


def idea(config: MatmulConfig) -> MatmulConfig:
    """What a rung is beside its tile: equal for rungs that a search cannot tell apart."""
    if not _portable(config):
        return config
    found: Any = config
    plain = {name: getattr(type(config)(), name) for name in FREE}
    return replace(found, **plain | {"stages": min(2, found.stages), "block_stride": min(1, found.block_stride)})


def distinct_ideas(rungs: Sequence[Rung[MatmulConfig]]) -> tuple[list[Rung[MatmulConfig]], list[str]]:
    """The first rung of each idea, and which the search of another one includes."""
    first: dict[MatmulConfig, Rung[MatmulConfig]] = {}
    notes: list[str] = []
    for rung in rungs:
        found = first.setdefault(idea(rung.config), rung)
        if found is not rung:
            notes.append(
                f"rung {rung.key} differs from {found.key} by its tile alone: the search of {found.key} has it"
            )
    return list(first.values()), notes


def family(config: MatmulConfig, target: Target) -> list[MatmulConfig]:
    """The configurations of a rung's idea that are worth compiling, its own first; a ``wgmma`` one stays alone."""
    return list(dict.fromkeys([config, *(_tiles(config, target) if _portable(config) else ())]))


def _tiles(config: Any, target: Target) -> Iterator[MatmulConfig]:
    depths = [(depth, stages) for depth, of in STAGES.items() for stages in (of if config.stages > 1 else (1,))]
    for (m, n), (warp_m, warp_n), (depth, stages), stride in itertools.product(
        TILES, WARP_TILES, depths, STRIDES if config.block_stride else (0,)
    ):
        tile = replace(
            config,
            tile_m=m,
            tile_n=n,
            tile_k=depth,
            warp_m=warp_m,
            warp_n=warp_n,
            stages=stages,
            block_stride=stride,
            opt_level=3,
        )
        if m % warp_m or n % warp_n or tile.num_warps not in WARPS or tile.check(target):
            continue
        room = spare_registers(tile, target)
        if room > 0:
            yield tile
            if room < CROWDED:
                yield replace(tile, opt_level=1)


@dataclass
class _Entry:
    rung: str
    config: MatmulConfig
    candidate: Candidate


@dataclass
class RungSearch:
    """The search on one GPU. ``data``: what the matrices hold, one of :data:`warploom.measure.matmul.DATA`."""

    gpu: TuningGpu
    data: str = "normal"
    effort: Effort = field(default_factory=Effort)
    report: Report = lambda text, fraction: None
    build: BuildAll = build_all
    workload: Callable[[MatmulProblem, int, str], MatmulOnGpu] = MatmulOnGpu
    _built: dict[KernelSource, Built | str] = field(default_factory=dict[KernelSource, "Built | str"])

    def run(self, rungs: Sequence[Rung[MatmulConfig]], sizes: Sequence[int]) -> Searched:
        """What wins, by rung and size: products of (n, n) matrices, all of one type and accumulator.

        A size begins with the fastest of the size below, the smallest with every candidate of the family. A rung of
        which nothing fits a size has no entry there.
        """
        kept, notes = distinct_ideas(rungs)
        left = {rung.key: family(rung.config, self.gpu.target) for rung in kept}
        own = {rung.key: rung.config for rung in kept}
        found: dict[Key, Won] = {}
        for number, n in enumerate(sorted(sizes)):
            told = _scaled(self.report, f"N = {n}: ", number / len(sizes), 1 / len(sizes))
            of_size, left = self._at(n, left, own, told)
            found |= {(key, n): won for key, won in of_size.items()}
        return Searched(kept, notes, found)

    def _at(
        self, n: int, left: dict[str, list[MatmulConfig]], own: dict[str, MatmulConfig], report: Report
    ) -> tuple[dict[str, Won], dict[str, list[MatmulConfig]]]:
        """What won at one size, and what goes on to the next."""
        first = next(iter(own.values()))
        problem = contiguous_problem(n, n, n, first.dtype, first.accumulate)
        dropped = {key: Counter[str]() for key in left}
        workload = self.workload(problem, self.gpu.index, self.data)
        entries = self._ready(problem, workload, left, dropped, report)
        report(f"a glance at {len(entries)}", 0.6)
        glance = self._seconds(entries, workload.sets, 1, self.effort.sample_seconds)
        ranked = {
            key: sorted((e for e in entries if e.rung == key), key=lambda e: glance[e.candidate.name]) for key in left
        }
        kept = {
            key: self._kept([(e.config, glance[e.candidate.name]) for e in of], own[key]) for key, of in ranked.items()
        }
        finalists = [
            entry
            for key, of in ranked.items()
            for place, entry in enumerate(of)
            if place < self.effort.finalists or entry.config == own[key]
        ]
        report(f"{len(finalists)} finalists", 0.8)
        seconds = self._seconds(finalists, workload.sets, self.effort.rounds, self.effort.final_seconds)
        won: dict[str, Won] = {}
        for key, of in ranked.items():
            best = sorted((e for e in finalists if e.rung == key), key=lambda e: seconds[e.candidate.name])
            if best:
                rates = {str(e.config): problem.flops / seconds[e.candidate.name] / 1e12 for e in best}
                won[key] = Won(best[0].config, rates, len(of), dropped[key])
        return won, kept

    def _kept(self, ranked: Sequence[tuple[MatmulConfig, float]], own: MatmulConfig) -> list[MatmulConfig]:
        """What goes on to the next size, of candidates with their seconds, fastest first: of every tile some."""
        shapes = Counter[tuple[object, ...]]()
        found: list[MatmulConfig] = []
        for config, seconds in ranked:
            shape = tuple(getattr(config, name, None) for name in ("tile_m", "tile_n", "warp_m", "warp_n"))
            shapes[shape] += 1
            near = shapes[shape] <= self.effort.kept and seconds <= self.effort.most_behind * ranked[0][1]
            if near or config == own:
                found.append(config)
        return found

    def _seconds(self, entries: Sequence[_Entry], sets: int, rounds: int, sample: float) -> dict[str, float]:
        """Median seconds of a call, without rests."""
        found = measure(
            [e.candidate for e in entries],
            sets,
            self.gpu.clock,
            rounds=rounds,
            sample_seconds=sample,
            warm_up_seconds=self.effort.warm_up_seconds,
        )
        return {name: measured.seconds.median for name, measured in found.items()}

    # -- candidates
    def _ready(
        self,
        problem: MatmulProblem,
        workload: MatmulOnGpu,
        left: Mapping[str, Sequence[MatmulConfig]],
        dropped: Mapping[str, Counter[str]],
        report: Report,
    ) -> list[_Entry]:
        """The candidates worth timing: they fit, compile, do not spill, differ from each other, and compute right."""
        fitting: list[tuple[str, MatmulConfig]] = []
        for key, configs in left.items():
            for config in configs:
                reasons = violations(config, problem, self.gpu.target)
                dropped[key].update(reasons[:1])
                if not reasons:
                    fitting.append((key, config))
        sources = [config.calls(problem, 1)[0].source for _, config in fitting]
        self._compile(sources, report)
        entries: list[_Entry] = []
        seen: set[tuple[str, bytes]] = set()
        for (key, config), source in zip(fitting, sources, strict=True):
            built = self._built[source]
            reason = self._fault(built, config, workload)
            if not reason and isinstance(built, Built) and (key, built.kernel.cubin) not in seen:
                seen.add((key, built.kernel.cubin))
                entries.append(_Entry(key, config, Candidate(f"{key} {config}", workload.prepare(config))))
            else:
                dropped[key][reason or "the same machine code as another"] += 1
        return entries

    def _compile(self, sources: Sequence[KernelSource], report: Report) -> None:
        missing = [source for source in dict.fromkeys(sources) if source not in self._built]
        if missing:
            built = self.build(
                missing,
                self.gpu.target.name,
                lambda done, total: report(f"compiling {done}/{total}", 0.5 * done / total),
            )
            self._built |= dict(zip(missing, built, strict=True))

    def _fault(self, built: Built | str, config: MatmulConfig, workload: MatmulOnGpu) -> str:
        """Why a candidate is not timed; "" if it is."""
        if isinstance(built, str):
            return built
        reasons = built.faults(self.gpu.target, MOST_SPILLED_BYTES)
        try:
            return reasons[0] if reasons else workload.fault(config) or ""
        except WarploomError as error:
            return f"does not run: {str(error).splitlines()[0]}"


def _scaled(report: Report, prefix: str, base: float, share: float) -> Report:
    return lambda text, fraction: report(prefix + text, base + share * fraction)
