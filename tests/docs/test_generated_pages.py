"""Generated pages are what their scripts write from the committed evidence; what was not measured is shown as such."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.project import load


@pytest.mark.parametrize(
    "script", ["gemm_page", "ladder_page", "ptx_forms", "ptx_mutants_page", "reduce_page", "wgmma_page"]
)
def test_the_page_is_up_to_date(script: str) -> None:
    assert load("page_parts").main(load(script).PAGES, ["--check"]) == 0, f"run python benchmarks/{script}.py"


def test_tables_of_pages_are_up_to_date() -> None:
    assert load("render").main(["--check"]) == 0, "run python benchmarks/render.py"


def test_a_template_takes_what_was_measured(tmp_path: Path) -> None:
    template = tmp_path / "page.md"
    template.write_text("a @ONE@\n<!-- if TWO -->\n@TWO@\n<!-- end if -->\nb\n", encoding="utf-8")
    filled = load("page_parts").filled
    assert filled(template, {"ONE": "1"}) == "a 1\nb\n"
    assert filled(template, {"ONE": "1", "TWO": "2"}, ["TWO"]) == "a 1\n2\nb\n"
    with pytest.raises(KeyError, match="THREE"):
        filled(template, {"ONE": "1", "THREE": "3"})
    with pytest.raises(KeyError, match="TWO"):
        filled(template, {"ONE": "1"}, ["TWO"])
