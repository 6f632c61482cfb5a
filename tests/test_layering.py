"""Who may import whom: every import in the source is walked and judged by the order of the packages."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent.parent / "src"
SOURCE = SOURCES / "warploom"
PACKAGES = sorted(p.name for p in SOURCE.iterdir() if p.is_dir() and (p / "__init__.py").exists())

HOSTS = frozenset({"flash_attn", "jax", "torch", "transformers"})
"""Modules that other libraries' callers import, by those libraries' names: one package."""

CORE = frozenset({"core"})
LAYOUT = CORE | {"layout"}
ISA = LAYOUT | {"isa"}
IR = ISA | {"ir"}
LANG = IR | {"lang"}
TILE = LANG | {"tile"}
KERNELS = TILE | {"kernels"}
BACKENDS = IR | {"interop"}
OPS = KERNELS | {"interop", "cuda", "emulate", "ptx", "ops"}

ALLOWED: dict[str, frozenset[str]] = {
    "core": CORE,
    "layout": LAYOUT,
    "isa": ISA,
    "ir": IR,
    "lang": LANG,
    "tile": TILE,
    "kernels": KERNELS,
    # The two ways to run a Program see neither each other nor the language.
    "cuda": IR | {"cuda"},
    "emulate": IR | {"emulate"},
    "ptx": IR | {"ptx"},
    "interop": CORE | {"interop"},
    "ops": OPS,
    "operators": OPS | {"operators"},
    "hosts": OPS | {"operators", "hosts"},
    "checking": OPS | {"checking"},
    "measure": OPS | {"checking", "measure"},
    "tune": OPS | {"measure", "tune"},
    "cli": OPS | {"operators", "checking", "measure", "tune", "cli", ""},
    "": OPS | {"operators", "checking"},
}
"""Package → packages it may import; '' is the package itself (``warploom/__init__.py``)."""
ALLOWED["lab"] = frozenset({*ALLOWED, "lab"})
"""What measures and teaches, ``warploom_lab``, imports everything, and nothing imports it."""

EVERYWHERE = frozenset({"numpy", "ml_dtypes"})
THIRD_PARTY: dict[str, frozenset[str]] = {
    "core": EVERYWHERE,
    "cuda": EVERYWHERE | {"cuda"},
    "operators": EVERYWHERE | {"torch"},
    "hosts": EVERYWHERE | {"jax", "torch", "transformers"},
    "cli": EVERYWHERE | {"typer", "rich", "click", "matplotlib"},
    "emulate": EVERYWHERE | {"rich"},
    "": EVERYWHERE | {"pytest"},
    "lab": EVERYWHERE | {"typer", "rich", "click", "matplotlib", "torch"},
}


@dataclass(frozen=True)
class Import:
    """One imported module: where, what, whether only when called, and whether for its types alone."""

    file: Path
    line: int
    module: str
    deferred: bool
    for_types: bool = False

    @property
    def source(self) -> str:
        """The importing module: ``warploom.cuda.compile``."""
        relative = self.file.relative_to(SOURCES).with_suffix("")
        parts = [p for p in relative.parts if p != "__init__"]
        return ".".join(parts)

    @property
    def package(self) -> str:
        """The importing package."""
        if not self.file.is_relative_to(SOURCE):
            return "lab"
        relative = self.file.relative_to(SOURCE)
        if len(relative.parts) > 1:
            return relative.parts[0]
        return "hosts" if relative.stem in HOSTS else "cli" if relative.name == "__main__.py" else ""

    @property
    def is_own(self) -> bool:
        return self.module.split(".")[0] in ("warploom", "warploom_lab")

    @property
    def target_package(self) -> str:
        """The imported package of this package."""
        package, _, rest = self.module.partition(".")
        if package == "warploom_lab":
            return "lab"
        first = rest.split(".")[0]
        return "hosts" if first in HOSTS else first

    def __str__(self) -> str:
        return f"{self.file.relative_to(SOURCES)}:{self.line} imports {self.module}"


def imports_of(file: Path) -> Iterator[Import]:
    """Every import of a file: at its top, in functions and under TYPE_CHECKING alike."""

    def visit(node: ast.AST, deferred: bool, for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name, deferred, for_types)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute here"
            assert node.module is not None
            for module in _from_import(node, node.module):
                yield Import(file, node.lineno, module, deferred, for_types)
        deferred = deferred or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for_types = for_types or (
            isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        )
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):  # expressions import nothing
                yield from visit(child, deferred, for_types)

    yield from visit(ast.parse(file.read_text(encoding="utf-8")), False, False)


def _from_import(node: ast.ImportFrom, module: str) -> Iterator[str]:
    """``from warploom import isa`` imports a package; ``from warploom.isa import form`` a module of one."""
    for alias in node.names:
        path = SOURCES.joinpath(*module.split("."), alias.name) if module.startswith("warploom") else None
        is_module = path is not None and (path.is_dir() or path.with_suffix(".py").exists())
        yield f"{module}.{alias.name}" if is_module else module


FILES = sorted(file for package in ("warploom", "warploom_lab") for file in (SOURCES / package).rglob("*.py"))


@cache
def imports() -> list[Import]:
    """Every import of the source."""
    return [found for file in FILES for found in imports_of(file)]


def _is_allowed(found: Import) -> bool:
    if found.target_package == "":  # the public surface leads to ops: for users, and for what stands on ops
        return found.package in ("cli", "lab")
    return found.target_package in ALLOWED[found.package]


def test_the_walker_sees_every_kind_of_import(tmp_path):
    file = tmp_path / "sample.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from warploom.cuda import launch\n"
        "def f():\n    import torch.nn\n    from warploom.core.dtypes import f32\n"
    )
    found = [(i.module, i.line, i.deferred, i.for_types) for i in imports_of(file)]
    assert found == [
        ("typing", 1, False, False),
        ("warploom.cuda.launch", 3, False, True),
        ("torch.nn", 5, True, False),
        ("warploom.core.dtypes", 6, True, False),
    ]


def test_every_room_has_its_place():
    assert set(PACKAGES) <= set(ALLOWED)
    assert len(imports()) > 200


def test_rooms_import_only_what_is_below():
    wrong = [str(i) for i in imports() if i.is_own and not _is_allowed(i)]
    assert wrong == []


@pytest.mark.parametrize(
    ("file", "module"),
    [
        ("kernels/settings.py", "warploom.cuda.printer"),
        ("emulate/launch/machine.py", "warploom.cuda.printer"),
        ("cuda/printer.py", "warploom.emulate.launch.machine"),
        ("cuda/printer.py", "warploom.lang.kernel"),
        ("isa/lanewise.py", "warploom.ir.program"),
        ("interop/arrays.py", "warploom.ops.attention"),
        ("ops/attention.py", "warploom.cli.main"),
        ("ops/attention.py", "warploom_lab.bench"),
        ("lang/kernel.py", "warploom"),
        ("cli/main.py", "warploom_lab.cli.ladder"),
        ("tune/tuner.py", "warploom_lab"),
    ],
)
def test_a_planted_import_is_refused(file, module):
    assert not _is_allowed(Import(SOURCE / file, 1, module, True))
    assert _is_allowed(Import(SOURCES / "warploom_lab" / file, 1, module, True))


_PLACE = re.compile(r"(warploom\w*(?:\.\w+)+):(\w+)")


def wrong_names(file: Path) -> list[str]:
    """Texts of a file by which it would reach what no import shows: the lab, or ``module:name`` that does not exist."""
    wrong: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        place = _PLACE.fullmatch(node.value)
        if "warploom_lab" in node.value or (place is not None and place[2] not in _defined(place[1])):
            wrong.append(f"{file.name}:{node.lineno}: {node.value}")
    return wrong


def _defined(module: str) -> set[str]:
    """The classes and functions at the top of a module."""
    file = SOURCES.joinpath(*module.split(".")).with_suffix(".py")
    if not file.exists():
        return set()
    top = ast.parse(file.read_text(encoding="utf-8")).body
    return {node.name for node in top if isinstance(node, ast.ClassDef | ast.FunctionDef)}


def test_no_text_names_the_lab_or_a_kernel_that_does_not_exist():
    assert [text for file in FILES if file.is_relative_to(SOURCE) for text in wrong_names(file)] == []


def test_a_planted_name_in_a_text_is_found(tmp_path):
    file = tmp_path / "sample.py"
    file.write_text(
        'A = "warploom.kernels.settings:Configuration"\n'
        'B = "warploom.kernels.settings:Configurations"\n'
        'C = "warploom_lab.kernels.attention.ladder_sm90:RungSm90"\n'
        'D = f"{A}: python -m warploom_lab"\n'
    )
    assert [text.split(":")[1] for text in wrong_names(file)] == ["2", "3", "4"]


def test_third_party_packages_stay_where_they_belong():
    wrong: list[str] = []
    for found in imports():
        top = found.module.split(".")[0]
        if found.is_own or top in sys.stdlib_module_names or top == "__future__":
            continue
        if top not in THIRD_PARTY.get(found.package, EVERYWHERE):
            wrong.append(str(found))
    assert wrong == []


def test_only_the_cuda_room_imports_cuda():
    assert {i.package for i in imports() if i.module.split(".")[0] == "cuda"} <= {"cuda"}


def test_frameworks_and_drawing_are_imported_when_needed_only():
    lazy = {"torch", "jax", "cupy", "matplotlib", "cuda"}
    early = [i for i in imports() if i.module.split(".")[0] in lazy and not i.deferred and not i.for_types]
    # operators are imported when PyTorch traces a graph, warploom.jax by JAX programs
    assert [str(i) for i in early if i.package != "operators" and i.source != "warploom.jax"] == []


def test_imports_form_no_circle():
    """Neither between packages nor between files, whether imported at the top, when called, or for their types.

    But a layout that shows itself in a notebook calls what draws layouts.
    """
    needed: dict[str, set[str]] = {}
    for found in imports():
        own_picture = found.module == "warploom.layout.draw" and found.package == "layout" and found.deferred
        if found.is_own and not own_picture:
            needed.setdefault(found.source, set()).add(found.module)
    assert _circle(needed) == []
    assert _circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]


def _circle(needed: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a loop, the first again at the end; empty where there is none."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module not in done:
            for other in sorted(needed.get(module, ())):
                found = visit(other, [*path, module])
                if found:
                    return found
            done.add(module)
        return []

    return next(filter(None, (visit(module, []) for module in sorted(needed))), [])


def test_operations_import_no_framework_and_no_language_until_they_trace():
    """What a later process finds on disk it need not trace: then it pays for none of these imports either."""
    code = (
        "import sys, warploom; [getattr(warploom, n) for n in warploom.__all__]; "
        "print(*{'.'.join(m.split('.')[: 1 + m.startswith('warploom.')]) for m in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    packages = set(done.stdout.split())
    assert "warploom.ops" in packages
    assert not {f"warploom.{package}" for package in ("layout", "isa", "ir", "lang", "emulate", "cuda")} & packages
    assert not {"torch", "cuda", "jax", "cupy", "matplotlib"} & packages


def test_an_unknown_public_name_lists_those_there_are():
    import warploom

    with pytest.raises(AttributeError, match="it has attention"):
        _ = warploom.atention  # pyright: ignore[reportAttributeAccessIssue]
    assert set(warploom.__all__) <= set(dir(warploom))


def _undocumented(tree: ast.AST, prefix: str = "") -> Iterator[str]:
    """Public classes, functions and methods without a docstring."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
            continue
        if isinstance(node, ast.ClassDef):
            yield from _undocumented(node, f"{node.name}.")
        elif any(isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list):
            continue
        if ast.get_docstring(node) is None:
            yield prefix + node.name


def test_everything_public_says_what_it_is():
    missing = [
        f"{file.relative_to(SOURCES)}: {name}"
        for file in FILES
        for name in _undocumented(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert missing == []
    assert list(_undocumented(ast.parse("class A:\n  def b(self): ...\n  def _c(self): ..."))) == ["A.b", "A"]
