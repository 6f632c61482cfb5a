"""The search of a ladder's tiles: what belongs to a rung's family, and what the search makes of known times."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest

from tests.clock import SimulatedClock
from tests.project import load
from tests.tune.fakes import compiled, config_of, fake_gpu
from warploom.core.dtypes import f16, f32
from warploom.core.errors import ConfigError
from warploom.core.targets import target
from warploom.tune.build import Built
from warploom_lab.bench.gemm import Square, settled
from warploom_lab.kernels.matmul.ladder import FULL_LADDER, LADDER

SEARCH = load("rung_search")
FREE, RungSearch, family, idea = SEARCH.FREE, SEARCH.RungSearch, SEARCH.family, SEARCH.idea
SM90 = target("sm_90a")
RUNGS = {rung.key: rung for rung in settled(FULL_LADDER.rungs, f16, {})}
F32 = {rung.key: rung for rung in settled(FULL_LADDER.rungs, f32, {})}
GENERAL = {key: rung for key, rung in RUNGS.items() if rung.config.requires == "sm_80"}
SEEDS_WINNER = {"tile_m": 256, "tile_n": 128, "tile_k": 64, "warp_m": 64, "warp_n": 64, "stages": 3}


@pytest.mark.parametrize("key", GENERAL)
def test_a_family_is_the_rungs_idea_with_other_tiles(key: str) -> None:
    config = GENERAL[key].config
    found = family(config, SM90)
    assert found[0] == config
    assert len(found) == len(set(found)) > 10
    for one in found:
        assert one.check(SM90) == []
        assert idea(one) == idea(config)
        changed = {f.name for f in fields(config) if getattr(one, f.name) != getattr(config, f.name)}
        assert changed <= set(FREE)
    for flag, least in (("stages", 1), ("block_stride", 0)):
        assert {getattr(one, flag, least) > least for one in found} == {getattr(config, flag, least) > least}
    if key in ("03", "04", "05"):
        assert any(all(getattr(c, name) == value for name, value in SEEDS_WINNER.items()) for c in found)


def test_rungs_that_differ_by_their_tile_alone_are_one_search() -> None:
    kept, notes = SEARCH.distinct_ideas(list(RUNGS.values()))
    assert [r.key for r in kept] == ["00a", "00b", "01a", "01b", "02", "03", "04", "05", "06"]
    assert [note.split()[1] for note in notes] == ["07", "best16"]
    (alone,), none = SEARCH.distinct_ideas([RUNGS["07"]])
    assert (alone.key, none) == ("07", [])
    assert family(F32["h5"].config, SM90) == [F32["h5"].config]
    assert len(SEARCH.distinct_ideas(settled(LADDER.rungs, f32, {}))[0]) == 9


@dataclass
class Fakes:
    """Builds that say what the test wants of them, and a GPU whose times are a formula."""

    clock: SimulatedClock = field(default_factory=SimulatedClock)
    ran: list[tuple[int, Any]] = field(default_factory=list)
    wrong: Any = lambda config: False
    spilled: Any = lambda config: 0
    broken: Any = lambda config: False
    refused: Any = lambda config: False
    code: Any = str

    def build(self, sources: Any, arch: str, progress: Any) -> list[Built | str]:
        configs = [config_of(source) for source in sources]
        progress(len(configs), len(configs))
        return [
            "does not compile: a test"
            if self.broken(c)
            else compiled(self.code(c), spills=self.spilled(c), threads=c.threads)
            for c in configs
        ]

    def workload(self, problem: Any, device: int, data: str) -> Any:
        assert data == "uniform"
        return FakeWorkload(self, problem.m)

    def seconds(self, n: int, config: Any) -> float:
        """256×128 is best at 4096 and 256×256 beyond; the more stages the better; -O1 is slow."""
        best = 256 * 128 if n <= 4096 else 256 * 256
        far = abs(config.tile_m * config.tile_n - best) / 2**18 + (config.tile_m < config.tile_n) * 0.01
        return 1e-3 * (1 + far) * (1 - 0.01 * config.stages) * (1.5 if config.opt_level == 1 else 1)


@dataclass
class FakeWorkload:
    of: Fakes
    n: int
    sets: int = 2

    def prepare(self, config: Any) -> Any:
        def run(index: int) -> None:
            self.of.ran.append((self.n, config))
            self.of.clock.spend(self.of.seconds(self.n, config))

        return run

    def fault(self, config: Any) -> str | None:
        if self.of.refused(config):
            raise ConfigError("needs more of something\nthan there is")
        return "computes wrong results" if self.of.wrong(config) else None


def search(fakes: Fakes, keys: list[str], sizes: list[int]) -> Any:
    gpu = fake_gpu(fakes.clock)
    made = RungSearch(gpu, "uniform", SEARCH.Effort(), build=fakes.build, workload=fakes.workload)
    return made.run([RUNGS[key] for key in keys], sizes)


def test_each_size_has_its_own_winner_within_the_rungs_idea() -> None:
    fakes = Fakes()
    found = search(fakes, ["03", "06", "07"], [16384, 4096])
    assert [r.key for r in found.rungs] == ["03", "06"]
    for key in ("03", "06"):
        small, large = (found.at_size(RUNGS[key], Square(n)).config for n in (4096, 16384))
        assert (small.tile_m, small.tile_n) == (256, 128)
        assert (large.tile_m, large.tile_n) == (256, 256)
        assert idea(small) == idea(large) == idea(RUNGS[key].config)
        told = found.json(key)
        assert list(told) == ["4096", "16384"]
        rates = list(told["4096"]["finalists"].values())
        assert rates == sorted(rates, reverse=True)
        assert str(RUNGS[key].config) in told["16384"]["finalists"], "the rung's own tile is always in the final"
    assert found.at_size(RUNGS["03"], Square(512)) is RUNGS["03"], "no such size was searched"


def test_what_is_not_worth_timing_is_left_out_and_counted() -> None:
    fakes = Fakes(
        wrong=lambda c: c.tile_m == 256 and c.warp_m == 128,
        spilled=lambda c: 4096 if c.tile_n == 256 else 0,
        broken=lambda c: c.tile_k == 32,
        refused=lambda c: c.warp_n == 32,
        code=lambda c: str(replace(c, stages=3)),
    )
    found = search(fakes, ["03"], [4096])
    dropped = found.json("03")["4096"]["dropped"]
    assert {"computes wrong results", "spills 4096 bytes", "does not compile: a test"} < set(dropped)
    assert dropped["does not run: needs more of something"] > 0
    assert dropped["the same machine code as another"] > 0
    assert {(c.tile_k, c.tile_n) for _, c in fakes.ran} == {(64, 128)}
    assert not any(c.tile_m == 256 and c.warp_m == 128 for _, c in fakes.ran)
    assert found.json("03")["4096"]["timed"] == len({c for _, c in fakes.ran})
