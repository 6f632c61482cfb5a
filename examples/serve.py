"""Serve many requests of uneven length with one paged cache: a small loop of continuous batching.

    python examples/serve.py [--requests 64] [--seed 0] [--picture requests.svg]

The model is a transformer with random weights, so what it says means nothing; the loop is the point. Each step takes
the next chunk of every prompt that is being read and the newest token of every request that is being answered, writes
their keys and values to pages, and computes the attention of all of them in one call per layer
(``warploom.attention_paged``). A request joins as soon as there are pages for it and leaves with its last token.
Without a GPU (or with ``--device cpu``) a tiny model answers a few short requests on the emulator, in seconds.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from torch import nn
from torch.nn import functional

import warploom
from warploom.core.errors import EmulationWarning
from warploom.layout.draw import Drawing, Label, Rectangle, tone

CHUNK = 16
"""Tokens of a prompt that one step reads."""


@dataclass(frozen=True)
class Size:
    """Of the model, its cache and the requests."""

    words: int = 32000
    width: int = 1024
    layers: int = 8
    heads: int = 16
    kv_heads: int = 4
    pages: int = 4096
    page_size: int = 64
    prompt: int = 1024
    answer: int = 256


TINY = Size(words=64, width=32, layers=1, heads=2, kv_heads=1, pages=8, page_size=16, prompt=24, answer=3)


@dataclass
class Request:
    """A prompt, the tokens that answer it, and where its keys and values are."""

    number: int
    prompt: list[int]
    wanted: int
    answer: list[int] = field(default_factory=list[int])
    pages: list[int] = field(default_factory=list[int])
    read: int = 0
    """Tokens whose keys and values are in the cache."""
    steps: list[int] = field(default_factory=list[int])
    """The steps before which it joined, after which its prompt was read, and in which it left."""

    def next_tokens(self) -> list[int]:
        """What the next step reads: a chunk of the prompt, or the newest token."""
        return (self.prompt + self.answer)[self.read : self.read + CHUNK]


class Batch(NamedTuple):
    """The tokens of one step, one request behind the other, and where everything is."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    """Of each token's keys and values among all pages."""
    starts: torch.Tensor
    kv_lens: torch.Tensor
    block_table: torch.Tensor


class Layer(nn.Module):
    """Attention on the cache and a feed-forward layer, each added to its normalised input."""

    cache: torch.Tensor
    """Keys and values, in pages."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size, self.head_dim = size, size.width // size.heads
        self.norms = nn.ModuleList(nn.RMSNorm(size.width) for _ in range(2))
        self.qkv = nn.Linear(size.width, (size.heads + 2 * size.kv_heads) * self.head_dim, bias=False)
        self.merge = nn.Linear(size.width, size.width, bias=False)
        self.feed = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.SiLU(), nn.Linear(4 * size.width, size.width)
        )
        shape = 2, size.pages, size.page_size, size.kv_heads, self.head_dim
        self.register_buffer("cache", torch.zeros(shape), persistent=False)

    def turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotary embedding."""
        half = self.head_dim // 2
        angle = positions[:, None] * 10000.0 ** (-torch.arange(half, device=x.device) / half)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """(tokens, width) → the same."""
        size = self.size
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self.head_dim))
        q, k, v = parts.split((size.heads, size.kv_heads, size.kv_heads), 1)
        q, k = self.turned(q, batch.positions), self.turned(k, batch.positions)
        for cache, new in zip(self.cache, (k, v), strict=True):
            cache.flatten(0, 1)[batch.slots] = new
        out = warploom.attention_paged(
            q, self.cache[0], self.cache[1], batch.kv_lens, block_table=batch.block_table, cu_seqlens_q=batch.starts
        )
        x = x + self.merge(out.flatten(1))
        return x + self.feed(self.norms[1](x))


