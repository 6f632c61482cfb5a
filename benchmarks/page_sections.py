"""The tables and sections that pages ask for by name: macros of tables.template.md, and what they compute."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from decode_baselines import to_the_fastest
from page_parts import functions, public, templates

Result = Mapping[str, Any]
SEQUENCES = (512, 1024, 4096, 16384)
"""Lengths that stand in tables; results have more."""
BASELINES = {
    "cudnn": "cuDNN",
    "torch_cudnn": "cuDNN",
    "torch_flash": "FlashAttention-2",
    "flash_attention_2": "FlashAttention-2",
    "flash_attention_4": "FlashAttention-4",
    "flashinfer": "FlashInfer",
    "flashinfer_tensor_cores": "FlashInfer (tensor cores)",
}
TABLES = (
    "attention-calls",
    "attention-means",
    "attention-data",
    "products",
    "product-cells",
    "large-products",
    "reductions",
    "ptx-speed",
    "triton-versions",
    "real-bugs-packages",
    "real-bugs-miniatures",
    "audit",
    "first-call",
    "host-cost",
)
SECTIONS = (
    "gradients",
    "few_key_heads",
    "sync_gradients",
    "limits",
    "losses",
    "training",
    "gpus",
    "decode",
    "prefill",
    "packed",
    "packed_gradients",
    "their_tests",
    "their_files",
    "few_queries",
    "models",
)
"""Parts of a page that bring their own sentences: nothing is there until they were measured."""
COLOURS = {"warploom": "#3b6ea5", "torch": "#d98032"}
WRONG = "†"
"""Marks the ratio to a baseline whose result failed the check against float64 in the same cell."""
SMOOTHED = 10
"""Steps whose mean a point of a curve is."""


def made(name: str, result: Result) -> str:
    """A table or section of a result."""
    template = templates(**functions(public(__name__)), **FILTERS).get_template("tables.template.md")
    return str(getattr(template.make_module({"baselines": BASELINES}), name.replace("-", "_"))(result))


# -- attention


def ratio_to(cell: Result, baseline: str) -> float | None:
    """The median ratio to a baseline; None where it was not timed."""
    return cell["ratio"][baseline]["median"] if baseline in cell["ratio"] else None


def ratios_to(cell: Result, baselines: Iterable[str]) -> list[str]:
    """``1.25×`` of each baseline, or –; WRONG behind one whose own result was beyond the bound."""
    errors = cell.get("baseline_errors", cell["error"])
    return [
        "–" if (ratio := ratio_to(cell, baseline)) is None else f"{ratio:.2f}×" + WRONG * (errors.get(baseline, 0) > 1)
        for baseline in baselines
    ]


def alone(cells: Iterable[Result]) -> list[Result]:
    """The cells as each kernel reached them alone; none where they were not run so."""
    found: list[Result] = []
    for cell in cells:
        rates = {name: {"median": load["tflops"]} for name, load in cell["power"].items()}
        if "warploom" in rates:
            own = rates["warploom"]["median"]
            ratio = {name: {"median": own / rate["median"]} for name, rate in rates.items() if name != "warploom"}
            found.append({**cell, "tflops": rates, "ratio": ratio})
    return found


def loads(cells: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    """The cells as all kernels took turns and, where they were timed so too, rested."""
    rested: list[Result] = [{**cell, **cell["rested"]} for cell in cells if "rested" in cell]
    return [("in turns", list(cells)), *([("rested", rested)] if rested else [])]


def means(cells: Sequence[Result], baselines: Iterable[str]) -> list[str]:
    """``1.26×, least 1.06× (64 causal 512)`` of each baseline, or –."""
    return [_mean(cells, baseline) for baseline in baselines]


def _mean(cells: Sequence[Result], baseline: str) -> str:
    ratios = [(ratio, cell) for cell in cells if (ratio := ratio_to(cell, baseline)) is not None]
    if not ratios:
        return "–"
    least, c = min(ratios, key=lambda found: found[0])
    where = f"{c['head_dim']} {'causal' if c['causal'] else 'full'} {c['seq']}"
    return f"{geometric_mean(ratio for ratio, _ in ratios):.2f}×, least {least:.2f}× (head_dim {where})"


def rates_beside(rows: Iterable[Result], name: str, baselines: Sequence[str]) -> list[str]:
    """``630 · 1.01× · –`` of each row: TFLOP/s, and ratios to baselines."""
    return [" · ".join((f"{row['tflops'][name]['median']:.0f}", *ratios_to(row, baselines))) for row in rows]


def at_lengths(cells: Iterable[Result], length: str, baselines: Iterable[str]) -> list[str]:
    """``301 · 1.25× · 1.00×`` at each of SEQUENCES: TFLOP/s, and ratios to baselines."""
    known = {cell[length]: cell for cell in cells}
    return [
        "–"
        if n not in known
        else " · ".join((f"{known[n]['tflops']['warploom']['median']:.0f}", *ratios_to(known[n], baselines)))
        for n in SEQUENCES
    ]


def square(cells: Iterable[Result]) -> list[Result]:
    """Those of plain problems: as many keys as queries, no groups, no window."""
    return [c for c in cells if c["q_len"] == c["kv_len"] and c["cell"].endswith(f" {c['q_len']}")]


def timed_beside(cells: Sequence[Result], baselines: Mapping[str, str]) -> dict[str, str]:
    """The baselines of some cell."""
    return {name: text for name, text in baselines.items() if any(name in c["ratio"] for c in cells)}


def by_dims(cells: Iterable[Result]) -> list[tuple[tuple[str, bool], list[Result]]]:
    """Cells by head_dim, as their names have it, and mask."""
    groups = groupby(cells, key=lambda c: (c["cell"].split()[0][1:], bool(c["causal"])))
    return [(key, list(found)) for key, found in groups]


# -- decode


def by_batch(cells: Iterable[Result]) -> list[tuple[str, list[Result]]]:
    """Parts of the copy's rate by head_dim, sequences, lengths and bytes."""
    rows: dict[str, list[Result]] = {}
    for c in cells:
        width, _, *others = c["cell"].replace("no pages", "pages 0").split()  # d128 32/8 pages 64 b16 even 256MB
        rows.setdefault(" ".join((width, *others[2:])), []).append(c["part"])
    return list(rows.items())


