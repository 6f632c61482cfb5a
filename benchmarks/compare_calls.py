"""What ``compare_trees.py`` compares: calls on random inputs, each held against float64."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from scripts import products

Make = Callable[..., Any]
"""Draws a normal tensor of a shape, in the type of the cell."""
CHECKED_ROWS = 512


@dataclass(frozen=True)
class Cell(ABC):
    """One call on inputs of certain shapes, and how wrong its result is."""

    group: str
    name: str
    dtype: str = "bfloat16"
    options: dict[str, Any] = field(default_factory=dict[str, Any], kw_only=True)

    @property
    @abstractmethod
    def flops(self) -> float:
        """Floating-point operations of the call's products."""

    @property
    def result_shape(self) -> tuple[int, ...]:
        """The shape of the first result."""
        raise NotImplementedError

    @abstractmethod
    def inputs(self, make: Make) -> list[Any]:
        """New inputs."""

    @abstractmethod
    def run(self, inputs: list[Any]) -> tuple[Any, ...]:
        """The call: its results."""

    @abstractmethod
    def error(self, inputs: list[Any], results: tuple[Any, ...]) -> float:
        """The largest error of the checked part of the results over what the type allows."""

    @property
    def unit(self) -> float:
        """The rounding error of the type, relative."""
        return 2.0**-8 if self.dtype == "bfloat16" else 2.0**-11


