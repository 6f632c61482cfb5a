"""Every instruction that the tables can make, and what ptxas says of it: ``python -m tests.isa.every_form [sm_80]``.

ptxas gets one kernel with a line for each instruction; what it refuses is declared too wide.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from itertools import product

from warploom.core.dtypes import DTYPES
from warploom.core.errors import VerifyError
from warploom.isa.form import FORMS, Form, load_tables
from warploom.isa.instruction import Instruction, home_of, instruction
from warploom.layout.wmma import WMMA_SHAPES

REGISTERS = {
    "pred": "%p",
    "u16": "%h",
    "s16": "%h",
    "u32": "%r",
    "s32": "%r",
    "f32": "%f",
    "u64": "%d",
    "s64": "%d",
    "f64": "%e",
}
HEAD = """.version 8.8
.target {target}
.address_size 64
.shared .align 16 .b8 memory[256];
.visible .entry k()
{{
.reg .pred %p<400>; .reg .b16 %h<400>; .reg .b32 %r<400>; .reg .f32 %f<400>; .reg .b64 %d<400>; .reg .f64 %e<400>;
"""
NUMBERS = {
    "size": (16, 128),
    "clamp": (31,),
    "threads": (64,),
    "count": (2,),
    "bytes": (64, 16),
    "expected_bytes": (64,),
    "policy": (0x12F0000000000000,),
    "table": (0x96,),
    "registers": (64,),
    "pending": (1,),
    "mask": (0xFFFFFFFF,),
    "scale_a": (1,),
    "scale_b": (1,),
    "transposed_a": (0,),
    "transposed_b": (1,),
    "index": (1,),
    "value": (0,),
}
"""Immediates for each name of one, of which each form takes the first that it does not refuse."""
WMMA_PRODUCTS = tuple((shape, DTYPES[kind]) for shape, types in WMMA_SHAPES.items() for kind in types)
"""Every shape of ``wmma`` with every type of A and B."""


def instructions(form: Form) -> Iterator[Instruction]:
    """Every word in every slot; of operands that may be left out none and, where it differs, all."""
    optional = frozenset(p.name for p in form.places if p.optional and not p.given)
    for words in form.choices():
        said = {"", *(slot.name for slot, word in zip(form.slots, words, strict=True) if word)}
        for left in dict.fromkeys((optional, frozenset[str]())):
            numbers = [p for p in form.places if p.kind == "number" and not p.hidden]
            names = [p.name for p in numbers if p.name not in left and p.given in said]
            for values in product(*(NUMBERS[name] for name in names)):
                with suppress(VerifyError):
                    yield instruction(form, words, tuple(zip(names, values, strict=True)), left, home_of(form, words))
                    break


@cache
def forms() -> tuple[Form, ...]:
    """Every form of PTX."""
    load_tables()
    return tuple(dict.fromkeys(f for of in FORMS.values() for f in of))


def every() -> list[Instruction]:
    """Every instruction of PTX."""
    return list(dict.fromkeys(i for form in forms() for i in instructions(form)))


def line(made: Instruction) -> str:
    """An instruction on registers of its types."""
    return made.text([f"{REGISTERS[t.name]}{n + 1}" for n, t in enumerate(made.ptx_types)])


def exists(made: Instruction, target: str) -> bool:
    """Whether an instruction is declared to exist for a target; those of ``sm_90a`` exist there alone."""
    if made.since.endswith("a"):
        return made.since == target
    return _generation(made.since) <= _generation(target)


def _generation(architecture: str) -> tuple[int, str]:
    return int(architecture[3:].rstrip("a")), architecture


def refused(made: Iterable[Instruction], target: str) -> dict[Instruction, str]:
    """What ptxas refuses of instructions that are declared to exist for a target, and why."""
    wanted = [i for i in made if exists(i, target)]
    head = HEAD.format(target=target)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(head + "".join(f"{line(i)}\n" for i in wanted) + "ret;\n}\n")
        file.flush()
        command = ["ptxas", f"-arch={target}", "-o", "/dev/null", file.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    first = head.count("\n") + 1
    found = {wanted[int(n) - first]: why for n, why in re.findall(r"line (\d+); error\s*: (.*)", done.stderr)}
    assert bool(found) == bool(done.returncode), done.stderr[:2000]
    return found


def main() -> int:
    """Prints what ptxas refuses, by form."""
    target = sys.argv[1] if len(sys.argv) > 1 else "sm_90a"
    made = every()
    found = refused(made, target)
    counted = sum(exists(i, target) for i in made)
    print(f"{counted} instructions of {len(forms())} forms for {target}: ptxas refuses {len(found)}")
    by_form = defaultdict[Form, list[tuple[Instruction, str]]](list)
    for i, why in found.items():
        by_form[i.form].append((i, why))
    for form, cases in by_form.items():
        print(f"  {form}  ({len(cases)})", *(f"\n      {line(i)}  {why}" for i, why in cases[:3]))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
