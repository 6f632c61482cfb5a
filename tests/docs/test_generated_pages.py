"""Generated pages are what their scripts write from the committed evidence; what was not measured is shown as such."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest

from tests.project import load


@pytest.mark.parametrize(
    "script", ["gemm_page", "ladder_page", "ptx_forms", "ptx_mutants_page", "reduce_page", "wgmma_page"]
)
def test_the_page_is_up_to_date(script: str) -> None:
    assert load("page_parts").main(load(script).PAGES, ["--check"]) == 0, f"run python benchmarks/{script}.py"


def test_tables_of_pages_are_up_to_date() -> None:
    assert load("render").main(["--check"]) == 0, "run python benchmarks/render.py"


def test_a_template_takes_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = load("page_parts")
    monkeypatch.setattr(parts, "HERE", tmp_path)
    tables = '{% if two %}\n{{ head("x", ["y", "z"]) }}\n{{ row(two, [1, 2]) }}\n{% endif %}\n'
    (tmp_path / "page.md").write_text(f'a {{{{ one|twice|f("+.1f", " W") }}}}\n{tables}b\n', encoding="utf-8")
    assert parts.filled("page.md", one=-1, two=None, twice=lambda x: 2 * x) == "a −2.0 W\nb\n"
    table = "| x | y | z |\n| --- | --- | --- |\n| w | 1 | 2 |\n"
    assert parts.filled("page.md", one=1, two="w", twice=lambda x: 2 * x) == f"a +2.0 W\n{table}b\n"
    with pytest.raises(jinja2.UndefinedError, match="one"):
        parts.filled("page.md", two=1, twice=lambda x: 2 * x)
