"""Write docs/evidence/ladder-reduce.md from the committed evidence: ``python benchmarks/reduce_page.py [--check]``.

The evidence is benchmarks/results/h200/reduce.json, reduce-textbook.json and matmul-reduce.json
(``benchmarks/reduce_h200.py``), and rungs 0 and 1 of attention-d128-bf16.json. ``--check`` changes nothing and ends
with 1 if the page is out of date.
"""

from __future__ import annotations

import sys
from itertools import product

from page_parts import EVIDENCE, HERE, Row, filled, main, read
from page_tables import markdown_table
from render import provenance

from warploom.kernels.reduce.ladder import LADDER

THROUGH_SHARED, IN_REGISTERS = ("1", "1w", "2"), ("3", "4", "5")
OPCODES = ("HMMA", "FMNMX", "FSEL", "SHFL", "LDS", "STS", "BAR", "LOP3", "IMAD.MOV", "WARPSYNC")


class Evidence:
    """The three results, and the rows of the experiment by rung."""

    def __init__(self) -> None:
        experiment, peers, attention = (
            read(f"h200/{name}") for name in ("reduce.json", "matmul-reduce.json", "attention-d128-bf16.json")
        )
        self.environment: Row = experiment["environment"]
        self.paper: Row = experiment["result"]["paper"]
        self.rows: dict[str, Row] = {row["rung"]: row for row in experiment["result"]["rungs"]}
        self.peers: Row = peers["result"]
        self.textbook: Row = read("h200/reduce-textbook.json")
        self.attention: dict[str, Row] = {row["rung"]: row for row in attention["rows"]}

    def faster(self, rung: str, than: str) -> float:
        """How many times the operations per second of another rung, with every SM full."""
        return _median(self.rows[rung]["grid"]["speed_up"]) / _median(self.rows[than]["grid"]["speed_up"])

    def energy(self, rung: str, than: str) -> float:
        """How many times less energy an operation takes than another rung's, with every SM full."""
        energies = [self.rows[key]["grid"]["energy_per_operation_j"] for key in (than, rung)]
        return energies[0] / energies[1]


def _median(figures: Row) -> float:
    return float(figures["median"])


def spread(figures: Row, factor: float = 1.0, digits: int = 2) -> str:
    """``4.05 (3.94–4.21)``."""
    low, middle, high = (f"{figures[key] * factor:.{digits}f}" for key in ("low", "median", "high"))
    return f"{middle} ({low}–{high})"


def rungs(_: Evidence) -> str:
    """What each rung is."""
    return markdown_table(["rung", "", ""], [[rung.key, rung.name, rung.changes] for rung in LADDER.rungs])


def needs(found: Evidence) -> str:
    """Registers, shared memory, barriers, shuffles, occupancy, wavefronts and conflicts of one operation."""
    body: list[list[str]] = []
    for key, row in found.rows.items():
        counted = row["counters"]["launch"]
        waves, conflicts = (counted[what].get("all shared", 0.0) for what in ("wavefronts", "bank_conflicts"))
        body.append([
            key, str(row["compiled"]["registers"]), str(row["shared_bytes"]), str(row["barriers"]),
            str(row["shuffles"]), f"{counted['achieved_occupancy_percent']:.2f} %", f"{waves:.0f}",
            str(row["wavefronts"]), f"{conflicts:.0f}", str(row["bank_conflicts"]),
        ])  # fmt: skip
    head = ["rung", "registers", "shared bytes", "barriers", "shuffles", "achieved occupancy", "wavefronts",
            "emulator", "bank conflicts", "emulator"]  # fmt: skip
    return markdown_table(head, body)


