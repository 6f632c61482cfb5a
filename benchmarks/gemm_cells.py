"""One product on one GPU: operands past the L2, kernels as graphs, checked against float64, and timed rested.

What ``gemm_h200.py`` measures with; needs torch with CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import warploom
from warploom.core.dtypes import f32
from warploom.core.errors import WarploomError
from warploom.core.targets import Target
from warploom.kernels.matmul.choice import candidates_sm80, candidates_sm90, fitting
from warploom.kernels.matmul.cost import seconds
from warploom.kernels.matmul.problem import MatmulConfig, MatmulProblem
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.measure.matmul import TorchBlock, blocks_error, torch_blocks
from warploom.measure.monitor import GpuMonitor
from warploom.measure.timing import Candidate, EventClock, Measured, graphed, measure
from warploom.ops.backends import gpu_target
from warploom.ops.matmul import MatmulPlan
from warploom.tune.build import build_all
from warploom_lab.bench.power import power_of

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


def ours(sets: Sequence[tuple[Any, Any]], config: MatmulConfig | None, out: Any) -> Callable[[int], Any]:
    """Calls of ``matmul`` with a configuration, None for what it chooses by itself."""
    return lambda i: warploom.matmul(*sets[i % len(sets)], config=config, out=out)


def cublas(sets: Sequence[tuple[Any, Any]], out: Any) -> Callable[[int], Any]:
    """Calls of ``torch.mm``."""
    return lambda i: torch.mm(*sets[i % len(sets)], out=out)


class Bench:
    """Checks and times kernels on GPU 0."""

    def __init__(self) -> None:
        self._monitor = GpuMonitor.of(0)
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
        found = measure(
            graphs, 1, self._clock, rounds=1, sample_seconds=0.002, warm_up_seconds=0.0, pause_seconds=pause
        )
        return {name: one.seconds.median for name, one in found.items()}

    def rested(self, graphs: Sequence[Candidate], longest: float, rounds: int = ROUNDS) -> dict[str, Measured]:
        """Interleaved, the GPU at rest before each sample; ``longest``: seconds of the slowest graph."""
        pause = max(PAUSE_SECONDS, PAUSE_SAMPLES * longest)
        return measure(
            graphs,
            1,
            self._clock,
            rounds=rounds,
            sample_seconds=SAMPLE_SECONDS,
            warm_up_seconds=0.002,
            pause_seconds=pause,
            monitor=self._monitor,
        )

    def sustained(self, graph: Candidate, flops: int) -> dict[str, Any] | None:
        """Alone and without a pause: TFLOP/s, watts, clock; ``flops`` of the whole graph."""
        found = power_of(graph, 1, self._clock, self._monitor)
        return None if found is None else found.json(flops)


# -- which configurations
def is_general(config: str) -> bool:
    """Whether a configuration's notation is one of ``mma.sync``."""
    return config.startswith(MatmulSm80.word)


def general_choice(problem: MatmulProblem, target: Target) -> MatmulSm80:
    """The ``mma.sync`` configuration that the cost model takes: what a GPU without ``wgmma`` would run."""
    found, _ = fitting(problem, candidates_sm80(problem), target)
    return min(found, key=lambda c: seconds(problem, c, target))


def tried(problem: MatmulProblem, chosen: MatmulConfig, target: Target, general: int, bulk: int) -> list[MatmulConfig]:
    """What ``matmul`` chooses, then the best by the cost model: ``general`` of ``mma.sync``, ``bulk`` of ``wgmma``.

    Of one tile at most two: with its best split of K (or none), and the next.
    """
    found: list[MatmulConfig] = [chosen]
    for candidates, most in ((candidates_sm80, general), (candidates_sm90, bulk)):
        kept: list[Any] = []
        of_kind: Any = candidates(problem)
        fit, _ = fitting(problem, of_kind, target)
        for c in sorted(fit, key=lambda c: seconds(problem, c, target)):
            same = sum(replace(c, split_k=1) == replace(t, split_k=1) for t in kept)
            if same < 2 and len(kept) < most:
                kept.append(c)
        found += kept
    return list(dict.fromkeys(found))


def finalists(seconds: dict[str, float], chosen: str, general: str) -> list[str]:
    """Who is timed in earnest: cuBLAS, what is chosen with ``wgmma`` and without, and the fastest at a glance.

    Of ``mma.sync`` the fastest other one, of ``wgmma`` one that seems faster than what is chosen.
    """
    ordered = sorted((name for name in seconds if name != CUBLAS), key=lambda name: seconds[name])
    others = [name for name in ordered if name not in (chosen, general)]
    limit = seconds.get(chosen, math.inf)
    named = [CUBLAS, chosen, general, *[name for name in others if is_general(name)][:1]]
    named += [name for name in others if not is_general(name) and seconds[name] < limit][:1]
    return [name for name in dict.fromkeys(named) if name in seconds]


def compile_all(plans: Iterable[MatmulPlan]) -> int:
    """Compile the kernels of plans on all cores; how many there are."""
    sources = list(dict.fromkeys(call.source for plan in plans for call in plan.calls))
    build_all(sources, gpu_target(0).name)
    return len(sources)
