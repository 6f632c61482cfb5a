"""``matmul_reduce`` and ``linear_cross_entropy`` beside PyTorch: seconds, memory beyond inputs and result, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from warploom.measure.pytorch import torch_module
from warploom.measure.timing import Candidate, EventClock, Measured, measure, paired_ratio

Row = dict[str, Any]
Call = Callable[[], Any]

PRODUCTS = ((8192, 131072, 4096), (16384, 16384, 128))
"""(m, n, k) of the comparison with PyTorch."""
OPS = ("max", "logsumexp")
CHECKED_ROWS = 256


def against_torch(rounds: int = 11) -> list[Row]:
    """``matmul_reduce`` beside PyTorch eager and ``torch.compile``, and beside itself by ``mma.sync``.

    Errors are over the tolerance of f32 sums.
    """
    import warploom
    from warploom.kernels.matmul.choice import general_for_rows
    from warploom.ops.backends import gpu_target

    torch = torch_module()
    rows: list[Row] = []
    for m, n, k in PRODUCTS:
        torch.manual_seed(0)
        a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16) / k**0.5
        b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16).T
        general, _ = general_for_rows(warploom.plan_matmul_reduce(a, b).problem.product, gpu_target(0))
        for op in OPS:
            eager = _eager(torch, op)
            fused = torch.compile(eager)
            calls: dict[str, Call] = {
                "warploom": lambda op=op, a=a, b=b: warploom.matmul_reduce(a, b, op),
                "torch": lambda f=eager, a=a, b=b: f(a, b),
                "torch.compile": lambda f=fused, a=a, b=b: f(a, b),
                "mma.sync": lambda op=op, a=a, b=b, c=general: warploom.matmul_reduce(a, b, op, config=c),
            }
            error = _error(torch, warploom.matmul_reduce(a, b, op), a, b, op)
            config = str(warploom.plan_matmul_reduce(a, b, op).config)
            row = {"op": op, "m": m, "n": n, "k": k, "config": config, "error": error} | compared(torch, calls, rounds)
            row["over mma.sync"] = row["over"].pop("mma.sync")
            rows.append(row)
    return rows


def compared(torch: Any, calls: dict[str, Call], rounds: int) -> Row:
    """Seconds, extra bytes and, for each baseline of the first call, how many times as fast the first is (``over``).

    A baseline that cannot run here is reported with its error.
    """
    clock = EventClock(int(torch.cuda.current_stream(0).cuda_stream))
    row: Row = {}
    usable: list[Candidate] = []
    for name, call in calls.items():
        try:
            row[f"{name}_extra_bytes"] = extra_bytes(torch, call)
        except Exception as error:  # PyTorch's errors have no common base: out of memory, a failed compilation
            row[f"{name}_error"] = str(error).splitlines()[0][:200]
        else:
            usable.append(Candidate(name, lambda _, call=call: call()))
    found: dict[str, Measured] = measure(usable, 1, clock, rounds=rounds, sample_seconds=0.02)
    for name, measured in found.items():
        row[f"{name}_s"] = measured.seconds.json()
    ours = next(iter(calls))
    row["over"] = {name: round(paired_ratio(found[ours], m), 3) for name, m in found.items() if name != ours}
    return row


def loss_against_torch(rounds: int = 5) -> Row:
    """The loss of 8192 tokens over 131072 words of width 4096, beside ``torch.nn.functional.cross_entropy``."""
    import warploom

    torch = torch_module()
    m, n, k = PRODUCTS[0]
    torch.manual_seed(0)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16) / k**0.5
    w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(n, (m,), device="cuda")
    cross_entropy = torch.nn.functional.cross_entropy
    calls: dict[str, Call] = {
        "warploom": lambda: warploom.linear_cross_entropy(x, w, target),
        "torch": lambda: cross_entropy(x @ w.T, target, reduction="none"),
    }
    found = calls["warploom"]()[:CHECKED_ROWS].double()
    logits = (x[:CHECKED_ROWS].float() @ w.float().T).double()
    error = float((found - cross_entropy(logits, target[:CHECKED_ROWS], reduction="none")).abs().max())
    del logits
    return {"op": "linear_cross_entropy", "m": m, "n": n, "k": k, "error": error} | compared(torch, calls, rounds)


def search_ten_millions(queries: int = 1024, vectors: int = 10_000_000, dimension: int = 128) -> Row:
    """The nearest of ten million vectors by inner product, in blocks of 2^20: seconds of all blocks, and memory."""
    import warploom

    torch = torch_module()
    torch.manual_seed(0)
    wanted = torch.randn(queries, dimension, device="cuda", dtype=torch.bfloat16)
    block = 1 << 20
    stored = torch.randn(vectors, dimension, device="cuda", dtype=torch.bfloat16)
    clock = EventClock(int(torch.cuda.current_stream(0).cuda_stream))

    def search() -> Any:
        best = torch.full((queries,), -torch.inf, device="cuda")
        where = torch.zeros(queries, dtype=torch.int64, device="cuda")
        for start in range(0, vectors, block):
            score, at = warploom.matmul_reduce(wanted, stored[start : start + block].T, return_index=True)
            better = score > best
            best, where = torch.where(better, score, best), torch.where(better, at + start, where)
        return best, where

    best, where = search()
    found = (wanted.double() * stored[where].double()).sum(-1)
    row: Row = {"queries": queries, "vectors": vectors, "dimension": dimension, "block": block}
    row["error"] = float((found - best.double()).abs().max())
    row["missed"] = int(sum((wanted[i : i + 1].float() @ stored.float().T).amax() > best[i] + 1e-3 for i in range(8)))
    row["extra_bytes"] = extra_bytes(torch, search)
    row["s"] = measure([Candidate("search", lambda _: search())], 1, clock, rounds=9)["search"].seconds.json()
    return row


def _eager(torch: Any, op: str) -> Callable[[Any, Any], Any]:
    if op == "max":
        return lambda x, y: (x @ y).amax(-1)
    return lambda x, y: torch.logsumexp(x @ y, -1)


def _error(torch: Any, found: Any, a: Any, b: Any, op: str) -> float:
    """The largest error of a few rows over what f32 accumulation may leave: at most 1."""
    rows, found = a[:CHECKED_ROWS].double(), found[:CHECKED_ROWS].double()
    right, sizes, worst = b.double(), b.double().abs(), 0.0
    for start in range(0, CHECKED_ROWS, 32):
        some = rows[start : start + 32]
        product, size = some @ right, some.abs() @ sizes
        expected = product.amax(-1) if op == "max" else torch.logsumexp(product, -1)
        allowed = a.shape[1] ** 0.5 * 2.0**-22 * size.amax(-1) + (0.0 if op == "max" else 1e-5)
        worst = max(worst, float(((found[start : start + 32] - expected).abs() / allowed).max()))
    return worst


def extra_bytes(torch: Any, call: Call) -> int:
    """Peak memory of a call beyond what was there before it."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)