def launch(found: Evidence) -> str:
    """One warp per launch: latencies, speed-ups, power and energy."""
    body: list[list[str]] = []
    first = found.rows["1"]["launch"]
    for key, row in found.rows.items():
        one = row["launch"]
        body.append([
            key, spread(one["launch_s"], 1e6), f"{_median(first['launch_s']) / _median(one['launch_s']):.2f}",
            spread(one["graph_s"], 1e6, 3), f"{_median(first['graph_s']) / _median(one['graph_s']):.2f}",
            spread(one["paper_protocol_s"], 1e6),
            f"{_median(first['paper_protocol_s']) / _median(one['paper_protocol_s']):.2f}",
            f"{one['watts']:.0f}", f"{one['energy_per_operation_j'] * 1e3:.2f}",
        ])  # fmt: skip
    head = ["rung", "launch, µs", "×", "graph replay, µs", "×", "mean of 1000, µs", "×", "W", "mJ"]
    return markdown_table(head, body)


def stalls(counted: Row, most: int = 4) -> str:
    """The largest shares of the cycles between two issues of a warp."""
    shares = list(counted["stall_shares_percent"].items())[:most]
    return ", ".join(f"{name.replace('_', ' ')} {share:.0f} %" for name, share in shares)


def loop(found: Evidence) -> str:
    """One warp: cycles, instructions and stalls of an operation."""
    first = _median(found.rows["1"]["loop"]["cycles_per_operation"])
    body: list[list[str]] = []
    for key, row in found.rows.items():
        cycles, counted = row["loop"]["cycles_per_operation"], row["counters"]["loop"]
        body.append([key, spread(cycles, digits=1), f"{first / _median(cycles):.2f}",
                     f"{counted['instructions']:.1f}", stalls(counted)])  # fmt: skip
    return markdown_table(["rung", "cycles", "×", "instructions", "stalls"], body)


def grid(found: Evidence) -> str:
    """Every SM full: rate, speed-ups, power and energy."""
    body: list[list[str]] = []
    for key, row in found.rows.items():
        full = row["grid"]
        body.append([
            key, spread(full["operations_per_s"], 1e-9), spread(full["speed_up"]), f"{found.faster(key, '1w'):.2f}",
            f"{found.faster(key, '2'):.2f}", f"{full['watts']:.0f}", f"{full['load_sm_mhz']:.0f}",
            f"{full['energy_per_operation_j'] * 1e9:.1f}", f"{full['energy_above_idle_j'] * 1e9:.1f}",
            f"{found.energy(key, '1'):.1f}",
        ])  # fmt: skip
    head = ["rung", "10⁹ operations/s", "× rung 1", "× 1w", "× 2", "W", "MHz", "nJ", "nJ above idle", "energy ÷"]
    return markdown_table(head, body)


def faster(found: Evidence) -> str:
    """Operations per second in registers over those through shared memory, with every SM full."""
    names = {"1": "the baseline as described (1)", "1w": "the baseline as compiled (1w)", "2": "done fairly (2)"}
    known = {rung.key: rung.name for rung in LADDER.rungs}
    body = [[f"{known[key]} ({key})", *(f"{found.faster(key, base):.2f}" for base in names)] for key in IN_REGISTERS]
    return markdown_table(["in registers", *names.values()], body)


def textbook(rows: Row) -> str:
    """The paper's own baseline beside rungs 1 and 1w, in the three settings."""
    body: list[list[str]] = []
    for key, row in rows.items():
        one, cycles, full = row["launch"], row["loop"]["cycles_per_operation"], row["grid"]
        body.append([
            key, spread(one["paper_protocol_s"], 1e6), spread(one["graph_s"], 1e6, 3), spread(cycles, digits=1),
            spread(full["operations_per_s"], 1e-9), spread(full["speed_up"]),
            f"{full['energy_per_operation_j'] * 1e9:.1f}",
        ])  # fmt: skip
    head = ["rung", "mean of 1000 launches, µs", "graph replay, µs", "one warp, cycles",
            "every SM full, 10⁹ operations/s", "× rung 1", "nJ"]  # fmt: skip
    return markdown_table(head, body)


