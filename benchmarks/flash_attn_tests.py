"""FlashAttention's own tests, run through ``warploom.flash_attn`` on a GPU.

    PYTHONPATH=src python benchmarks/flash_attn_tests.py [--count 60] [--seconds 60] [--out DIR] [--dry-run]

Their parametrisation, their references and their bounds, as ``tests/test_flash_attn.py`` of FlashAttention-2 has them
(https://github.com/Dao-AILab/flash-attention, August 2026), without dropout and ALiBi: ``--count`` cases of each test
are drawn with ``--seed``. A result's largest error must be at most so many times that of the same computation in 16
bits with PyTorch; both are judged against float64, rounded to 16 bits. Cases run in several processes, since each
compiles kernels, and those that do not begin within ``--seconds`` are left out. Writes DIR/flash-attn-tests.json, and
exits with 1 if a case fails. ``--dry-run`` draws two cases of each test, makes them small, and runs them on the
emulator.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from warploom import flash_attn
from warploom_lab.bench.cells import parser_of
from warploom_lab.bench.evidence import write

Case = dict[str, Any]
PARAMETERS = Path(__file__).resolve().parent / "seeds" / "flash_attn_tests.json"
"""Of each of their tests: values of its parameters, batch and heads, how far results and gradients may be off."""


@dataclass(frozen=True)
class Bound:
    """The largest error may be ``times`` that of 16 bits in PyTorch, and ``slack``."""

    times: float
    slack: float = 0.0

    def excess(self, found: Any, rounded: Any, exact: Any) -> float:
        """The error over what is allowed; at most 1 is right, NaN is infinitely much."""
        exact = exact.to(found.dtype).double()
        error, of_16_bits = ((x.double() - exact).abs().max().item() for x in (found, rounded))
        if math.isnan(error):
            return math.inf
        allowed = self.times * of_16_bits + self.slack
        return error / allowed if allowed else error and math.inf


@dataclass(frozen=True)
class Test:
    """One of their tests: values of its parameters, batch and heads, how far results and gradients may be off."""

    name: str
    run: Callable[[Case, Test], dict[str, float]]
    values: dict[str, list[Any]]
    batch: int
    heads: int
    out: Bound
    gradients: Bound

    @classmethod
    def of(cls, run: str, out: list[float], gradients: list[float], **told: Any) -> Test:
        """The test that :data:`PARAMETERS` tells of."""
        return cls(run=RUNS[run], out=Bound(*out), gradients=Bound(*gradients), **told)

    def cases(self, count: int, seed: int) -> list[Case]:
        """So many of all combinations, at random; all of them if there are fewer."""
        combinations = itertools.product(*self.values.values())
        every = [dict(zip(self.values, found, strict=True)) for found in combinations]
        random.Random(f"{seed} {self.name}").shuffle(every)
        return [{"test": self.name, "batch": self.batch, "heads": self.heads, **case} for case in every[:count]]


def small(case: Case) -> Case:
    """The case at a size for the emulator: the same options, less of everything."""
    lengths = tuple(min(length, 24 + length % 5) for length in case["lengths"])
    return {**case, "batch": 1, "heads": min(2, case["heads"]), "d": min(40, case["d"]), "lengths": lengths}


# -- inputs and references


def drawn(case: Case) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Random q, k and v that require gradients, and the options of the call."""
    import torch

    torch.manual_seed(0)
    random.seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    (q_len, kv_len), heads = case["lengths"], case["heads"]
    softcap = case.get("softcap", 0.0)
    kv_heads = {"mha": heads, "mqa": 1, "gqa": max(1, heads // 3)}[case.get("mha_type", "mha")]
    like: dict[str, Any] = {"device": device, "dtype": getattr(torch, case["dtype"])}
    q = torch.randn(case["batch"], q_len, heads, case["d"], **like)
    k, v = (torch.randn(case["batch"], kv_len, kv_heads, case["d"], **like) for _ in range(2))
    q, k, v = (
        x * factor for x, factor in zip((q * (softcap or 1.0), k, v), case.get("factors", (1, 1, 1)), strict=True)
    )
    window = tuple(torch.randint(0, kv_len, (2,)).tolist()) if case.get("local") else (-1, -1)
    options = {"causal": case["causal"], "window_size": window, "softcap": softcap}
    return *(x.requires_grad_() for x in (q, k, v)), options  # pyright: ignore[reportReturnType]


def reference(q: Any, k: Any, v: Any, options: dict[str, Any], *, exact: bool) -> Any:
    """Their reference in float64, or in 16 bits with another order of operations, on tensors' own history."""
    import torch

    kind, group = q.dtype, q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[3])
    if exact:
        q, k, v = (x.double() for x in (q, k, v))
        s = torch.einsum("bthd,bshd->bhts", q * scale, k)
    else:
        s = torch.einsum("bthd,bshd->bhts", q, k * scale)
    softcap = options["softcap"]
    s = (s / softcap).tanh() * softcap if softcap else s
    left, right = options["window_size"]
    right = 0 if options["causal"] else right
    apart = torch.arange(k.shape[1], device=q.device) - (
        torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1]
    )
    hidden = torch.zeros_like(apart, dtype=torch.bool)
    hidden = hidden | (apart < -left) if left >= 0 else hidden
    hidden = hidden | (apart > right) if right >= 0 else hidden
    p = torch.softmax(s.masked_fill(hidden, -torch.inf), -1).masked_fill(hidden.all(-1, keepdim=True), 0.0)
    return torch.einsum("bhts,bshd->bthd", p.to(v.dtype), v).to(torch.float64 if exact else kind)


