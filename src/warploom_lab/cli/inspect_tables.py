"""A kernel's SASS figures as tables and lines for the terminal."""

from __future__ import annotations

import linecache
import statistics
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from warploom_lab.inspect.purpose import opcode_name, purpose
from warploom_lab.inspect.report import ADDRESSED
from warploom_lab.inspect.waits import waits

if TYPE_CHECKING:
    from rich.table import Table

    from warploom_lab.inspect import Change, Comparison, SassReport
    from warploom_lab.inspect.estimate import Estimate

_OPCODES_SHOWN = 6
_CHANGES_SHOWN = 16


def headline(report: SassReport) -> Iterator[str]:
    """Registers, memory, instructions and occupancy in sentences."""
    registers = str(report.registers) if report.registers_are_exact else f"at least {report.registers}"
    spills = f"{report.spill_store_bytes} bytes of spill stores, {report.spill_load_bytes} of spill loads"
    stack = "" if report.stack_bytes is None else f", {report.stack_bytes} bytes of stack"
    yield f"{registers} registers per thread{stack}, {spills}"
    if report.static_shared_bytes is not None or report.dynamic_shared_bytes is not None:
        dynamic = "unknown" if report.dynamic_shared_bytes is None else report.dynamic_shared_bytes
        yield f"shared memory per CTA: {report.static_shared_bytes or 0} bytes static, {dynamic} dynamic"
    yield _occupancy(report)
    loop = f"{len(report.loop_instructions)} of them in the main loop" if report.main_loop else "no loop"
    yield f"{len(report.instructions)} instructions, {loop}"
    if report.mma_per_ldmatrix:
        text = f"{report.mma_per_ldmatrix:.2f} mma per ldmatrix in the main loop"
        if report.ldmatrix_to_mma:
            between = statistics.median(report.ldmatrix_to_mma)
            text += f"; {between:g} instructions (median) between an ldmatrix and the first mma that reads it"
        yield text


def _occupancy(report: SassReport) -> str:
    known = report.known_occupancy()
    if known is None:
        return "occupancy: unknown without the threads per CTA (--threads, --shared) and the architecture"
    guess = " with no dynamic shared memory (--shared)" if report.dynamic_shared_bytes is None else ""
    allowed = ", ".join(f"{name} {ctas}" for name, ctas in known.limits.items())
    return (
        f"occupancy{guess}: {known.warps_per_sm} of {known.max_warps_per_sm} warps ({100 * known.fraction:.1f} %), "
        f"{known.ctas_per_sm} CTAs per SM, limited by {' and '.join(known.limited_by)} (CTAs allowed: {allowed})"
    )


def report_tables(report: SassReport) -> list[Any]:
    """The tables of one kernel: instructions by purpose, and the address registers."""
    table = _table("Instructions by purpose", "purpose", "kernel", "share", "per iteration", "share", "opcodes")
    total, loop_total = len(report.instructions), len(report.loop_instructions)
    opcodes = _opcodes_of_groups(report)
    for group, count in report.groups.items():
        inside = report.loop_groups.get(group, 0)
        table.add_row(group, str(count), _share(count, total), str(inside), _share(inside, loop_total), opcodes[group])
    return [table, *_address_tables(report)]


def estimate_table(found: Estimate) -> list[Any]:
    """The resources of an estimate, and the bound in a sentence."""
    gpu, bound = found.gpu, found.bound
    table = _table(
        f"The example on an {gpu.name}, at least", "resource", "amount", "unit", "a second", "µs", "of the bound"
    )
    for share in found.shares:
        cells = f"{share.amount:.4g}", share.unit, f"{share.per_second:.4g}", f"{share.seconds * 1e6:.3g}"
        table.add_row(share.resource, *cells, _share(share.seconds, bound.seconds))
    filled = min(found.ctas, gpu.multiprocessors)
    return [
        table,
        f"bound by {bound.resource}, if CTAs fill all SMs evenly (the example's {found.ctas} are on {filled} of "
        f"{gpu.multiprocessors}); {found.l2_bytes / 1e6:.4g} MB go through the L2",
    ]


