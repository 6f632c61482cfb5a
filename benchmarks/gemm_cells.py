"""One product on one GPU: operands past the L2, kernels as graphs, checked against float64, and timed rested.

What ``gemm_h200.py`` measures with; needs torch with CUDA.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from warploom.kernels.gemm.choice import expected_seconds, fitting
from warploom.kernels.gemm.config import GemmConfig
from warploom.kernels.gemm.hopper_choice import warp_candidates
from warploom.kernels.gemm.problem import AnyGemmConfig, GemmProblem

import warploom
from warploom.bench.gemm import TorchBlock, blocks_error, torch_blocks
from warploom.bench.monitor import GpuMonitor
from warploom.bench.power import power_of
from warploom.bench.timing import Candidate, EventClock, Measured, graphed, measure
from warploom.core.dtypes import f32
from warploom.core.errors import WarploomError
from warploom.core.targets import Target
from warploom.cuda.device import cuda_core
from warploom.ops.backends import compiled, gpu_target
from warploom.ops.matmul_plan import MatmulPlan

ROTATE_BYTES = 160e6
"""Of the operands of one rotation: three times what the L2 holds."""
GRAPH_SECONDS = 1e-3
"""A graph holds so many calls that the gaps between two graphs do not count."""
MOST_CALLS = 96
ROUNDS = 7
SAMPLE_SECONDS = 0.003
PAUSE_SECONDS, PAUSE_SAMPLES = 0.008, 2
"""The least rest before each sample, and its ratio to the longest sample: as in the ladder, twice as long.

With it the clock stays at the GPU's highest (``mhz`` in the evidence), as after ``GemmFamily``'s 20 ms.
"""
CUBLAS = "cublas"


@dataclass(frozen=True)
class Layer:
    """y (m, n) = x (m, k) · Wᵀ."""

    name: str
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """Floating-point operations: 2 · m · n · k."""
        return 2 * self.m * self.n * self.k

    @property
    def seconds(self) -> float:
        """About what a call takes on an H200."""
        return max(self.flops / 6e14, 2.0 * self.k * (self.m + self.n) / 4e12)

    @property
    def sets(self) -> int:
        """Input sets whose rotation does not fit the L2."""
        return max(1, min(6, int(ROTATE_BYTES / (2.0 * self.k * (self.m + self.n))) + 1))

    @property
    def calls(self) -> int:
        """Calls of one graph: whole rotations, of about :data:`GRAPH_SECONDS`."""
        return self.sets * max(1, min(MOST_CALLS // self.sets, round(GRAPH_SECONDS / self.seconds / self.sets)))


class Operands:
    """Random f16 x and W in rotating sets; the float64 result of the last set."""

    def __init__(self, layer: Layer) -> None:
        def draw(*shape: int) -> Any:
            return torch.randn(shape, device="cuda", dtype=torch.float16)

        self._x = [draw(layer.m, layer.k) for _ in range(layer.sets)]
        self._w = [draw(layer.n, layer.k) for _ in range(layer.sets)]
        self.reference: list[TorchBlock] = list(torch_blocks(self._x[-1], self._w[-1].T))
        self.out = torch.empty(layer.m, layer.n, device="cuda", dtype=torch.float16)

    def sets(self, weight_rows: bool) -> list[tuple[Any, Any]]:
        """(x, Wᵀ) of each set; W is stored (n, k), else as (k, n)."""
        return [(x, w.T if weight_rows else w.T.contiguous()) for x, w in zip(self._x, self._w, strict=True)]


def ours(sets: Sequence[tuple[Any, Any]], config: AnyGemmConfig | None, out: Any) -> Callable[[int], Any]:
    """Calls of ``matmul`` with a configuration, None for what it chooses by itself."""
    return lambda i: warploom.matmul(*sets[i % len(sets)], config=config, out=out)


def cublas(sets: Sequence[tuple[Any, Any]], out: Any) -> Callable[[int], Any]:
    """Calls of ``torch.mm``."""
    return lambda i: torch.mm(*sets[i % len(sets)], out=out)


class Bench:
    """Checks and times kernels on GPU 0."""

    def __init__(self) -> None:
        self._monitor = GpuMonitor(cuda_core().Device(0).pci_bus_id)
        self._clock = EventClock(int(torch.cuda.current_stream().cuda_stream))

    def ready(
        self, kernels: dict[str, Callable[[int], Any]], layer: Layer, operands: Operands
    ) -> tuple[list[Candidate], dict[str, float], dict[str, str]]:
        """(each as a graph, largest error over its bound, what is wrong): only what is right can be timed.

        The graph itself is checked, on its last call, twice over an output full of NaN; of cuBLAS the error is noted.
        """
        graphs: list[Candidate] = []
        errors: dict[str, float] = {}
        wrong: dict[str, str] = {}
        for name, run in kernels.items():
            try:
                graph = graphed(Candidate(name, run), layer.calls, torch)
                for _ in range(2):  # the second does not live on what the first left behind
                    operands.out.fill_(math.nan)
                    graph.run(0)
                error = blocks_error(operands.reference, operands.out, f32)
            except (WarploomError, RuntimeError) as failure:
                wrong[name] = repr(failure)[:300]
                continue
            errors[name] = float(f"{min(error.value, 1e300):.3g}")
            if error.ok or name == CUBLAS:
                graphs.append(graph)
            else:
                wrong[name] = f"error over bound {error.value:.3g}"
        return graphs, errors, wrong

    def glance(self, graphs: Sequence[Candidate], layer: Layer) -> dict[str, float]:
        """Seconds of one short sample of each graph: enough to leave out what is slow."""
        pause = max(PAUSE_SECONDS / 2, layer.calls * layer.seconds)
        found = measure(graphs, 1, self._clock, rounds=1, sample_seconds=0.002, warm_up_seconds=0.0,
                        pause_seconds=pause)  # fmt: skip
        return {name: one.seconds.median for name, one in found.items()}

    def rested(self, graphs: Sequence[Candidate], longest: float, rounds: int = ROUNDS) -> dict[str, Measured]:
        """Interleaved, the GPU at rest before each sample; ``longest``: seconds of the slowest graph."""
        pause = max(PAUSE_SECONDS, PAUSE_SAMPLES * longest)
        return measure(graphs, 1, self._clock, rounds=rounds, sample_seconds=SAMPLE_SECONDS, warm_up_seconds=0.002,
                       pause_seconds=pause, monitor=self._monitor)  # fmt: skip

    def sustained(self, graph: Candidate, flops: int) -> dict[str, Any] | None:
        """Alone and without a pause: TFLOP/s, watts, clock; ``flops`` of the whole graph."""
        found = power_of(graph, 1, self._clock, self._monitor)
        return None if found is None else found.json(flops)


# -- which configurations
def is_general(config: str) -> bool:
    """Whether a configuration's notation is one that multiplies by ``mma.sync``, however its tiles arrive."""
    return config != CUBLAS and not config.startswith("wgmma")


