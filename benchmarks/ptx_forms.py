"""Write docs/reference/ptx-forms.md: which PTX the emulator runs. ``python benchmarks/ptx_forms.py [--check]``.

The forms that run are the lines of the tables of instructions. Each line of ``ptx-forms.txt``, a sample of what
compilers write, is put into a kernel and read. A form runs, is refused (its opcode is known, this use of it is not), or
is unknown; what is refused or unknown raises PtxError with line and form before anything runs.
``--check`` changes nothing and ends with 1 if the page is out of date.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from page_parts import HERE, ROOT, Row, filled, main, read

from warploom.core.errors import PtxError
from warploom.isa.form import FORMS as DECLARED
from warploom.isa.form import load_tables
from warploom.ptx.parser import parse
from warploom.ptx.program import entry_of, to_program

FORMS = HERE / "ptx-forms.txt"
_MOST_WORDS = 20  # of a slot, that the page lists
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
    for letter, kind, count, value in (
        ("h", "b16", 4, "1"),
        ("r", "b32", 16, "1"),
        ("f", "f32", 8, "0f3F800000"),
        ("d", "b64", 4, "1"),
        ("e", "f64", 4, "0d3FF0000000000000"),
    )
    for i in range(count)
) + "".join(f"    setp.eq.u32 %p{i}, %r0, %r0;\n" for i in range(4))


@dataclass(frozen=True)
class Form:
    """A form, whether it ``runs``, is ``refused`` or ``unknown``, and the message."""

    text: str
    verdict: str
    message: str = ""

    @classmethod
    def of(cls, text: str) -> Form:
        """Put it into a kernel and read that."""
        opcode = text.split(".")[0].split(" ")[0]
        try:
            module = parse(_KERNEL.format(form=text, defined=_DEFINED))
            to_program(module, entry_of(module), block=(128, 1, 1), shared_bytes=1024)
        except PtxError as error:
            known = opcode in ("bra", "brx", "ret", "exit", "call") or opcode in DECLARED
            return cls(text, "refused" if known else "unknown", str(error).rsplit(": ", 1)[-1])
        return cls(text, "runs")

    @property
    def code(self) -> str:
        """The form without its operands, as code."""
        return f"`{self.text.split(' ')[0]}`"


def declared() -> Iterator[str]:
    """The lines of the tables of instructions, with the words of each slot in place of its name."""
    load_tables()
    for form in dict.fromkeys(f for of in DECLARED.values() for f in of):
        parts = [_choice(slot.words, slot.optional) for slot in form.slots]
        operands = [x for x in form.pattern.partition(" ")[2].split(", ") if not x.startswith(("^", "#^"))]
        yield f"{''.join(parts).removeprefix('.')} {', '.join(operands)}".rstrip()


def _choice(words: tuple[str, ...], optional: bool) -> str:
    """The words of a slot: ``.f32``, ``.{lo|hi}``, or in braces what may be left out."""
    listed = words if len(words) <= _MOST_WORDS else (*words[:2], "…", words[-1])
    if optional:
        return f"{{.{'|.'.join(listed)}}}"
    return f".{words[0]}" if len(words) == 1 else f".{{{'|'.join(listed)}}}"


def refused(evidence: Row) -> Iterator[list[str]]:
    """Of all forms that the assembler takes, those that do not run, by opcode, with the messages of most."""
    reasons: dict[str, Counter[str]] = {}
    for text, why in evidence["refused"].items():
        reasons.setdefault(text.split(".")[0], Counter())[why] += 1
    for name, of in sorted(reasons.items(), key=lambda item: -item[1].total()):
        yield [f"`{name}`", str(of.total()), "; ".join(why for why, _ in of.most_common(3))]


def page() -> str:
    """The page."""
    kinds: dict[str, list[Form]] = {}
    for line in FORMS.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            kinds[line[2:]] = []
        elif line:
            kinds[list(kinds)[-1]].append(Form.of(line))
    evidence = read("h200/ptx-forms.json")
    lines = {"refused": refused(evidence), "declared": sorted(declared())}
    return filled("ptx-forms.template.md", __name__, kinds=kinds, evidence=evidence, **lines)


PAGES = {ROOT / "docs" / "reference" / "ptx-forms.md": page}

if __name__ == "__main__":
    sys.exit(main(PAGES))
