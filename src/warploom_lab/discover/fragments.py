"""Who holds which element? Every fragment traced on a GPU or the emulator, fitted and compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from warploom.core.dtypes import DTYPES
from warploom.core.errors import LayoutError
from warploom.ir.program import Program
from warploom.layout.catalogue import FRAGMENTS, ldmatrix_fragment, movmatrix_fragment, wgmma_accumulator, wgmma_operand
from warploom.layout.fit import Difference, Fit, Observation, compare, fit, formulas
from warploom.layout.fragments import FragmentLayout
from warploom.layout.wmma import (
    discovered,
    wmma_fragment,
)
from warploom_lab.discover.tracers import FragmentTracer, Run, tracers
from warploom_lab.discover.transcribed import PTX_FORMULAS, WMMA_FORMULAS

Array = NDArray[Any]
Where = Literal["gpu", "emulator"]


@dataclass(frozen=True, eq=False)
class Discovered:
    """One fragment: what was seen, the map fitted to it, and how that compares.

    ``expected`` is the catalogue's map (None: it has none yet), ``difference`` the first place where the observation is
    not what it says, or what the PTX ISA's formula does: the emulator computes with the catalogue, so that there only
    the formula tells.
    """

    observation: Observation
    fit: Fit
    bits: int
    expected: FragmentLayout | None
    difference: Difference | None

    @property
    def name(self) -> str:
        """The fragment's name in the catalogue."""
        return self.observation.name

    @property
    def verdict(self) -> str:
        """``"agrees"``, ``"differs"`` or ``"new"`` (the catalogue has no map to compare with)."""
        if self.difference is not None:
            return "differs"
        return "new" if self.expected is None else "agrees"

    def as_row(self) -> dict[str, Any]:
        """The row of the JSON report; a fragment that is not linear brings its whole table."""
        seen = self.observation
        row: dict[str, Any] = {
            "name": self.name,
            "shape": list(seen.shape),
            "bits": self.bits,
            "elements": seen.elements,
            "linear": self.fit.is_linear,
            "verdict": self.verdict,
        }
        if self.difference is not None:
            row["difference"] = str(self.difference)
        if self.fit.map is None:
            return row | {"reason": self.fit.reason, "rows": seen.rows.tolist(), "cols": seen.cols.tolist()}
        bases = {dim: [list(v) for v in self.fit.map.bases(dim)] for dim in self.fit.map.in_dims}
        return row | bases | {"formulas": formulas(self.fit.map)}


def catalogued(name: str) -> FragmentLayout | None:
    """The catalogue's map of a traced fragment, or None if it has none (``wmma`` that was never traced)."""
    parts = name.split(".")
    if parts[0] == "mma":
        bits = DTYPES[parts[-1]].bits
        return FRAGMENTS[f"mma.{parts[1]}.{'C' if parts[2] == 'D' else parts[2]}.b{bits}"]
    if parts[0] in ("ldmatrix", "stmatrix"):
        return ldmatrix_fragment(int(parts[1][1:]), "trans" in parts)
    if parts[0] == "movmatrix":
        return movmatrix_fragment(transposed=True)
    if parts[0] == "wgmma":
        return wgmma_operand() if parts[2] == "A" else wgmma_accumulator(8)
    order: Literal["row", "col"] = "col" if parts[-1] == "col" and parts[2] in "AB" else "row"
    try:
        return wmma_fragment(parts[1], parts[2], DTYPES[parts[4 if parts[2] == "D" else 3]], order)
    except LayoutError:
        return FRAGMENTS["wmma.m16n16k16.C.b32"] if name.startswith("wmma.m16n16k16.C.f32") else None


def _difference_from_isa(seen: Observation, layout: FragmentLayout) -> Difference | None:
    formulas, source = PTX_FORMULAS, "the PTX ISA"
    if layout.name not in formulas:
        formulas, source = WMMA_FORMULAS, "the ISA's mma.sync that it becomes"
    formula = formulas[layout.name]
    threads, elements = seen.rows.shape
    table = np.array([[formula(t, e) for e in range(elements)] for t in range(threads)], dtype=np.int64)
    wrong = np.argwhere((table[..., 0] != seen.rows) | (table[..., 1] != seen.cols))
    if not len(wrong):
        return None
    thread, element = (int(x) for x in wrong[0])
    row, col = table[thread, element].tolist()
    return Difference(seen.name, thread, element, seen.at(thread, element), (row, col), len(wrong), seen.warps, source)


def trace_fragment(tracer: FragmentTracer, run: Run) -> Discovered:
    """Trace one fragment, fit a map, and compare it with the catalogue and the ISA's formula."""
    seen = tracer.observe(run)
    expected = catalogued(tracer.name)
    difference: Difference | None = None
    if expected is not None:
        difference = compare(seen, expected) or _difference_from_isa(seen, expected)
    return Discovered(seen, fit(seen), tracer.bits, expected, difference)


def gpu_runner() -> Run:
    """Runs tracers on GPU 0."""
    from warploom.ops.launch import launch

    return lambda program, source, out: launch(program, len(source), [np.ascontiguousarray(source), out])


def emulator_runner() -> Run:
    """Runs tracers on the emulator, with its checks."""
    from warploom.core.errors import EmulationError
    from warploom.emulate import emulate

    def run(program: Program, source: Array, out: Array) -> None:
        done = emulate(program, len(source), [np.ascontiguousarray(source), out])
        if done.findings:
            raise EmulationError(f"{program.name} has defects: {done.findings[0]}", tuple(done.findings))

    return run


def discover(on: Where, wanted: str = "") -> Iterator[Discovered]:
    """Trace every fragment whose name contains ``wanted``.

    On the emulator, ``wgmma`` and fragments without a map (``wmma`` that no GPU has traced) are left out; on a GPU,
    those of later architectures.
    """
    chosen = [t for t in tracers() if wanted in t.name]
    if not chosen:
        raise LayoutError(f"no fragment has {wanted!r} in its name; `warploom layout` lists those there are")
    if on == "emulator":
        run = emulator_runner()
        chosen = [t for t in chosen if _is_emulated(t.name)]
    else:
        from warploom.ops.backends import gpu_target

        run = gpu_runner()
        capability = gpu_target(0).compute_capability
        chosen = [t for t in chosen if t.capability <= capability]
    for tracer in chosen:
        yield trace_fragment(tracer, run)


def _is_emulated(name: str) -> bool:
    kind, *parts = name.split(".")
    if kind != "wmma":
        return kind != "wgmma"
    shape, operand, *types = parts
    needed = [f"{operand}.{'.'.join(types[: 2 if operand in 'AB' else 1])}"]
    if operand == "D":  # a product, in which A and B have a part
        inputs, sums, of_a, of_b = types
        needed = [f"A.{inputs}.{of_a}", f"B.{inputs}.{of_b}", f"C.{sums}"]
    return all(f"wmma.{shape}.{one}" in discovered()["fragments"] for one in needed)


def wmma_maps(found: list[Discovered], gpu: str) -> dict[str, Any]:
    """The contents of ``wmma_maps.json``: the linear ``wmma`` fragments among ``found``, each by its plain name."""
    fragments: dict[str, Any] = {}
    for item in found:
        kind, *parts = item.name.split(".")
        plain = kind == "wmma" and parts[1] in "ABC" and not {"load", "store"} & set(parts)
        if plain and item.fit.map is not None:
            row = item.as_row()
            fragments[item.name] = {key: row[key] for key in ("shape", "bits", "register", "lane")}
    return {"gpu": gpu, "fragments": fragments}
