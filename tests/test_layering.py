"""Who may import whom: every import in the source is walked and judged by the order of the rooms."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "warploom"
ROOMS = sorted(p.name for p in SOURCE.iterdir() if p.is_dir() and (p / "__init__.py").exists())

CORE = frozenset({"core"})
LAYOUT = CORE | {"layout"}
ISA = LAYOUT | {"isa"}
IR = ISA | {"ir"}
LANG = IR | {"lang"}
KERNELS = LANG | {"kernels"}
BACKENDS = IR | {"interop"}
OPS = KERNELS | {"interop", "tune", "cuda", "emulate", "ops"}

ALLOWED: dict[str, frozenset[str]] = {
    "core": CORE,
    "layout": LAYOUT,
    "isa": ISA,
    "ir": IR,
    "lang": LANG,
    "kernels": KERNELS,
    # The two ways to run a Program see neither each other nor the language.
    "cuda": IR | {"cuda"},
    "emulate": IR | {"emulate"},
    "interop": CORE | {"interop"},
    "ops": OPS,
    "tune": OPS | {"inspect", "bench"},
    "inspect": OPS | {"inspect"},
    "bench": OPS | {"inspect", "bench"},
    "cli": OPS | {"inspect", "bench", "cli", ""},
    "": OPS,
}
"""Room → rooms it may import; '' is the package itself (``warploom/__init__.py``)."""

ABOVE_OPS = frozenset(
    {"interop.torch", "interop.torch_matmul", "interop.torch_reduce", "interop.torch_operator", "interop.jax"}
)
"""Modules that register operators with a framework: in the room of arrays, but on top of ops."""

TRACED_CALLS = frozenset({
    ("ops.attention", "interop.torch"), ("ops.matmul", "interop.torch_matmul"), ("ops.reduce", "interop.torch_reduce"),
})  # fmt: skip
"""The only steps up: while a framework traces a graph, a call becomes the operator that stands on ops. In functions."""

BELOW_OPS = frozenset({"tune.store", "tune.classes"})
"""The store of winners is read by ops, so nothing of ops may be in it."""

EVERYWHERE = frozenset({"numpy", "ml_dtypes"})
THIRD_PARTY: dict[str, frozenset[str]] = {
    "core": EVERYWHERE,
    "cuda": EVERYWHERE | {"cuda"},
    "cli": EVERYWHERE | {"typer", "rich", "click", "matplotlib"},
    "emulate": EVERYWHERE | {"rich"},
    "inspect": EVERYWHERE | {"rich"},
    "bench": EVERYWHERE | {"rich", "matplotlib", "torch"},
    "tune": EVERYWHERE | {"rich"},
}
FRAMEWORKS: dict[str, frozenset[str]] = {
    "interop.torch": frozenset({"torch"}),
    "interop.torch_matmul": frozenset({"torch"}),
    "interop.torch_reduce": frozenset({"torch"}),
    "interop.torch_operator": frozenset({"torch"}),
    "interop.jax": frozenset({"jax"}),
}


@dataclass(frozen=True)
class Import:
    """One imported module: where, what, and whether only when called."""

    file: Path
    line: int
    module: str
    deferred: bool

    @property
    def source(self) -> str:
        """The importing module without ``warploom.``: ``cuda.compile``."""
        relative = self.file.relative_to(SOURCE).with_suffix("")
        parts = [p for p in relative.parts if p != "__init__"]
        return ".".join(parts)

    @property
    def room(self) -> str:
        """The importing room."""
        relative = self.file.relative_to(SOURCE)
        return relative.parts[0] if len(relative.parts) > 1 else ""

    @property
    def is_own(self) -> bool:
        return self.module == "warploom" or self.module.startswith("warploom.")

    @property
    def target_room(self) -> str:
        """The imported room of this package."""
        return self.module.removeprefix("warploom").lstrip(".").split(".")[0]

    def __str__(self) -> str:
        return f"{self.file.relative_to(SOURCE.parent)}:{self.line} imports {self.module}"


def imports_of(file: Path) -> Iterator[Import]:
    """Every import of a file: at its top, in functions and under TYPE_CHECKING alike."""

    def visit(node: ast.AST, deferred: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name, deferred)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute here"
            assert node.module is not None
            yield from _from_import(file, node, node.module, deferred)
        inner = deferred or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inner)

    yield from visit(ast.parse(file.read_text(encoding="utf-8")), False)


def _from_import(file: Path, node: ast.ImportFrom, module: str, deferred: bool) -> Iterator[Import]:
    """``from warploom import isa`` imports a room; ``from warploom.isa import base`` a module of one."""
    for alias in node.names:
        path = SOURCE.joinpath(*module.split(".")[1:], alias.name) if module.startswith("warploom") else None
        is_module = path is not None and (path.is_dir() or path.with_suffix(".py").exists())
        yield Import(file, node.lineno, f"{module}.{alias.name}" if is_module else module, deferred)


FILES = sorted(SOURCE.rglob("*.py"))
IMPORTS = [found for file in FILES for found in imports_of(file)]


def _is_allowed(found: Import) -> bool:
    source, target = found.source, found.module.removeprefix("warploom").lstrip(".")
    if source in ABOVE_OPS:
        return found.target_room not in ("cli", "bench", "inspect")
    if (source, target) in TRACED_CALLS:
        return found.deferred
    if target in ABOVE_OPS:
        return found.room in ("cli", "bench")
    if source in BELOW_OPS:
        return found.target_room in KERNELS | {"tune"}
    if found.target_room == "tune" and found.room in ("ops", ""):
        return target in BELOW_OPS
    if found.target_room == "":  # the public surface leads to ops: for users, and for what stands on ops
        return found.room in ("cli", "bench", "inspect")
    return found.target_room in ALLOWED[found.room]


def test_the_walker_sees_every_kind_of_import(tmp_path):
    file = tmp_path / "sample.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from warploom.cuda import launch\n"
        "def f():\n    import torch.nn\n    from warploom.core.dtypes import f32\n"
    )
    found = [(i.module, i.line, i.deferred) for i in imports_of(file)]
    assert found == [
        ("typing", 1, False),
        ("warploom.cuda.launch", 3, False),
        ("torch.nn", 5, True),
        ("warploom.core.dtypes", 6, True),
    ]


def test_every_room_has_its_place():
    assert set(ROOMS) <= set(ALLOWED)
    assert len(IMPORTS) > 200


def test_rooms_import_only_what_is_below():
    wrong = [str(i) for i in IMPORTS if i.is_own and not _is_allowed(i)]
    assert wrong == []


@pytest.mark.parametrize(
    ("file", "module"),
    [
        ("kernels/ladder.py", "warploom.cuda.printer"),
        ("emulate/machine.py", "warploom.cuda.printer"),
        ("cuda/printer.py", "warploom.emulate.machine"),
        ("cuda/printer.py", "warploom.lang.kernel"),
        ("isa/alu.py", "warploom.ir.program"),
        ("interop/arrays.py", "warploom.ops.attention"),
        ("ops/attention.py", "warploom.cli.main"),
        ("ops/attention.py", "warploom.bench"),
        ("lang/kernel.py", "warploom"),
    ],
)
def test_a_planted_import_is_refused(file, module):
    assert not _is_allowed(Import(SOURCE / file, 1, module, True))


def test_third_party_packages_stay_where_they_belong():
    wrong: list[str] = []
    for found in IMPORTS:
        top = found.module.split(".")[0]
        if found.is_own or top in sys.stdlib_module_names or top == "__future__":
            continue
        allowed = FRAMEWORKS.get(found.source, frozenset()) | THIRD_PARTY.get(found.room, EVERYWHERE)
        if top not in allowed:
            wrong.append(str(found))
    assert wrong == []


def test_only_the_cuda_room_imports_cuda():
    assert {i.room for i in IMPORTS if i.module.split(".")[0] == "cuda"} <= {"cuda"}


def test_frameworks_and_drawing_are_imported_when_needed_only():
    lazy = {"torch", "jax", "cupy", "matplotlib", "cuda"}
    wrong = [str(i) for i in IMPORTS if i.module.split(".")[0] in lazy and not i.deferred and not _for_types(i)]
    assert [w for w in wrong if "interop/torch" not in w and "interop/jax" not in w] == []


def _for_types(found: Import) -> bool:
    """Whether the import stands under ``if TYPE_CHECKING``."""
    for node in ast.walk(ast.parse(found.file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            first, last = node.body[0].lineno, node.body[-1].end_lineno or 0
            if first <= found.line <= last:
                return True
    return False


_TIMED = """
import sys, time
before = set(sys.modules)
start = time.perf_counter()
import warploom
seconds = time.perf_counter() - start
import json
print(json.dumps([seconds, sorted({m.split(".")[0] for m in set(sys.modules) - before})]))
"""


def test_importing_is_quick_and_loads_no_framework():
    seconds: list[float] = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", _TIMED], capture_output=True, text=True, check=True)
        taken, loaded = json.loads(done.stdout)
        seconds.append(taken)
        assert not {"torch", "cuda", "jax", "cupy", "matplotlib"} & set(loaded)
    assert min(seconds) < 0.15, f"import warploom took {min(seconds):.3f} s at best"


def test_operations_import_no_language_until_they_trace():
    """What a later process finds on disk it need not trace: then it pays for none of these imports either."""
    code = (
        "import sys, warploom; [getattr(warploom, n) for n in warploom.__all__]; "
        "print(*sorted({'.'.join(m.split('.')[:2]) for m in sys.modules if m.startswith('warploom.')}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rooms = set(done.stdout.split())
    assert "warploom.ops" in rooms
    assert not {f"warploom.{room}" for room in ("layout", "isa", "ir", "lang", "emulate", "cuda", "inspect")} & rooms


def test_public_names_resolve():
    code = (
        "import warploom; [getattr(warploom, n) for n in warploom.__all__]; import sys; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_an_unknown_public_name_lists_those_there_are():
    import warploom

    with pytest.raises(AttributeError, match="it has attention"):
        _ = warploom.atention
    assert set(warploom.__all__) <= set(dir(warploom))


def test_files_and_functions_stay_readable():
    """About 400 lines a file, 60 a function: a limit with some air, so that growth is noticed."""
    too_long: list[str] = []
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        if text.count("\n") > 600:
            too_long.append(f"{file.name}: {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno > 75:
                too_long.append(f"{file.name}:{node.lineno} {node.name}")
    assert too_long == []
