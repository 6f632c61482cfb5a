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

import pytest
from tests.processes import holds_in_forked_child

from warploom.core.errors import CompileError, ConfigError, UnsupportedDeviceError
from warploom.cuda import compile as compile_room
from warploom.cuda import device
from warploom.cuda import store as store_module
from warploom.cuda.compile import compile_source, forget_compiled
from warploom.cuda.store import KernelStore

pytest.importorskip("cuda.core")

SCALE = """
extern "C" __global__ void __launch_bounds__(128) scale(float* out, const float* in, float factor, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = in[i] * factor + 1.0f;
}
"""
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """An own, empty cache for each test."""
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path))
    forget_compiled()
    return tmp_path / "kernels"


def entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir(), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_target_compiles_without_a_gpu(arch):
    kernel = compile_source(SCALE, "scale", arch=arch)
    assert kernel.arch == arch
    assert kernel.cubin[:4] == b"\x7fELF"
    assert not kernel.from_cache
    assert 0 < kernel.resources.registers <= 32
    assert f"'{arch}'" in kernel.log


def test_products_and_sums_are_not_contracted():
    from warploom.cuda.cubin import disassemble, find_nvdisasm

    if find_nvdisasm() is None:
        pytest.skip("no nvdisasm")
    sass = disassemble(compile_source(SCALE, "scale", arch="sm_80").cubin)
    assert "FFMA" not in sass
    assert "FMUL" in sass
    assert "FADD" in sass


def test_memory_then_disk(cache):
    first = compile_source(SCALE, "scale", arch="sm_80")
    again = compile_source(SCALE, "scale", arch="sm_80")
    forget_compiled()
    from_disk = compile_source(SCALE, "scale", arch="sm_80")
    assert (first.from_cache, again.from_cache, from_disk.from_cache) == (False, True, True)
    assert first.cubin == again.cubin == from_disk.cubin
    assert from_disk.log == first.log, "a hit still tells what ptxas said"
    assert from_disk.resources == first.resources
    assert any(path.read_bytes() == first.cubin for path in entries(cache)), "the entry is the plain cubin"


def test_options_are_part_of_the_key():
    variants = [
        compile_source(SCALE, "scale", arch="sm_80"),
        compile_source(SCALE, "scale", arch="sm_86"),
        compile_source(SCALE, "scale", arch="sm_80", opt_level=1),
        compile_source(SCALE, "scale", arch="sm_80", max_registers=24),
        compile_source(SCALE, "scale", arch="sm_80", line_info=True),
    ]
    assert not any(kernel.from_cache for kernel in variants)


def test_the_compiler_version_is_part_of_the_key(monkeypatch):
    compile_source(SCALE, "scale", arch="sm_80")
    forget_compiled()
    monkeypatch.setattr(compile_room, "_compiler_identity", lambda: b"another NVRTC")
    assert not compile_source(SCALE, "scale", arch="sm_80").from_cache


def test_without_cache_nothing_is_written(cache):
    compile_source(SCALE, "scale", arch="sm_80", cache=False)
    assert not cache.exists()
    assert not compile_source(SCALE, "scale", arch="sm_80", cache=False).from_cache