def is_portable(config: str) -> bool:
    """Whether it is one of the generator that every GPU from sm_80 on runs."""
    return config.startswith("BM=")


def general_choice(problem: GemmProblem, goal: Target) -> GemmConfig:
    """The ``mma.sync`` configuration that the cost model takes: what a GPU without ``wgmma`` would run."""
    found = [c for c in fitting(problem, goal)[0] if isinstance(c, GemmConfig)]
    return min(found, key=lambda c: expected_seconds(problem, c, goal))


def tried(problem: GemmProblem, chosen: AnyGemmConfig, goal: Target, general: int, bulk: int) -> list[AnyGemmConfig]:
    """What ``matmul`` chooses, then the best of each kind by the cost model.

    ``general`` many of ``mma.sync``, portable ones and ones fed by the TMA each, which no call chooses as ``wgmma``
    runs wherever they do; ``bulk`` many of ``wgmma``. Of one tile at most two: with its best split of K (or none), and
    the next.
    """
    fed = [c for c in warp_candidates(problem) if not c.check(goal) + problem.misfits(c)]
    every = dict.fromkeys((*fitting(problem, goal)[0], *fed))
    ranked = sorted(every, key=lambda c: expected_seconds(problem, c, goal))
    found: list[AnyGemmConfig] = [chosen]
    kinds = ((is_portable, general), (_is_fed, general), (lambda name: not is_general(name), bulk))
    for of_kind, most in kinds:
        kept: list[AnyGemmConfig] = []
        for c in (c for c in ranked if of_kind(str(c))):
            same = sum(replace(c, split_k=1) == replace(t, split_k=1) for t in kept)
            if same < 2 and len(kept) < most:
                kept.append(c)
        found += kept
    return list(dict.fromkeys(found))


def _is_fed(config: str) -> bool:
    """Whether it multiplies by ``mma.sync`` what the TMA brings."""
    return is_general(config) and not is_portable(config)


def finalists(seconds: dict[str, float], chosen: str, general: str) -> list[str]:
    """Who is timed in earnest: cuBLAS, what is chosen with ``wgmma`` and without, and the fastest at a glance.

    Of portable ``mma.sync`` the fastest other one and of the ones fed by the TMA the fastest; of ``wgmma`` one that
    seems faster than what is chosen.
    """
    ordered = sorted((name for name in seconds if name != CUBLAS), key=lambda name: seconds[name])
    others = [name for name in ordered if name not in (chosen, general)]
    named = [CUBLAS, chosen, general]
    named += [name for name in others if is_portable(name)][:1]
    named += [name for name in others if _is_fed(name)][:1]
    limit = seconds.get(chosen, math.inf)
    named += [name for name in others if not is_general(name) and seconds[name] < limit][:1]
    return [name for name in dict.fromkeys(named) if name in seconds]


def compile_all(plans: Iterable[MatmulPlan]) -> int:
    """Trace (one thread: Python) and compile (all cores) the kernels of plans; how many there are."""
    recipes = dict.fromkeys(r for plan in plans for r in (plan.recipe, plan.finish_recipe) if r is not None)
    arch = gpu_target(0).name
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda program: compiled(program, arch), [recipe.program for recipe in recipes]))
    return len(recipes)
