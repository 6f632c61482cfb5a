"""NVRTC compiles without a GPU; the cache on disk never costs a result."""

import hashlib
import os
import stat
import subprocess
import sys
import textwrap
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.processes import holds_in_forked_child
from tests.project import needs_nvdisasm

from warploom.core.errors import CompileError, ConfigError, UnsupportedDeviceError
from warploom.cuda import compile as compile_room
from warploom.cuda import device
from warploom.cuda import store as store_module
from warploom.cuda.compile import compile_source, forget_compiled
from warploom.cuda.cubin import disassemble
from warploom.cuda.diagnostics import excerpt, refuse_serialised_wgmma
from warploom.cuda.store import CompiledKernel, KernelStore

pytest.importorskip("cuda.core")

SCALE = """
extern "C" __global__ void __launch_bounds__(128) scale(float* out, const float* in, float factor, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = in[i] * factor + 1.0f;
}
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """An own, empty cache for each test."""
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path))
    forget_compiled()
    return tmp_path / "kernels"


def entries(folder: Path) -> list[Path]:
    """A kernel's note, which is shorter, and its cubin."""
    return sorted(folder.iterdir(), key=lambda path: path.stat().st_size)


def scale(source: str = SCALE, arch: str = "sm_80", **options: Any) -> CompiledKernel:
    return compile_source(source, "scale", arch=arch, **options)


def anew(source: str = SCALE) -> CompiledKernel:
    """As another process would ask."""
    forget_compiled()
    return scale(source)


def adding(number: int) -> str:
    return SCALE.replace("1.0f", f"{number}.0f")


@needs_nvdisasm
def test_products_and_sums_are_not_contracted():
    sass = disassemble(scale().cubin)
    assert [word in sass for word in ("FFMA", "FMUL", "FADD")] == [False, True, True]


def test_memory_then_disk(cache):
    first, again, from_disk = scale(), scale(), anew()
    assert (first.from_cache, again.from_cache, from_disk.from_cache) == (False, True, True)
    assert first.cubin == again.cubin == from_disk.cubin
    assert from_disk.log == first.log, "a hit still tells what ptxas said"
    assert from_disk.resources == first.resources
    assert any(path.read_bytes() == first.cubin for path in entries(cache)), "the entry is the plain cubin"


def test_options_and_the_compilers_version_are_part_of_the_key(monkeypatch):
    options: Any = {}, {"arch": "sm_86"}, {"opt_level": 1}, {"max_registers": 24}, {"line_info": True}
    assert not any(scale(**of).from_cache for of in options)
    monkeypatch.setattr(compile_room, "_compiler_identity", lambda: b"another NVRTC")
    assert not anew().from_cache


def test_without_cache_nothing_is_written(cache):
    assert not any(scale(cache=False).from_cache for _ in range(2))
    assert not cache.exists()