@dataclass(frozen=True)
class Attention(Cell):
    """``attention`` of q (batch, q_len, heads, head_dim) on ``kv_len`` keys of ``kv_heads`` heads."""

    q: tuple[int, int, int, int] = (1, 1, 1, 64)
    kv_len: int = 0
    kv_heads: int = 0

    @property
    def keys(self) -> tuple[int, int, int, int]:
        """The shape of K and of V."""
        return self.q[0], self.kv_len or self.q[1], self.kv_heads or self.q[2], self.q[3]

    @property
    def flops(self) -> float:
        """Of Q·Kᵀ and P·V; half of them under a causal mask."""
        batch, q_len, heads, dim = self.q
        return 4.0 * batch * heads * q_len * self.keys[1] * dim * (0.5 if self.options.get("causal") else 1.0)

    @property
    def result_shape(self) -> tuple[int, ...]:
        return self.q

    def inputs(self, make: Make) -> list[Any]:
        return [make(self.q), make(self.keys), make(self.keys)]

    def run(self, inputs: list[Any]) -> tuple[Any, ...]:
        import warploom

        found = warploom.attention(*inputs, **self.options)
        return found if isinstance(found, tuple) else (found,)

    def error(self, inputs: list[Any], results: tuple[Any, ...]) -> float:
        """Of the last rows of the last head."""
        rows, head = min(self.q[1], CHECKED_ROWS), self.q[2] - 1
        q, k, v = (x[-1, :, head * x.shape[2] // self.q[2]].double() for x in inputs)
        found = output_error(q[-rows:], k, v, results[0][-1, -rows:, head], self.unit, self.options)
        if len(results) == 1:
            return found
        sums = _scores(q[-rows:], k, self.q[3] ** -0.5, self.options).logsumexp(-1)
        return max(found, largest(results[1][-1, head, -rows:].double() - sums, 2.0**-16 * (sums.abs() + 1)))


@dataclass(frozen=True)
class Backward(Attention):
    """``attention_backward`` of the same."""

    @property
    def flops(self) -> float:
        """Of the five products."""
        return 2.5 * super().flops

    def inputs(self, make: Make) -> list[Any]:
        """dO, Q, K, V, and O and the log-sum-exps of the forward pass."""
        import warploom

        qkv = super().inputs(make)
        return [make(self.q), *qkv, *warploom.attention(*qkv, return_lse=True, **self.options)]

    def run(self, inputs: list[Any]) -> tuple[Any, ...]:
        import warploom

        return warploom.attention_backward(*inputs, **self.options)

    def error(self, inputs: list[Any], results: tuple[Any, ...]) -> float:
        """Of the last key head's gradients, and those of the query heads that share it."""
        group, dim = self.q[2] // self.keys[2], self.q[3]
        dout, q = (x[-1, :, -group:].double().transpose(0, 1) for x in inputs[:2])
        k, v = (x[-1, :, -1].double() for x in inputs[2:4])
        dq = results[0][-1, :, -group:].double().transpose(0, 1)
        dk, dv = (x[-1, :, -1].double() for x in results[1:3])
        return gradient_error((dout, q, k, v), (dq, dk, dv), dim**-0.5, self.unit, self.options)


@dataclass(frozen=True)
class Decode(Cell):
    """``attention_paged``: ``queries`` of each sequence on a cache; with ``page`` keys in pages in random order."""

    lengths: tuple[int, ...] = (1024,)
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    queries: int = 1
    page: int = 0

    @property
    def flops(self) -> float:
        return 4.0 * self.queries * self.heads * self.head_dim * sum(self.lengths)

    def inputs(self, make: Make) -> list[Any]:
        """q, the caches, the lengths, and the block table if there are pages."""
        import torch

        batch, longest = len(self.lengths), max(self.lengths)
        q = make((batch, self.queries, self.heads, self.head_dim))
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=q.device)
        if not self.page:
            return [q, *(make((batch, longest, self.kv_heads, self.head_dim)) for _ in range(2)), lengths, None]
        columns = -(-longest // self.page)
        caches = [make((batch * columns, self.page, self.kv_heads, self.head_dim)) for _ in range(2)]
        table = torch.randperm(batch * columns, device=q.device).to(torch.int32).reshape(batch, columns)
        return [q, *caches, lengths, table]

    def run(self, inputs: list[Any]) -> tuple[Any, ...]:
        import warploom

        *arrays, table = inputs
        return (warploom.attention_paged(*arrays, block_table=table, **self.options),)

    def error(self, inputs: list[Any], results: tuple[Any, ...]) -> float:
        """Of the last sequence's last head."""
        q, *caches, _, table = inputs
        k, v = (x[-1] if table is None else x[table[-1].long()].flatten(0, 1) for x in caches)
        k, v = (x[: self.lengths[-1], -1].double() for x in (k, v))
        return output_error(q[-1, :, -1].double(), k, v, results[0][-1, :, -1], self.unit, {"causal": True})


@dataclass(frozen=True)
class Packed(Cell):
    """``attention_varlen`` of sequences of these lengths; with ``gradients`` its backward pass alone, by autograd."""

    lengths: tuple[int, ...] = (1024,)
    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    gradients: bool = False

    @property
    def flops(self) -> float:
        products = 10.0 if self.gradients else 4.0
        half = 0.5 if self.options.get("causal") else 1.0
        return products * half * self.heads * self.head_dim * sum(n * n for n in self.lengths)

    def inputs(self, make: Make) -> list[Any]:
        """q, k, v, where sequences begin; with gradients also the output of the forward pass and dO."""
        import torch

        import warploom

        total = sum(self.lengths)
        q, k, v = (make((total, heads, self.head_dim)) for heads in (self.heads, self.kv_heads, self.kv_heads))
        starts = torch.tensor([0, *self.lengths], device=q.device).cumsum(0).to(torch.int32)
        if not self.gradients:
            return [q, k, v, starts]
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out = warploom.attention_varlen(q, k, v, starts, **self.options)
        return [q, k, v, starts, out, make(out.shape)]

    def run(self, inputs: list[Any]) -> tuple[Any, ...]:
        import torch

        import warploom

        if not self.gradients:
            return (warploom.attention_varlen(*inputs, **self.options),)
        q, k, v, _, out, dout = inputs
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    def error(self, inputs: list[Any], results: tuple[Any, ...]) -> float:
        """Of the last sequence's last key head."""
        rows, group = slice(-self.lengths[-1], None), self.heads // self.kv_heads
        k, v = (x[rows, -1].detach().double() for x in inputs[1:3])
        if not self.gradients:
            return output_error(inputs[0][rows, -1].double(), k, v, results[0][rows, -1], self.unit, self.options)
        dout, q, dq = (x[rows, -group:].detach().double().transpose(0, 1) for x in (inputs[5], inputs[0], results[0]))
        dk, dv = (x[rows, -1].double() for x in results[1:])
        return gradient_error((dout, q, k, v), (dq, dk, dv), self.head_dim**-0.5, self.unit, self.options)


@dataclass(frozen=True)
class Product(Cell):
    """x·wᵀ of x (m, k) and w (n, k): ``matmul``, or ``matmul_reduce`` by the option ``op``."""

    m: int = 1
    n: int = 1
    k: int = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def result_shape(self) -> tuple[int, ...]:
        return (self.m,) if "op" in self.options else (self.m, self.n)

    def inputs(self, make: Make) -> list[Any]:
        return [make((self.m, self.k)), make((self.n, self.k))]

    def run(self, inputs: list[Any]) -> tuple[Any, ...]:
        import warploom

        call = warploom.matmul_reduce if "op" in self.options else warploom.matmul
        return (call(inputs[0], inputs[1].T, **self.options),)

    def error(self, inputs: list[Any], results: tuple[Any, ...]) -> float:
        """Of the first rows."""
        import torch

        rows, slack = slice(0, 256), self.k * 2.0**-22
        a, b = (x.double() for x in inputs)
        whole, magnitude = a[rows] @ b.T, a[rows].abs() @ b.abs().T
        found, op = results[0][rows].double(), self.options.get("op")
        if self.options.get("epilogue"):  # gelu, whose slope is at most 1.13, and whose approximation errs by 2^-10
            magnitude = 1.13 * (magnitude + 2.0**-10 / slack * whole.abs())
            whole = torch.nn.functional.gelu(whole, approximate="tanh")
        if op is None:
            return largest(found - whole, self.unit * whole.abs() + slack * magnitude + 1e-7)
        expected = whole.max(1)[0] if op == "max" else whole.sum(1) if op == "sum" else torch.logsumexp(whole, 1)
        allowed = slack * (magnitude.sum(1) if op == "sum" else magnitude.max(1)[0]) + 2.0**-20 * expected.abs()
        return largest(found - expected, allowed)


@dataclass(frozen=True)
class Loss(Product):
    """The mean ``linear_cross_entropy`` of x (m, k) and w (n, k); with ``gradients`` also those of x and w."""

    gradients: bool = False

    @property
    def flops(self) -> float:
        return super().flops * (3 if self.gradients else 1)

    def inputs(self, make: Make) -> list[Any]:
        import torch

        x, w = super().inputs(make)
        w = w * self.k**-0.5
        return [x.requires_grad_(self.gradients), w.requires_grad_(self.gradients), torch.randint(self.n, (self.m,))]

    def run(self, inputs: list[Any]) -> tuple[Any, ...]:
        import torch

        import warploom

        x, w, target = inputs
        loss = warploom.linear_cross_entropy(x, w, target, reduction="mean")
        return (loss, *torch.autograd.grad(loss, (x, w))) if self.gradients else (loss,)

    def error(self, inputs: list[Any], results: tuple[Any, ...]) -> float:
        """Of the loss, of the first rows of dx, and of the first rows of dw."""
        import torch

        x, w, target = (t.detach() for t in inputs)
        some, loss = slice(0, 64), 0.0
        dx: Any = None
        dw, dw_size = (torch.zeros(64, self.k, dtype=torch.float64, device=x.device) for _ in range(2))
        for rows in (slice(i, i + 1024) for i in range(0, self.m, 1024)):
            logits = x[rows].double() @ w.double().T
            loss += float(torch.nn.functional.cross_entropy(logits, target[rows], reduction="sum"))
            if not self.gradients:
                continue
            shares = torch.softmax(logits, 1)
            shares[torch.arange(len(shares), device=x.device), target[rows]] -= 1.0
            dw += shares[:, some].T @ x[rows].double()
            dw_size += shares[:, some].abs().T @ x[rows].double().abs()
            dx = (shares[some] @ w.double(), shares[some].abs() @ w.double().abs()) if dx is None else dx
        worst = abs(float(results[0]) * self.m - loss) / (2.0**-16 * abs(loss))
        if not self.gradients:
            return worst
        checks = (results[1], *dx), (results[2], dw, dw_size)
        found = [
            largest(got[some].double() * self.m - want, 4 * self.unit * (want.abs() + size) + 2.0**-16)
            for got, want, size in checks
        ]
        return max(worst, *found)


# -- references in float64


def largest(error: Any, allowed: Any) -> float:
    """The largest error over what is allowed; NaN counts as infinite."""
    found = float((error.abs() / allowed).max())
    return math.inf if math.isnan(found) else found


def _scores(q: Any, k: Any, scale: float, options: dict[str, Any]) -> Any:
    """The scaled, capped and masked scores of the last rows of a sequence; ``q`` (…, rows, head_dim)."""
    import torch

    scores = q @ k.T * scale
    if options.get("softcap"):
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    at = torch.arange(k.shape[0] - q.shape[-2], k.shape[0], device=q.device)[:, None]
    key = torch.arange(k.shape[0], device=q.device)[None]
    if options.get("causal"):
        scores = scores.masked_fill(key > at, -math.inf)
    if options.get("window"):
        scores = scores.masked_fill(key < at - options["window"][0], -math.inf)
    return scores


def output_error(q: Any, k: Any, v: Any, out: Any, unit: float, options: dict[str, Any]) -> float:
    """Of some last rows of a head: P and O are rounded to the type."""
    import torch

    weights = torch.softmax(_scores(q, k, q.shape[-1] ** -0.5, options), -1)
    expected, magnitude = weights @ v, weights @ v.abs()
    allowed = 2 * unit * (expected.abs() + magnitude) + 2.0**-18 * (magnitude + 1)
    return largest(out.double() - expected, allowed)


def gradient_error(
    inputs: tuple[Any, ...], found: tuple[Any, ...], scale: float, unit: float, options: dict[str, Any]
) -> float:
    """Of dq (heads, rows, head_dim), dk and dv of the heads that share keys: P, dS and O are rounded to the type."""
    import torch

    dout, q, k, v = inputs
    weights = torch.softmax(_scores(q, k, scale, options), -1)
    out = weights @ v
    change = weights * (dout @ v.T - (dout * out).sum(-1, keepdim=True))
    size = change.abs() + weights * (dout * out).abs().sum(-1, keepdim=True)
    wanted = (
        (scale * change @ k, scale * size @ k.abs()),
        (scale * (change.mT @ q).sum(0), scale * (size.mT @ q.abs()).sum(0)),
        ((weights.mT @ dout).sum(0), (weights.mT @ dout.abs()).sum(0)),
    )
    return max(
        largest(got - want, 2 * unit * (want.abs() + magnitude) + 2.0**-18)
        for got, (want, magnitude) in zip(found, wanted, strict=True)
    )


# -- the cells


def attention_cells() -> Iterator[Cell]:
    """The 36 cells: 16384 tokens, heads × head_dim = 2048."""
    for dim, causal, seq in product((64, 128, 256), (False, True), (512, 1024, 2048, 4096, 8192, 16384)):
        name = f"d{dim} {'causal' if causal else 'full'} {seq}"
        yield Attention("attention", name, q=(16384 // seq, seq, 2048 // dim, dim), options={"causal": causal})


def other_cells() -> Iterator[Cell]:
    """Attention on shapes that nobody tuned for."""

    def causal(name: str, q: tuple[int, int, int, int], kv_heads: int = 0, **options: Any) -> Cell:
        return Attention("other", name, q=q, kv_heads=kv_heads, options={"causal": True, **options})

    def full(name: str, q: tuple[int, int, int, int], kv_heads: int = 0, kv_len: int = 0) -> Cell:
        return Attention("other", name, q=q, kv_heads=kv_heads, kv_len=kv_len)

    yield causal("70B prefill 4k", (1, 4096, 64, 128), 8)
    yield causal("8B 8k", (1, 8192, 32, 128), 8)
    yield causal("1x2048 32/8", (1, 2048, 32, 128), 8)
    yield causal("32k 40/8", (1, 32768, 40, 128), 8)
    yield causal("131k 8/1", (1, 131072, 8, 128), 1)
    yield causal("3000 causal", (4, 3000, 16, 128))
    yield full("1000 full", (16, 1000, 16, 128))
    yield full("8191 full", (2, 8191, 16, 128))
    yield causal("window 1024 16k", (1, 16384, 16, 128), window=(1023, 0))
    yield causal("softcap d256 16/8", (2, 4096, 16, 256), 8, softcap=50.0)
    yield causal("d96 causal", (4, 4096, 16, 96))
    yield full("d80 full", (4, 4096, 16, 80))
    yield full("d72 full", (4, 4096, 16, 72))
    yield causal("d192 causal", (2, 4096, 16, 192))
    yield full("197 d64", (64, 197, 12, 64))
    yield full("decode 8k 32/8", (16, 1, 32, 128), 8, kv_len=8192)
    yield Attention("other", "f16 d128 causal 4k", "float16", q=(4, 4096, 16, 128), options={"causal": True})
    yield Attention("other", "f16 d64 full 4k", "float16", q=(4, 4096, 32, 64))
    yield full("one head 16k", (1, 16384, 1, 128))
    yield causal("lse causal 4k", (4, 4096, 16, 128), return_lse=True)


def backward_cells() -> Iterator[Cell]:
    """Gradients: lengths and sizes of heads, grouped heads, and shapes that are short."""
    for dim, causal, seq in product((64, 128, 256), (False, True), (1024, 4096)):
        name = f"backward d{dim} {'causal' if causal else 'full'} {seq}"
        yield Backward("backward", name, q=(8192 // seq, seq, 2048 // dim, dim), options={"causal": causal})
    yield Backward("backward", "backward 8B 8k", q=(1, 8192, 32, 128), kv_heads=8, options={"causal": True})
    yield Backward("backward", "backward f16 d96 3000", "float16", q=(2, 3000, 16, 96), options={"causal": True})
    yield Backward("backward", "backward 197 d64", q=(64, 197, 12, 64))
    yield Backward("backward", "backward 4096x77 d64", q=(8, 4096, 10, 64), kv_len=77)


def decode_cells() -> Iterator[Cell]:
    """Few queries on caches, in pages and without, and a chunk of a prompt."""
    yield Decode("decode", "decode 32x2048 28/4", lengths=(2048,) * 32, heads=28, kv_heads=4)
    yield Decode("decode", "decode 8x32768 40/8 pages 64", lengths=(32768,) * 8, heads=40, page=64)
    yield Decode("decode", "decode 1x131072 8/1", lengths=(131072,), heads=8, kv_heads=1)
    yield Decode("decode", "decode uneven 32/8 pages 16", lengths=tuple(range(256, 8448, 256)), page=16)
    yield Decode("decode", "decode f16 d64 64x1024", "float16", lengths=(1024,) * 64, head_dim=64)
    yield Decode("decode", "decode 4 queries 16x4096 d256", lengths=(4096,) * 16, heads=16, head_dim=256, queries=4)
    yield Decode("decode", "chunk 512x8192 pages 64", lengths=(8192,) * 2, queries=512, page=64)


def packed_cells() -> Iterator[Cell]:
    """Packed sequences of uneven lengths, and their gradients."""
    uneven = tuple(128 + 331 * i % 1900 for i in range(24))
    for gradients in (False, True):
        what, causal = "packed backward" if gradients else "packed", {"causal": True}
        yield Packed("packed", f"{what} 32x512", lengths=(512,) * 32, gradients=gradients)
        yield Packed("packed", f"{what} uneven causal", lengths=uneven, options=causal, gradients=gradients)
        yield Packed(
            "packed",
            f"{what} 4x4096 32/8 causal",
            "bfloat16",
            lengths=(4096,) * 4,
            heads=32,
            kv_heads=8,
            gradients=gradients,
            options=causal,
        )


def product_cells() -> Iterator[Cell]:
    """y = x·Wᵀ of ``gemm_shapes.csv``, W stored as (n, k)."""
    for name, m, n, k in products():
        yield Product("products", name, "float16", m=m, n=n, k=k)


def reduction_cells() -> Iterator[Cell]:
    """Row reductions of products that are never written."""
    large, narrow = (8192, 131072, 4096), (16384, 16384, 128)
    of = (("max", large), ("logsumexp", large), ("max", narrow), ("logsumexp", narrow), ("sum", (4096, 32768, 2048)))
    for op, (m, n, k) in of:
        yield Product("reductions", f"{op} {m}x{n}x{k}", m=m, n=n, k=k, options={"op": op})


def loss_cells() -> Iterator[Cell]:
    """Cross-entropies of a linear layer, without its logits."""
    yield Loss("loss", "loss 8192x131072x4096", m=8192, n=131072, k=4096)
    yield Loss("loss", "loss 4096x50304x768", m=4096, n=50304, k=768)
    yield Loss("loss", "loss and gradients 4096x50304x768", m=4096, n=50304, k=768, gradients=True)
    yield Loss("loss", "loss and gradients 4096x131072x2048", m=4096, n=131072, k=2048, gradients=True)


GROUPS: dict[str, Callable[[], Iterator[Cell]]] = {
    "attention": attention_cells,
    "other": other_cells,
    "backward": backward_cells,
    "decode": decode_cells,
    "packed": packed_cells,
    "products": product_cells,
    "reductions": reduction_cells,
    "loss": loss_cells,
}


def cells_of(groups: str, names: str = "") -> list[Cell]:
    """The cells of some groups ("attention,other"), or of those the ones with ``names`` ("3000 causal|8191 full")."""
    found = [cell for name in groups.split(",") for cell in GROUPS[name]()]
    return [cell for cell in found if not names or cell.name in names.split("|")]
