"""Every block of the README and the pages does what it says; every link leads somewhere."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

import warploom
from tests.docs.pages import PAGES, ROOT, PageError, Reader, blocks_of, load

_LINK = re.compile(r"\[[^\]]*\]\((?!https?:|mailto:)([^)#\s]*)(#[^)\s]*)?\)")
_CODE = re.compile(r"^(```+).*?^\1$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
OTHERS = [
    ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "benchmarks/results/README.md")
]
"""What is linked and links, beside the pages."""


def _runs_something(page: Path, *, gpu: bool) -> bool:
    needs = [block.needs for block in blocks_of(page.read_text(encoding="utf-8"))]
    return any("gpu" in need for need in needs) if gpu else bool(needs)


@pytest.mark.parametrize("page", [p for p in PAGES if _runs_something(p, gpu=False)], ids=lambda p: p.name)
def test_blocks_do_what_the_page_says(page: Path, tmp_path: Path) -> None:
    Reader(page, tmp_path, gpu=False).run(blocks_of(page.read_text(encoding="utf-8")))


@pytest.mark.gpu
@pytest.mark.parametrize("page", [p for p in PAGES if _runs_something(p, gpu=True)], ids=lambda p: p.name)
def test_blocks_that_need_a_gpu(page: Path, tmp_path: Path) -> None:
    assert Reader(page, tmp_path, gpu=True).run(blocks_of(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "page",
    [*PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"))],
    ids=lambda p: p.name,
)
def test_links_lead_somewhere(page: Path) -> None:
    text = _CODE.sub("code", page.read_text(encoding="utf-8"))  # which calls what it has indexed: kernel[grid](x)
    for path, anchor in _LINK.findall(text):
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} links to {path}, which is not there"
        if anchor and there.suffix == ".md":
            headings = _HEADING.findall(there.read_text(encoding="utf-8"))
            slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor[1:] in slugs, f"{page.name} links to {path}{anchor}; {there.name} has no such heading"


def test_some_page_leads_to_every_example() -> None:
    everything = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [e.name for e in (ROOT / "examples").glob("*.py") if f"examples/{e.name}" not in everything] == []


def test_every_module_of_tile_words_is_at_work_in_an_example() -> None:
    examples = "".join(example.read_text(encoding="utf-8") for example in (ROOT / "examples").glob("*.py"))
    page = (ROOT / "docs" / "reference" / "tile.md").read_text(encoding="utf-8")
    words = re.findall(r"automodule:: (warploom\.tile\.\w+)", page)
    assert words
    assert [module for module in words if f"from {module} import" not in examples] == []


def test_paths_named_in_the_pages_exist() -> None:
    """Files and folders of the project that the pages name in code quotes."""
    named = re.compile(r"`((?:src|tests|docs|examples|benchmarks)/[\w./-]*)`")
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        for path in named.findall(page.read_text(encoding="utf-8")):
            assert (ROOT / path).exists(), f"{page.name} names {path}, which is not there"


def test_the_pictures_are_what_is_drawn(tmp_path: Path) -> None:
    folder = ROOT / "docs" / "pictures"
    load("steps", "docs/pictures").draw(tmp_path)
    assert {f.name: f.read_bytes() for f in folder.glob("*.svg")} == {
        f.name: f.read_bytes() for f in tmp_path.iterdir()
    }


FENCE = "```"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (f"{FENCE}python\nprint(1 + 1)\n{FENCE}\n\n{FENCE}text\n3\n{FENCE}\n", ("3", "2")),
        (f"{FENCE}console\n$ python said.py\nyes\n{FENCE}\n", ("yes", "no")),
    ],
)
def test_a_page_that_shows_what_does_not_come_out_is_caught(wrong: str, right: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "said.py").write_text("print('no')")
    page = tmp_path / "page.md"
    with pytest.raises(PageError, match="but this comes out"):
        Reader(page, tmp_path, gpu=False).run(blocks_of(wrong))
    assert Reader(page, tmp_path, gpu=False).run(blocks_of(wrong.replace(*right))) == 1


def test_files_made_from_others_lose_the_text_or_the_whole_line(tmp_path: Path) -> None:
    page = (
        f"<!-- save: a.py -->\n{FENCE}python\nx = 1\ny = 2  # why\n{FENCE}\n"
        f"<!-- file: b.py from a.py without: y = 2 -->\n<!-- file: c.py from a.py without:  = 1 -->\n"
        f"{FENCE}python\n{FENCE}\n"
    )
    Reader(tmp_path / "page.md", tmp_path, gpu=False).run(blocks_of(page))
    assert (tmp_path / "b.py").read_text() == "x = 1\n"
    assert (tmp_path / "c.py").read_text() == "x\ny = 2  # why\n"


def test_a_part_of_a_file_is_in_it(tmp_path: Path) -> None:
    page = f"<!-- in: examples/rowmax.py -->\n{FENCE}python\nk.commit_group({{}})\n{FENCE}\n"
    reader = Reader(tmp_path / "page.md", tmp_path, gpu=False)
    assert reader.run(blocks_of(page.format(""))) == 0
    with pytest.raises(PageError, match=r"rowmax\.py has no such part"):
        reader.run(blocks_of(page.format("1")))


def test_blocks_wait_for_what_they_need(tmp_path: Path) -> None:
    page = f"<!-- needs: no_such_module -->\n{FENCE}python\nraise SystemExit\n{FENCE}\n"
    assert Reader(tmp_path / "page.md", tmp_path, gpu=False).run(blocks_of(page)) == 0


def test_the_reference_lists_members_that_exist() -> None:
    """Sphinx would refuse others, where it is installed."""
    listed = [
        (module, name.strip())
        for page in PAGES
        for module, names in re.findall(r"automodule:: (\S+)\n +:members: +(.+)", page.read_text(encoding="utf-8"))
        for name in names.split(",")
    ]
    assert listed
    assert [at for at in listed if not hasattr(import_module(at[0]), at[1])] == []


def test_the_changelog_begins_with_the_version_that_this_is() -> None:
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert first is not None
    assert first[1] == warploom.__version__