def truncate(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip_one_bit(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def of_another_kernel(_: bytes) -> bytes:
    return compile_source(SCALE.replace("scale(", "other("), "other", arch="sm_80", cache=False).cubin


@pytest.mark.parametrize("damage", [truncate, flip_one_bit, of_another_kernel, lambda _: b"garbage", lambda _: b""])
@pytest.mark.parametrize("part", [0, 1], ids=["note", "cubin"])
def test_a_damaged_entry_is_replaced(cache, damage, part):
    good = scale()
    victim = entries(cache)[part]
    victim.write_bytes(damage(victim.read_bytes()))
    mended = anew()
    assert (mended.cubin, mended.resources, mended.from_cache) == (good.cubin, good.resources, False)
    assert anew().from_cache


def test_entries_that_changed_places_are_not_believed(cache):
    """Both are whole, and of kernels with one name: only the key tells them apart."""
    good = [scale(adding(number)).cubin for number in (1, 2)]
    assert good[0] != good[1]
    first, second = sorted({path.stem for path in entries(cache)})
    for suffix in (".cubin", ".note"):
        one, other = cache / (first + suffix), cache / (second + suffix)
        content = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(content)
    assert [anew(adding(number)).cubin for number in (1, 2)] == good


def sealed(path: Path, text: bytes) -> bytes:
    """The text as the store would have written it to this file."""
    return hashlib.sha256(path.name.encode() + b"\n" + text).hexdigest().encode() + b"\n" + text


@pytest.mark.parametrize(
    "text",
    [b"[" * 10**5, b"[]", b"{}", b'"text"', b"null", b"Infinity", b"1" * 10_000, b'{"sha256": 1e999, "log": []}'],
    ids=lambda text: repr(text[:12]),
)
def test_a_sealed_note_of_any_content_costs_no_result(cache, text):
    good = scale()
    note, _ = entries(cache)
    note.write_bytes(sealed(note, text))
    mended = anew()
    assert (mended.cubin, mended.from_cache) == (good.cubin, False)
    assert anew().from_cache


def in_place_of(path: Path, kind: str) -> None:
    """Something else than a file of ours at ``path``."""
    content = path.read_bytes()
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        aside = path.parent.parent / f"{path.name}.aside"
        aside.write_bytes(content)
        path.symlink_to(aside if kind == "link" else path)


@pytest.mark.skipif(sys.platform == "win32", reason="pipes and links")
@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "loop"])
@pytest.mark.parametrize("part", [0, 1], ids=["note", "cubin"])
def test_what_is_no_file_costs_a_warning_and_no_result(cache, kind, part):
    good = scale()
    in_place_of(entries(cache)[part], kind)

    def compiles() -> bool:
        with pytest.warns(RuntimeWarning, match="it is (a symbolic link|not a regular file)"):
            mended = anew()
        return (mended.cubin, mended.from_cache) == (good.cubin, False)

    assert holds_in_forked_child(compiles)
    assert kind == "folder" or anew().from_cache, "the next kernel took its place"


@pytest.mark.skipif(sys.platform == "win32", reason="permission bits")
def test_what_others_can_write_to_is_not_used(cache, monkeypatch):
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.warns(RuntimeWarning, match=r"other users can write to it.*WARPLOOM_CACHE"):
        assert scale().cubin
    assert entries(cache) == []
    cache.chmod(0o700)
    monkeypatch.setattr(KernelStore, "_opened", {})
    anew()
    _, cubin = entries(cache)
    cubin.chmod(0o666)
    with pytest.warns(RuntimeWarning, match="other users can write to it"):
        assert not anew().from_cache
    assert anew().from_cache


def test_what_was_not_read_for_longest_goes_first(cache, monkeypatch):
    def from_disk(*factors: int) -> list[bool]:
        return [anew(adding(factor)).from_cache for factor in factors]

    def opened_again(limit: float) -> None:
        monkeypatch.setattr(store_module, "LIMIT_BYTES", int(limit))
        monkeypatch.setattr(KernelStore, "_opened", {})

    def used() -> int:
        return sum(path.stat().st_size for path in entries(cache))

    assert from_disk(1) == [False]
    one = used()
    assert from_disk(2) == [False]
    (cache / ".new-killed").write_bytes(b"half a kernel")
    for path in entries(cache):
        os.utime(path, (0, 0))
    assert from_disk(1) == [True]  # so the second is the one to go
    opened_again(2.5 * one)
    assert from_disk(3) == [False]
    assert used() < 2.5 * one
    assert not (cache / ".new-killed").exists()
    assert from_disk(1, 3, 2) == [True, True, False]


def warns_once(says: str) -> None:
    with pytest.warns(RuntimeWarning, match=says):
        assert not scale().from_cache
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert anew(adding(2)).cubin


