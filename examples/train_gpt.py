"""Train a small GPT on the text of this repository's documentation, with this package's kernels or PyTorch's.

    python examples/train_gpt.py --attention warploom --loss warploom --seed 0 --out run.json

About 100 million parameters, bfloat16 with float32 master weights, ``torch.compile``, bytes as tokens on a vocabulary
of 50304 words. Writes each step's loss, tokens per second and the peak of memory as JSON. ``--tiny --device cpu`` takes
a model of one layer through two steps, on the emulator.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import warploom

DOCS = Path(__file__).resolve().parents[1] / "docs"


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
        for embedding in (self.words, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean loss of the next tokens."""
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        x = self.norm(self.blocks(x)).flatten(0, 1)
        if self.loss == "warploom":
            return warploom.linear_cross_entropy(x, self.words.weight, target.flatten(), reduction="mean")
        return functional.cross_entropy(functional.linear(x, self.words.weight), target.flatten())


def text(device: str) -> torch.Tensor:
    """The documentation as bytes."""
    pages = b"".join(page.read_bytes() for page in sorted(DOCS.rglob("*.md")))
    return torch.frombuffer(bytearray(pages), dtype=torch.uint8).long().to(device)


def train(given: argparse.Namespace) -> dict[str, Any]:
    """Losses, tokens per second without the first ten steps, and the peak of memory."""
    torch.manual_seed(given.seed)
    words, width, layers, length, batch = (256, 64, 1, 32, 1) if given.tiny else (50304, 768, 8, 1024, 16)
    model = Gpt(words, width, layers, length, given.attention, given.loss).to(given.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    step = model if given.tiny else torch.compile(model)
    data, steps, losses, start = text(given.device), 2 if given.tiny else given.steps, list[torch.Tensor](), 0.0
    gpu = given.device == "cuda"
    chosen = torch.Generator().manual_seed(given.seed)
    for number in range(steps):
        if number == min(10, steps - 1):
            torch.cuda.synchronize() if gpu else None
            start = time.perf_counter()
        first = torch.randint(len(data) - length - 1, (batch,), generator=chosen).to(given.device)
        part = data[first[:, None] + torch.arange(length + 1, device=given.device)]
        with torch.autocast(given.device, dtype=torch.bfloat16):
            loss = step(part[:, :-1], part[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    torch.cuda.synchronize() if gpu else None
    seconds = time.perf_counter() - start
    return {
        "attention": given.attention, "loss": given.loss, "seed": given.seed,
        "parameters": sum(p.numel() for p in model.parameters()), "losses": [float(x) for x in losses],
        "tokens_per_second": batch * length * (steps - min(10, steps - 1)) / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated() if gpu else None,
    }  # fmt: skip


def main() -> None:
    """Train once and write what was seen."""
    parser = argparse.ArgumentParser(description="Train a small GPT.")
    for name in ("--attention", "--loss"):
        parser.add_argument(name, choices=("warploom", "torch"), default="warploom")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = train(given)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    ends = found["losses"][0], found["losses"][-1]
    print(f"{found['parameters'] / 1e6:.1f}M parameters, loss {ends[0]:.3f} → {ends[1]:.3f}, "
          f"{found['tokens_per_second']:.0f} tokens/s, peak {(found['peak_bytes'] or 0) / 2**30:.1f} GiB")  # fmt: skip


if __name__ == "__main__":
    main()
