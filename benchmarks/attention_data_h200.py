"""What attention's speed depends on in the data: the kernel with stale maxima, and one without, on four kinds.

    PYTHONPATH=src python benchmarks/attention_data_h200.py --out OUT

The kernel takes it that the maxima of one block serve the next, and recomputes a block's scores where P shows that
they do not. So data matters: independent scores of deviation 1 and of 8, a first key that every query attends to, and
keys that grow from block to block as they are visited, so that every block raises every maximum. Each result is checked
against float64 on random rows; then what a call chooses, the ladder's kernel of the same tile, which looks for maxima
in every block, torch's cuDNN backend and, where it is installed, FlashAttention-4 are timed interleaved. Writes
OUT/attention-data.json; exits with 1 if a result is wrong.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from attention_cells import bytes_of, is_causal, others_of, ours, problem_of
from attention_others import fresh, plane_error

from warploom.core.targets import Target, target
from warploom.kernels.attention.choice import choose
from warploom.kernels.attention.decode import Decode
from warploom.kernels.attention.problem import ArrayStrides, AttentionConfig, AttentionProblem
from warploom.kernels.source import KernelCall
from warploom_lab.bench.cells import CellScript, Load, Row, Trial
from warploom_lab.kernels.attention.ladder_sm90 import RungSm90

CELLS = (
    (64, False, 4096),
    (64, True, 1024),
    (128, False, 512),
    (128, False, 16384),
    (128, True, 4096),
    (256, False, 16384),
    (256, True, 4096),
)
DEVIATION, GROWTH, SINK = 8.0, 40.0, 80.0
Tensors = tuple[Any, Any, Any]


def wide(q: Any, k: Any, v: Any) -> Tensors:
    """Independent scores of deviation DEVIATION: their maxima grow now and then."""
    return q * DEVIATION, k, v


def sink(q: Any, k: Any, v: Any) -> Tensors:
    """Every query likes the first key, which is visited last: one step of all maxima."""
    q, k = q.clone(), k.clone()
    q[..., 0] += 2.0
    k[:, 0] = 0.0
    k[:, 0, :, 0] = SINK
    return q, k, v


def growing(q: Any, k: Any, v: Any) -> Tensors:
    """Every block raises every maximum by more than is let pass."""
    import torch

    factor = torch.linspace(GROWTH, 1.0, k.shape[1], device=k.device)[None, :, None, None]
    return q, (k * factor).to(k.dtype), v


KINDS: dict[str, Callable[[Any, Any, Any], Tensors]] = {
    "deviation 1": lambda q, k, v: (q, k, v),
    f"deviation {DEVIATION:.0f}": wide,
    "one key that all attend to": sink,
    "growing in every block": growing,
}


@dataclass(frozen=True)
class Cell:
    """One problem on one kind of data."""

    problem: AttentionProblem
    kind: str

    @property
    def name(self) -> str:
        """As the table has it."""
        p = self.problem
        return f"d{p.head_dim} {'causal' if is_causal(p) else 'full'} {p.q_len} {self.kind}"

    def configs(self, goal: Target) -> dict[str, AttentionConfig]:
        """What a call chooses, and the same tile with maxima in every block."""
        chosen, _ = choose(self.problem, goal)
        assert not isinstance(chosen, Decode), "every cell has many queries"
        flags: dict[str, Any] = {f.name: getattr(chosen, f.name) for f in dataclasses.fields(chosen)}
        flags |= {"sum_column": False, "skip_masked": False}
        return {"carried": chosen, "plain": RungSm90(**flags)}


class AttentionData(CellScript[Cell]):
    """The script."""

    file, listed, rounds = "attention-data.json", "rows", 9
    baselines = ("torch_cudnn", "flash_attention_4")

    def cells(self) -> list[Cell]:
        return [Cell(problem_of(*size), kind) for size in CELLS for kind in KINDS]

    def calls(self, cell: Cell, goal: Target) -> Iterator[KernelCall]:
        for config in cell.configs(goal).values():
            yield from config.calls(cell.problem, ArrayStrides.contiguous(cell.problem), 132)

    def trial(self, cell: Cell) -> Trial:
        p, configs = cell.problem, cell.configs(target(self.gpu.arch))
        drawn = ([*fresh(p).values()] for _ in range(self.gpu.sets(bytes_of(p))))
        sets = [dict(zip("qkv", KINDS[cell.kind](*qkv), strict=True)) for qkv in drawn]
        others = others_of(is_causal(p))
        return Trial(
            {name: ours(p, config) for name, config in configs.items()}
            | {name: others[name] for name in self.given.baselines if name in others},
            sets,
            lambda name, out: plane_error(sets[0], out, p.window, 0, 0) if name in configs else None,
            p.flops,
            ours="carried",
            facts={
                "head_dim": p.head_dim,
                "causal": is_causal(p),
                "seq": p.q_len,
                "data": cell.kind,
                "config": str(configs["carried"]),
            },
        )

    def rates(self, cell: Cell, load: Load) -> Row:
        found = super().rates(cell, load)
        return found | {"over_plain": found["ratio"].pop("plain")}


if __name__ == "__main__":
    sys.exit(AttentionData().main())
