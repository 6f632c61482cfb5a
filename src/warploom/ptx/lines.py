"""The author's lines of PTX instructions, from ``.file`` and ``.loc``.

Source: PTX ISA, "Debugging Directives".
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from warploom.ir.statements import SourceLine

Place = tuple[int, int, int]
"""File number, line, column."""
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/include/")


@dataclass(frozen=True, slots=True)
class _Location:
    place: Place
    inlined: _Location | None = None


class Lines:
    """Follows the ``.loc`` of a file. Places are named in files whose numbers the end of the text tells."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.files: dict[int, str] = {}
        self._known: dict[Place, _Location] = {}
        self._current: _Location | None = None
        self._assembly = 0  # 2 before the first place in inline assembly, 1 after it
        self._used: dict[int, _Location] = {}  # PTX line → where its code comes from

    def start(self) -> None:
        """A function begins."""
        self._current = None

    def assembly(self, begins: bool) -> None:
        """Inline assembly begins or ends. LLVM counts on by its lines: only the first place in it is the author's."""
        self._assembly = 2 if begins else 0

    def set(self, place: Place, inlined: Place | None) -> None:
        """A ``.loc``. What it is inlined at was a place of its own shortly before. Line 0 is code of the compiler's."""
        if self._assembly == 1 or (place[1] == 0 and inlined is None):
            return
        self._assembly = min(self._assembly, 1)
        outer = None if inlined is None else self._known.get(inlined, _Location(inlined))
        self._current = self._known[place] = _Location(place, outer)

    def here(self, line: int) -> SourceLine:
        """Stands for the current place until the whole text has been read."""
        if self._current is not None:
            self._used[line] = self._current
        return SourceLine(self.name, line, ptx=line)

    def resolved(self, where: SourceLine) -> SourceLine:
        """The author's line of a PTX line, and the calls that were inlined there; without any, the PTX line itself.

        That is the innermost line that is no library's.
        """
        location, chain = self._used.get(where.ptx), list[_Location]()
        if location is None:
            return replace(where, ptx=0)
        while location is not None:
            chain.append(location)
            location = location.inlined
        line, *callers = (self._line(x) for x in [x for x in chain if not self._is_library(x)] or chain[-1:])
        return replace(line, ptx=where.ptx, callers=tuple(callers))

    def _line(self, location: _Location) -> SourceLine:
        file, line, _ = location.place
        return SourceLine(self.files.get(file, f"file {file}"), line)

    def _is_library(self, location: _Location) -> bool:
        return any(part in self.files.get(location.place[0], "") for part in _LIBRARIES)