def parts_beside(parts: Sequence[Result], baselines: Iterable[str]) -> list[str]:
    """The baselines of some cell."""
    return [name for name in baselines if any(name in part for part in parts)]


def ranges(parts: Sequence[Result], names: Iterable[str]) -> list[str]:
    """The lowest and the highest of each, or –."""
    found = ([part[name] for part in parts if name in part] for name in names)
    return [" … ".join(dict.fromkeys(f"{x:.2f}" for x in (min(of), max(of)))) if of else "–" for of in found]


# -- products


def by_rows(shapes: Iterable[Result]) -> list[tuple[tuple[int, str], list[Result]]]:
    """Products by rows and layout of the weights."""

    def group(row: Result) -> tuple[int, str]:
        return int(row["name"].rpartition(".m")[2]), row["weights"]

    return [(key, list(found)) for key, found in groupby(sorted(shapes, key=group), key=group)]


def beside_cublas(rows: Iterable[Result], key: str) -> list[str]:
    """Least, mean and largest ratio."""
    ratios = [row[key] / row["cublas"] for row in rows]
    return [f"{of(ratios):.2f}×" for of in (min, geometric_mean, max)]


def product_table(shapes: Sequence[Result], layouts: Sequence[str]) -> Iterator[list[str]]:
    """Of each product in each layout cuBLAS, what ``matmul`` chooses, the fastest ``mma.sync``."""
    rows = {(row["name"], row["weights"]): row for row in shapes}
    for name in dict.fromkeys(name for name, _ in rows):
        cells = (rows.get((name, layout)) for layout in layouts)
        yield [name, *(text for row in cells for text in (["–"] * 3 if row is None else _product(row)))]


def _product(row: Result) -> Iterator[str]:
    """TFLOP/s with the 10th and 90th percentile, and the ratio to cuBLAS."""
    names = {"cublas": "cublas", **row["configs"]}
    for key in ("cublas", "chosen", "best mma.sync"):
        low, high = row["spread"].get(names[key], (row[key], row[key]))
        yield f"{row[key]:.0f} ({low:.0f}–{high:.0f})" + f" · {row[key] / row['cublas']:.2f}×" * (key != "cublas")


# -- training


def steps(row: Result, names: Iterable[str]) -> list[str]:
    """Milliseconds and memory of a loss by each."""
    return [
        f"{1e3 * row['seconds'][name]['median']:.1f} ms · {row['extra_bytes'][name] / 2**20:.0f} MiB"
        if name in row["seconds"]
        else "–"
        for name in names
    ]


def against(row: Result, name: str) -> str:
    """``1.27 times the time and 0.03 of the memory at 8192 tokens``."""
    time = row["seconds"]["warploom"]["median"] / row["seconds"][name]["median"]
    memory = row["extra_bytes"]["warploom"] / row["extra_bytes"][name]
    return f"{time:.2f} times the time and {memory:.2f} of the memory at {row['m']} tokens"