def excesses(
    case: Case, test: Test, given: tuple[Any, ...], out: Any, parts: list[Any], options: dict[str, Any]
) -> dict[str, float]:
    """Errors of a result and of its gradients by ``given``, from which the q, k and v of each part were made."""
    import torch

    by = torch.randn_like(out)
    if case.get("strided_gradient"):  # as of a result whose sequence comes first, in twice the batch
        by = torch.randn(out.shape[1], 2 * out.shape[0], *out.shape[2:], device=out.device, dtype=out.dtype)
        by = by[:, ::2].transpose(0, 1)
    exact, rounded = (
        torch.cat([reference(*qkv, options=options, exact=exact).flatten(0, 1) for qkv in parts]).view(out.shape)
        for exact in (True, False)
    )
    found = {"out": test.out.excess(out.detach(), rounded.detach(), exact.detach())}
    mine, coarse, want = (
        torch.autograd.grad(x, given, by.to(x.dtype), retain_graph=True) for x in (out, rounded, exact)
    )
    for name, a, b, c in zip(("dq", "dk", "dv") if len(given) == 3 else ("dqkv",), mine, coarse, want, strict=False):
        found[name] = test.gradients.excess(a, b, c)
    return found


# -- their tests


def run_dense(case: Case, test: Test) -> dict[str, float]:
    """``flash_attn_func``, or ``flash_attn_kvpacked_func`` on the same k and v."""
    import torch

    q, k, v, options = drawn(case)
    more = {"deterministic": case.get("deterministic", False), "return_attn_probs": True}
    if case.get("kvpacked"):
        out, *_ = flash_attn.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), 0.0, **options, **more)
    else:
        out, *_ = flash_attn.flash_attn_func(q, k, v, 0.0, **options, **more)
    return excesses(case, test, (q, k, v), out, [(q, k, v)], options)


def run_qkvpacked(case: Case, test: Test) -> dict[str, float]:
    """``flash_attn_qkvpacked_func``."""
    import torch

    q, k, v, options = drawn(case)
    qkv = torch.stack([q, k, v], 2).detach().requires_grad_()
    out = flash_attn.flash_attn_qkvpacked_func(qkv, 0.0, deterministic=case["deterministic"], **options)
    return excesses(case, test, (qkv,), out, [qkv.unbind(2)], options)