def truncate(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip_one_bit(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize("damage", [truncate, flip_one_bit, lambda data: b"garbage", lambda data: b""])
@pytest.mark.parametrize("part", ["note", "cubin"])
def test_a_damaged_entry_is_replaced(cache, damage, part):
    good = compile_source(SCALE, "scale", arch="sm_80")
    forget_compiled()
    note, cubin = entries(cache)
    victim = note if part == "note" else cubin
    victim.write_bytes(damage(victim.read_bytes()))
    mended = compile_source(SCALE, "scale", arch="sm_80")
    assert not mended.from_cache
    assert mended.cubin == good.cubin
    assert mended.resources == good.resources
    forget_compiled()
    assert compile_source(SCALE, "scale", arch="sm_80").from_cache


def test_an_entry_of_another_kernel_is_not_believed(cache):
    compile_source(SCALE, "scale", arch="sm_80")
    forget_compiled()
    _, cubin = entries(cache)
    other = compile_source(SCALE.replace("scale(", "other("), "other", arch="sm_80", cache=False)
    cubin.write_bytes(other.cubin)
    assert not compile_source(SCALE, "scale", arch="sm_80").from_cache


def test_entries_that_changed_places_are_not_believed(cache):
    """Both are whole, and of kernels with one name: only the key tells them apart."""
    sources = SCALE, SCALE.replace("1.0f", "2.0f")
    good = [compile_source(source, "scale", arch="sm_80").cubin for source in sources]
    assert good[0] != good[1]
    first, second = sorted({path.stem for path in entries(cache)})
    for suffix in (".cubin", ".note"):
        one, other = cache / (first + suffix), cache / (second + suffix)
        content = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(content)
    forget_compiled()
    assert [compile_source(source, "scale", arch="sm_80").cubin for source in sources] == good


def sealed(path: Path, text: bytes) -> bytes:
    """The text as the store would have written it to this file."""
    return hashlib.sha256(path.name.encode() + b"\n" + text).hexdigest().encode() + b"\n" + text


@pytest.mark.parametrize(
    "text",
    [b"[" * 10**5, b"[]", b"{}", b'"text"', b"null", b"Infinity", b"1" * 10_000, b'{"sha256": 1e999, "log": []}'],
    ids=lambda text: repr(text[:12]),
)
def test_a_sealed_note_of_any_content_costs_no_result(cache, text):
    good = compile_source(SCALE, "scale", arch="sm_80")
    forget_compiled()
    note, _ = entries(cache)
    note.write_bytes(sealed(note, text))
    mended = compile_source(SCALE, "scale", arch="sm_80")
    assert (mended.cubin, mended.from_cache) == (good.cubin, False)
    forget_compiled()
    assert compile_source(SCALE, "scale", arch="sm_80").from_cache


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
@pytest.mark.parametrize("part", ["note", "cubin"])
def test_what_is_no_file_costs_a_warning_and_no_result(cache, kind, part):
    good = compile_source(SCALE, "scale", arch="sm_80")
    note, cubin = entries(cache)
    in_place_of(note if part == "note" else cubin, kind)

    def compiles() -> bool:
        forget_compiled()
        with pytest.warns(RuntimeWarning, match="it is (a symbolic link|not a regular file)"):
            mended = compile_source(SCALE, "scale", arch="sm_80")
        return (mended.cubin, mended.from_cache) == (good.cubin, False)

    assert holds_in_forked_child(compiles)
    forget_compiled()
    if kind != "folder":
        assert compile_source(SCALE, "scale", arch="sm_80").from_cache, "the next kernel took its place"


@pytest.mark.skipif(sys.platform == "win32", reason="permission bits")
def test_a_folder_that_others_can_write_to_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path / "open"))
    folder = tmp_path / "open" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match=r"other users can write to it.*WARPLOOM_CACHE"):
        assert compile_source(SCALE, "scale", arch="sm_80").cubin
    assert entries(folder) == []


def test_an_entry_that_others_can_write_to_is_not_used(cache):
    compile_source(SCALE, "scale", arch="sm_80")
    _, cubin = entries(cache)
    cubin.chmod(0o666)
    if sys.platform != "win32":
        forget_compiled()
        with pytest.warns(RuntimeWarning, match="other users can write to it"):
            assert not compile_source(SCALE, "scale", arch="sm_80").from_cache
    forget_compiled()
    assert compile_source(SCALE, "scale", arch="sm_80").from_cache


def test_what_was_not_read_for_longest_goes_first(cache, monkeypatch):
    def from_disk(*factors: int) -> list[bool]:
        forget_compiled()
        sources = [SCALE.replace("1.0f", f"{factor}.0f") for factor in factors]
        return [compile_source(source, "scale", arch="sm_80").from_cache for source in sources]

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


