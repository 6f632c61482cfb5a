"""Decode on caches: which part of the memory's own rate ``warploom.attention_paged`` reads keys and values at.

    PYTHONPATH=src python benchmarks/decode_cells.py --out OUT

One GPU, one process. Groups of 1, 4, 8 and 16 query heads, head_dim 64, 128 and 256, pages of 16, 64 and 256 keys and
none, batches of 1 to 256 sequences of even and very uneven lengths, bf16, one new query each; 64 MB of keys and values
and more. Every cell is checked against float64 first (two sequences, a key head each), and timed, in company and
rested, beside a copy on the same GPU. The rate counts keys and values alone, the copy's what it reads and writes.
16-bit cells run beside others: contiguous caches of even lengths beside PyTorch's attention, and all beside
FlashAttention-4 (``flash_attn.cute``) and FlashInfer, on CUDA cores and on tensor cores, where they can be imported.
``small`` is one sequence of 4096 keys. ``--set`` times the configuration with other flags besides. Writes
OUT/decode-cells.json; calls one behind the other that differ are a missed figure too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any

import numpy as np
from decode_baselines import BASELINES, runs_of, versions

import warploom
from warploom.core.dtypes import bf16
from warploom.core.targets import Target, target
from warploom.kernels.attention.decode import Decode, decode_configuration
from warploom.kernels.attention.problem import ArrayStrides, AttentionProblem, Cached
from warploom.kernels.attention.reference import AttentionReference, attention_error, attention_reference
from warploom.kernels.source import KernelCall
from warploom_lab.bench.cells import CellScript, Figure, Inputs, Load, Row, Trial

PART, SMALL_US = 0.85, 12.0
"""Of the copy's rate, from 64 MB of keys and values on; microseconds of the small cell."""
COPIED = 2**29
"""Bytes that the copy reads and writes."""
MEGABYTE = 10**6
MOST_TO_MEAN = {True: 64, False: 8}
"""Of uneven lengths, with and without pages: a cache without pages has room for the longest in every sequence."""
CHECKED_ROWS = 8
"""Query rows of each of two sequences that are held against float64: with few elements a ratio says little."""


