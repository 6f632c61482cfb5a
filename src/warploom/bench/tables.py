"""Rows as tables: for the terminal (rich) and, generated from committed result files, for Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]
_FEW_SIZES = 2
"""Up to so many, a cell has the spread and every peer; with more, the median and the first peer."""
_NUMBERED = re.compile(r"^kernel \w+: ")
_MARKER = re.compile(r"(<!-- table: (?P<spec>[^>]*?) -->\n)(?P<body>.*?)(<!-- end table -->)", re.DOTALL)


def static_cells(rows: Rows) -> tuple[list[str], list[list[str]]]:
    """(header, cells) of what needs no GPU: error, findings, bank conflicts, registers and spills."""
    targets = list(dict.fromkeys(arch for row in rows for arch in row["targets"]))
    header = ["rung", "name", "error / bound", "findings", "ldmatrix × ideal", "other shared × ideal"]
    header += [f"{arch} registers (spilled)" for arch in targets]
    body: list[list[str]] = []
    for row in rows:
        cells = [row["rung"], row["name"], f"{row['error']['value'] / row['error']['bound']:.2f}"]
        cells += [str(sum(f["count"] for f in row["findings"]) or "none"), *_conflicts(row["wavefronts"])]
        body.append([*cells, *(_target(row["targets"].get(arch)) for arch in targets)])
    return header, body


def gpu_cells(rows: Rows, condition: str | None = None) -> tuple[list[str], list[list[str]]]:
    """(header, cells) of the rows that were timed: a column for each size; of one of :func:`conditions` if given."""
    timed = [(row, {_size(c): c for c in _cells(row) if condition in (None, condition_of(c))})
             for row in rows if row["gpu"]]  # fmt: skip
    sizes = list(dict.fromkeys(size for _, cells in timed for size in cells))
    cell_of = _beside_peers if len(sizes) <= _FEW_SIZES else _short
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
    static = "registers per thread; spills in bytes; wavefronts of shared memory over the conflict-free ideal"
    timed = [(", ".join(filter(None, (_gpu_title(rows), of))), gpu_cells(rows, of)) for of in conditions(rows)]
    for title, (header, body) in ((static, static_cells(rows)), *timed, ("run alone for power", power_cells(rows))):
        if not body:
            continue
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        for number, name in enumerate(header):
            words = number == 1
            text = name if words else _stacked(name)
            table.add_column(text, justify="left" if words else "right", overflow="fold", no_wrap=not words)
        for rung, name, *cells in body:
            table.add_row(rung, _NUMBERED.sub("", name), *(c.replace("does not fit", "no fit") for c in cells))
        tables.append(table)
    return tables


def _gpu_title(rows: Rows) -> str:
    """What the cells of :func:`gpu_cells` are."""
    cells = [cell for row in rows for cell in _cells(row)]
    if len({_size(cell) for cell in cells}) <= _FEW_SIZES:
        return "TFLOP/s, median (10th–90th percentile), and × the peers' in the same rounds"
    return f"TFLOP/s, median, and × {_first_peer(cells[0])[0]} in the same rounds"


def _stacked(header: str) -> str:
    """One word a line; signs stay with the word beside them."""
    return header.replace(" /", "\u00a0/").replace("× ", "×\u00a0").replace(" ", "\n").replace("\u00a0", " ")


def markdown_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    rows = [header, ["---"] * len(header), *body]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def gpu_markdown(rows: Rows) -> str:
    """TFLOP/s and, in brackets, the ratio to the first peer: a row for each rung, a column for each size."""
    cells = [{_size(c): c for c in (row["gpu"] or {}).get("cells", ())} for row in rows]
    sizes = list(dict.fromkeys(size for of_row in cells for size in of_row))
    body = [
        [row["rung"], row["name"], *(_beside_first_peer(of_row.get(size)) for size in sizes)]
        for row, of_row in zip(rows, cells, strict=True)
    ]
    return markdown_table(["rung", "name", *sizes], body)


def static_markdown(rows: Rows) -> str:
    """What needs no GPU: bank conflicts, registers and spills."""
    return markdown_table(*static_cells(rows))


def peers_markdown(rows: Rows) -> str:
    """The peers' own TFLOP/s, from the cells of the row that has most of them."""
    cells = max(((row["gpu"] or {}).get("cells", ()) for row in rows), key=len, default=())
    names = list(dict.fromkeys(name for cell in cells for name in cell["peers"]))
    body = [[n, *(_rate(c["peers"][n]["tflops"]) if n in c["peers"] else "–" for c in cells)] for n in names]
    return markdown_table(["peer", *(_size(cell) for cell in cells)], body)


