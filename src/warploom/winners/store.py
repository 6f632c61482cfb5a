"""The store of winners: what was found here (a file that survives a kill), and what comes with the package.

``$WARPLOOM_CACHE/tuned/winners.jsonl`` holds one JSON record a line and is only ever appended to, under a lock: a
killed process leaves at most one unfinished line, which readers skip and the next writer removes. Winners that come
with the package are one file per GPU in ``shipped/`` beside this module.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from warploom.core.errors import warn_caller
from warploom.core.files import make_private_folder, open_private, parse_json, require_private_folder
from warploom.core.settings import cache_folder
from warploom.winners.classes import ProblemClass

SHIPPED = Path(__file__).parent / "shipped"
NEAR_ENOUGH = 3.0
"""The distance of classes up to which a winner is still taken: both lengths and the batch off by a factor of 2."""

Record = dict[str, Any]
_FORMAT = 1


def package_version() -> str:
    """The version winners are kept for. Read from the package itself, which has been imported by now."""
    return str(sys.modules[__name__.partition(".")[0]].__version__)


@dataclass(frozen=True)
class Winner:
    """The fastest configuration found for a class of problems on one GPU.

    ``config`` in the family's notation; seconds per call: median, 10th and 90th percentile over ``rounds``;
    ``speedup`` over the untuned default, the median of the rounds' ratios; ``candidates`` were timed.
    """

    gpu: str
    version: str
    problem: ProblemClass
    config: str
    seconds: float
    low: float
    high: float
    rounds: int
    speedup: float
    candidates: int
    date: str

    def json(self) -> Record:
        """For a file; :meth:`from_json` reads it."""
        return dict(vars(self)) | {"problem": self.problem.json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Winner:
        """From :meth:`json`. Raises ValueError for anything else."""
        try:
            numbers = {name: float(value[name]) for name in ("seconds", "low", "high", "speedup")}
            if not all(math.isfinite(number) and number > 0 for number in numbers.values()):
                raise ValueError(f"figures must be positive: {numbers}")
            values: dict[str, Any] = {name: str(value[name]) for name in ("gpu", "version", "config", "date")}
            values |= {name: int(value[name]) for name in ("rounds", "candidates")}
            return cls(problem=ProblemClass.from_json(value["problem"]), **numbers, **values)
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"no winner: {error!r}") from error


@dataclass(frozen=True)
class Found:
    """A winner for a problem; ``distance`` is that of its class (0: the same), ``shipped`` where it came from."""

    winner: Winner
    distance: float
    shipped: bool

    @property
    def reason(self) -> str:
        """Why this configuration, in words."""
        w = self.winner
        whose = "comes with the package" if self.shipped else "found on this machine"
        near = "" if self.distance == 0 else ", the nearest class tuned"
        spread = f"{w.seconds * 1e3:.4g} ms ({w.low * 1e3:.4g} to {w.high * 1e3:.4g})"
        gain = f"{w.speedup:.3g}× the untuned default"
        return f"tuned on {w.gpu} for {w.problem}{near}: {spread}, {gain}; the winner {whose}"


class WinnerStore:
    """The records of one folder. Reading never fails; writing raises OSError where the folder cannot be written."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = cache_folder() / "tuned" if folder is None else folder
        self.path = self.folder / "winners.jsonl"
        self._seen: tuple[int, int, int] | None = None
        self._records: list[Record] = []
        self._guard = threading.Lock()

    # -- reading
    def records(self) -> list[Record]:
        """Every whole record, oldest first; read again only when the file has changed.

        Lines that are no records (beside an unfinished last one) mean damage from outside: a warning is given, they
        are kept in ``winners.jsonl.damaged`` and removed.
        """
        with self._guard:
            try:
                state = self.path.stat()
                seen = state.st_ino, state.st_size, state.st_mtime_ns
                if seen != self._seen:
                    self._records, damaged = parse_records(self._content())
                    self._seen = seen
                    if damaged:
                        self._rebuild()
            except FileNotFoundError:
                self._seen, self._records = None, []
            except OSError as error:
                warn_caller(
                    f"the tuned winners in {self.path} cannot be read ({error.strerror or error}): defaults are used",
                    RuntimeWarning,
                )
                self._records = []
            return self._records

    def _content(self) -> bytes:
        """The file's bytes. Raises OSError, also where another user could have written them."""
        require_private_folder(self.folder)
        with open(self.path, "rb", opener=open_private) as file:
            return file.read()

    def winners(self, gpu: str | None = None, version: str | None = None) -> list[Winner]:
        """The latest winner of each class, of one GPU and package version if given."""
        latest: dict[tuple[str, str, ProblemClass], Winner] = {}
        for record in self.records():
            if record.get("record") != "winner":
                continue
            try:
                winner = Winner.from_json(record)
            except ValueError:
                continue
            if gpu in (None, winner.gpu) and version in (None, winner.version):
                latest[winner.gpu, winner.version, winner.problem] = winner
        return list(latest.values())

    def rounds(self, gpu: str, version: str, problem: ProblemClass, space: str) -> list[Record]:
        """The rounds timed for a class since its last winner, oldest first: what a killed search had reached.

        ``space`` identifies the candidates: rounds of another space do not count.
        """
        key = {"gpu": gpu, "version": version, "problem": problem.json()}
        mine = [r for r in self.records() if all(r.get(name) == value for name, value in key.items())]
        last = max((i for i, r in enumerate(mine) if r.get("record") == "winner"), default=-1)
        return [r for r in mine[last + 1 :] if r.get("record") == "round" and r.get("space") == space]

    # -- writing
    def require_writable(self) -> None:
        """Raise OSError where records could not be kept: better before a search than after it."""
        with self._locked():
            return

    def add(self, winner: Winner) -> None:
        """Keep a winner. Raises OSError where the folder cannot be written."""
        self.append({"record": "winner", **winner.json()})

    def suspects(self, gpu: str, version: str, problem: ProblemClass) -> set[str]:
        """Configurations whose first run was begun and never ended: they hung, or took the process with them.

        For problems of any size that agree in all else: they run the same kernels.
        """
        begun: dict[str, bool] = {}
        for r in self.records():
            if r.get("record") in ("trying", "tried") and (r.get("gpu"), r.get("version")) == (gpu, version):
                of = r.get("problem")
                alike = {"family": problem.family, "fixed": dict(problem.fixed)}
                if isinstance(of, dict) and {name: of.get(name) for name in alike} == alike:
                    begun[str(r.get("config"))] = r["record"] == "trying"
        return {config for config, is_open in begun.items() if is_open}

    def append(self, record: Record) -> None:
        """Keep a record: one line, whole or not at all for every reader. Raises OSError."""
        line = json.dumps({"format": _FORMAT, **record}, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        try:
            with self._locked(), open(self.path, "a+b", opener=open_private) as file:
                _remove_unfinished_line(file)
                file.write(line)
                file.flush()
                if record.get("record") == "winner":  # the rest may be lost with the power, not with the process
                    os.fsync(file.fileno())
        except OSError as error:
            if error.filename is not None:
                raise
            raise OSError(error.errno, error.strerror, str(self.path)) from error  # a full disk names no file

    def _rebuild(self) -> None:
        """Set damaged lines aside; what is whole stays. A reader that may not write leaves the file as it is."""
        try:
            with self._locked():
                data = self._content()  # again: others may have appended meanwhile
                _, damaged = parse_records(data)
                whole = [line for line in data.split(b"\n")[:-1] if line not in damaged]
                aside = self.path.with_name(self.path.name + ".damaged")
                fresh = self.path.with_name(f"{self.path.name}.{os.getpid()}.new")
                for path, lines in ((aside, damaged), (fresh, whole)):
                    with open(path, "wb", opener=open_private) as file:
                        file.write(b"".join(line + b"\n" for line in lines))
                os.replace(fresh, self.path)
            kept = f"they were moved to {aside.name}"
        except OSError:
            kept = "they are skipped"
        warn_caller(
            f"{self.path} holds lines that are no records of warploom; {kept}. Tune again what is missing "
            "(warploom tune show lists what is there).",
            RuntimeWarning,
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One writer at a time among all processes; the system drops the lock of a process that dies."""
        make_private_folder(self.folder)
        with open(self.folder / "winners.lock", "a+b", opener=open_private) as file:
            _lock(file)
            try:
                yield
            finally:
                _unlock(file)


def parse_records(data: bytes) -> tuple[list[Record], list[bytes]]:
    """(records, damaged lines) of a file's bytes. An unfinished last line is neither."""
    records: list[Record] = []
    damaged: list[bytes] = []
    *lines, _unfinished = data.split(b"\n")
    for line in lines:
        if not line.strip():
            continue
        try:
            record = parse_json(line)
            if not isinstance(record, dict) or record.get("format") != _FORMAT:
                raise ValueError
            records.append(record)
        except ValueError:  # not JSON, or not UTF-8
            damaged.append(line)
    return records, damaged


def _remove_unfinished_line(file: BinaryIO) -> None:
    """Under the lock a line without an end can only be that of a process that was killed while it wrote."""
    if file.seek(0, os.SEEK_END) == 0:
        return
    file.seek(-1, os.SEEK_END)
    if file.read(1) != b"\n":
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


if sys.platform == "win32":
    import msvcrt

    def _lock(file: BinaryIO) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)

    def _unlock(file: BinaryIO) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)