def run_again(case: Case, _test: Test) -> dict[str, float]:
    """Gradients have the same bits fifty times."""
    import torch

    q, k, v, options = drawn(case)
    out = flash_attn.flash_attn_func(q, k, v, 0.0, deterministic=True, **options)
    by = torch.randn_like(out)
    times = 50 if q.is_cuda else 2
    first, *others = (torch.autograd.grad(out, (q, k, v), by, retain_graph=True) for _ in range(times))
    differs = any(not torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    return {"bits": math.inf if differs else 0.0}


def run_varlen(case: Case, test: Test) -> dict[str, float]:
    """``flash_attn_varlen_func`` on sequences up to 20 shorter than the longest."""
    import torch

    q, k, v, options = drawn(case)
    lengths = [[random.randint(max(1, n - 20), n) for _ in range(case["batch"])] for n in case["lengths"]]
    parts = [[x[i : i + 1, :n] for i, n in enumerate(lengths[which])] for x, which in ((q, 0), (k, 1), (v, 1))]
    starts = [torch.tensor([0, *ns], device=q.device).cumsum(0).to(torch.int32) for ns in lengths]
    packed = [torch.cat(part, 1)[0] for part in parts]
    call: Any = flash_attn.flash_attn_varlen_func
    given: list[Any] = packed
    if case["kvpacked"]:
        call, given = flash_attn.flash_attn_varlen_kvpacked_func, [packed[0], torch.stack(packed[1:], 1)]
    where: Any = (*starts, *map(max, lengths))
    out, lse, _ = call(*given, *where, deterministic=case["deterministic"], return_attn_probs=True, **options)
    if lse.shape != (case["heads"], len(packed[0])):
        raise AssertionError(f"log-sum-exps of shape {tuple(lse.shape)}")
    return excesses(case, test, (q, k, v), out, list(zip(*parts, strict=True)), options)


def turned(x: Any, cos: Any, sin: Any, positions: Any, interleaved: bool) -> Any:
    """Rotary embedding of (length, heads, d) in float32."""

    c, s = (table[positions.long(), None].float() for table in (cos, sin))
    half, found = c.shape[-1], x.float().clone()
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )
    a, b = x[..., first].float(), x[..., second].float()
    found[..., first], found[..., second] = a * c - b * s, b * c + a * s
    return found.to(x.dtype) if half else x


