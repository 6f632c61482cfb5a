"""Write docs/reference/ptx-forms.md: which PTX the emulator runs. ``python benchmarks/ptx_forms.py [--check]``.

Each line of ``ptx-forms.txt`` is put into a kernel and read. A form runs, is refused (its opcode is known, this use of
it is not), or is unknown; what is refused or unknown raises PtxError with line and form before anything runs.
``--check`` changes nothing and ends with 1 if the page is out of date.
"""

from __future__ import annotations

import sys
from collections import Counter

from page_parts import HERE, ROOT, main, read
from page_tables import markdown_table

from warploom.core.errors import PtxError
from warploom.ptx.builder import HANDLERS
from warploom.ptx.parser import parse
from warploom.ptx.program import entry_of, to_program

FORMS = HERE / "ptx-forms.txt"
_KERNEL = """.version 8.7
.target sm_90a
.address_size 64
.const .align 4 .b8 table[16];
.func (.param .b32 out) function(.param .b32 in)
{{ .reg .b32 %x; ld.param.b32 %x, [in]; st.param.b32 [out], %x; ret; }}
.visible .entry k()
{{
    .reg .pred %p<4>; .reg .b16 %h<4>; .reg .b32 %r<16>; .reg .f32 %f<8>; .reg .b64 %d<4>; .reg .f64 %e<4>;
    .reg .b128 %q<4>; .shared .align 8 .b8 bar[8]; .param .b32 argument; .param .b32 result; .param .b64 address;
{defined}
    {form};
done:
    ret;
table_of_labels: .branchtargets done, done;
}}
"""
_DEFINED = "".join(
    f"    mov.{kind} %{letter}{i}, {value};\n"
    for letter, kind, count, value in (("h", "b16", 4, "1"), ("r", "b32", 16, "1"), ("f", "f32", 8, "0f3F800000"),
                                       ("d", "b64", 4, "1"), ("e", "f64", 4, "0d3FF0000000000000"))
    for i in range(count)
) + "".join(f"    setp.eq.u32 %p{i}, %r0, %r0;\n" for i in range(4))  # fmt: skip


def verdict(form: str) -> tuple[str, str]:
    """``runs``, ``refused`` or ``unknown``, and the message."""
    structural = form.split(".")[0].split(" ")[0] in ("bra", "brx", "ret", "exit")
    try:
        module = parse(_KERNEL.format(form=form, defined=_DEFINED))
        to_program(module, entry_of(module), block=(128, 1, 1), shared_bytes=1024)
    except PtxError as error:
        known = structural or form.split(".")[0].split(" ")[0] in HANDLERS
        return ("refused" if known else "unknown"), str(error).rsplit(": ", 1)[-1]
    return "runs", ""


def page() -> str:
    """The page."""
    kinds: dict[str, list[tuple[str, str, str]]] = {}
    for line in FORMS.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            kinds[line[2:]] = []
        elif line:
            kinds[list(kinds)[-1]].append((line.split(" ")[0], *verdict(line)))
    parts = [
        "# PTX that the emulator runs\n\n"
        "`warploom.check_ptx`, `check_cuda` and `check_triton` read PTX. A form that is *refused* or *unknown* raises\n"
        "PtxError with the author's line, the PTX line and the form, before anything runs: there is never a verdict\n"
        "about a kernel of which a part was left out. `python benchmarks/ptx_forms.py` writes this page from\n"
        "`benchmarks/ptx-forms.txt`, a sample of each kind of form. The emulator is no assembler: it reads some text\n"
        "that ptxas refuses, such as types that do not fit a register's width. Assemble PTX that you write by hand.\n\n"
        "| kind | run | refused | unknown |\n| --- | --- | --- | --- |\n"
    ]
    for kind, rows in kinds.items():
        counts = (sum(v == which for _, v, _ in rows) for which in ("runs", "refused", "unknown"))
        parts.append(f"| {kind} | {' | '.join(map(str, counts))} |\n")
    for kind, rows in kinds.items():
        parts.append(f"\n## {kind[0].upper()}{kind[1:]}\n\n")
        running = dict.fromkeys(f"`{form}`" for form, v, _ in rows if v == "runs")
        parts.append(f"Run: {', '.join(running)}.\n" if running else "Run: none.\n")
        others = [(form, v, message) for form, v, message in rows if v != "runs"]
        if others:
            parts.append("\n| form | | message |\n| --- | --- | --- |\n")
            parts += [f"| `{form}` | {v} | {message} |\n" for form, v, message in others]
    return "".join([*parts, lanewise()])


def lanewise() -> str:
    """What ``ptx_forms_h200.py`` found: of all forms that the assembler takes, which run, and are they right?"""
    evidence = read("h200/ptx-forms.json")
    refused: dict[str, str] = evidence["refused"]
    opcodes = Counter(text.split(".")[0] for text in refused)
    reasons = {name: Counter(why for text, why in refused.items() if text.split(".")[0] == name) for name in opcodes}
    rows = [[f"`{name}`", str(n), "; ".join(why for why, _ in reasons[name].most_common(3))]
            for name, n in opcodes.most_common()]  # fmt: skip
    forms, gpu = evidence["forms"], evidence["environment"]["gpu"]["name"]
    differing = [f"- `{text}` {why}\n" for text, why in evidence["differing"].items()]
    beside = "".join([" except\n\n", *differing, "\n"] if differing else ["."])
    return (
        "\n## Every lanewise form\n\n"
        "The samples above are chosen. `benchmarks/ptx_forms_h200.py` chooses nothing: it puts arithmetic,\n"
        "comparisons, conversions, loads, stores, atomics and exchanges within a warp together with all modifiers and\n"
        f"types. {forms} of them are PTX for the assembler, {forms - len(refused)} run and give the bits of an {gpu}\n"
        "on edges and random operands (of what PTX defines as an approximation, the number within its bound)"
        f"{beside} The\nrest is refused:\n\n"
        f"{markdown_table(['opcode', 'refused forms', 'messages'], rows)}"
    )


PAGES = {ROOT / "docs" / "reference" / "ptx-forms.md": page}

if __name__ == "__main__":
    sys.exit(main(PAGES))
