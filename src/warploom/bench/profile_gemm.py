"""Hardware counters of matmul rungs, as :mod:`warploom.bench.profile` reads attention's."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from warploom.bench.counters import METRICS, Profile
from warploom.bench.profile import profile_launches
from warploom.core.errors import UnsupportedDeviceError
from warploom.cuda.device import target_of
from warploom.inspect import SassReport, inspect_program


@dataclass(frozen=True)
class GemmLaunch:
    """One launch to profile: a rung on random row-major matrices of its own types; ``settings`` are FLAG=VALUE.

    ``accumulate``: "f16" or "f32" instead of the rung's own.
    """

    rung: str
    m: int
    n: int
    k: int
    accumulate: str | None = None
    settings: tuple[str, ...] = ()

    @property
    def config(self) -> Any:
        """The rung's configuration with the settings. Raises ConfigError for a rung or a flag that does not exist."""
        from warploom.bench.gemm import ACCUMULATORS, settled
        from warploom.kernels.matmul.ladder import LADDER

        flags = dict(text.split("=", 1) for text in self.settings)
        kind = None if self.accumulate is None else ACCUMULATORS[self.accumulate]
        return settled([LADDER.rung(self.rung)], kind, flags)[0].config

    def plan(self) -> Any:
        """What runs."""
        import numpy as np

        from warploom.ops.matmul import plan_matmul

        config = self.config
        a, b = (np.empty(shape, config.dtype.numpy) for shape in ((self.m, self.k), (self.k, self.n)))
        return plan_matmul(a, b, config=config, accumulate=config.accumulate)  # reads shapes and strides alone

    def report(self) -> SassReport | None:
        """What the launched Program compiles to, with lines and encodings; None where nvdisasm is missing."""
        try:
            return inspect_program(self.plan().program, target_of(0).name, with_source=True)
        except UnsupportedDeviceError:
            return None


def profile_gemm(
    launches: Sequence[GemmLaunch], *, tables: Sequence[str] = tuple(METRICS), samples: bool = True,
    seconds: float = 120.0,
) -> list[Profile]:  # fmt: skip
    """:func:`warploom.bench.profile.profile_launches` of matrix products; of a split K it would see two kernels."""
    module = "warploom.bench.profile_gemm"
    return profile_launches(launches, module, tables=tables, samples=samples, seconds=seconds)


def run_launches(launches: Sequence[GemmLaunch]) -> None:
    """Run each once on random NumPy arrays: the process that ncu watches."""
    import numpy as np

    from warploom.cuda.device import require_driver
    from warploom.ops.matmul import matmul

    require_driver()
    rng = np.random.default_rng(0)
    for one in launches:
        config = one.config
        shapes = (one.m, one.k), (one.k, one.n)
        a, b = (rng.standard_normal(shape, np.float32).astype(config.dtype.numpy) for shape in shapes)
        matmul(a, b, config=config, accumulate=config.accumulate)


def main() -> None:
    """``python -m warploom.bench.profile_gemm '[{"rung": "02", "m": 256, "n": 256, "k": 512}, …]'``: each once."""
    parser = argparse.ArgumentParser(description="Launch matrix products, each once, for a profiler to watch.")
    parser.add_argument("launches", help='as JSON: [{"rung": "02", "m": 256, "n": 256, "k": 512}, …]')
    described: list[dict[str, Any]] = json.loads(parser.parse_args().launches)
    run_launches([GemmLaunch(**{**one, "settings": tuple(one.get("settings", ()))}) for one in described])


if __name__ == "__main__":
    main()