def test_a_cache_folder_that_cannot_be_made_warns_once(tmp_path, monkeypatch):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    monkeypatch.setenv("WARPLOOM_CACHE", str(in_the_way))
    with pytest.warns(RuntimeWarning, match="set WARPLOOM_CACHE"):
        assert not compile_source(SCALE, "scale", arch="sm_80").from_cache
    forget_compiled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile_source(SCALE, "scale", arch="sm_80").cubin


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_cache_folder_warns_once(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        with pytest.warns(RuntimeWarning, match="set WARPLOOM_CACHE"):
            compile_source(SCALE, "scale", arch="sm_80")
    finally:
        tmp_path.chmod(stat.S_IRWXU)


def test_a_full_disk_warns_once(monkeypatch):
    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkstemp", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        assert compile_source(SCALE, "scale", arch="sm_80").cubin
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile_source(SCALE, "scale", arch="sm_86").cubin


def test_processes_share_a_folder(cache):
    script = textwrap.dedent(
        """
        import sys
        from warploom.cuda.compile import compile_source
        source = sys.stdin.read()
        for factor in range(6):
            kernel = compile_source(source.replace("1.0f", f"{factor}.0f"), "scale", arch="sm_80")
            assert kernel.resources.registers > 0
        """
    )
    running = [
        subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    errors = [process.communicate(SCALE)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], errors
    assert len(entries(cache)) == 12
    assert compile_source(SCALE.replace("1.0f", "3.0f"), "scale", arch="sm_80").from_cache


def test_an_error_shows_the_lines_concerned():
    source = SCALE.replace("factor + 1.0f", "faktor + 1.0f")
    with pytest.raises(CompileError) as raised:
        compile_source(source, "scale", arch="sm_80")
    text = str(raised.value)
    assert 'identifier "faktor" is undefined' in text
    assert ">    4 |   if (i < n) out[i] = in[i] * faktor + 1.0f;" in text
    assert "     3 |   int i" in text
    assert raised.value.source == source
    assert "faktor" in raised.value.log


def test_an_error_of_ptxas_shows_the_line_of_the_source():
    source = SCALE.replace("if (i < n)", 'asm volatile("mma.nonsense;");\n  if (i < n)')
    with pytest.raises(CompileError) as raised:
        compile_source(source, "scale", arch="sm_80")
    assert '>    4 |   asm volatile("mma.nonsense;");' in str(raised.value)


def test_instructions_the_target_lacks_are_an_error():
    source = SCALE.replace("if (i < n)", 'asm volatile("wgmma.fence.sync.aligned;");\n  if (i < n)')
    assert compile_source(source, "scale", arch="sm_90a").cubin
    with pytest.raises(CompileError, match="wgmma"):
        compile_source(source, "scale", arch="sm_80")


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
    with pytest.raises(CompileError, match=r"serialises.*C75\d\d|C75\d\d") as raised:
        compile_source(SERIALISED, "serialised", arch="sm_90a")
    assert "serialis" in str(raised.value)
    assert entries(cache) == []


def test_threads_may_compile():
    sources = [SCALE.replace("1.0f", f"{i}.0f") for i in range(5)]
    with ThreadPoolExecutor(5) as pool:
        kernels = list(pool.map(lambda source: compile_source(source, "scale", arch="sm_80"), sources))
    assert len({kernel.cubin for kernel in kernels}) == 5
    forget_compiled()
    assert [compile_source(source, "scale", arch="sm_80").cubin for source in sources] == [k.cubin for k in kernels]


def test_bad_requests():
    with pytest.raises(ConfigError, match="sm_75"):
        compile_source(SCALE, "scale", arch="sm_75")
    with pytest.raises(ValueError, match="0 to 3"):
        compile_source(SCALE, "scale", arch="sm_80", opt_level=4)
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
        compile_source(SCALE, "scale", arch="sm_80")