def by_kernels(runs: Iterable[Result]) -> list[tuple[list[str], list[Result]]]:
    """Trainings by whose attention and whose loss."""
    return [(list(kind), list(of)) for kind, of in groupby(runs, key=lambda run: (run["attention"], run["loss"]))]


def ends_at(run: Result, last: int) -> str:
    """The mean of a run's last losses."""
    return f"{sum(run['losses'][-last:]) / last:.3f}"


def product_heads(layouts: Iterable[str]) -> list[str]:
    """The heads of :func:`product_table`."""
    return [f"{layout}: {kernel}" for layout in layouts for kernel in ("cuBLAS", "matmul", "mma.sync")]


def linked(thread: str) -> str:
    """A link to an issue or pull request, ``owner/name#12``."""
    repository, number = thread.split("#")
    return f"[{repository.split('/')[1]} {number}](https://github.com/{repository}/issues/{number})"


def said(side: Result) -> str:
    """What was found in a kernel, where, and in what time."""
    found = f"**{side['kinds'][0]}** at {side['at']}" if side["kinds"] else "nothing"
    return f"{found}, {side['seconds']:.1f} s"


def result_of(case: Result, kernel: Result) -> str:
    """Whether the result of an audited case is right; of one that was not run, why."""
    refused = kernel.get("refused") or case.get("refused")
    if refused:
        return "not run: " + refused.replace("|", "\\|")
    return "right" if case["error"] <= 1 else f"**wrong**, {case['wrong']}"


def is_false_error(kernel: Result) -> bool:
    """Whether an audited kernel has an error and no fault."""
    verdicts = {found["verdict"] for found in kernel["findings"]}
    errors = any(found["grade"] == "error" for found in kernel["findings"])
    return errors and not any(verdict.startswith("true") for verdict in verdicts)


def findings_of(kernel: Result) -> str:
    """The findings of an audited kernel, those of one kind and verdict together."""
    of = dict[tuple[str, ...], list[str]]()
    for found in kernel["findings"]:
        of.setdefault((found["kind"], found["grade"], found["verdict"], found["why"]), []).append(found["at"])
    told: list[str] = []
    for (kind, grade, verdict, why), places in of.items():
        at = ", ".join(place.rpartition("/")[2] for place in dict.fromkeys(places))
        told.append(f"{kind} at {at} ({grade}): **{verdict}**{': ' * (why != '')}{why}")
    return "; ".join(told) or "none"


def reported_in(thread: str, rows: Iterable[Result]) -> str:
    """The tools of compute-sanitizer that report something of a miniature, and not the same of its repaired form."""
    sides = {row["change"]: row for row in rows if row["kernel"] == thread}
    if not sides:
        return "–"
    faulty, repaired = sides["faulty"], sides["repaired"]["tools"]
    tools = [tool for tool, reports in faulty["tools"].items() if set(reports) - set(repaired[tool])]
    return ", ".join(tools) or ("hangs" if "hangs" in faulty["ended"].values() else "nothing")


def over_best(cells: Iterable[Result]) -> list[float]:
    """How many times as long as the fastest configuration the chosen one takes."""
    return [c["microseconds"][c["chosen"]] / min(c["microseconds"].values()) for c in cells]


FILTERS: dict[str, Any] = {
    "largest": lambda of: max(of.values()),
    "count_of": lambda cases, outcome: sum(case["outcome"] == outcome for case in cases),
    "baseline_name": lambda name: BASELINES.get(name, name),
    "as_list": lambda x: x if isinstance(x, list) else [x],
    "to_the_fastest": to_the_fastest,
}


def draw_training(result: Result, out: Path) -> None:
    """The loss of every run by step, as an SVG."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    style = {"svg.hashsalt": "warploom", "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(7.0, 3.6))
        named: set[str] = set()
        for run in result["runs"]:
            name = f"{run['attention']}, loss {run['loss']}"
            parts = [run["losses"][i : i + SMOOTHED] for i in range(0, len(run["losses"]), SMOOTHED)]
            axes.plot(
                [SMOOTHED * i + len(part) / 2 for i, part in enumerate(parts)],
                [sum(part) / len(part) for part in parts],
                color=COLOURS[run["attention"]],
                label=None if name in named else name,
                linewidth=1.0,
                linestyle="-" if run["loss"] == "warploom" else "--",
            )
            named.add(name)
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        axes.legend(frameon=False)
        figure.savefig(out, bbox_inches="tight", metadata={"Date": None})
        pyplot.close(figure)
