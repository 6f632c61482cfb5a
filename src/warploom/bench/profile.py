"""Hardware counters of attention rungs, read by Nsight Compute (``ncu``) from a process that launches each once."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Protocol

from warploom.bench.counters import METRICS, OPCODES, Profile, choose_metrics, parse_profiles
from warploom.bench.ncu import available_metrics, find_ncu, record
from warploom.bench.samples import locate, parse_source_page
from warploom.core.errors import ConfigError, UnsupportedDeviceError
from warploom.cuda.device import target_of
from warploom.inspect import SassReport, inspect_program
from warploom.kernels.attention.problem import AttentionConfig


@dataclass(frozen=True)
class Launch:
    """One launch to profile: a rung on random inputs (full, head_dim 128, bf16); ``settings`` are FLAG=VALUE."""

    rung: str
    seq: int
    batch: int = 1
    heads: int = 1
    settings: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, seq, heads, head_dim) of q, k and v."""
        return self.batch, self.seq, self.heads, self.config.head_dim

    @property
    def config(self) -> AttentionConfig:
        """The rung's configuration with the settings. Raises ConfigError for a rung or a flag that does not exist."""
        from warploom.bench.attention import settled
        from warploom.core.dtypes import bf16
        from warploom.kernels.attention.ladder import FULL_LADDER

        flags = dict(text.split("=", 1) for text in self.settings)
        return settled(FULL_LADDER.rung(self.rung), 128, bf16, flags).config

    def report(self) -> SassReport | None:
        """What the launched Program compiles to, with lines and encodings; None where nvdisasm is missing."""
        import numpy as np

        from warploom.ops.attention import plan

        q = np.empty(self.shape, self.config.dtype.numpy)  # never touched: planning reads shapes and strides
        program = plan(q, q, q, config=self.config).program
        try:
            return inspect_program(program, target_of(0).name, with_source=True)
        except UnsupportedDeviceError:
            return None


class Watched(Protocol):
    """A launch that can be described as JSON: a dataclass of plain values."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def config(self) -> Any:
        """What runs. Raises ConfigError for a rung or a flag that does not exist."""
        ...

    def report(self) -> SassReport | None:
        """What it compiles to, with lines and encodings; None where nvdisasm is missing."""
        ...


def profile_attention(
    launches: Sequence[Launch], *, tables: Sequence[str] = tuple(METRICS), samples: bool = True, seconds: float = 120.0
) -> list[Profile]:
    """:func:`profile_launches` of attention."""
    return profile_launches(launches, "warploom.bench.profile", tables=tables, samples=samples, seconds=seconds)


def profile_launches(
    launches: Sequence[Watched],
    module: str,
    *,
    tables: Sequence[str],
    samples: bool,
    seconds: float,
    kernels: str = "",
) -> list[Profile]:
    """Counters and samples of each launch, from one process that ncu watches; clocks as they are.

    The process is ``python -m MODULE JSON``, which launches each once and nothing else (or nothing whose name
    ``kernels``, a regular expression, matches). Of :data:`METRICS` ``tables`` are read: a launch is replayed until all
    of them are, so few take less time.

    Raises UnsupportedDeviceError where ncu is missing, refuses or takes longer than ``seconds``, ConfigError for a rung
    or flag that does not exist.
    """
    ncu = find_ncu()
    for one in launches:
        one.config  # noqa: B018  # a mistake is told before anything runs
    known = choose_metrics(available_metrics(ncu))
    chosen = {name: known[name] for name in tables if name in known}
    wanted = [
        *(m for table in chosen.values() for m in table.values()),
        *([OPCODES] if "instructions" in tables else []),
    ]
    driver = [sys.executable, "-m", module, json.dumps([asdict(one) for one in launches])]
    raw, source = record(ncu, wanted, driver, samples=samples, seconds=seconds, kernels=kernels)
    profiles = parse_profiles(raw, chosen)
    if len(profiles) != len(launches):
        raise UnsupportedDeviceError(f"ncu saw {len(profiles)} kernels where {len(launches)} were launched")
    return with_samples(profiles, source, launches)


def with_samples(profiles: Sequence[Profile], source: str, launches: Sequence[Watched]) -> list[Profile]:
    """The profiles with the samples of ncu's source page; as they are where ncu took none."""
    try:
        kernels = parse_source_page(source)
    except ConfigError:
        return list(profiles)
    if len(kernels) != len(profiles):
        return list(profiles)
    joined = zip(profiles, kernels, launches, strict=True)
    return [replace(profile, samples=locate(sampled, one.report())) for profile, sampled, one in joined]


def run_launches(launches: Sequence[Launch]) -> None:
    """Run each once on random NumPy arrays: the process that ncu watches."""
    import numpy as np

    from warploom.cuda.device import require_driver
    from warploom.ops.attention import attention

    require_driver()
    rng = np.random.default_rng(0)
    inputs: dict[tuple[int, ...], list[Any]] = {}
    for one in launches:
        if one.shape not in inputs:
            inputs.clear()  # of one problem at a time: a long one fills a gigabyte
            kind = one.config.dtype.numpy
            inputs[one.shape] = [rng.standard_normal(one.shape, np.float32).astype(kind) for _ in range(3)]
        attention(*inputs[one.shape], config=one.config)


def main() -> None:
    """``python -m warploom.bench.profile '[{"rung": "1", "seq": 256}, …]'``: one launch of each."""
    parser = argparse.ArgumentParser(description="Launch attention kernels, each once, for a profiler to watch.")
    parser.add_argument("launches", help='as JSON: [{"rung": "1", "seq": 256, "batch": 1, "heads": 1}, …]')
    described: list[dict[str, Any]] = json.loads(parser.parse_args().launches)
    run_launches([Launch(**{**one, "settings": tuple(one.get("settings", ()))}) for one in described])


if __name__ == "__main__":
    main()
