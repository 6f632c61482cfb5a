"""Findings that a project has accepted for now: a file of them, which new findings stand out from."""

from __future__ import annotations

import json
import linecache
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from warploom.checking.kernel_file import Checked
from warploom.core.errors import ProblemError
from warploom.emulate import Finding
from warploom.ir.statements import SourceLine

_VERSION = 1
_NAMED = "rule", "file", "kernel", "source"
"""What each entry says."""


@dataclass(frozen=True, order=True)
class Identity:
    """A finding as it is known after its lines have moved: its kind, the kernel's file and name, its lines' text."""

    rule: str
    file: str
    kernel: str
    source: str
    other: str = ""


def identity_of(finding: Finding, file: str, kernel: str) -> Identity:
    """The identity of a finding in a kernel of a file."""
    other = "" if finding.other is None else source_of(finding.other)
    return Identity(finding.kind, relative(file), kernel, source_of(finding.where), other)


def source_of(line: SourceLine) -> str:
    """The text of a line, with single spaces."""
    return " ".join(linecache.getline(line.file, line.line).split())


@cache
def repository_root(folder: Path | None = None) -> Path:
    """The nearest folder upwards from the working one that has a ``.git``; without any, the working folder."""
    here = (folder or Path()).resolve()
    return next((path for path in (here, *here.parents) if (path / ".git").exists()), here)


def relative(file: str) -> str:
    """A file as the repository names it, with ``/``; absolute if it is outside."""
    path = Path(file).resolve()
    root = repository_root(Path.cwd())
    return (path.relative_to(root) if path.is_relative_to(root) else path).as_posix()


@dataclass(frozen=True)
class Accepted:
    """The findings that are no failures: those of ``identities``, or each (``everything``), to be written down."""

    identities: Collection[Identity] = frozenset()
    everything: bool = False

    def screened(self, checked: Checked, file: str) -> Checked:
        """Return the checked run with its accepted findings moved from ``emulation.findings`` to ``accepted``."""
        old, new = list[Finding](), list[Finding]()
        for finding in checked.emulation.findings:
            known = self.everything or identity_of(finding, file, checked.name) in self.identities
            (old if known else new).append(finding)
        return replace(checked, emulation=replace(checked.emulation, findings=tuple(new)), accepted=tuple(old))


class Baseline:
    """A baseline file: a JSON object whose ``accepted`` lists findings; each may have a ``reason``, which is kept."""

    def __init__(self, path: Path, *, may_be_missing: bool = False) -> None:
        """Read the file. Raises ProblemError for one that is missing or no baseline."""
        self.path = path
        self.entries: dict[Identity, dict[str, Any]] = {}
        if may_be_missing and not path.exists():
            return
        try:
            found: Any = json.loads(path.read_text(encoding="utf-8"))
            if found["version"] != _VERSION:
                raise ValueError(f"version {found['version']}, which another warploom wrote")
            self.entries = {_identity(entry): entry for entry in found["accepted"]}
        except FileNotFoundError:
            raise ProblemError(f"there is no baseline {path}: --write-baseline makes it") from None
        except (KeyError, TypeError, ValueError) as error:
            said = (
                str(error)
                if isinstance(error, ValueError)
                else f"it lacks version, accepted, or {', '.join(_NAMED)} of an entry"
            )
            raise ProblemError(f"{path} is no baseline of warploom ({said}): --write-baseline makes one") from error

    def settled(self, seen: Collection[Identity], covers: Callable[[Identity], bool], write: bool) -> Iterator[str]:
        """Say which entries no longer occur; or ``write`` the file anew, and say so.

        ``seen`` are the accepted findings of a run; ``covers`` tells of which entries the run says something.
        """
        root = repository_root(Path.cwd())
        gone = [x for x in self.entries if x not in seen and (covers(x) or not (root / x.file).exists())]
        if not write:
            for x in gone:
                yield f"{self.path} accepts what no longer occurs: {x.rule} in {x.kernel} of {x.file}: {x.source}"
            return
        entries = [self.entries.get(x, _entry(x)) for x in sorted({*seen, *self.entries} - set(gone))]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"version": _VERSION, "accepted": entries}, indent=2, ensure_ascii=False)
        self.path.write_text(text + "\n", encoding="utf-8")
        yield f"{self.path} accepts {len(entries)} finding{'' if len(entries) == 1 else 's'}"


def _entry(identity: Identity) -> dict[str, Any]:
    return {name: value for name, value in vars(identity).items() if value or name == "source"}


def _identity(entry: Mapping[str, Any]) -> Identity:
    rule, file, kernel, source = (entry[name] for name in _NAMED)
    if not all(isinstance(entry[name], str) for name in _NAMED):
        raise ValueError(f"{', '.join(_NAMED)} of an entry are texts")
    return Identity(rule, file, kernel, source, str(entry.get("other", "")))
