"""The page on the language names every word there is, and none that is not."""

from __future__ import annotations

import re

import pytest

import warploom
from tests.project import ROOT
from warploom.lang import Fragment, Kernel, SharedTile, TileReader
from warploom.lang.builder import Builder

PAGE = re.sub(r"\]\([^)]*\)", "]", (ROOT / "docs" / "reference" / "language.md").read_text(encoding="utf-8"))
"""Without the targets of its links."""


API = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", warploom.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    assert re.search(rf"^\.\. auto(function|class):: {name}$", API, re.MULTILINE)


def words(kind: type, *, beyond: type = object) -> set[str]:
    """The public attributes of a class that its base ``beyond`` does not have."""
    return {name for name in dir(kind) if not name.startswith("_")} - set(dir(beyond))


@pytest.mark.parametrize("word", sorted(words(Kernel, beyond=Builder) - {"regions", "shared_bytes"}))
def test_every_word_of_k_is_named(word: str) -> None:
    assert re.search(rf"\bk\.{word}\b", PAGE), f"docs/reference/language.md does not name k.{word}"


def test_words_that_are_named_exist() -> None:
    known = words(Kernel)
    assert set(re.findall(r"\bk\.(\w+)", PAGE)) <= known
    for prefix, kind in (("tile", SharedTile), ("fragment", Fragment)):
        named = set(re.findall(rf"`[^`]*\b{prefix}\.(\w+)", PAGE))
        assert named, prefix
        assert named <= words(kind) | set(getattr(kind, "__dataclass_fields__", ()))


def test_methods_of_tiles_fragments_and_readers_are_named() -> None:
    for kind in (SharedTile, Fragment, TileReader):
        methods = {name for name in words(kind) if callable(getattr(kind, name))}
        missing = {name for name in methods if not re.search(rf"\b{name}\b", PAGE)}
        assert not missing, f"docs/reference/language.md does not name {missing} of {kind.__name__}"
