"""The notebooks: made from the pages as they are now, and their cells run."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import warnings

import pytest

from tests.project import ROOT, load

notebooks = load("notebooks", "docs")


@pytest.mark.parametrize("name", notebooks.PAGES)
def test_a_notebook_is_what_its_page_says_now(name):
    page, made = (ROOT / "docs" / "tutorials" / f"{name}.{kind}" for kind in ("md", "ipynb"))
    current = notebooks.notebook(page.read_text(encoding="utf-8"))
    assert made.read_text(encoding="utf-8") == current, "run python docs/notebooks.py"


def test_the_cells_of_the_first_one_run(tmp_path, monkeypatch):
    pytest.importorskip("cuda.core")  # a cell compiles
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    cells = json.loads((ROOT / "docs/tutorials/first-kernel.ipynb").read_text(encoding="utf-8"))["cells"]
    modules, names, ran = set(sys.modules), {"__name__": "__notebook__"}, 0
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code" or source.startswith("!"):  # commands are the page's own test
            continue
        if source.startswith("%%writefile "):
            first, _, text = source.partition("\n")
            (tmp_path / first.removeprefix("%%writefile ")).write_text(text + "\n", encoding="utf-8")
            continue
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(source, "<cell>", "exec", dont_inherit=True), names)
        ran += 1
    assert ran >= 8
    assert {"race.py", "hasty.py", "plain.py"} <= {p.name for p in tmp_path.iterdir()}
    for name in {"rowmax", "race", "hasty", "plain"} - modules:
        sys.modules.pop(name, None)
