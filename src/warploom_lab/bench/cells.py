"""The harness of scripts that check and time cells: a script states its cells, what is called there, and its figures.

Calls are CUDA graphs on inputs that rotate past the L2. What a graph writes over NaN is checked, and then all graphs of
a cell are timed under two loads. *In company* they take turns without a pause, at the clock that they share; *rested*,
every sample follows a pause, so that each runs at the clock of a GPU that was idle. A row is written as soon as it is
known: a run that is cut keeps the rows that it has.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Generic, TypeVar

from warploom.core.errors import CompileError
from warploom.core.targets import Target, target
from warploom.kernels.source import KernelCall
from warploom.measure.monitor import GpuMonitor
from warploom.measure.timing import Candidate, EventClock, Measured, graphed, input_sets, measure, paired_spread
from warploom.tune.build import build_all
from warploom_lab.bench.evidence import environment, write
from warploom_lab.bench.power import power_of

Cell = TypeVar("Cell")
Row = dict[str, Any]
Inputs = Any
"""What a call is made on; as a rule a dictionary of tensors."""
Run = Callable[[Inputs], Any]
BASELINES_BOUND = 2.0
"""The largest error of a baseline that is timed, in bounds of ours: baselines round at other places."""
PAUSE_SECONDS, PAUSE_SAMPLES = 0.020, 2
"""A pause before a rested sample: at least so long, and so many times the longest replay."""
RESTED_SAMPLE = 0.003


class TorchGpu:
    """GPU 0, on a stream of PyTorch that graphs are captured on too: autograd runs where the forward pass ran."""

    def __init__(self) -> None:
        import torch

        from warploom.ops.backends import gpu_target

        self._torch, self._stream = torch, torch.cuda.Stream()
        torch.cuda.graph.default_capture_stream = self._stream
        self.arch, self.monitor = gpu_target(0).name, GpuMonitor.of(0)
        self.clock = EventClock(int(self._stream.cuda_stream))

    def working(self) -> AbstractContextManager[Any]:
        """The stream on which everything runs."""
        return self._torch.cuda.stream(self._stream)

    def sets(self, bytes_per_set: int) -> int:
        """The number of sets of inputs that rotate past the L2."""
        return input_sets(bytes_per_set, self._torch.cuda.get_device_properties(0).L2_cache_size)

    def graphed(self, candidate: Candidate, calls: int) -> Candidate:
        """A graph of so many calls."""
        return graphed(candidate, calls, self._torch)

    def poison(self, result: Any) -> None:
        """Fill the memory of a result with NaN."""
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, self._torch.Tensor) and x.is_floating_point() and x.element_size() > 1:
                x.detach().fill_(float("nan"))

    def release(self) -> None:
        """Give back the memory that the last cell has left: the next one's sizes are others."""
        self._torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait for the GPU. Raises RuntimeError for what it refused."""
        self._torch.cuda.synchronize()

    def power(self, candidate: Candidate, flops: float) -> Row | None:
        """Watts, clock and rate of a candidate that runs alone without a pause; None where power cannot be read."""
        found = power_of(candidate, 1, self.clock, self.monitor)
        return None if found is None else found.json(flops)


@dataclass(frozen=True)
class Trial:
    """Calls that are checked and then timed beside each other.

    ``sets`` of inputs rotate; a mapping has those of each call, equally many. ``error`` of a name and a result is at
    most 1 where the result is right, and None where nobody checks it. ``flops`` are those of a call, or of each call.
    Ratios say how many times as fast as each other call ``ours`` is or, where there is ``over``, how many times as fast
    as that one each call is. The ``metered`` ones are run alone for their power; those in ``optional`` may fail, as
    baselines may. A graph holds each set ``turns`` times; calls that are no ``graphs`` are timed one by one on their
    only set, with what they cost the host. ``facts`` stand in the row.
    """

    calls: Mapping[str, Run]
    sets: Sequence[Inputs] | Mapping[str, Sequence[Inputs]]
    error: Callable[[str, Any], float | None]
    flops: float | Mapping[str, float] = 0
    ours: str = "warploom"
    over: str = ""
    metered: Collection[str] = ()
    optional: Collection[str] = ()
    turns: int = 1
    graphs: bool = True
    facts: Row = field(default_factory=dict[str, Any])

    def sets_of(self, name: str) -> Sequence[Inputs]:
        """The inputs that a call rotates through."""
        return self.sets[name] if isinstance(self.sets, Mapping) else self.sets

    @property
    def count(self) -> int:
        """The calls of a graph. Raises ValueError where calls have different numbers of sets."""
        (found,) = {len(self.sets_of(name)) for name in self.calls}
        return found * self.turns

    def flops_of(self, name: str) -> float:
        """The floating-point operations of a call."""
        return self.flops[name] if isinstance(self.flops, Mapping) else self.flops


@dataclass(frozen=True)
class Load:
    """What the calls of a trial took under one load, where a measured replay is :attr:`Trial.count` calls."""

    trial: Trial
    found: Mapping[str, Measured]

    def seconds(self, name: str) -> float:
        """The median time of a call."""
        return self.found[name].seconds.median / self.trial.count

    def microseconds(self) -> Row:
        """The median times of all calls."""
        return {name: round(1e6 * self.seconds(name), 2) for name in self.found}

    def tflops(self) -> Row:
        """The rates of all calls, with their spread."""
        work = {name: self.trial.count * self.trial.flops_of(name) / 1e12 for name in self.found}
        return {name: m.seconds.rate(work[name]).json() for name, m in self.found.items()}

    def ratio(self) -> Row:
        """The ratios that :class:`Trial` describes, round by round."""
        base = self.found[self.trial.over or self.trial.ours]
        others = {name: (base, m) for name, m in self.found.items() if m is not base}
        step = -1 if self.trial.over else 1
        return {name: paired_spread(*pair[::step]).json() for name, pair in others.items()}

    def clocks(self) -> Row:
        """The median clock in MHz while each call ran, where it can be read."""
        return {name: round(m.clock_mhz.median) for name, m in self.found.items() if m.clock_mhz is not None}


@dataclass(frozen=True)
class Figure:
    """What ratios to a call must be: in each cell ``where`` fields have these values, or in the geometric mean.

    ``mean``: from how many cells on there is one; 0 for each cell.
    """

    baseline: str
    at_least: float
    where: Mapping[str, Collection[Any]] = field(default_factory=dict[str, Collection[Any]])
    mean: int = 0

    def missed(self, rows: Sequence[Row]) -> list[str]:
        """Where it is not reached; rows without its baseline are passed over."""
        mine = [r for r in rows if self.baseline in r["ratio"] and all(r[k] in of for k, of in self.where.items())]
        ratios = [r["ratio"][self.baseline]["median"] for r in mine]
        wanted = f"× {self.baseline}, wanted {self.at_least}"
        if not self.mean:
            return [f"{r['cell']}: {x} {wanted}" for r, x in zip(mine, ratios, strict=True) if not x >= self.at_least]
        if len(ratios) < self.mean or (mean := geometric_mean(ratios)) >= self.at_least:
            return []
        return [f"{mean:.3f} {wanted} in the mean of {dict(self.where)}"]


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser with ``--out``: a folder, by default $OUT, else the folder out."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out")), help="folder of the result")
    return parser


def compile_all(calls: Iterable[KernelCall], arch: str) -> int:
    """Compile the kernels of calls on all cores, so that nothing waits for a compiler afterwards; how many there are.

    Processes are spawned and import the script again: it needs ``if __name__ == "__main__"``. Raises CompileError.
    """
    sources = list(dict.fromkeys(call.source for call in calls))
    for source, found in zip(sources, build_all(sources, arch), strict=True):
        if isinstance(found, str):
            raise CompileError(f"{source.name}: {found}")
    return len(sources)


def said(error: Exception) -> str:
    """An exception in a line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def rates_line(rates: Row) -> str:
    """TFLOP/s of each call, and ratios, in a line."""
    ratios = {name: f" ×{ratio['median']:.3f}" for name, ratio in rates["ratio"].items()}
    return "  ".join(f"{name} {rate['median']:.0f}{ratios.get(name, '')}" for name, rate in rates["tflops"].items())