def test_a_cache_folder_that_cannot_be_made_warns_once(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path / "file"))
    warns_once("set WARPLOOM_CACHE")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_cache_folder_warns_once(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        warns_once("set WARPLOOM_CACHE")
    finally:
        tmp_path.chmod(stat.S_IRWXU)


def test_a_full_disk_warns_once(monkeypatch):
    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkstemp", full)
    warns_once("No space left on device")


def test_processes_share_a_folder(cache):
    script = textwrap.dedent("""
        import sys
        from warploom.cuda.compile import compile_source
        source = sys.stdin.read()
        for number in range(6):
            kernel = compile_source(source.replace("1.0f", f"{number}.0f"), "scale", arch="sm_80")
            assert kernel.resources.registers > 0
    """)
    running = [
        subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    errors = [process.communicate(SCALE)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], errors
    assert len(entries(cache)) == 12
    assert scale(adding(3)).from_cache


def test_an_error_shows_the_lines_concerned():
    source = SCALE.replace("factor + 1.0f", "faktor + 1.0f")
    with pytest.raises(CompileError) as raised:
        scale(source)
    text = str(raised.value)
    assert 'identifier "faktor" is undefined' in text
    assert ">    4 |   if (i < n) out[i] = in[i] * faktor + 1.0f;" in text
    assert "     3 |   int i" in text
    assert raised.value.source == source
    assert "faktor" in raised.value.log


def test_an_error_of_ptxas_shows_the_line_of_the_source():
    def saying(instruction: str) -> str:
        return SCALE.replace("if (i < n)", f'asm volatile("{instruction};");\n  if (i < n)')

    with pytest.raises(CompileError) as raised:
        scale(saying("mma.nonsense"))
    assert '>    4 |   asm volatile("mma.nonsense;");' in str(raised.value)
    fence = saying("wgmma.fence.sync.aligned")
    assert scale(fence, "sm_90a").cubin
    with pytest.raises(CompileError, match="wgmma"):
        scale(fence, "sm_80")


SERIALISED = """
extern "C" __global__ void __launch_bounds__(128) serialised(float* out, unsigned long long a, unsigned long long b) {
  float d0 = 0.0f, d1 = 0.0f, d2 = 0.0f, d3 = 0.0f;
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  for (int k = 0; k < 4; ++k) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0;"
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, 0;}"
                 : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3) : "l"(a), "l"(b));
    d0 += 1.0f;
  }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  out[threadIdx.x] = d0 + d1 + d2 + d3;
}
"""


def test_wgmma_that_ptxas_serialises_is_an_error(cache):
    with pytest.raises(CompileError, match=r"serialises the wgmma .* of kernel 'serialised' for sm_90a:\n.*C75\d\d"):
        compile_source(SERIALISED, "serialised", arch="sm_90a")
    assert entries(cache) == []


def test_every_advisory_of_ptxas_that_it_serialises_is_an_error():
    usual = "ptxas info    : Used 168 registers, 75 bytes cmem[0]\nptxas info    : (C7601) something of 7512 bytes"
    refuse_serialised_wgmma(usual, "", "kernel", "sm_90a")
    for code, why in ((508, "extern calls"), (510, "a function call"), (514, "few registers"), (519, "definitions")):
        line = f"ptxas info    : (C7{code}) Potential Performance Loss: wgmma are serialized due to {why}"
        with pytest.raises(CompileError, match="wait for the group before touching its accumulators") as raised:
            refuse_serialised_wgmma(f"{usual}\n{line}\n{line}\n", "the source", "kernel", "sm_90a")
        assert str(raised.value).count(line) == 1
        assert raised.value.log.startswith(usual)
        assert raised.value.source == "the source"


def test_threads_may_compile():
    sources = [adding(number) for number in range(5)]
    with ThreadPoolExecutor(5) as pool:
        kernels = list(pool.map(scale, sources))
    assert len({kernel.cubin for kernel in kernels}) == 5
    assert [anew(source).cubin for source in sources] == [kernel.cubin for kernel in kernels]


def test_bad_requests():
    with pytest.raises(ConfigError, match="sm_75"):
        scale(arch="sm_75")
    with pytest.raises(ValueError, match="0 to 3"):
        scale(opt_level=4)
    with pytest.raises(ValueError, match="no kernel named 'other'"):
        compile_source(SCALE, "other", arch="sm_80")


@pytest.mark.parametrize("missing", ["cuda.core", "cuda.bindings.nvrtc"])
def test_a_missing_compiler_says_what_to_install(monkeypatch, missing):
    real = device.importlib.import_module

    def import_module(name, *rest):
        if name == missing:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *rest)

    monkeypatch.setattr(device.importlib, "import_module", import_module)
    with pytest.raises(UnsupportedDeviceError, match="install the extra cu13"):
        scale()


def test_lines_around_each_place_are_shown_once():
    source = "\n".join(f"line {n}" for n in range(1, 20))
    shown = excerpt(source, [1, 4, 12, 99])
    numbers = [(line.startswith(">"), int(line.split()[-1])) if "|" in line else "gap" for line in shown.splitlines()]
    first, second = ([(n in (1, 4, 12), n) for n in of] for of in (range(1, 7), range(10, 15)))
    assert numbers == [*first, "gap", *second]
