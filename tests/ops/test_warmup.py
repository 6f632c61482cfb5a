"""Kernels that are compiled ahead: side by side before the first call, and in packs that need no compiler."""

from __future__ import annotations

import json
import os
import re
import threading
import warnings
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import warploom
from tests.ops.emulated_gpu import EmulatedGpu
from tests.project import needs_nvdisasm
from warploom.core.errors import ConfigError, ProblemError, UnsupportedDeviceError
from warploom.core.targets import target
from warploom.cuda import compile as of_compile
from warploom.cuda import pack as of_pack
from warploom.lang import functions
from warploom.ops import backends, warmup
from warploom.ops.backends import Processor, built, planned_for

pytestmark = needs_nvdisasm  # which the compiler comes with


class Unknown:
    """An object that only this process knows."""

    factor = 2.0


def matrices() -> tuple[Any, Any]:
    return np.empty((128, 64), ml_dtypes.bfloat16), np.empty((64, 128), ml_dtypes.bfloat16)


def plans() -> list[Any]:
    return [warploom.plan_matmul(*matrices()), warploom.plan_matmul(*matrices(), epilogue=functions.gelu)]


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path / "cache"))
    for kept in (built, backends.compiled):
        kept.cache_clear()
    of_compile.forget_compiled()
    of_pack._opened.cache_clear()


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pack for two architectures, in a process that cannot compile."""
    path = tmp_path / "kernels.pack"
    done = warmup.pack(path, plans, ["sm_90a", "sm_80"])
    assert len(done.kernels) == 4
    assert done.bytes == path.stat().st_size
    assert done.left_out == ()
    built.cache_clear()
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path / "another"))
    monkeypatch.setattr(of_compile, "_compiler_unloaded", refuse)
    monkeypatch.setattr(backends, "compiled", refuse)
    return path


def refuse(*_: Any) -> Any:
    raise UnsupportedDeviceError("there is no compiler")


def sources(arch: str) -> list[Any]:
    with planned_for(arch):
        return [plan.calls[0].source for plan in plans()]


def test_a_pack_runs_without_a_compiler(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arch in ("sm_90a", "sm_80"):
        with pytest.raises(UnsupportedDeviceError):
            built(sources(arch)[0], arch)
    monkeypatch.setenv("WARPLOOM_PACK", f"/nowhere/else.pack{os.pathsep}{packed}")
    with pytest.warns(RuntimeWarning, match=r"else\.pack cannot be used"):
        found = [(source, arch, *built(source, arch)) for arch in ("sm_90a", "sm_80") for source in sources(arch)]
    for source, arch, kernel, signature in found:
        assert (kernel.arch, kernel.cubin[:4]) == (arch, b"\x7fELF")
        assert kernel.resources.registers > 0
        assert signature.threads == source.program.threads
    with pytest.raises(UnsupportedDeviceError):  # a kernel that is not in it
        built(warploom.plan_matmul(*matrices(), alpha=2.0, accumulate="f32", out_dtype="f32").calls[0].source, "sm_80")


def test_a_pack_of_other_sources_is_told_once_and_ignored(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPLOOM_PACK", str(packed))
    (one, *_) = sources("sm_80")
    monkeypatch.setattr(backends, "_PYTHON", "another Python")
    with pytest.warns(RuntimeWarning, match="another warploom, Python or NumPy"), pytest.raises(UnsupportedDeviceError):
        built(one, "sm_80")
    with warnings.catch_warnings(action="error"), pytest.raises(UnsupportedDeviceError):
        built(one, "sm_80")


def test_a_damaged_pack_is_ignored(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed.write_bytes(packed.read_bytes()[:-100])
    monkeypatch.setenv("WARPLOOM_PACK", str(packed))
    with pytest.warns(RuntimeWarning, match="cannot be used"), pytest.raises(UnsupportedDeviceError):
        built(sources("sm_80")[0], "sm_80")


def test_what_no_pack_can_hold_is_told(tmp_path: Path) -> None:
    own = Unknown()
    with pytest.raises(ProblemError, match="nothing to pack"):
        warmup.pack(
            tmp_path / "x", lambda: [warploom.plan_matmul(*matrices(), epilogue=lambda x: x * own.factor)], ["sm_80"]
        )
    with pytest.raises(ProblemError, match="a plan is"):
        warmup.pack(tmp_path / "x", lambda: [[1]], ["sm_80"])
    with pytest.raises(ConfigError, match="sm_12"):
        warmup.pack(tmp_path / "x", plans, ["sm_12"])


def test_the_command_writes_a_pack(invoke: Any, tmp_path: Path) -> None:
    file = tmp_path / "calls.py"
    file.write_text(
        "import numpy as np, warploom\n"
        "def plans():\n"
        "    x = np.empty((64, 64), np.float16)\n"
        "    return [warploom.plan_matmul(x, x)]\n"
    )
    found = json.loads(
        invoke("pack", str(file), "--for", "sm_80", "--out", str(tmp_path / "one.pack"), "--json").stdout
    )
    (name,) = found["kernels"]
    assert name.endswith("for sm_80")
    assert len(zipfile.ZipFile(found["file"]).namelist()) == 3
    said = invoke("pack", str(file), "--for", "sm_80", "--out", str(tmp_path)).stderr
    assert f"error: {tmp_path}: Is a directory" in said
    file.write_text("x = 1")
    assert "plans()" in invoke("pack", str(file), "--for", "sm_80").stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def plans(:", "calls.py:1: .*SyntaxError"),
        ("def plans():\n    return 1 // 0", "calls.py:2: .*ZeroDivisionError"),
        ("def plans():\n    return 3", "'int' object is not iterable"),
    ],
)
def test_what_a_file_of_plans_raises_is_one_message(invoke: Any, tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "calls.py"
    file.write_text(text)
    result = invoke("pack", str(file), "--for", "sm_80")
    assert result.exit_code == 2
    assert re.search(says, result.stderr)


def test_a_warm_up_compiles_for_the_gpu_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedDeviceError, match="warploom pack"):
        warploom.warmup(*plans())
    with planned_for("sm_90a"):
        found = plans()
    monkeypatch.setattr(Processor, "of", lambda *_: Processor(0, target("sm_90a"), 132))
    warploom.warmup(found, found[0])
    wanted = [(plan.calls[0].source, "sm_90a") for plan in found]
    assert sorted(built.known(), key=repr) == sorted(wanted, key=repr)


def test_the_backward_pass_compiles_beside_the_forward_pass(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from warploom.operators import attention

    begun = list[set[str]]()
    monkeypatch.setattr(warmup, "compile_together", lambda calls, _: begun.append({x.source.name for x in calls}))
    gpu.hold(monkeypatch)
    recorder = attention._attention._recorder
    assert recorder is not None
    recorder._begun.clear()
    for length in (16, 32):
        tensors = [torch.zeros(1, length, 1, 16, dtype=torch.float16) for _ in range(3)]
        for x in tensors:
            gpu.keep(x)
        out = warploom.attention(*[x.requires_grad_() for x in tensors])
    for thread in threading.enumerate():
        if thread.name == "warploom-meanwhile":
            thread.join()
    assert len(begun) == 1, "the same kernels serve other lengths"
    gpu.prepared.clear()
    by_out = torch.zeros_like(out)
    gpu.keep(by_out)
    out.backward(by_out)
    assert {name for name in gpu.prepared if "backward" in name} <= begun[0]
