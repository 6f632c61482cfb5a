"""Train a small GPT on the text of this repository's documentation, with this package's kernels or PyTorch's.

    python examples/train_gpt.py --attention warploom --loss warploom --seed 0 --out run.json --picture loss.svg

About 100 million parameters, bfloat16 with float32 master weights, ``torch.compile``, bytes as tokens on a vocabulary
of 50304 words. Prints the loss as it falls; writes each step's, tokens per second and the peak of memory as JSON.
Without a GPU (or with ``--device cpu``, ``--tiny``) a model of one layer takes some steps on the emulator, in seconds.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import warploom
from warploom.core.errors import EmulationWarning
from warploom.layout.draw import Drawing, Label, Stroke

DOCS = Path(__file__).resolve().parents[1] / "docs"
WARM_UP = 10
"""Steps before the clock starts: the first compiles."""
TOLD = 20
"""Losses that are printed, at most."""


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to its normalised input."""

    def __init__(self, width: int, heads: int, kernels: str) -> None:
        super().__init__()
        self.heads, self.kernels = heads, kernels
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.merge = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) → the same."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).unbind(2)
        if self.kernels == "warploom":
            out = warploom.attention(q, k, v, causal=True)
        else:
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.merge(out.reshape(batch, length, width))
        return x + self.feed(self.norms[1](x))


class Gpt(nn.Module):
    """The model and its loss; the embeddings are also the output layer."""

    def __init__(self, words: int, width: int, layers: int, length: int, attention: str, loss: str) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64 or 1, attention) for _ in range(layers)))
        self.norm, self.loss = nn.LayerNorm(width), loss

    def reset(self) -> None:
        """Parameters as they are before a training."""
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.LayerNorm):
                part.reset_parameters()
            elif isinstance(part, nn.Embedding):
                nn.init.normal_(part.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean loss of the next tokens."""
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        x = self.norm(self.blocks(x)).flatten(0, 1)
        if self.loss == "warploom":
            return warploom.linear_cross_entropy(x, self.words.weight, target.flatten(), reduction="mean")
        return functional.cross_entropy(functional.linear(x, self.words.weight), target.flatten())


@dataclass(frozen=True)
class Size:
    """A model and its batches."""

    words: int = 50304
    width: int = 768
    layers: int = 8
    length: int = 1024
    batch: int = 16


TINY = Size(words=256, width=64, layers=1, length=32, batch=1)


class Training:
    """A model that is compiled once and can be trained again and again, each time from the beginning."""

    def __init__(self, size: Size, attention: str, loss: str, device: str) -> None:
        self.size, self.device, self.kernels = size, device, {"attention": attention, "loss": loss}
        self.model = Gpt(size.words, size.width, size.layers, size.length, attention, loss).to(device)
        self.step = self.model if size is TINY else torch.compile(self.model)
        pages = b"".join(page.read_bytes() for page in sorted(DOCS.rglob("*.md")))
        self.data = torch.frombuffer(bytearray(pages), dtype=torch.uint8).long().to(device)

    def run(self, seed: int, steps: int, tell: Callable[[str], None] | None = None) -> dict[str, Any]:
        """Train: each step's loss, and tokens per second and the peak of memory without the first steps.

        ``tell`` gets some of the losses as the training goes on: each waits for the GPU.
        """
        torch.manual_seed(seed)
        self.model.reset()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, weight_decay=0.1)
        gpu, first = self.device == "cuda", min(WARM_UP, steps - 1)
        chosen, losses, start = torch.Generator().manual_seed(seed), list[torch.Tensor](), 0.0
        for number in range(steps):
            if number == first:
                if gpu:
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                start = time.perf_counter()
            with torch.autocast(self.device, dtype=torch.bfloat16):
                loss = self.step(*self._batch(chosen))
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if tell is not None and (number + 1) % -(-steps // TOLD) == 0:
                tell(f"step {number + 1} of {steps}: loss {float(losses[-1]):.3f}")
        seen = [float(x) for x in losses]  # waits for the last step
        tokens = self.size.batch * self.size.length * (steps - first)
        return self.kernels | {
            "seed": seed,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "losses": seen,
            "tokens_per_second": tokens / (time.perf_counter() - start),
            "peak_bytes": torch.cuda.max_memory_allocated() if gpu else None,
        }

    def _batch(self, chosen: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        length, reach = self.size.length, torch.arange(self.size.length + 1, device=self.device)
        first = torch.randint(len(self.data) - length - 1, (self.size.batch,), generator=chosen).to(self.device)
        part = self.data[first[:, None] + reach]
        return part[:, :-1], part[:, 1:]


def picture(losses: list[float]) -> Drawing:
    """The loss of each step."""
    low, high, wide, tall = min(losses), max(losses), 640, 240
    at = [
        (60 + wide * i / max(1, len(losses) - 1), 40 + tall * (high - x) / max(high - low, 1e-9))
        for i, x in enumerate(losses)
    ]
    strokes = tuple(Stroke(*a, *b) for a, b in pairwise(at))
    labels = [Label(60, 20, f"loss of {len(losses)} steps", 15, anchor="start", bold=True)]
    labels += [Label(52, y, f"{x:.2f}", 10.5, anchor="end") for x, y in ((high, 40), (low, 40 + tall))]
    return Drawing(wide + 80, tall + 60, (), tuple(labels), "loss by step", strokes)


def main() -> None:
    """Train once and write what was seen."""
    parser = argparse.ArgumentParser(description="Train a small GPT.")
    for name in ("--attention", "--loss"):
        parser.add_argument(name, choices=("warploom", "torch"), default="warploom")
    parser.add_argument("--steps", type=int, help="300, and 8 of the tiny model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a model of one layer, as always on the CPU")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the loss of each step")
    given = parser.parse_args()
    tiny = given.tiny or given.device == "cpu"
    if given.device == "cpu":
        print("on the CPU, by the emulator: a tiny model")
        warnings.simplefilter("ignore", EmulationWarning)
    training = Training(TINY if tiny else Size(), given.attention, given.loss, given.device)
    found = training.run(given.seed, given.steps or (8 if tiny else 300), partial(print, flush=True))
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if given.picture is not None:
        given.picture.write_text(picture(found["losses"]).svg(), encoding="utf-8")
    ends = found["losses"][0], found["losses"][-1]
    print(
        f"{found['parameters'] / 1e6:.1f}M parameters, loss {ends[0]:.3f} → {ends[1]:.3f}, "
        f"{found['tokens_per_second']:.0f} tokens/s, peak {(found['peak_bytes'] or 0) / 2**30:.1f} GiB"
    )


if __name__ == "__main__":
    main()
