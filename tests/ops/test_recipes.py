"""Kernels kept on disk by what they are traced from: found without a trace, and never where anything has changed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import stat
import subprocess
import sys
import textwrap
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import warploom
from warploom.core.dtypes import bf16
from warploom.cuda import compile as compile_room
from warploom.cuda import store as store_module
from warploom.cuda.compile import forget_compiled
from warploom.cuda.store import KernelStore
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.kernels.matmul.sm90 import MatmulSm90
from warploom.kernels.source import KernelSource
from warploom.ops import backends
from warploom.ops.backends import Signature, built, origin

pytest.importorskip("cuda.core")

ARCH = "sm_90a"
SMALL = MatmulSm80(32, 32, 32, 16, 16, stages=2, dtype=bf16)


def new_process() -> None:
    """Forget what a process remembers, not what is on disk."""
    built.cache_clear()
    backends.compiled.cache_clear()
    forget_compiled()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """An own, empty cache for each test."""
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path / "cache"))
    new_process()
    return tmp_path / "cache" / "kernels"


def product(**options):
    a, b = np.zeros((32, 64), bf16.numpy), np.zeros((64, 32), bf16.numpy)
    return warploom.plan_matmul(a, b, config=SMALL, **options).calls[0].source


def refuse_to_trace(monkeypatch) -> None:
    def traced(*_):
        pytest.fail("traced again")

    def loaded():
        pytest.fail("NVRTC is not needed")

    monkeypatch.setattr(KernelSource, "program", property(traced))
    monkeypatch.setattr(compile_room, "nvrtc_version", loaded)


def pointers(folder: Path) -> list[Path]:
    """The entries that lead from a source to a kernel."""
    return list(folder.glob("*.traced"))


def test_a_later_process_neither_traces_nor_needs_a_compiler(monkeypatch):
    source = product()
    kernel, signature = built(source, ARCH)
    assert signature == Signature.of(source.program)
    new_process()
    refuse_to_trace(monkeypatch)
    again, same = built(product(), ARCH)
    assert (again.cubin, again.name, again.resources, same) == (kernel.cubin, kernel.name, kernel.resources, signature)
    assert again.from_cache


def test_a_later_process_imports_no_more_than_a_launch_needs(cache):
    script = textwrap.dedent("""
        import sys
        import numpy as np, warploom
        from warploom.core.dtypes import bf16
        from warploom.ops.backends import built
        q = np.zeros((1, 64, 2, 64), bf16.numpy)
        call = warploom.plan(q, q, q, config="attention_sm90(head_dim=64, tile_n=64)").calls[0]
        built(call.source, "sm_90a")
        import warploom.cuda.tensor_maps
        assert all(x.spec for x in call.maps) and call.maps
        print(*[m for m in sys.modules if m.startswith("warploom")])
    """)
    for later in (False, True):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        found = set(done.stdout.split())
        assert ("warploom.lang" in found) != later  # the first process traced
    needless = ("isa", "ir", "lang", "emulate", "layout.", "cuda.diagnostics", "cuda.ptx")
    used = {m for m in found if m.removeprefix("warploom.").startswith(needless)}
    assert used == {"warploom.layout.tensor_map"}


def test_every_operation_gives_sources_that_determine_their_kernels():
    q = np.zeros((1, 64, 2, 64), bf16.numpy)
    a, b = np.zeros((32, 64), bf16.numpy), np.zeros((64, 32), bf16.numpy)
    hopper = "attention_sm90(head_dim=64, tile_n=64)"
    plans = [
        warploom.plan_matmul(a, b, config=MatmulSm90(dtype=bf16)),
        warploom.plan_matmul(a, b, config=replace(SMALL, split_k=2)),
        warploom.plan_matmul_reduce(a, b, "max", config=MatmulSm90(dtype=bf16)),
        warploom.plan_matmul_reduce(a, b, "logsumexp", config=SMALL),
    ]
    listed = [
        warploom.plan(q, q, q).calls[0],
        warploom.plan(q, q, q, causal=True).calls[0],
        warploom.plan(q, q, q, scale=0.3).calls[0],
        warploom.plan(q, q, q, config=hopper).calls[0],
        warploom.plan(q, q, q, config=hopper, layout="bhsd").calls[0],
        *(call for plan in plans for call in plan.calls),
    ]
    origins = [origin(call.source) for call in listed]
    assert None not in origins
    assert len(set(origins)) == len(listed)


def test_a_configuration_or_a_kernel_of_another_package_is_not_kept_by_its_sources(monkeypatch):
    source = product()
    assert origin(source) is not None
    assert origin(replace(source, function="another.kernels:product")) is None
    other = dataclass(frozen=True)(type("Other", (MatmulSm80,), {"__module__": "another.config"}))
    (name, config), *rest = source.arguments
    assert (name, config) == ("config", SMALL)
    assert origin(replace(source, arguments=((name, other()), *rest))) is None


def test_architecture_compiler_and_arguments_are_part_of_the_key(monkeypatch):
    built(product(), ARCH)
    new_process()
    assert not built(product(), "sm_80")[0].from_cache
    assert not built(product(out_dtype="f32"), ARCH)[0].from_cache
    monkeypatch.setattr(compile_room, "_compiler_unloaded", lambda: "another NVRTC")
    monkeypatch.setattr(compile_room, "_compiler_identity", lambda: b"another NVRTC")
    new_process()
    assert not built(product(), ARCH)[0].from_cache


@pytest.mark.parametrize("damage", [lambda x: x[: len(x) // 2], lambda x: x.replace(b"128", b"256"), lambda _: b""])
def test_a_damaged_pointer_is_replaced(cache, damage, monkeypatch):
    kernel, signature = built(product(), ARCH)
    (pointer,) = pointers(cache)
    good = pointer.read_bytes()
    pointer.write_bytes(damage(good))
    assert pointer.read_bytes() != good
    new_process()
    again, same = built(product(), ARCH)
    assert (again.cubin, same) == (kernel.cubin, signature)
    assert pointer.read_bytes() == good
    new_process()
    refuse_to_trace(monkeypatch)
    built(product(), ARCH)


def sealed(path: Path, text: bytes) -> bytes:
    """The text as the store would have written it to this file."""
    return hashlib.sha256(path.name.encode() + b"\n" + text).hexdigest().encode() + b"\n" + text


def test_pointers_that_changed_places_are_not_believed(cache):
    kernels = [built(product(out_dtype=to), ARCH) for to in ("bf16", "f32")]
    one, other = pointers(cache)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    new_process()
    again = [built(product(out_dtype=to), ARCH) for to in ("bf16", "f32")]
    assert [(kernel.cubin, signature) for kernel, signature in again] == [(k.cubin, s) for k, s in kernels]
    assert one.read_bytes() == content, "and each is in its place again"


def test_a_pointer_to_another_kernel_or_to_none_is_not_believed(cache):
    built(product(), ARCH)
    (pointer,) = pointers(cache)
    other = built(product(out_dtype="f32"), ARCH)[0]
    good = pointer.read_bytes()
    found = json.loads(good.partition(b"\n")[2])
    text = json.dumps(found | {"kernel": other.key.hex(), "name": other.name}).encode()
    pointer.write_bytes(sealed(pointer, text))
    new_process()
    assert built(product(), ARCH)[0].key.hex() == found["kernel"], "the pointer names the digest of its own kernel"
    assert pointer.read_bytes() == good
    for path in set(cache.iterdir()) - set(pointers(cache)):
        path.unlink()
    new_process()
    assert not built(product(), ARCH)[0].from_cache, "the kernel's own entry is gone"


SIGNATURE: dict[str, Any] = {"threads": 128, "shared_bytes": 0, "arrays": ["a"], "scalars": []}


@pytest.mark.parametrize(
    "facts",
    [
        {},
        None,
        [],
        3,
        *[SIGNATURE | {name: value} for name in SIGNATURE for value in (None, math.inf, 1e400, "abc", [3])],
    ],
    ids=repr,
)
def test_facts_of_any_content_cost_no_result(cache, facts, monkeypatch):
    kernel, signature = built(product(), ARCH)
    (pointer,) = pointers(cache)
    good = pointer.read_bytes()
    found = json.loads(good.partition(b"\n")[2])
    pointer.write_bytes(sealed(pointer, json.dumps(found | {"facts": facts}).encode()))
    new_process()
    again, same = built(product(), ARCH)
    assert (again.cubin, same) == (kernel.cubin, signature)
    assert pointer.read_bytes() == good


def test_a_full_disk_costs_no_result(monkeypatch, cache):
    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkstemp", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        assert built(product(), ARCH)[0].cubin
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert built(product(out_dtype="f32"), ARCH)[0].cubin
    assert pointers(cache) == []


def test_what_is_found_writes_nothing(monkeypatch, cache):
    """So a cache that can only be read serves, also where root runs this test and may write everywhere."""
    built(product(), ARCH)
    new_process()
    monkeypatch.setattr(KernelStore, "_opened", {})
    for name in ("replace", "unlink", "utime"):
        monkeypatch.setattr(store_module.os, name, lambda *_, name=name: pytest.fail(name))
    refuse_to_trace(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert built(product(), ARCH)[0].from_cache


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_can_only_be_read_is_read(cache, monkeypatch):
    built(product(), ARCH)
    new_process()
    folders = [cache, *(path for path in cache.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        refuse_to_trace(monkeypatch)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert built(product(), ARCH)[0].from_cache
    finally:
        for folder in folders:
            folder.chmod(stat.S_IRWXU)


def test_an_epilogue_is_kept_by_what_it_computes(monkeypatch, cache):
    def scaled(factor):
        return lambda x: x * factor

    class Own:
        factor = 2.0

    built(product(epilogue=scaled(2.0)), ARCH)
    built(product(epilogue=scaled(3.0)), ARCH)
    assert len(pointers(cache)) == 2
    own = Own()
    built(product(epilogue=lambda x: x * own.factor), ARCH)
    assert len(pointers(cache)) == 2, "an object of this process is nothing that a file can be kept by"
    new_process()
    refuse_to_trace(monkeypatch)
    assert built(product(epilogue=scaled(3.0)), ARCH)[0].from_cache


_BEGIN = """
import time
from warploom.kernels.source import KernelSource
from warploom.ops.backends import origin
source = KernelSource.of("warploom.kernels.a:b", "name", x=1)
"""


@pytest.fixture
def copied_package(tmp_path):
    """A copy of the package's sources that may be edited, and a way to run code on it."""
    folder = tmp_path / "sources"
    shutil.copytree(Path(warploom.__file__).parent, folder / "warploom", ignore=shutil.ignore_patterns("__pycache__"))
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(script: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", _BEGIN + textwrap.dedent(script)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    time.sleep(0.02)  # a file system's clock is coarser than the process's
    return folder / "warploom", run


def test_an_edited_source_is_never_met_by_an_old_entry(copied_package):
    package, run = copied_package
    before = run("print(origin(source))")
    assert run("print(origin(source))") == before
    source = package / "kernels" / "attention" / "forward_sm90.py"
    text, at = source.read_text(), source.stat()
    source.write_text(text.replace("e", "f", 1))
    os.utime(source, ns=(at.st_atime_ns, at.st_mtime_ns))  # same size, same time: only the contents differ
    time.sleep(0.02)
    assert run("print(origin(source))") != before
    source.write_text(text)
    time.sleep(0.02)
    assert run("print(origin(source))") == before


def test_a_process_whose_sources_were_edited_keeps_nothing(copied_package):
    package, run = copied_package
    told = run(f"""
        assert origin(source) is not None
        time.sleep(0.02)
        path = {str(package / "lang" / "fold.py")!r}
        open(path, "a").write("# edited\\n")
        print(origin(source))
    """)
    assert told.strip() == "None"


def test_the_rooms_that_decide_a_kernel_are_hashed():
    from tests.test_layering import KERNELS

    assert set(backends.SOURCES) >= KERNELS | {"cuda", "ops"}


def test_two_processes_at_once(cache):
    script = textwrap.dedent("""
        import numpy as np, warploom
        from warploom.core.dtypes import bf16
        from warploom.kernels.matmul.sm80 import MatmulSm80
        from warploom.ops.backends import built
        a, b = np.zeros((32, 64), bf16.numpy), np.zeros((64, 32), bf16.numpy)
        config = MatmulSm80(32, 32, 32, 16, 16, stages=2, dtype=bf16)
        source = warploom.plan_matmul(a, b, config=config).calls[0].source
        print(built(source, "sm_90a")[0].resources.registers)
    """)
    running = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    told = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0], told
    assert len(pointers(cache)) == 1
    assert built(product(), ARCH)[0].from_cache
