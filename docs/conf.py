"""How Sphinx builds the site: ``sphinx-build -W docs docs/_build/html``.

Sphinx, because it resolves the links of the docstrings, which are reStructuredText, and MyST reads the pages as the
same Markdown that the repository shows.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

from sphinx.pycode import ModuleAnalyzer

import warploom

project = "warploom"
author = "The warploom developers"
copyright = f"2026, {author}"  # noqa: A001  # Sphinx's name
version = release = warploom.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"warploom {version}"
# Where the sources and the built site of this version are, if anywhere: pages then link to both.
if repository := os.environ.get("WARPLOOM_REPOSITORY", ""):
    html_theme_options = {"source_repository": repository, "source_branch": "main", "source_directory": "docs/"}
html_baseurl = os.environ.get("WARPLOOM_SITE", "")
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]
smartquotes = False  # options keep both their hyphens, and JSON its quotes
copybutton_exclude = ".linenos, .gp, .go"  # of a console block the commands alone

myst_heading_anchors = 4  # headings are link targets, as the repository page has them
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_use_type_comments = False


def write_commands(file: Path) -> None:
    """The command line's reference, from the help of its commands."""
    file.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "typer", "warploom.cli.main", "utils", "docs", "--name", "warploom"]
    environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
    text = subprocess.run(command, check=True, capture_output=True, encoding="utf-8", env=environment).stdout
    file.write_text(commands_page(text).partition("\n")[2], encoding="utf-8")


def commands_page(text: str) -> str:
    """What Typer writes of all commands, with whole summaries in its lists, and without marks for terminals."""
    text = text.replace("\b", "")
    summaries = dict(re.findall(r"^#+ `warploom (.+)`\n\n(.+)$", text, flags=re.MULTILINE))
    group, lines = "", list[str]()
    for line in text.splitlines():
        if heading := re.match(r"#+ `warploom ?(.*)`$", line):
            group = heading[1]
        elif (item := re.match(r"\* `(\S+)`: ", line)) and (name := f"{group} {item[1]}".strip()) in summaries:
            line = item[0] + summaries[name]
        lines.append(line)
    return re.sub(r"^Examples?:\n((?:  .+\n)+)", r"```sh\n\1```\n", "\n".join(lines) + "\n", flags=re.MULTILINE)


def show_signatures_of_implementations() -> None:
    """Overloads of the public functions are for type checkers; the page shows what a call takes."""
    for module in {sys.modules[getattr(warploom, name).__module__].__name__ for name in warploom.__all__}:
        analyzer = ModuleAnalyzer.for_module(module)
        analyzer.analyze()
        analyzer.overloads.clear()


_PICTURES = Path(__file__).parent / "pictures"
runpy.run_path(str(_PICTURES / "steps.py"))["draw"](_PICTURES)
write_commands(Path(__file__).parent / "_build" / "commands.md")
show_signatures_of_implementations()
