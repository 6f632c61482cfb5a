"""Reads the fenced blocks of a Markdown page, and runs them from top to bottom as a reader would.

Python blocks of a page share one namespace and one folder; what a block prints is compared with the ``text`` block that
follows it at once. In ``console`` blocks the commands after ``$`` that start with ``warploom`` or ``python FILE.py``
are run there and compared with the lines below them, an ``error:`` included; ``...`` stands for anything. Comments
before a block direct it:

``<!-- save: NAME.py -->``: the block is also a file of that name, and is run as one.
``<!-- file: NEW.py from OLD.py without: X -->``: OLD.py without the text X, or the line that is just X.
``<!-- in: FILE -->``: the block, which does not run, is a part of that file but for indentation and blank lines.
``<!-- needs: gpu -->``: runs only on a GPU, under ``-m gpu``; another word is a module that must be there.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import warploom
from tests.project import ROOT
from tests.project import load as load
from warploom.cli.main import app


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


PAGES = (ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts))

_FENCE = re.compile(r"^```(\w*|\{[\w-]+\}.*)\s*$")
_DIRECTIVE = re.compile(r"^<!-- (save|file|in|needs): (.*?) -->$")
_FILE = re.compile(r"(\S+) from (\S+) without: (.*)")
_CHECKER = doctest.OutputChecker()
_PACKAGES = os.pathsep.join(
    [str(Path(warploom.__file__).resolve().parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
)
"""Commands run in another folder, where a relative path would lead elsewhere: they find the package that is tested."""
_LOOSE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass
class Block:
    """One fenced block: its language, its text, the line it starts on, and the directives before it."""

    language: str
    text: str
    line: int
    directives: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    expected: str | None = None

    @property
    def needs(self) -> list[str]:
        """What the block cannot do without."""
        return [value for name, value in self.directives if name == "needs"]


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    directives: list[tuple[str, str]] = []
    body: list[str] = []
    start, language = 0, ""
    last_end = -10
    for number, line in enumerate(text.splitlines(), 1):
        fence = _FENCE.match(line)
        if start:
            if fence and not fence[1]:
                block = Block(language, "\n".join(body) + "\n", start, directives)
                follows = language == "text" and start - last_end <= 2 and found and found[-1].language == "python"
                if follows:
                    found[-1].expected = block.text
                else:
                    found.append(block)
                start, directives, last_end = 0, [], number
            else:
                body.append(line)
        elif fence:
            start, language, body = number, fence[1], []
        elif directive := _DIRECTIVE.match(line):
            directives.append((directive[1], directive[2]))
        elif line.strip():
            directives = []
    assert not start, f"the block that starts on line {start} is not closed"
    return found


def matches(expected: str, got: str) -> bool:
    """Whether output is what the page shows; whitespace is loose and ``...`` stands for anything."""
    return _CHECKER.check_output(expected, got, _LOOSE)


def _dedented(lines: list[str]) -> list[str]:
    """The lines that are not blank, without the indentation that they share."""
    return textwrap.dedent("\n".join(line for line in lines if line.strip())).splitlines()


class PageError(AssertionError):
    """A block does not do what the page says."""


class Reader:
    """Follows one page in a folder of its own."""

    def __init__(self, page: Path, folder: Path, *, gpu: bool) -> None:
        self.page, self.folder, self.gpu = page, folder, gpu
        self.namespace: dict[str, Any] = {"__name__": "__page__"}
        self.ran = 0

    def run(self, blocks: list[Block]) -> int:
        """Run what can run here; returns how many blocks did. Raises PageError at the first that is not as shown."""
        with self._inside():
            for block in blocks:
                self._files(block)
                excerpts = [value for name, value in block.directives if name == "in"]
                for file in excerpts:
                    self._excerpt_of(block, file)
                if excerpts or not self._possible(block):
                    continue
                if block.language == "python":
                    self._python(block)
                elif block.language == "console":
                    self._console(block)
        return self.ran

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        before, modules = Path.cwd(), set(sys.modules)
        shutil.copytree(ROOT / "examples", self.folder / "examples", dirs_exist_ok=True)
        os.chdir(self.folder)
        sys.path.insert(0, str(self.folder))
        try:
            yield
        finally:
            os.chdir(before)
            sys.path.remove(str(self.folder))
            for name in set(sys.modules) - modules:
                if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(self.folder)):
                    del sys.modules[name]

    def _excerpt_of(self, block: Block, file: str) -> None:
        shown = _dedented(block.text.splitlines())
        lines = [line for line in (ROOT / file).read_text(encoding="utf-8").splitlines() if line.strip()]
        if not any(shown == _dedented(lines[i : i + len(shown)]) for i in range(len(lines))):
            raise PageError(f"{self._at(block)}: {file} has no such part")

    def _possible(self, block: Block) -> bool:
        return all(self.gpu if need == "gpu" else _is_installed(need) for need in block.needs)

    def _files(self, block: Block) -> None:
        for name, value in block.directives:
            if name == "save":
                (self.folder / value).write_text(block.text, encoding="utf-8")
            elif name == "file":
                made = _FILE.fullmatch(value)
                assert made, f"{self._at(block)}: not a file directive: {value}"
                new, old, text = made.groups()
                source = (self.folder / old).read_text(encoding="utf-8")
                assert text in source, f"{self._at(block)}: {old} has no {text!r}"
                lines = [line for line in source.splitlines() if line.split("#")[0].strip() != text]
                (self.folder / new).write_text("\n".join(lines).replace(text, "") + "\n", encoding="utf-8")

    def _python(self, block: Block) -> None:
        saved = [value for name, value in block.directives if name == "save"]
        # A real file, so that findings and value names can be read back from the source.
        file = self.folder / (saved[0] if saved else f"block_at_line_{block.line}.py")
        file.write_text(block.text, encoding="utf-8")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block.text, str(file), "exec", dont_inherit=True), self.namespace)
        self.ran += 1
        self._compare(block, block.expected, printed.getvalue())

    def _console(self, block: Block) -> None:
        for command, expected in commands_of(block.text):
            words = shlex.split(command)
            if words[0] == "warploom":
                code, out, said = self._warploom(words[1:])
            elif words[0] == "python" and len(words) > 1 and words[1].endswith(".py"):
                code, out, said = self._python_file(words[1:])
            else:
                continue
            failed = code not in (0, 1)
            if failed and "error:" not in expected:
                raise PageError(f"{self._at(block)}: {command} ended with {code}:\n{said}")
            self.ran += 1
            self._compare(block, expected, out + said if failed else out)

    @staticmethod
    def _warploom(words: list[str]) -> tuple[int, str, str]:
        """The command, in this process: to import NumPy, PyTorch and the package takes longer than most of them."""
        with warnings.catch_warnings():  # the command shows them its own way
            warnings.simplefilter("default")
            done = CliRunner().invoke(app, words)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.exit_code, done.stdout, done.stderr

    def _python_file(self, words: list[str]) -> tuple[int, str, str]:
        environment = os.environ | {"PYTHONIOENCODING": "utf-8", "NO_COLOR": "1", "PYTHONPATH": _PACKAGES}
        done = subprocess.run(
            [sys.executable, *words],
            capture_output=True,
            cwd=self.folder,
            env=environment,
            encoding="utf-8",
            timeout=300,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def _compare(self, block: Block, expected: str | None, got: str) -> None:
        if expected and not matches(expected, got):
            raise PageError(f"{self._at(block)}: the page shows\n{expected}\nbut this comes out:\n{got}")

    def _at(self, block: Block) -> str:
        return f"{self.page.name}, block at line {block.line}"


def commands_of(text: str) -> Iterator[tuple[str, str]]:
    """The commands of a console block, each with the output shown below it."""
    command, output = "", []
    for line in [*text.splitlines(), "$ "]:
        if line.startswith("$ "):
            if command:
                yield command, "".join(f"{shown}\n" for shown in output)
            command, output = line[2:].split("  #")[0].strip(), []
        else:
            output.append(line)