class Server:
    """The model, the pages that are free, and the requests that are under way."""

    def __init__(self, size: Size, device: str) -> None:
        self.size, self.device = size, device
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers)).to(device, torch.bfloat16)
        self.words = nn.Embedding(size.words, size.width).to(device, torch.bfloat16)
        self.free = list(range(size.pages))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.steps = 0

    def admit(self) -> None:
        """Let requests join, in order, while there are pages for all that they will need."""
        while self.waiting:
            first = self.waiting[0]
            needed = -(-(len(first.prompt) + first.wanted) // self.size.page_size)
            if needed > len(self.free):
                return
            first.steps.append(self.steps)
            first.pages = [self.free.pop() for _ in range(needed)]
            self.running.append(self.waiting.popleft())

    def batch(self) -> Batch:
        """The next tokens of every request."""
        tokens = [request.next_tokens() for request in self.running]
        positions = [range(r.read, r.read + len(new)) for r, new in zip(self.running, tokens, strict=True)]
        size, most = self.size.page_size, max(len(r.pages) for r in self.running)
        slots = [
            r.pages[p // size] * size + p % size for r, ps in zip(self.running, positions, strict=True) for p in ps
        ]
        starts = [0]
        for new in tokens:
            starts.append(starts[-1] + len(new))

        def numbers(values: list[int] | list[list[int]], dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        return Batch(
            numbers([t for new in tokens for t in new], torch.long),
            numbers([p for ps in positions for p in ps]),
            numbers(slots, torch.long),
            numbers(starts),
            numbers([ps.stop for ps in positions]),
            numbers([r.pages + [0] * (most - len(r.pages)) for r in self.running]),
        )

    @torch.no_grad()
    def step(self) -> list[tuple[Request, int]]:
        """One pass through the model. Returns the tokens that it added, each with its request."""
        self.admit()
        batch = self.batch()
        x = self.words(batch.tokens)
        for layer in self.layers:
            x = layer(x, batch)
        logits = functional.linear(x[batch.starts[1:].long() - 1], self.words.weight)
        best: list[int] = logits.argmax(-1).tolist()
        self.steps += 1
        added: list[tuple[Request, int]] = []
        for request, token, end in zip(self.running, best, batch.kv_lens.tolist(), strict=True):
            request.read = end
            if request.read == len(request.prompt) + len(request.answer):
                request.answer.append(token)
                request.steps += [self.steps] * (len(request.answer) in (1, request.wanted))
                added.append((request, token))
        for request in [r for r in self.running if len(r.answer) == r.wanted]:
            self.running.remove(request)
            self.free += request.pages
        return added


def requests(size: Size, count: int, seed: int) -> list[Request]:
    """Prompts of random tokens, of uneven lengths."""
    rng = random.Random(seed)
    return [
        Request(i, [rng.randrange(size.words) for _ in range(rng.randint(1, size.prompt))], rng.randint(1, size.answer))
        for i in range(count)
    ]


def serve(server: Server, given: list[Request]) -> float:
    """Answer all requests, showing how far each is. Returns tokens per second."""
    server.waiting.extend(given)
    start, count = time.perf_counter(), 0
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, transient=True, disable=not sys.stdout.isatty()) as progress:
        everything = progress.add_task("all requests", total=sum(r.wanted for r in given))
        tasks: dict[int, TaskID] = {}
        while server.waiting or server.running:
            for request, _token in server.step():
                count += 1
                progress.advance(everything)
                if request.number not in tasks:
                    tasks[request.number] = progress.add_task(f"request {request.number}", total=request.wanted)
                progress.advance(tasks[request.number])
                if len(request.answer) == request.wanted:
                    progress.remove_task(tasks[request.number])
    return count / (time.perf_counter() - start)


def picture(given: list[Request]) -> Drawing:
    """Each request from the step in which it joins to that in which it leaves: its prompt, then its answer."""
    scale, row = 800 / max(request.steps[-1] for request in given), 18
    boxes: list[Rectangle] = []
    labels = [Label(18, 20, f"{len(given)} requests by step: prompt, then answer", 15, anchor="start", bold=True)]
    for number, request in enumerate(given):
        joined, answered, y = request.steps[0], request.steps[1], 40 + row * number
        for begin, end, fill in ((joined, answered, tone(5, 2)), (answered, request.steps[-1], tone(3, 2))):
            if end > begin:
                what = f"request {request.number}: steps {begin} to {end}"
                boxes.append(Rectangle(60 + begin * scale, y, (end - begin) * scale, row - 4, fill, what))
        labels.append(Label(52, y + 7, str(request.number), 10.5, anchor="end"))
    return Drawing(878, 48 + row * len(given), tuple(boxes), tuple(labels), "requests by step")


def main() -> None:
    """Serve random requests."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, help="64, and 8 of the tiny model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--tiny", action="store_true", help="a model of one layer and a few tokens, as always on the CPU"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw when each request was answered")
    options = parser.parse_args()
    tiny = options.tiny or options.device == "cpu"
    if options.device == "cpu":
        print("on the CPU, by the emulator: a tiny model")
        warnings.simplefilter("ignore", EmulationWarning)
    torch.manual_seed(options.seed)
    size = TINY if tiny else Size()
    given = requests(size, options.requests or (8 if tiny else 64), options.seed)
    rate = serve(Server(size, options.device), given)
    answered = sum(len(request.answer) for request in given)
    if options.picture is not None:
        options.picture.write_text(picture(given).svg(), encoding="utf-8")
    print(f"{len(given)} requests, {answered} tokens, {rate:.0f} tokens/s")


if __name__ == "__main__":
    main()