class CellScript(Generic[Cell]):
    """A script that checks and times cells, and exits with 1 where a result is wrong or a figure is missed.

    Subclasses state what is below "declared"; :meth:`main` does the rest.
    """

    # -- declared
    file: str
    """The name of the result's file."""
    listed: str = "cells"
    """The key of its rows."""
    rounds: int = 7
    sample: float = 0.010
    """Seconds of a sample in company."""
    baselines: Sequence[str] = ()
    """The kernels of others: one may fail, and ``--baselines`` chooses among them."""
    figures: Sequence[Figure] = ()
    loads: tuple[str, str] = ("company", "rested")
    """The load that stands in the row itself, where figures hold, and the row's key for the other one."""

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Options beside those of every script."""

    def cells(self) -> Iterable[Cell]:
        """All cells, in order."""
        raise NotImplementedError

    def name_of(self, cell: Any) -> str:
        """The name that a cell has in tables."""
        return str(cell.name)

    def calls(self, cell: Cell, goal: Target) -> Iterable[KernelCall]:
        """Launches whose kernels are compiled ahead."""
        return ()

    def trial(self, cell: Cell) -> Trial:
        """What is called in a cell."""
        raise NotImplementedError

    def trials(self, cell: Cell) -> Mapping[str, Trial]:
        """What is called, by the row's key of its rates; "" for those that stand in the row itself."""
        return {"": self.trial(cell)}

    def rates(self, cell: Cell, load: Load) -> Row:
        """What a row says of a load."""
        return {"tflops": load.tflops(), "ratio": load.ratio()}

    def head(self) -> Row:
        """What the environment says besides."""
        return {}

    def summary(self, rows: list[Row]) -> Row:
        """What is written beside the rows."""
        return {}

    def configs(self, rows: list[Row]) -> Collection[str] | None:
        """The configurations whose kernels a result names, where a search has tried others too; None for all."""
        return None

    def missed(self, rows: list[Row]) -> list[str]:
        """Every wrong result, and every figure that is not reached."""
        wrong = [
            f"{name} is wrong at {row['cell']}: {off:.2f}"
            for row in rows
            for name, off in row["error"].items()
            if not off <= (BASELINES_BOUND if name.split()[-1] in self.baselines else 1.0)
        ]
        return wrong + [said for figure in self.figures for said in figure.missed(rows)]

    def line(self, row: Row) -> str:
        """A row as a line of text."""
        return f"{self.line_head(row)}  {rates_line(row)}"

    def line_head(self, row: Row) -> str:
        """The cell, its largest error, and what could not run."""
        refused = f"  {row['not_run']}" if row["not_run"] else ""
        return f"{row['cell']:32} error {max(row['error'].values()):.2f}{refused}"

    # -- done by the harness
    given: argparse.Namespace
    gpu: Any  # a TorchGpu, or what a test puts in its place

    def timed(self, trial: Trial, row: Row, way: str) -> tuple[dict[str, Load], Row]:
        """The loads by their names, and power; the row gets errors and failures."""
        candidates = [c for name in trial.calls if (c := self._checked(name, trial, row, way)) is not None]
        take_turns = partial(measure, candidates, 1, self.gpu.clock, rounds=self.given.rounds, monitor=self.gpu.monitor)
        company = take_turns(sample_seconds=self.sample, warm_up_seconds=5 * self.sample)
        pause = max(PAUSE_SECONDS, *(PAUSE_SAMPLES * m.seconds.high for m in company.values()))
        rested = take_turns(sample_seconds=RESTED_SAMPLE, warm_up_seconds=0.0, pause_seconds=pause)
        metered = (c for c in candidates if c.name in trial.metered)
        drawn = {c.name: self.gpu.power(c, trial.count * trial.flops_of(c.name)) for c in metered}
        loads = {"company": Load(trial, company), "rested": Load(trial, rested)}
        return loads, {name: x for name, x in drawn.items() if x is not None}

    def _checked(self, name: str, trial: Trial, row: Row, way: str) -> Candidate | None:
        """A call as a graph; None of a baseline that cannot run or is wrong."""
        run, sets, told = trial.calls[name], trial.sets_of(name), f"{way} {name}".strip()
        last: list[Any] = [None]

        def call(i: int) -> None:
            last[0] = run(sets[-1 - i % len(sets)])  # the last one, which is checked, on the first set

        try:
            for x in sets:  # forward passes of baselines are no part of a graph
                run(x)
            found = Candidate(name, call)
            found = self.gpu.graphed(found, trial.count) if trial.graphs else found
            for _ in range(2):  # the second replay does not live on what the first one left behind
                self.gpu.poison(last[0])
                last[0] = last[0] if trial.graphs else None  # a graph writes there again, a call to what was freed last
                found.run(0)
            self.gpu.synchronize()
            if (off := trial.error(name, last[0])) is not None:
                row["error"][told] = off
                if name in self.baselines and not off <= BASELINES_BOUND:
                    raise ValueError(f"its error is {off:.2f} of what is allowed")
        except Exception as refusal:
            if name not in (*self.baselines, *trial.optional):
                raise
            row["not_run"][told] = said(refusal)
            self.gpu.synchronize()  # raises where the GPU refused: nothing can be timed behind that
            return None
        finally:
            last[0] = None
        return found

    def row(self, cell: Cell) -> Row:
        """One cell: checked, timed and metered."""
        row: Row = {"cell": self.name_of(cell), "error": {}, "not_run": {}}
        for way, trial in self.trials(cell).items():
            timed, power = self.timed(trial, row, way)
            first, other = (self._rates(cell, timed[load]) for load in self.loads)
            found = first | {self.loads[1]: other}
            row |= trial.facts | (found if not way else {way: found}) | ({"power": power} if trial.metered else {})
        return row

    def _rates(self, cell: Cell, load: Load) -> Row:
        """A load's rates and clocks; ``best``, where a figure asks for it, is the ratio to the fastest baseline."""
        rates, others = self.rates(cell, load), [name for name in load.found if name in self.baselines]
        if others and any(figure.baseline == "best" for figure in self.figures):
            rates["ratio"]["best"] = rates["ratio"][min(others, key=load.seconds)]
        return rates | {"sm_mhz": load.clocks()}

    def main(self, arguments: Sequence[str] | None = None, gpu: Callable[[], Any] = TorchGpu) -> int:
        """Compile ahead, then check and time all cells; the exit code."""
        parser = parser_of(sys.modules[type(self).__module__].__doc__)
        parser.add_argument("--rounds", type=int, default=self.rounds)
        parser.add_argument("--only", nargs="*", default=[], help="cells whose names contain one of these")
        parser.add_argument("--every", type=int, default=1, help="only every so-many-th cell, and the last")
        parser.add_argument("--compile-only", action="store_true", help="for sm_90a, without a GPU")
        if self.baselines:
            parser.add_argument("--baselines", nargs="*", choices=self.baselines, default=[*self.baselines])
        self.options(parser)
        self.given = parser.parse_args(arguments)
        only = self.given.only
        todo = [c for c in self.cells() if not only or any(word in self.name_of(c) for word in only)]
        todo = [*todo[: -1 : self.given.every], *todo[-1:]]
        if not self.given.compile_only:
            self.gpu = gpu()
        goal = target("sm_90a" if self.given.compile_only else self.gpu.arch)
        count = compile_all((call for cell in todo for call in self.calls(cell, goal)), goal.name)
        print(f"{len(todo)} cells, {count} kernels", flush=True)
        if self.given.compile_only:
            return 0
        with self.gpu.working():
            return self._measured(todo)

    def _measured(self, todo: Iterable[Cell]) -> int:
        """Print each row, and write all that there are after each."""
        rows = list[Row]()
        head = {"power_limit_watts": self.gpu.monitor.power_limit()} | self.head()
        result: Row = {"environment": environment() | head, self.listed: rows, "missed": list[str]()}
        for cell in todo:
            self.gpu.release()
            rows.append(self.row(cell))
            print(self.line(rows[-1]), flush=True)
            result |= {"missed": self.missed(rows)} | self.summary(rows)
            write(self.given.out / self.file, result, self.configs(rows))
        print("\n".join(result["missed"]) or "every result is right, and every figure is reached")
        return 1 if result["missed"] else 0
