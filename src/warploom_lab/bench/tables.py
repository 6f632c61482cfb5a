"""Rows of a ladder as tables for the terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]
_FEW_SIZES = 2
"""Up to so many, a cell has the spread and every baseline; with more, the median and the first baseline."""
_NUMBERED = re.compile(r"^kernel \w+: ")


def static_cells(rows: Rows) -> tuple[list[str], list[list[str]]]:
    """(header, cells) of what needs no GPU: error, findings, bank conflicts, registers and spills."""
    targets = list(dict.fromkeys(arch for row in rows for arch in row["targets"]))
    header = ["rung", "name", "error / bound", "findings", "ldmatrix wavefronts", "other wavefronts"]
    header += [f"{arch} registers (spilled)" for arch in targets]
    body: list[list[str]] = []
    for row in rows:
        cells = [row["rung"], row["name"], f"{row['error']['value'] / row['error']['bound']:.2f}"]
        cells += [str(sum(f["count"] for f in row["findings"]) or "none"), *conflicts(row["wavefronts"])]
        body.append([*cells, *(_target(row["targets"].get(arch)) for arch in targets)])
    return header, body


def gpu_cells(rows: Rows, condition: str | None = None) -> tuple[list[str], list[list[str]]]:
    """(header, cells) of the rows that were timed: a column for each size; of one of :func:`conditions` if given."""
    timed = [
        (row, {size_of(c): c for c in _cells(row) if condition in (None, condition_of(c))})
        for row in rows
        if row["gpu"]
    ]
    sizes = list(dict.fromkeys(size for _, cells in timed for size in cells))
    cell_of = _beside_baselines if len(sizes) <= _FEW_SIZES else _short
    body = [
        [row["rung"], row["name"], *(_with_tile(cell_of(cells.get(size)), cells.get(size)) for size in sizes)]
        for row, cells in timed
    ]
    return ["rung", "name", *sizes], body


def _cells(row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return (row["gpu"] or {}).get("cells", ())


def condition_of(cell: Mapping[str, Any]) -> str:
    """What the matrices held and under which load a cell was timed: ``"uniform data, sustained"``; "" where untold."""
    data = f"{cell['data']} data" if "data" in cell else ""
    return ", ".join(filter(None, (data, cell.get("load"))))


def conditions(rows: Rows) -> list[str]:
    """Every :func:`condition_of` the cells."""
    return list(dict.fromkeys(condition_of(cell) for row in rows for cell in _cells(row)))


def tile_text(config: Mapping[str, Any]) -> str:
    """``256×128×64 64×64 s3 g16``: tile, warp tile, stages, rows of a group of CTAs; "" of another kind of kernel."""
    if "warp_m" not in config:
        return ""
    words = [f"{config['tile_m']}×{config['tile_n']}×{config['tile_k']}", f"{config['warp_m']}×{config['warp_n']}"]
    words += [f"s{config['stages']}"] + [f"g{config['block_stride']}"] * bool(config["block_stride"])
    return " ".join(words + ["-O1"] * (config["opt_level"] == 1))


def _with_tile(text: str, cell: Mapping[str, Any] | None) -> str:
    """A cell with the tile that was timed, where it is not the rung's own."""
    return f"{text}\n{tile_text(cell['config'])}" if cell and "config" in cell else text


def ladder_tables(rows: Rows) -> list[Any]:
    """``rich`` tables of a ladder's rows: the static one, and one of TFLOP/s where rows were timed.

    They fit a terminal of 80 columns: names lose the number that stands before them, headers take several lines.
    """
    from rich import box
    from rich.table import Table

    tables: list[Any] = []
    static = (
        "wavefronts of shared-memory accesses × the fewest without bank conflicts; registers per thread, bytes of "
        "spills; –: not for that architecture"
    )
    timed = [(", ".join(filter(None, (_gpu_title(rows), of))), gpu_cells(rows, of)) for of in conditions(rows)]
    for title, (header, body) in ((static, static_cells(rows)), *timed):
        if not body:
            continue
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        for number, name in enumerate(header):
            words = number == 1
            text = name if words else _stacked(name)
            table.add_column(text, justify="left" if words else "right", overflow="fold", no_wrap=not words)
        for rung, name, *cells in body:
            table.add_row(rung, _NUMBERED.sub("", name), *cells)
        tables.append(table)
    return tables


def _gpu_title(rows: Rows) -> str:
    """What the cells of :func:`gpu_cells` are."""
    cells = [cell for row in rows for cell in _cells(row)]
    if len({size_of(cell) for cell in cells}) <= _FEW_SIZES:
        return "TFLOP/s, median (10th–90th percentile), and × the baselines' in the same rounds"
    return f"TFLOP/s, median, and × {_first_baseline(cells[0])[0]} in the same rounds"


def _stacked(header: str) -> str:
    """One word a line; signs stay with the word beside them."""
    return header.replace(" /", "\u00a0/").replace("× ", "×\u00a0").replace(" ", "\n").replace("\u00a0", " ")


def size_of(cell: Mapping[str, Any]) -> str:
    """The size that a cell was timed at, as the head of its column."""
    if "seq" in cell:
        return f"seq {cell['seq']}"
    return f"N = {cell['n']}" if "n" in cell else str(cell.get("label", ""))


def rate_text(spread: Mapping[str, float]) -> str:
    """A median with its 10th and 90th percentile."""
    return f"{spread['median']:.0f} ({spread['low']:.0f}–{spread['high']:.0f})"


def _beside_baselines(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "–"
    ratios = [f"{ratio:.2f}× {baseline}" for baseline, ratio in cell["ratio"].items()]
    return "\n".join([rate_text(cell["tflops"]), *ratios])


def _short(cell: Mapping[str, Any] | None) -> str:
    return beside_first_baseline(cell).replace(" (", "\n").rstrip(")")


def beside_first_baseline(cell: Mapping[str, Any] | None) -> str:
    """The first baseline measured: PyTorch's flash backend for attention, cuBLAS for matmul."""
    if cell is None:
        return "–"
    _, ratio = _first_baseline(cell)
    return f"{cell['tflops']['median']:.0f}" + (f" ({ratio:.2f}×)" if ratio else "")


def _first_baseline(cell: Mapping[str, Any]) -> tuple[str, float | None]:
    """(name, ratio) of PyTorch's flash backend, else of the first baseline there is."""
    ratios = cell["ratio"]
    name = "torch_flash" if "torch_flash" in ratios else next(iter(ratios), "no baseline")
    return name, ratios.get(name)


def wavefront_factor(wavefronts: Mapping[str, Mapping[str, int]], *, matrix: bool) -> float | None:
    """Executed wavefronts over the conflict-free ones, of ldmatrix or of all other accesses; None without such."""
    chosen = [of for name, of in wavefronts.items() if (name == "ldmatrix") == matrix]
    ideal = sum(of["ideal"] for of in chosen)
    return sum(of["actual"] for of in chosen) / ideal if ideal else None


def conflicts(wavefronts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """The factors of ldmatrix and of all other accesses as text."""
    factors = (wavefront_factor(wavefronts, matrix=matrix) for matrix in (True, False))
    return ["–" if factor is None else f"{factor:.2f}" for factor in factors]


def _target(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "–"
    if "registers" not in entry:
        return "–" if "not_for" in entry else "error"
    spilled = entry["spill_bytes"]
    return f"{entry['registers']} ({'?' if spilled is None else spilled})"
