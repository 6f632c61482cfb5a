"""benchmarks/README.md names every file of the folder and every result, and nothing that is not there."""

from __future__ import annotations

import re

from tests.project import ROOT

FOLDER = ROOT / "benchmarks"
TEXT = (FOLDER / "README.md").read_text(encoding="utf-8")
LINKED = set(re.findall(r"\]\(([\w./-]+)\)", TEXT))


def test_every_file_is_named_and_every_name_is_a_file() -> None:
    there = {path.name for path in FOLDER.iterdir() if not path.name.startswith((".", "__"))}
    named = {name for name in LINKED if not name.startswith("../")}
    assert {name.split("/")[0] for name in named} == there - {"README.md"}
    assert [name for name in LINKED if not (FOLDER / name).exists()] == []


def test_every_result_has_a_script_that_writes_it() -> None:
    results = {str(path.relative_to(FOLDER / "results").as_posix()) for path in (FOLDER / "results").rglob("*.json")}
    named = set(re.findall(r"`((?:h200|static)/[\w.-]+\.json)`", TEXT))
    assert results <= named
    for row in re.findall(r"^\| \[`(\w+\.py)`\].*$", TEXT, re.MULTILINE):
        line = next(x for x in TEXT.splitlines() if x.startswith(f"| [`{row}`]"))
        script = (FOLDER / row).read_text(encoding="utf-8")
        for result in re.findall(r"`(?:h200|static)/([\w.-]+\.json)`", line):
            assert result in script or result.split("-d128")[0] in script, f"{row} does not write {result}"


def test_pages_that_take_it_up_name_the_evidence() -> None:
    """A page under "taken up by" is made from one of the results of its row, by its tables or by its generator."""
    generators = "".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py"))
    for line in TEXT.splitlines():
        results, pages = (
            re.findall(r"`(?:h200|static)/([\w.-]+\.json)`", line),
            re.findall(r"\.\./([\w./-]+\.md)", line),
        )
        for page in pages if results else ():
            shown = (ROOT / page).read_text(encoding="utf-8")
            assert any(result in shown or result in generators for result in results), line