def limits(found: Evidence) -> str:
    """Pipes and stalls with every SM full."""
    body: list[list[str]] = []
    for key, row in found.rows.items():
        counted = row["counters"]["grid"]
        pipes = counted["pipes_percent"]
        body.append([
            key, f"{counted['achieved_occupancy_percent']:.0f} %", f"{counted['issue_percent']:.0f} %",
            f"{pipes['alu']:.0f} %", f"{pipes['tensor']:.0f} %", f"{pipes['lsu']:.0f} %",
            f"{counted['mio_stalls_percent']:.0f} %", stalls(counted, 3),
        ])  # fmt: skip
    head = ["rung", "occupancy", "issue slots", "arithmetic pipe", "tensor", "memory instructions", "MIO stalls",
            "stalls"]  # fmt: skip
    return markdown_table(head, body)


def sass(found: Evidence) -> str:
    """Instructions of an operation by opcode."""
    body: list[list[str]] = []
    for key, row in found.rows.items():
        counts: dict[str, float] = row["loop_opcodes"]
        others = sum(counts.values()) - sum(counts.get(op, 0.0) for op in OPCODES)
        numbers = [*(counts.get(op, 0.0) for op in OPCODES), others, sum(counts.values())]
        body.append([key, *(f"{n:g}" for n in numbers)])
    return markdown_table(["rung", *(f"`{op}`" for op in OPCODES), "others", "all"], body)


def paper(found: Evidence) -> str:
    """Speed-up and energy gain of the paper, and of each setting here."""
    rows, body = found.rows, list[list[str]]()
    for gpu, theirs in found.paper.items():
        (slow, fast), (much, little) = theirs["latency_ms"], theirs["energy_mj"]
        body.append([f"paper, {gpu}, one launch", f"{slow * 1e3:.1f} → {fast * 1e3:.1f} µs", f"{theirs['speed_up']}",
                     f"{much} → {little} mJ", f"{theirs['energy_gain']}"])  # fmt: skip
    for base in THROUGH_SHARED:
        one, printed = rows[base]["launch"], rows["3"]["launch"]
        times = [_median(x["paper_protocol_s"]) for x in (one, printed)]
        energies = [x["energy_per_operation_j"] for x in (one, printed)]
        body.append([f"here, one launch, {base} → 3", f"{times[0] * 1e6:.2f} → {times[1] * 1e6:.2f} µs",
                     f"{times[0] / times[1]:.2f}", f"{energies[0] * 1e3:.2f} → {energies[1] * 1e3:.2f} mJ",
                     f"{energies[0] / energies[1]:.2f}"])  # fmt: skip
    for base, key in product(THROUGH_SHARED, ("3", "4")):
        cycles = [_median(rows[k]["loop"]["cycles_per_operation"]) for k in (base, key)]
        body.append([f"here, one warp, {base} → {key}", f"{cycles[0]:.0f} → {cycles[1]:.0f} cycles",
                     f"{cycles[0] / cycles[1]:.2f}", "–", "–"])  # fmt: skip
    for base, key in product(THROUGH_SHARED, IN_REGISTERS):
        rates = [_median(rows[k]["grid"]["operations_per_s"]) for k in (base, key)]
        energies = [rows[k]["grid"]["energy_per_operation_j"] for k in (base, key)]
        body.append([f"here, every SM full, {base} → {key}", f"{1e12 / rates[0]:.0f} → {1e12 / rates[1]:.0f} ps",
                     f"{found.faster(key, base):.2f}", f"{energies[0] * 1e9:.1f} → {energies[1] * 1e9:.1f} nJ",
                     f"{energies[0] / energies[1]:.2f}"])  # fmt: skip
    return markdown_table(["", "time of an operation", "speed-up", "energy of an operation", "gain"], body)


def attention(found: Evidence) -> str:
    """Rungs 0 and 1 of attention at every length."""
    before, after = ({c["seq"]: c["tflops"] for c in found.attention[key]["gpu"]["cells"]} for key in ("0", "1"))
    body = [[str(seq), spread(before[seq], digits=1), spread(after[seq], digits=1),
             f"{_median(after[seq]) / _median(before[seq]):.2f}"] for seq in before]  # fmt: skip
    return markdown_table(["length", "through shared memory (0)", "in registers (1)", "×"], body)