else:
    import fcntl

    def _lock(file: BinaryIO) -> None:
        fcntl.flock(file, fcntl.LOCK_EX)

    def _unlock(file: BinaryIO) -> None:
        fcntl.flock(file, fcntl.LOCK_UN)


# --- look-up ----------------------------------------------------------------------------------------------------------


def gpu_file_name(gpu: str) -> str:
    """The file of a GPU's shipped winners: ``"NVIDIA H200"`` → ``"nvidia-h200.json"``."""
    words = "".join(c if c.isalnum() else " " for c in gpu.lower()).split()
    return "-".join(words) + ".json"


@lru_cache(maxsize=16)
def shipped_winners(gpu: str) -> tuple[Winner, ...]:
    """The winners that come with the package for a GPU; none for most."""
    try:
        content = json.loads((SHIPPED / gpu_file_name(gpu)).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    return tuple(Winner.from_json(one) for one in content["winners"])


def all_shipped_winners() -> list[Winner]:
    """The winners that come with the package, for every GPU."""
    names = [json.loads(file.read_text(encoding="utf-8"))["gpu"] for file in sorted(SHIPPED.glob("*.json"))]
    return [winner for name in names for winner in shipped_winners(name)]


@lru_cache(maxsize=16)
def _store_of(folder: Path) -> WinnerStore:
    return WinnerStore(folder)


def find_winner(
    gpu: str, wanted: ProblemClass, store: WinnerStore | None = None, *, near: float = NEAR_ENOUGH
) -> Found | None:
    """The winner for a class of problems on a GPU: of the same class, else of the nearest at a distance up to ``near``.

    At equal distance what was found on this machine (by this version of the package) goes before what came with it.
    """
    own = (store or _store_of(cache_folder() / "tuned")).winners(gpu, package_version())
    best: Found | None = None
    for shipped, winners in ((False, own), (True, shipped_winners(gpu))):
        for winner in winners:
            distance = wanted.distance(winner.problem)
            if distance is not None and distance <= near and (best is None or distance < best.distance):
                best = Found(winner, distance, shipped)
    return best
