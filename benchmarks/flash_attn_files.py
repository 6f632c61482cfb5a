"""FlashAttention's own test files, unchanged, through ``warploom.flash_attn``: a plugin of pytest.

    PYTHONPATH=src:benchmarks python -m pytest -p flash_attn_files CHECKOUT/tests/test_flash_attn.py --cases 200
    PYTHONPATH=src:benchmarks python -m pytest -p flash_attn_files CHECKOUT/hopper/test_flash_attn.py --cases 200

CHECKOUT is a clone of https://github.com/Dao-AILab/flash-attention, of which nothing is built: its tests import these
kernels under the names of its packages, and its Python helpers (padding, the rotary embedding, which takes Triton) from
the clone. It takes einops. ``--cases`` are drawn with ``--cases-seed``; all of them by default. Other options are
pytest's, such as ``-n 12`` of pytest-xdist.

A call that warploom refuses by name ends its test as skipped, with what was said; every other error is a failure. Where
a test goes through values wider than 256 and an ``attention_chunk`` beside others, the others run. Left out are tests
of the C++ extensions' own functions, and the one that needs a call to wait for the GPU. Without a GPU the files run on
the emulator, where only the smallest cases end in time (``-k "1-1-"``).
"""

from __future__ import annotations

import itertools
import random
import sys
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
    parser.addoption("--cases", type=int, default=0, help="cases of FlashAttention's to draw; 0: all")
    parser.addoption("--cases-seed", type=int, default=0)


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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Draw cases; leave out what no shim can serve, and from loops over options what is refused."""
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
    count = config.getoption("--cases")
    if count and count < len(items):
        chosen = random.Random(config.getoption("--cases-seed")).sample(range(len(items)), count)
        items[:] = [items[i] for i in sorted(chosen)]


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
