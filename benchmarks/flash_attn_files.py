"""FlashAttention's own test files, unchanged, through ``warploom.flash_attn``: a plugin of pytest.

    PYTHONPATH=src:benchmarks python -m pytest -p flash_attn_files CHECKOUT/tests/test_flash_attn.py \\
        --cases 200 --cases-seconds 60 --cases-out OUT/flash-attn-files.json -n 12 -q
    … the same with CHECKOUT/hopper/test_flash_attn.py

CHECKOUT is a clone of https://github.com/Dao-AILab/flash-attention, of which nothing is built: its tests import these
kernels under the names of its packages, and its Python helpers (padding, the rotary embedding, which takes Triton) from
the clone. It takes einops. ``--cases`` of each test function are drawn with ``--cases-seed``; all of them by default.
Those that do not begin within ``--cases-seconds`` after the collection are left out. ``--cases-out`` is a file of
JSON with the outcome of every case; a second run adds its own to it. Other options are pytest's, such as ``-k``, or
``-n 12`` of pytest-xdist: a case is mostly compilation. hopper/test_flash_attn.py has cases of 70 GiB, which must not
run at once: give it ``--dist loadgroup`` and a GPU with 140 GiB, or one process.

A call that warploom refuses by name ends its test as skipped, with what was said; every other error is a failure. Where
a test goes through values wider than 256 and an ``attention_chunk`` beside others, the others run. Left out are tests
of the C++ extensions' own functions, and the one that needs a call to wait for the GPU. Without a GPU the files run on
the emulator, where only the smallest cases end in time (``-k "1-1-"``); PyTorch's bound of a gradient that is 0 is 0 on
a CPU, and 2e-3 or 1e-4 on a GPU, where 0.3 is not rounded to 16 bits before it is added and taken away again.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from functools import wraps
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from warploom import flash_attn
from warploom.core.errors import ProblemError

WIDEST = 256
"""The largest head_dim of values."""
_EXTENSION = "calls a function of the C++ extension"
LEFT_OUT = {
    "test_flash3_bw_compatibility": _EXTENSION,
    "test_flash_attn_generator_arg_must_be_none": _EXTENSION,
    "test_flash_attn_varlen_paged_kv_num_splits": _EXTENSION,
}
WAITS = "test_flash_attn_kvcache_paged_block_table_bounds"
"""The test whose lengths lie on the GPU and are to be looked at."""
LARGE = "test_flash_attn_race_condition"
"""A test whose tensors take 70 GiB: with ``--dist loadgroup`` one process runs all its cases."""
OUTCOMES: dict[str, dict[str, Any]] = {}
"""Of every case, by pytest's name of it: whether it passed, was refused, left out or failed, and what was said."""


class RefusedError(RuntimeError):
    """A call that warploom refused; FlashAttention's tests expect RuntimeErrors."""


class OnCpu(TorchFunctionMode):
    """Tensors of the device "cuda" lie on the CPU, for the emulator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The call, with another device."""
        named = dict(kwargs or {})
        if torch.device(named.get("device") or "cpu").type == "cuda":
            named["device"] = "cpu"
        return func(*args, **named)


def pytest_addoption(parser: pytest.Parser) -> None:
    """How many cases."""
    parser.addoption("--cases", type=int, default=0, help="cases to draw of each test function; 0: all")
    parser.addoption("--cases-seed", type=int, default=0)
    parser.addoption("--cases-seconds", type=float, default=float("inf"), help="cases that begin later are left out")
    parser.addoption("--cases-out", type=Path, help="file for the outcome of every case")


def pytest_configure(config: pytest.Config) -> None:
    """Put warploom's functions under the names that the files import."""
    files = [Path(x.partition("::")[0]).resolve() for x in config.args]
    root = next((x.parent.parent for x in files if x.name == "test_flash_attn.py"), None)
    if root is None:
        raise pytest.UsageError("name CHECKOUT/tests/test_flash_attn.py or CHECKOUT/hopper/test_flash_attn.py")
    functions = {
        name: _refusing(function)
        for name, function in vars(flash_attn).items()
        if name.startswith(("flash_attn_", "get_"))
    }
    sys.path.insert(0, str(root / "hopper"))
    _module("flash_attn_interface", functions)
    package = _module("flash_attn", functions)
    package.__path__ = [str(root / "flash_attn")]
    _module("flash_attn.flash_attn_interface", {"USE_TRITON_ROCM": False, "_get_block_size_n": None, **functions})
    if not torch.cuda.is_available():
        _emulate()


def _refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        try:
            return function(*given, **named)
        except ProblemError as error:
            raise RefusedError(str(error)) from error

    return call


def _module(name: str, holds: dict[str, Any]) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(holds)
    sys.modules[name] = module
    return module


