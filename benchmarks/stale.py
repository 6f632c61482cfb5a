"""Whether evidence is of today's kernels: what a page asks before it shows a result.

A page is not made of a result whose kernels have another digest today, or that names none, except for the files in
``results/older.json``: those stand there with their date and commit, and their pages say so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scripts import products

from warploom.core.dtypes import bf16
from warploom.core.errors import WarploomError
from warploom.core.targets import target
from warploom.kernels.attention.choice import choose as choose_attention
from warploom.kernels.attention.problem import AttentionProblem, Even
from warploom.kernels.matmul.choice import choose as choose_product
from warploom.ops.matmul import plan_matmul
from warploom_lab.bench.evidence import decoded

RESULTS = Path(__file__).resolve().parent / "results"
OLDER = "older.json"
"""File below ``results`` → {"date", "commit" that brought the file, "kernels": a word of :data:`KERNELS`}."""
KERNELS = {
    "older": "measured on an older kernel, {date}, commit {commit}",
    "unnamed": "measured {date}, commit {commit}, before results named their kernels",
    "foreign": "measured {date}, commit {commit}",
    "many": "measured {date}, commit {commit}; it ran more kernels than it names",
}
"""What pages say of such a file: its kernels are others today, nobody can tell, none of this package's ran, or many."""
Result = Mapping[str, Any]


class StaleEvidenceError(Exception):
    """Evidence was measured on kernels that are not today's, or does not say on which."""


@cache
def _digest_today(recipe_text: str) -> str | None:
    """The digest of the kernel that a recipe gives today; None where it gives none."""
    try:
        return decoded(json.loads(recipe_text)).program.digest
    except (ImportError, AttributeError, KeyError, TypeError, ValueError, WarploomError):
        return None


def older() -> dict[str, dict[str, str]]:
    """The files in ``older.json`` with their date, commit, and what is known of their kernels."""
    path = RESULTS / OLDER
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def told(file: str) -> str:
    """What a page says of a file in ``older.json``; "" of all others."""
    entry = older().get(file)
    return KERNELS[entry["kernels"]].format_map(entry) if entry else ""


def other_attention(result: Result) -> Iterator[str]:
    """Cells of ``attention_cells.py`` that a call would run with another configuration today."""
    gpu = result["environment"]["gpu"]
    for cell in result["cells"]:
        batch, heads, seq, dim = (cell[name] for name in ("batch", "heads", "seq", "head_dim"))
        window = None, 0 if cell["causal"] else None
        problem = AttentionProblem(batch, heads, heads, Even(seq, seq), dim, bf16, window=window)
        today = str(choose_attention(problem, target(gpu["target"]), gpu["multiprocessors"])[0])
        if today != cell["config"]:
            yield f"{cell['cell']} ran {cell['config']} and would run {today}"


def other_products(result: Result) -> Iterator[str]:
    """Products of ``gemm_h200.py`` that ``matmul`` would run with another configuration today."""
    on = target(result["environment"]["gpu"]["target"])
    sizes = {name: size for name, *size in products()}
    for row in result["shapes"]:
        m, n, k = sizes[row["name"]]
        x, w = (np.empty(shape, np.float16) for shape in ((m, k), (n, k) if row["weights"] == "n×k" else (k, n)))
        problem = plan_matmul(x, w.T if row["weights"] == "n×k" else w).problem
        today = str(choose_product(problem, on)[0])
        if today != row["configs"]["chosen"]:
            yield f"{row['name']} {row['weights']} ran {row['configs']['chosen']} and would run {today}"


CHOICES: dict[str, Callable[[Result], Iterator[str]]] = {
    "h200/attention-cells.json": other_attention,
    "h100/attention-cells.json": other_attention,
    "h200/gemm.json": other_products,
}
"""Files of what calls choose by themselves, and what they would choose otherwise today."""


def unproven(file: str, result: Result) -> list[str]:
    """What keeps a result from being one of today's kernels: no commit, other digests, other choices."""
    environment = result.get("environment", {})
    found = [f"it names no {word}" for word in ("commit", "kernels") if not environment.get(word)]
    for kernel in environment.get("kernels", ()):
        name = f"kernel {kernel['name']} ({kernel['digest'][:12]})"
        if kernel["recipe"] is None:
            found.append(f"{name} cannot be traced again")
        elif (today := _digest_today(json.dumps(kernel["recipe"], sort_keys=True))) != kernel["digest"]:
            found.append(f"{name} {'is no longer there' if today is None else f'is {today[:12]} today'}")
    return found + (list(CHOICES[file](result)) if file in CHOICES else [])


def problems(file: str, result: Result) -> list[str]:
    """Why a page may not show a result: it is not of today's kernels, or ``older.json`` is wrong about it."""
    entry = older().get(file)
    if entry is None:
        return unproven(file, result)
    environment = result.get("environment", {})
    if not environment.get("commit"):
        return []
    if not environment["date"].startswith(entry["date"]):
        return [f"{OLDER} has it with {entry['date']}, and it is of {environment['date'][:10]}"]
    return [] if unproven(file, result) else [f"it is of today's kernels: take it off {OLDER}"]


def checked(file: str, result: Result) -> Result:
    """The result, if a page may show it. Raises StaleEvidenceError that says why not and what to do."""
    if found := problems(file, result):
        raise StaleEvidenceError(
            f"benchmarks/results/{file}: {'; '.join(found)}. Measure it again, or list it with its date and commit in "
            f"benchmarks/results/{OLDER}: its pages then say that they show an older kernel"
        )
    return result