def run_kvcache(case: Case, test: Test) -> dict[str, float]:
    """``flash_attn_with_kvcache``: new keys, rotary embedding and pages, forward."""
    import torch

    q, k, v, options = drawn(case)
    (q_len, kv_len), batch, like = case["lengths"], case["batch"], {"device": q.device, "dtype": q.dtype}
    new = (q_len if case["seqlen_new_eq_seqlen_q"] else random.randint(1, q_len)) if case["new_kv"] else 0
    if new and q_len > kv_len:
        return {}
    size = case["paged_kv_block_size"] or kv_len
    pages = -(-kv_len // size) * batch
    table = torch.randperm(pages, device=q.device).to(torch.int32).view(batch, -1)
    caches = [torch.randn(pages, size, k.shape[2], case["d"], **like) for _ in range(2)]
    if not case["paged_kv_block_size"]:
        table = torch.arange(batch, device=q.device, dtype=torch.int32)[:, None]
    rows = [[cache[table[i].long()].flatten(0, 1) for i in range(batch)] for cache in caches]
    lengths = [random.randint(0 if new else 1, kv_len - (q_len if new else 0)) for _ in range(batch)]
    rotary = int(case["rotary_fraction"] * case["d"]) // 16 * 16 if new else 0
    angle = torch.rand(pages * size, rotary // 2, device=q.device) * 2 * math.pi
    cos, sin = (f(angle).to(q.dtype) for f in (torch.cos, torch.sin))
    with torch.no_grad():
        added = [x[:, :new].contiguous() for x in (k, v)] if new else [None, None]
        out = flash_attn.flash_attn_with_kvcache(
            q,
            *caches,
            *added,
            *((cos, sin) if rotary else ()),
            num_splits=case["num_splits"],
            **options,
            cache_seqlens=torch.tensor(lengths, device=q.device, dtype=torch.int32),
            block_table=table if case["paged_kv_block_size"] else None,
            rotary_interleaved=case["rotary_interleaved"],
        )
        exact, rounded = [], []
        masked = options["causal"] or options["window_size"] != (-1, -1)
        count = torch.arange(max(q_len, 1), device=q.device)
        for i, length in enumerate(lengths):
            keys, values, query = rows[0][i], rows[1][i], q[i]
            if new:
                keys[length : length + new] = turned(
                    k[i, :new], cos, sin, count[:new] + length, case["rotary_interleaved"]
                )
                values[length : length + new] = v[i, :new]
                query = turned(query, cos, sin, count * masked + length, case["rotary_interleaved"])
            held = [cache[table[i].long()].flatten(0, 1) for cache in caches]
            if not (torch.allclose(held[0], keys, rtol=1e-3, atol=1e-3) and torch.equal(held[1], values)):
                raise AssertionError("the cache holds something else")
            one = query[None], keys[None, : length + new], values[None, : length + new]
            exact.append(reference(*one, options=options, exact=True))
            rounded.append(reference(*one, options=options, exact=False))
    return {"out": test.out.excess(out, torch.cat(rounded), torch.cat(exact))}


RUNS = {
    "dense": run_dense,
    "qkvpacked": run_qkvpacked,
    "again": run_again,
    "varlen": run_varlen,
    "kvcache": run_kvcache,
}
TESTS = tuple(Test.of(**told) for told in json.loads(PARAMETERS.read_text(encoding="utf-8"))["tests"])


def run_share(cases: list[Case], deadline: float) -> list[Case]:
    """The cases that begin before the deadline, with their errors; an exception is infinitely wrong."""
    import torch

    named = {test.name: test for test in TESTS}
    done: list[Case] = []
    for case in cases:
        if time.time() > deadline:
            break
        began = time.time()
        try:
            found: dict[str, Any] = {"excess": named[case["test"]].run(case, named[case["test"]])}
        except Exception as error:
            found = {"excess": {"error": math.inf}, "said": f"{type(error).__name__}: {error}"[:300]}
            torch.cuda.empty_cache() if torch.cuda.is_available() else None
        done.append({**case, **found, "seconds": round(time.time() - began, 2)})
    return done


def worst(case: Case) -> float:
    """The largest error of a case over what is allowed."""
    return max(case["excess"].values(), default=0.0)


def main() -> int:
    """Draw, run, print a row for each test, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, default=60, help="cases of each test")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--dry-run", action="store_true", help="two small cases of each test, on the emulator")
    options = parser.parse_args()
    cases = [case for test in TESTS for case in test.cases(2 if options.dry_run else options.count, options.seed)]
    random.Random(options.seed).shuffle(cases)  # where time runs out, every test has had its share
    deadline = time.time() + options.seconds
    if options.dry_run:
        done = run_share([small(case) for case in cases], math.inf)
    else:
        shares = [cases[i :: options.workers] for i in range(options.workers)]
        with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
            done = [case for share in pool.map(run_share, shares, itertools.repeat(deadline)) for case in share]
    for test in TESTS:
        mine = [case for case in done if case["test"] == test.name]
        passed = sum(worst(case) <= 1 for case in mine)
        largest = max(map(worst, mine), default=0)
        print(f"{test.name:16}{passed:5} of {len(mine):4} pass, largest error / bound {largest:.2f}")
    failed = [case for case in done if not worst(case) <= 1]
    for case in failed[:20]:
        print("FAILED", json.dumps(case))
    if not options.dry_run:
        result = {"drawn": len(cases), "seed": options.seed, "cases": done}
        write(options.out / "flash-attn-tests.json", result)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