def _address_tables(report: SassReport) -> list[Any]:
    used = {name: report.address_registers(name) for name in ADDRESSED}
    if not any(used.values()):
        return []
    table = _table(
        "Registers that hold shared addresses", "instruction", "count", "registers", "how often each is used"
    )
    for name, registers in used.items():
        histogram = report.address_histogram(name)
        spread = ", ".join(f"{number} × {uses}" for uses, number in histogram.items())
        table.add_row(name, str(report.counts.get(name, 0)), str(len(registers)), spread)
    return [table]


def _opcodes_of_groups(report: SassReport) -> dict[str, str]:
    """Group → its most frequent opcodes with their counts, as text."""
    by_group: dict[str, Counter[str]] = {}
    for instruction in report.instructions:
        by_group.setdefault(purpose(instruction), Counter())[opcode_name(instruction)] += 1
    found: dict[str, str] = {}
    for group, counts in by_group.items():
        text = ", ".join(f"{name} {count}" for name, count in counts.most_common(_OPCODES_SHOWN))
        found[group] = text + (", …" if len(counts) > _OPCODES_SHOWN else "")
    return found


def comparison_tables(found: Comparison) -> list[Any]:
    """The tables of two kernels: figures, instructions by purpose, and the opcodes that changed most."""
    figures = _table("Figures", "figure", "before", "after", "difference")
    for change in found.figures:
        figures.add_row(change.name, *_cells(change))
    columns = ("before", "after", "difference", "before", "after", "difference")
    groups = _table("Instructions by purpose: whole kernel, then one main-loop iteration", "purpose", *columns)
    opcodes = _table("The opcodes that changed most", "opcode", *columns)
    changed = [c for c in found.counts if c.differs][:_CHANGES_SHOWN]
    for table, changes, loops in ((groups, found.groups, found.loop_groups), (opcodes, changed, found.loop_counts)):
        inside = {change.name: _cells(change) for change in loops}
        for change in changes:
            table.add_row(change.name, *_cells(change), *inside.get(change.name, ("0", "0", "·")))
    if found.same_code:
        figures.caption = "The SASS is the same."
    return [figures, groups, *([opcodes] if opcodes.row_count else []), *_address_tables(found.after)]


def source_lines(report: SassReport) -> Iterator[str]:
    """Every instruction with whom it waits for and, where it changes, the author's line.

    The main loop is marked with a bar. "LDSM −3" waits for the LDSM with three instructions between the two.
    """
    inside = {i.address for i in report.loop_instructions}
    waiting = waits(report.flow)
    last = None
    for instruction in report.instructions:
        where = report.python_line(instruction)
        bar = "│" if instruction.address in inside else " "
        whom = waiting.get(instruction.address, ())[:1]
        wait = "".join(f"{w.producer.mnemonic} −{w.between}" for w in whom)
        text = f"{instruction.address:06x} {bar} {instruction!s:<64} {wait:<14}"
        if where is not None and where != last:
            text += f" {where}  {linecache.getline(where.file, where.line).strip()}"
            last = where
        elif where is None and instruction.source is not None and not report.python_lines:
            text += f" {instruction.source[0].rsplit('/', 1)[-1]}:{instruction.source[1]}"
        yield text.rstrip()


def _table(title: str, first: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column(first)
    for column in columns:
        words = column in ("opcodes", "how often each is used")
        table.add_column(column, justify="left" if words else "right", overflow="fold")
    return table


def _cells(change: Change) -> tuple[str, str, str]:
    before, after = ("?" if value is None else str(value) for value in (change.before, change.after))
    difference = change.difference
    return before, after, "?" if difference is None else f"{difference:+d}" if difference else "·"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""