def _emulate() -> None:
    """A GPU's answers, its tensors on the CPU, and a rotary embedding that nobody calls where there is no Triton."""
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # pyright: ignore[reportAttributeAccessIssue]
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(total_memory=2**40)  # pyright: ignore[reportAttributeAccessIssue]
    _module("flash_attn.ops.triton.rotary", {"apply_rotary": None})
    OnCpu().__enter__()


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Draw cases of a test before pytest makes an item of each, of which FlashAttention's files have 200,000."""
    marks = list(metafunc.definition.iter_markers("parametrize"))
    count = metafunc.config.getoption("--cases")
    places = [range(len(mark.args[1])) for mark in marks]
    if not count or math.prod(map(len, places)) <= count:
        return
    chance = random.Random(f"{metafunc.config.getoption('--cases-seed')} {metafunc.function.__name__}")
    drawn: dict[tuple[int, ...], None] = {}
    while len(drawn) < count:
        drawn[tuple(chance.choice(of) for of in places)] = None
    names = [[name.strip() for name in mark.args[0].split(",")] for mark in marks]
    cases = [[_values(mark.args[1][i]) for mark, i in zip(marks, at, strict=True)] for at in drawn]
    ids = ["-".join(_words(names, at, case)) for at, case in zip(drawn, cases, strict=True)]
    kept = [mark for mark in metafunc.definition.own_markers if mark.name != "parametrize"]
    whole = pytest.mark.parametrize(
        list(itertools.chain(*names)), [list(itertools.chain(*case)) for case in cases], ids=ids
    )
    metafunc.definition.own_markers[:] = [*kept, whole.mark]


def _values(given: Any) -> tuple[Any, ...]:
    """The values of one place of a parameter, or of several that go together."""
    return tuple(given) if isinstance(given, tuple | list) else (given,)


def _words(names: list[list[str]], at: tuple[int, ...], case: list[tuple[Any, ...]]) -> Iterable[str]:
    """What pytest calls the values."""
    for of, place, values in zip(names, at, case, strict=True):
        for name, value in zip(of, values, strict=True):
            yield str(value) if isinstance(value, str | int | float | None) else f"{name}{place}"


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the marks of its groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what no shim can serve, and from loops over options what is refused; take tests in turns."""
    for item in items:
        module: Any = getattr(item, "module", None)
        if hasattr(module, "itertools"):
            module.itertools = SimpleNamespace(product=_product)
        name = item.name.partition("[")[0]
        reason = LEFT_OUT.get(name)
        if name == WAITS and torch.cuda.is_available():
            reason = "the lengths are on the GPU, which warploom does not wait for"
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
        if name == LARGE:
            item.add_marker(pytest.mark.xdist_group(LARGE))
    by_test: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        by_test[item.name.partition("[")[0]].append(item)
    turns = itertools.zip_longest(*by_test.values())  # a run that ends early has some of each
    items[:] = [item for turn in turns for item in turn if item is not None]


COLLECTED = pytest.StashKey[float]()
"""When a process had collected the cases."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin to count the seconds."""
    session.config.stash[COLLECTED] = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave a case out that comes too late."""
    if time.monotonic() - item.config.stash[COLLECTED] > float(item.config.getoption("--cases-seconds") or 0):
        pytest.skip("not begun in time")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note the outcome of a case: of its call, or of what ended before one."""
    if report.when != "call" and report.passed:
        return
    said = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
    outcome = "refused" if said.startswith("refused: ") else "left out" if report.skipped else report.outcome
    if not report.passed:
        said = said or report.longreprtext.strip().rpartition("\n")[2]
    file, _, name = report.nodeid.partition("::")
    OUTCOMES[report.nodeid] = {
        "file": "/".join(Path(file).parts[-2:]),
        "test": name.partition("[")[0],
        "case": name.partition("[")[2].removesuffix("]"),
        "outcome": outcome,
        "said": said.removeprefix("refused: "),
        "seconds": round(report.duration, 2),
    }


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what became of every case, with what earlier runs wrote of other files."""
    out: Path | None = session.config.getoption("--cases-out")
    if out is None or hasattr(session.config, "workerinput"):  # a process of pytest-xdist
        return
    from warploom_lab.bench.evidence import write

    files = {case["file"] for case in OUTCOMES.values()}
    before = json.loads(out.read_text(encoding="utf-8"))["cases"] if out.is_file() else []
    kept = [case for case in before if case["file"] not in files]
    write(out, {"seed": session.config.getoption("--cases-seed"), "cases": [*kept, *OUTCOMES.values()]})


def _product(*values: Iterable[Any]) -> list[tuple[Any, ...]]:
    """``itertools.product``; of (head_dim of values, attention_chunk) those that are computed, if some are."""
    found = list(itertools.product(*values))
    computed = [x for x in found if [type(y) for y in x] != [int, int] or (x[0] <= WIDEST and not x[1])]
    return computed or found


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call() -> Generator[None, Any, None]:
    """A test that ends with a refusal is skipped."""
    outcome = yield
    if outcome.excinfo is not None and issubclass(outcome.excinfo[0], RefusedError):
        outcome.force_exception(pytest.skip.Exception(f"refused: {outcome.excinfo[1]}"))