@dataclass(frozen=True)
class Cell:
    """``megabytes`` of keys and values of ``batch`` sequences; ``page`` 0: none."""

    head_dim: int
    group: int
    page: int
    batch: int
    megabytes: float
    uneven: bool
    kv_heads: int = 8
    fp8: bool = False

    @property
    def name(self) -> str:
        """As the table has it."""
        lengths = "uneven" if self.uneven else "even"
        pages = f"pages {self.page}" if self.page else "no pages"
        heads = f"{self.group * self.kv_heads}/{self.kv_heads}"
        return (
            f"d{self.head_dim} {heads} {pages} b{self.batch} {lengths} {self.megabytes:g}MB{' fp8' if self.fp8 else ''}"
        )

    @cached_property
    def lengths(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Keys of each sequence."""
        keys = int(self.megabytes * MEGABYTE / self.key_bytes)
        shares = np.ones(self.batch)
        if self.uneven:
            shares = np.random.default_rng(self.batch).exponential(1.0, self.batch) ** 2
            shares = np.minimum(shares / shares.mean(), MOST_TO_MEAN[bool(self.page)])
        return np.maximum(keys * shares / shares.sum(), 1).astype(np.int32)

    @property
    def bytes(self) -> int:
        """Of keys and values that the call has to read."""
        return int(self.lengths.sum()) * self.key_bytes

    @property
    def key_bytes(self) -> int:
        """Of a key and a value, of all heads."""
        return (2 if self.fp8 else 4) * self.head_dim * self.kv_heads

    @property
    def capacity(self) -> int:
        """Keys that a sequence has room for."""
        size = self.page or 16
        return int(-(-self.lengths.max() // size) * size)

    @property
    def blocks(self) -> int:
        """Pages in use, or sequences."""
        return int((-(-self.lengths // self.page)).sum()) if self.page else self.batch

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the caches."""
        return self.blocks, self.page or self.capacity, self.kv_heads, self.head_dim

    @property
    def problem(self) -> AttentionProblem:
        """What is asked, for the compilers."""
        entries = self.capacity // self.page if self.page else 0
        cached = Cached(1, self.capacity, self.page, self.blocks, entries, fp8=self.fp8)
        heads = self.group * self.kv_heads, self.kv_heads
        return AttentionProblem(self.batch, *heads, cached, self.head_dim, bf16, window=(None, 0))


def cells() -> list[Cell]:
    """The product of groups, widths and pages, then batches, then sizes."""
    found = [
        Cell(d, group, page, 16, 256, uneven)
        for d in (64, 128, 256)
        for group in (1, 4, 8, 16)
        for page in (0, 16, 64, 256)
        for uneven in (False, True)
    ]
    found += [
        Cell(128, 4, page, batch, 256, uneven)
        for page in (0, 64)
        for batch in (1, 4, 64, 256)
        for uneven in (False, True)
        if batch > 1 or not uneven
    ]
    found += [Cell(128, 4, page, 16, size, False) for page in (0, 64) for size in (64, 128, 1024)]
    found += [
        Cell(d, group, page, 16, 256, uneven, fp8=True)
        for d in (64, 128, 256)
        for group in (4, 16)
        for page in (0, 64)
        for uneven in (False, True)
    ]
    return [*found, small()]


def small() -> Cell:
    """One sequence of 4096 keys."""
    return Cell(128, 4, 0, 1, 4096 * 4 * 128 * 8 / MEGABYTE, False)


# -- on the GPU


def fresh(cell: Cell) -> Inputs:
    """Random arguments of a call; pages come in a random order."""
    import torch

    def make(*shape: int) -> Any:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    x = {"q": make(cell.batch, 1, cell.group * cell.kv_heads, cell.head_dim)}
    for name in ("k_cache", "v_cache"):
        cache = make(*cell.shape)
        x[name] = cache.to(torch.float8_e4m3fn) if cell.fp8 else cache
    x["kv_lens"] = torch.from_numpy(cell.lengths).cuda()
    if cell.page:
        entries = -(-cell.lengths // cell.page)
        table = np.zeros((cell.batch, cell.capacity // cell.page), np.int32)
        pages = np.random.default_rng(1).permutation(cell.blocks)
        for row, part in zip(table, np.split(pages, np.cumsum(entries)[:-1]), strict=True):
            row[: len(part)] = part
        x["block_table"] = torch.from_numpy(table).cuda()
    return x


def ends(cell: Cell) -> list[tuple[int, int]]:
    """Numbers of sequences and of key heads that are checked: :data:`CHECKED_ROWS` of the first and the last one."""
    heads = range(-(-CHECKED_ROWS // cell.group))
    return [(0, h) for h in heads] + [(cell.batch - 1, cell.kv_heads - 1 - h) for h in heads]


def expected(cell: Cell, x: Inputs) -> AttentionReference:
    """What float64 gives at the :func:`ends`, one behind the other."""
    found: list[AttentionReference] = []
    for number, head in ends(cell):
        length = int(cell.lengths[number])
        k, v = (_rows(cell, x, name, number)[:length, head].float().cpu().numpy() for name in ("k_cache", "v_cache"))
        q = x["q"][number, 0, head * cell.group : (head + 1) * cell.group]
        found.append(attention_reference(q.float().cpu().numpy(), k, v, bf16))
    names = [f.name for f in fields(AttentionReference)]
    return AttentionReference(**{n: np.concatenate([getattr(y, n) for y in found]) for n in names})


def error(cell: Cell, reference: AttentionReference, out: Any) -> float:
    """The largest error at the :func:`ends` over what is allowed; NaN where any element is."""
    import torch

    if torch.isnan(out).any():
        return float("nan")
    got = [out[number, 0, head * cell.group : (head + 1) * cell.group] for number, head in ends(cell)]
    report = attention_error(torch.cat(got).float().cpu().numpy(), reference, bf16)
    return max(report.value / report.bound, report.against_rounded / 2)


def repeated(x: Inputs, config: Decode, count: int) -> list[Any]:
    """Results of ``count`` calls that are queued one behind the other."""
    import torch

    outs = [torch.full_like(x["q"], float("nan")) for _ in range(count)]
    for out in outs:
        warploom.attention_paged(**x, out=out, config=str(config))
    return outs


def _rows(cell: Cell, x: Inputs, name: str, number: int) -> Any:
    """Keys or values of a sequence, side by side."""
    import torch

    if not cell.page:
        return x[name][number]
    cache = x[name].view(torch.uint8) if cell.fp8 else x[name]  # PyTorch gathers no fp8
    pages = x["block_table"][number, : -(-int(cell.lengths[number]) // cell.page)].long()
    return cache[pages].view(x[name].dtype).flatten(0, 1)


class DecodeCells(CellScript[Cell]):
    """The script."""

    file, sample = "decode-cells.json", 0.003
    baselines = tuple(BASELINES)
    figures = (Figure("best", 0.95), Figure("best", 1.1, mean=1))

    def options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--set", nargs="*", default=[], help="flags of configurations timed besides: stages=2")
        parser.add_argument("--repeat", type=int, default=20, help="calls whose bits must be the first one's")

    def cells(self) -> list[Cell]:
        return cells()

    def configurations(self, cell: Cell, goal: Target) -> dict[str, Decode]:
        """The one that is chosen, and it with each ``--set`` of flags where that fits."""
        chosen = decode_configuration(cell.problem, goal)
        found = {"warploom": chosen}
        for text in self.given.set:
            other = chosen.with_settings(dict(part.split("=") for part in text.split(",")))
            if other != chosen and not (other.check(goal) + other.violations(cell.problem)):
                found[text] = other
        return found

    def calls(self, cell: Cell, goal: Target) -> Iterator[KernelCall]:
        heads, d = cell.group * cell.kv_heads, cell.head_dim
        _, keys, kv, _ = cell.shape
        q, row = (heads * d, d, heads * d), d // 2 if cell.fp8 else d
        rows = keys * kv * row, row, kv * row
        for config in self.configurations(cell, goal).values():
            yield from config.calls(cell.problem, ArrayStrides({"q": q, "k": rows, "v": rows, "out": q}), 132)

    @cached_property
    def here(self) -> dict[str, str]:
        """The baselines that can be imported, with their versions."""
        return versions(self.given.baselines)

    def head(self) -> Row:
        return {"baselines": self.here}

    def trial(self, cell: Cell) -> Trial:
        import torch

        sets = [fresh(cell) for _ in range(self.gpu.sets(cell.bytes))]
        configs, reference = self.configurations(cell, target(self.gpu.arch)), expected(cell, sets[0])
        outs = {name: repeated(sets[0], config, max(1, self.given.repeat)) for name, config in configs.items()}
        half = torch.randn(COPIED // 4, device="cuda", dtype=torch.bfloat16)
        spare = torch.empty_like(half)
        asked = {name: None if name == "warploom" else str(config) for name, config in configs.items()}

        def error_of(name: str, out: Any) -> float | None:
            if name == "copy":
                return None
            return max(error(cell, reference, x) for x in (out.reshape(sets[0]["q"].shape), *outs.get(name, ())[:1]))

        ours = {
            name: partial(lambda text, x: warploom.attention_paged(**x, config=text), text)
            for name, text in asked.items()
        }
        unsteady = {name: sum(not torch.equal(out, found[0]) for out in found) for name, found in outs.items()}
        return Trial(
            {"copy": lambda _: spare.copy_(half), **ours, **runs_of(cell, sets, self.here)},
            sets,
            error_of,
            optional=self.given.set,
            facts={"config": str(configs["warploom"]), "bytes": cell.bytes, "unsteady": unsteady},
        )

    def rates(self, cell: Cell, load: Load) -> Row:
        """Times, and the part of the copy's rate."""
        copied = COPIED / load.seconds("copy")
        return {
            "copy_gb_s": copied / 1e9,
            "us": load.microseconds(),
            "part": {n: cell.bytes / load.seconds(n) / copied for n in load.found if n != "copy"},
            "ratio": {name: ratio for name, ratio in load.ratio().items() if name != "copy"},
        }

    def missed(self, rows: list[Row]) -> list[str]:
        found = [f"{n}: {x} calls with other bits at {c['cell']}" for c in rows for n, x in c["unsteady"].items() if x]
        for c in rows:
            if c["cell"] == small().name and c["us"]["warploom"] > SMALL_US:
                found.append(f"{c['cell']}: {c['us']['warploom']:.1f} µs, wanted {SMALL_US}")
            if c["bytes"] >= 0.99 * 64 * MEGABYTE and c["part"]["warploom"] < PART:
                found.append(f"{c['cell']}: {c['part']['warploom']:.3f} of the copy's rate, wanted {PART}")
        return found + super().missed(rows)

    def line(self, row: Row) -> str:
        parts = "  ".join(f"{n} {x:.3f} ({row['us'][n]:.1f} µs)" for n, x in row["part"].items())
        return f"{self.line_head(row)}  copy {row['copy_gb_s']:.0f} GB/s  {parts}"


if __name__ == "__main__":
    sys.exit(DecodeCells().main())
