"""Defects of examples/wgmma_pipeline.py: what the emulator says, and what compute-sanitizer's tools say on a GPU.

    PYTHONPATH=src python benchmarks/sanitize_unseen.py [--out DIR]

Each variant is the example with lines moved or taken out. Writes ``sanitizer-unseen.json``: of each variant the
emulator's findings, whether the GPU's result was right, and the errors that each tool counted for its kernel. Without a
GPU only the emulator's part. The tools run at the same time, each on all variants in one process; a variant that
hangs costs its tool the rest.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import warploom
from warploom.emulate import emulate
from warploom.ops.backends import gpu_present
from warploom_lab.bench.cells import parser_of
from warploom_lab.bench.evidence import write

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "wgmma_pipeline.py"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
SECONDS = 45
WAIT = "            k.wgmma_wait(0, c)\n"
GIVE_BACK = "            empty.arrive(ring.stage, when=k.lane == 0)\n"
VARIANTS = {
    "as it is": [],
    "stage given back before the product has read it": [(WAIT + GIVE_BACK, GIVE_BACK + WAIT)],
    "no proxy fence before the TMA store": [("        k.fence_async()\n", "")],
    "no barrier before the TMA store": [("        k.bar_sync(1, 128)\n", "")],
    "no fence after the mbarriers' initialisation": [("        k.mbarrier_fence()\n", "")],
}
"""Name → replacements in the example's text."""


def variant(name: str, folder: Path) -> Any:
    """The example's module with the replacements of a variant."""
    text = EXAMPLE.read_text(encoding="utf-8")
    for old, new in VARIANTS[name]:
        if old not in text:
            raise ValueError(f"{EXAMPLE.name} has no {old!r}")
        text = text.replace(old, new)
    number = list(VARIANTS).index(name)
    path = folder / f"variant_{number}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_emulator(module: Any) -> list[dict[str, str]]:
    """Kind and message of each finding."""
    launch = module.example(np.random.default_rng(0))
    found = emulate(module.product.trace(), launch.grid, launch.arguments).findings
    return [{"kind": f.kind, "message": f.message} for f in found]


def on_gpu(name: str, module: Any) -> bool:
    """Run once on random inputs with a poisoned output; whether the result is right."""
    launch = module.example(np.random.default_rng(1))
    c, _ = launch.arguments[2]
    c[...] = np.nan
    warploom.launch(replace(module.product.trace(), name=kernel_name(name)), launch.grid, launch.arguments)
    wanted, tolerance = launch.expect["c_map"]
    return bool((np.abs(c.astype(np.float64) - wanted) <= tolerance).all())


def kernel_name(name: str) -> str:
    """What the kernel of a variant is called in the tools' reports."""
    return f"product_{list(VARIANTS).index(name)}"


def run_all() -> None:
    """Every variant on the GPU; prints lines of JSON."""
    with tempfile.TemporaryDirectory() as scratch:
        for name in VARIANTS:
            print("RESULT " + json.dumps({name: on_gpu(name, variant(name, Path(scratch)))}), flush=True)


def under_tools() -> dict[str, dict[str, Any]]:
    """Of each tool: errors of each variant's kernel, results, and the end of its report."""

    def command(tool: str) -> list[str]:
        quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
        return ["compute-sanitizer", "--tool", tool, *quiet, sys.executable, __file__, "--run"]

    running = {
        tool: subprocess.Popen(command(tool), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for tool in TOOLS
    }
    found: dict[str, dict[str, Any]] = {}
    for tool, process in running.items():
        try:
            text = process.communicate(timeout=SECONDS)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            text = process.communicate()[0] + "\nstopped after its time"
        results: dict[str, bool] = {}
        for line in text.splitlines():
            if line.startswith("RESULT "):
                results |= json.loads(line.removeprefix("RESULT "))
        errors = {name: len(re.findall(rf"\b(?:at|in) {kernel_name(name)}\b", text)) for name in VARIANTS}
        summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", text)
        found[tool] = {"reports": errors, "right": results, "summary": summary, "tail": text[-400:]}
    return found


def main() -> int:
    """Measure and write; 0 where every defect has a finding and the example none."""
    parser = parser_of(__doc__)
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run_all()
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        findings = {name: on_emulator(variant(name, Path(scratch))) for name in VARIANTS}
    result = {"findings": findings, "tools": under_tools() if gpu_present() else {}}
    write(options.out / "sanitizer-unseen.json", result)
    for name, found in findings.items():
        kinds = ", ".join(dict.fromkeys(f["kind"] for f in found)) or "none"
        tools = ", ".join(
            f"{tool} {of['reports'][name]} ({'right' if of['right'].get(name) else 'wrong or not run'})"
            for tool, of in result["tools"].items()
        )
        print(f"{name}: emulator {kinds}; {tools}")
    for tool, of in result["tools"].items():
        print(tool, of["summary"])
    return int(any(bool(found) == (name == "as it is") for name, found in findings.items()))


if __name__ == "__main__":
    sys.exit(main())
