"""Trace every fragment on this machine's GPU: ``python benchmarks/discover_h200.py [--out DIR]``.

Writes ``discovery.json`` (one row per fragment, with the GPU's name and driver; and the largest error over its bound of
random products by each ``wmma.mma``, against float64) and ``wmma_maps.json`` (what
``src/warploom/layout/wmma_maps.json`` is made of). A fragment that cannot be traced is reported with its error; exit
status 1 if any differs from the catalogue, or a product is wrong.
"""

from __future__ import annotations

import json
import sys

from wmma_products import errors

from warploom.core.errors import WarploomError
from warploom_lab.bench.cells import parser_of
from warploom_lab.bench.evidence import environment, write
from warploom_lab.discover.fragments import Discovered, gpu_runner, trace_fragment, wmma_maps
from warploom_lab.discover.tracers import tracers


def main() -> int:
    """Trace, write, summarise."""
    folder, machine = parser_of(__doc__).parse_args().out, environment()
    run = gpu_runner()
    found: list[Discovered] = []
    rows: list[dict[str, object]] = []
    for tracer in tracers():
        try:
            one = trace_fragment(tracer, run)
        except WarploomError as error:
            rows.append({"name": tracer.name, "verdict": "error", "error": str(error)})
        else:
            found.append(one)
            rows.append(one.as_row())
        print(f"{rows[-1]['name']:36} {rows[-1]['verdict']} {rows[-1].get('difference', rows[-1].get('error', ''))}")
    products = errors(run)
    write(folder / "discovery.json", {"environment": machine, "fragments": rows, "products": products})
    maps = wmma_maps(found, str((machine["gpu"] or {}).get("name", "")))
    (folder / "wmma_maps.json").write_text(json.dumps(maps) + "\n", encoding="utf-8")
    wrong = [r for r in rows if r["verdict"] in ("differs", "error")]
    print(f"{len(rows)} fragments, {len(wrong)} wrong, {sum(not r.get('linear', True) for r in rows)} not linear")
    off = {name: ratio for name, ratio in products.items() if not ratio <= 1}
    print(f"{len(products)} kinds of wmma.mma, {f'wrong (error over bound): {off}' if off else 'all right'}")
    return 1 if wrong or off else 0


if __name__ == "__main__":
    sys.exit(main())