def peers(found: Evidence) -> str:
    """The reductions of a product beside PyTorch."""
    body: list[list[str]] = []
    for row in [*found.peers["against_torch"], found.peers["loss_against_torch"]]:
        ours, theirs = row["warploom_s"], [row.get(f"{name}_s") for name in ("mma.sync", "torch", "torch.compile")]
        extra = [row.get(f"{name}_extra_bytes") for name in ("warploom", "torch", "torch.compile")]
        body.append([
            row["op"], f"{row['m']} × {row['n']} × {row['k']}", spread(ours, 1e3, 3),
            *("–" if x is None else spread(x, 1e3, 3) for x in theirs), f"{min(row['over'].values()):.2f}",
            " / ".join("–" if x is None else f"{x / 2**20:.0f}" for x in extra), f"{row['error']:.2g}",
        ])  # fmt: skip
    head = [
        "",
        "m × n × k",
        "warploom, ms",
        "with mma.sync, ms",
        "eager, ms",
        "compiled, ms",
        "times as fast",
        "extra MiB",
        "error",
    ]
    return markdown_table(head, body)


def page() -> str:
    """The whole page."""
    found = Evidence()
    rows, search = found.rows, found.peers["search_ten_millions"]
    one, cycles = rows["4"]["launch"], _median(rows["4"]["loop"]["cycles_per_operation"])
    mhz = float(rows["4"]["grid"]["load_sm_mhz"])
    graph = _median(one["graph_s"])

    def arrow(key: str) -> str:
        return " → ".join(str(rows[k]["compiled"]["registers"]) for k in ("1w", key))

    figures = {
        "RUNGS": rungs(found), "NEEDS": needs(found), "LAUNCH": launch(found), "LOOP": loop(found),
        "GRID": grid(found), "LIMITS": limits(found), "SASS": sass(found), "PAPER": paper(found),
        "ATTENTION": attention(found), "PEERS": peers(found), "MERGED": f"{found.faster('1w', '1'):.1f}",
        "IDLE": f"{one['idle_watts']:.0f}", "PLAIN": f"{_median(one['launch_s']) * 1e6:.1f}",
        "GRAPH": f"{graph * 1e6:.2f}", "SHARE": f"{cycles / mhz / 1e6 / graph:.0%}", "CYCLES": f"{cycles:.0f}",
        "MHZ": f"{mhz:.0f}", "FASTER": faster(found),
        "LONG": f"{found.paper['H100']['latency_ms'][0] * 1e-3 / _median(one['launch_s']):.0f}",
        "SHORT": f"{found.paper['H100']['latency_ms'][1] * 1e-3 / _median(one['launch_s']):.0f}",
        "PRINTED": f"{found.faster('3', '1w'):.1f}", "FULL": f"{found.faster('4', '1w'):.1f}",
        "ENERGY": f"{found.energy('5', '1'):.1f}", "ENERGYW": f"{found.energy('5', '1w'):.1f}",
        "WAVEFRONTS": " and ".join(str(rows[key]["wavefronts"]) for key in ("1", "1w")),
        "MASKS": f"{found.faster('4', '3'):.1f}",
        "REGISTERS3": arrow("3"), "REGISTERS4": arrow("4"),
        "VECTORS": f"{search['vectors']:,}".replace(",", " "), "DIMENSION": str(search["dimension"]),
        "QUERIES": str(search["queries"]), "SEARCH": spread(search["s"], 1e3, 1),
        "SEARCHMIB": f"{search['extra_bytes'] / 2**20:.0f}", "MADE": provenance(found.environment),
    }  # fmt: skip
    if found.textbook:
        timed = found.textbook["result"]
        rates = {key: _median(row["grid"]["operations_per_s"]) for key, row in timed.items()}
        figures |= {"TEXTBOOK": textbook(timed), "MADETEXTBOOK": provenance(found.textbook["environment"]),
                    "AS1W": f"{rates['wmma'] / rates['1w']:.2f}"}  # fmt: skip
    return filled(HERE / "ladder-reduce.template.md", figures, ["TEXTBOOK"] if found.textbook else [])


PAGES = {EVIDENCE / "ladder-reduce.md": page}

if __name__ == "__main__":
    sys.exit(main(PAGES))
