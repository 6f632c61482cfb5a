"""The first tutorials as notebooks: ``python docs/notebooks.py`` writes one beside each page.

Blocks become cells: a saved file is written by ``%%writefile``, commands run after ``!``, and what the page shows of an
output is the cell's output. Blocks that only quote a file, or need a GPU, stay text.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

TUTORIALS = Path(__file__).parent / "tutorials"
PAGES = ("first-kernel", "reductions")

_BLOCK = re.compile(r"(?:^<!--[^\n]*-->\n)*^```(\w+)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_DIRECTIVE = re.compile(r"<!-- (\w+): (.*?) -->")
_WITHOUT = re.compile(r"(\S+) from (\S+) without: (.*)")


def notebook(page: str) -> str:
    """A page as the JSON of a notebook (nbformat 4.5). Raises nothing: what is no cell stays text."""
    cells: list[dict[str, Any]] = []
    end = 0
    for block in _BLOCK.finditer(page):
        _add_text(cells, page[end : block.start()])
        end = block.end()
        language, text = block[1], block[2]
        given = _DIRECTIVE.findall(block[0].partition("```")[0])
        directives = dict(given)
        if language == "text" and cells and cells[-1]["cell_type"] == "code":
            cells[-1]["outputs"].append({"output_type": "stream", "name": "stdout", "text": _lines(text)})
            continue
        source = None if ("needs", "gpu") in given else _source(language, text, directives)
        if source is None:
            _add_text(cells, block[0])
            continue
        if made := _WITHOUT.fullmatch(directives.get("file", "")):
            _add_code(cells, _without(*made.groups()))
        _add_code(cells, source)
    _add_text(cells, page[end:])
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    whole = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _source(language: str, text: str, directives: dict[str, str]) -> str | None:
    """A block as the code of a cell; None for what does not run."""
    if language == "python" and "save" in directives:
        return f"%%writefile {directives['save']}\n{text}"
    if language == "python" and "in" not in directives:
        return text
    commands = [f"!{line[2:]}\n" for line in text.splitlines() if line.startswith("$ ")]
    return "".join(commands) if language == "console" and commands else None


def _without(new: str, old: str, text: str) -> str:
    """Code that writes a file without a text, or without the line that is just that."""
    return (
        f"from pathlib import Path\n\nlines = Path({old!r}).read_text().splitlines()\n"
        f"kept = [line for line in lines if line.split('#')[0].strip() != {text!r}]\n"
        f"Path({new!r}).write_text('\\n'.join(kept).replace({text!r}, '') + '\\n');\n"
    )


def _add_text(cells: list[dict[str, Any]], text: str) -> None:
    text = _DIRECTIVE.sub("", text).strip()
    if not text:
        return
    if cells and cells[-1]["cell_type"] == "markdown":
        cells[-1]["source"] += ["\n", "\n", *_lines(text)]
    else:
        cells.append({"cell_type": "markdown", "metadata": {}, "source": _lines(text)})


def _add_code(cells: list[dict[str, Any]], source: str) -> None:
    cell = {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [],
        "source": _lines(source.strip()),
    }
    cells.append(cell)


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> None:
    """Write the notebooks."""
    for name in PAGES:
        page = (TUTORIALS / f"{name}.md").read_text(encoding="utf-8")
        (TUTORIALS / f"{name}.ipynb").write_text(notebook(page), encoding="utf-8")


if __name__ == "__main__":
    main()