def power_cells(rows: Rows) -> tuple[list[str], list[list[str]]]:
    """(header, cells) of the rows and peers that were run for power: speed under that load, watts, clock, energy."""
    body: list[list[str]] = []
    peers: dict[str, Mapping[str, Any]] = {}
    label = ""
    for row in rows:
        for cell in (row["gpu"] or {}).get("cells", ()):
            if cell.get("power"):
                label = _size(cell)
                body.append([row["rung"], row["name"], *_power(cell["power"])])
                peers |= {name: peer["power"] for name, peer in cell["peers"].items() if peer.get("power")}
    body += [["", name, *_power(power)] for name, power in peers.items()]
    return ["rung", "name", f"TFLOP/s, {label}", "W", "MHz", "TFLOP/J"], body


def power_markdown(rows: Rows) -> str:
    """Watts, clock and TFLOP per joule at the size that was run for power, the peers last."""
    return markdown_table(*power_cells(rows))


def _power(power: Mapping[str, Any]) -> list[str]:
    clock = power["sm_mhz"]
    return [f"{power['tflops']:.0f}", f"{power['watts']:.0f}", "–" if clock is None else f"{clock:.0f}",
            f"{power['tflop_per_joule']:.3f}"]  # fmt: skip


def first_call_markdown(rows: Rows) -> str:
    """Milliseconds of the first call of a shape family: with an empty cache, and in a later process."""
    body = [[row["call"], *(_spread(row[key], 1e3) for key in ("fresh_s", "later_s"))] for row in rows]
    return markdown_table(["first call of", "ms, empty cache", "ms, later process"], body)


def host_cost_markdown(rows: Rows) -> str:
    """Microseconds of host time of a repeated call."""
    body = [[f"`{row['call']}`", _spread(row["microseconds"], 1, 1)] for row in rows]
    return markdown_table(["call", "µs"], body)


def _spread(spread: Mapping[str, float], scale: float, digits: int = 0) -> str:
    median, low, high = (f"{spread[name] * scale:.{digits}f}" for name in ("median", "low", "high"))
    return f"{median} ({low}–{high})"


MARKDOWN_TABLES = {
    "gpu": gpu_markdown, "static": static_markdown, "peers": peers_markdown, "power": power_markdown,
    "first-call": first_call_markdown, "host-cost": host_cost_markdown,
}  # fmt: skip
"""The tables a Markdown file can ask for."""


def table_names(text: str) -> list[str]:
    """The names of the tables that ``text`` asks for."""
    return [match["spec"].strip() for match in _MARKER.finditer(text)]


def fill_markdown(text: str, tables: Mapping[str, str]) -> str:
    """``text`` with the body of every ``<!-- table: NAME -->`` … ``<!-- end table -->`` replaced by ``tables[NAME]``.

    Raises KeyError for a name without a table.
    """

    def replaced(match: re.Match[str]) -> str:
        return match[1] + tables[match["spec"].strip()] + match[4]

    return _MARKER.sub(replaced, text)


def _size(cell: Mapping[str, Any]) -> str:
    if "seq" in cell:
        return f"seq {cell['seq']}"
    return f"N = {cell['n']}" if "n" in cell else str(cell.get("label", ""))


def _rate(spread: Mapping[str, float]) -> str:
    return f"{spread['median']:.0f} ({spread['low']:.0f}–{spread['high']:.0f})"


def _beside_peers(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "–"
    ratios = [f"{ratio:.2f}× {peer}" for peer, ratio in cell["ratio"].items()]
    return "\n".join([_rate(cell["tflops"]), *ratios])


def _short(cell: Mapping[str, Any] | None) -> str:
    return _beside_first_peer(cell).replace(" (", "\n").rstrip(")")


def _beside_first_peer(cell: Mapping[str, Any] | None) -> str:
    """The first peer measured: PyTorch's flash backend for attention, cuBLAS for matmul."""
    if cell is None:
        return "–"
    _, ratio = _first_peer(cell)
    return f"{cell['tflops']['median']:.0f}" + (f" ({ratio:.2f}×)" if ratio else "")


def _first_peer(cell: Mapping[str, Any]) -> tuple[str, float | None]:
    """(name, ratio) of PyTorch's flash backend, else of the first peer there is."""
    ratios = cell["ratio"]
    name = "torch_flash" if "torch_flash" in ratios else next(iter(ratios), "no peer")
    return name, ratios.get(name)


def _conflicts(wavefronts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """(ldmatrix's, the others') executed wavefronts over the ideal ones."""

    def factor(names: list[str]) -> str:
        ideal = sum(wavefronts[n]["ideal"] for n in names)
        return f"{sum(wavefronts[n]['actual'] for n in names) / ideal:.2f}" if ideal else "–"

    matrix = [n for n in wavefronts if n == "ldmatrix"]
    return [factor(matrix), factor([n for n in wavefronts if n != "ldmatrix"])]


def _target(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "–"
    if "registers" not in entry:
        return "does not fit" if "not_for" in entry else "error"
    spilled = entry["spill_bytes"]
    return f"{entry['registers']} ({'?' if spilled is None else spilled})"
