"""What a cubin says is what ptxas said."""

import re
from functools import cache

import pytest
from tests.project import needs_nvdisasm

from warploom.core.errors import UnsupportedDeviceError
from warploom.core.targets import target
from warploom.cuda import cubin as cubin_room
from warploom.cuda.compile import compile_source
from warploom.cuda.cubin import (
    CubinParameter,
    compute_capability,
    disassemble,
    find_nvdisasm,
    local_memory_bytes,
    resources,
    spills_from_log,
)
from warploom.cuda.store import CompiledKernel

pytest.importorskip("cuda.core")
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
VALUES = 64
LOADS = "\n".join(f"  float x{i} = a[i * {i + 1}];" for i in range(VALUES))
STORES = "\n".join(f"  a[i + {i}] = x{i} * x{(i * 7 + 3) % VALUES};" for i in range(VALUES))
GREEDY = f"""
struct __align__(64) Map {{ char bytes[128]; }};
extern "C" __global__ void greedy(float* a, int i, double d, const __grid_constant__ Map map) {{
  __shared__ float s[256];
  s[threadIdx.x] = (float)d + map.bytes[threadIdx.x & 127];
{LOADS}
  __syncthreads();
{STORES}
  a[threadIdx.x] = s[255 - threadIdx.x];
}}
"""


@cache
def greedy(arch: str, max_registers: int | None = None) -> CompiledKernel:
    return compile_source(GREEDY, "greedy", arch=arch, max_registers=max_registers, cache=False)


def said_by_ptxas(pattern: str, log: str) -> int:
    found = re.search(pattern, log)
    assert found, log
    return int(found[1])


@pytest.mark.parametrize(("arch", "max_registers"), [("sm_80", None), *((arch, 32) for arch in ARCHITECTURES)])
def test_the_cubin_agrees_with_ptxas(arch, max_registers):
    kernel = greedy(arch, max_registers)
    needs = resources(kernel.cubin, "greedy")  # without the log
    assert needs.registers == said_by_ptxas(r"Used (\d+) registers", kernel.log)
    assert needs.barriers == said_by_ptxas(r"used (\d+) barriers", kernel.log)
    assert needs.static_shared_bytes == said_by_ptxas(r"(\d+) bytes smem", kernel.log)
    assert needs.stack_bytes == said_by_ptxas(r"(\d+) bytes stack frame", kernel.log)
    assert compute_capability(kernel.cubin) == target(arch).compute_capability


def test_parameters_have_their_sizes_and_offsets():
    parameters = greedy("sm_90a", 32).resources.parameters
    assert parameters[:3] == (CubinParameter(0, 8), CubinParameter(8, 4), CubinParameter(16, 8))
    # The compiler aligns the address in the constant bank (parameters begin at 0x210 there on sm_90), not the offset.
    assert parameters[3].size == 128
    assert (0x210 + parameters[3].offset) % 64 == 0


@needs_nvdisasm
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_spills_counted_in_sass_are_those_of_ptxas(arch):
    kernel = greedy(arch, max_registers=32)
    told = spills_from_log(kernel.log, "greedy")
    assert told is not None
    assert min(told) > 0
    assert local_memory_bytes(disassemble(kernel.cubin), "greedy") == told
    without_log = resources(kernel.cubin, "greedy")
    assert (without_log.spill_store_bytes, without_log.spill_load_bytes) == told
    assert without_log.spill_bytes == sum(told)


def test_spills_without_a_disassembler_are_those_of_the_log_and_else_unknown(monkeypatch):
    kernel = greedy("sm_80", max_registers=32)
    disassemble.cache_clear()
    monkeypatch.setattr(cubin_room, "find_nvdisasm", lambda: None)
    assert resources(greedy("sm_80").cubin, "greedy").spill_bytes == 0, "it has no stack"
    assert resources(kernel.cubin, "greedy").spill_bytes is None
    assert resources(kernel.cubin, "greedy", log=kernel.log).spill_bytes
    with pytest.raises(UnsupportedDeviceError, match="nvidia-cuda-nvdisasm"):
        disassemble(kernel.cubin)


def test_widths_of_local_accesses():
    sass = ".text.k:\n  STL.128 [R1], R4 ;\n  STL [R1+0x10], R8 ;\n @P0 LDL.LU.64 R2, [R1+0x8] ;\n  LDL.U8 R3, [R1] ;\n"
    assert local_memory_bytes(sass, "k") == (20, 9)
    assert local_memory_bytes(sass, "another") == (0, 0)


def test_what_is_no_cubin_is_refused():
    cubin = greedy("sm_80").cubin
    cut = (cubin[: int(len(cubin) * part)] for part in (0.0, 0.01, 0.3, 0.7, 0.99))
    for data in (*cut, b"garbage" * 100, b"\x7fELF" + bytes(200), b"\x7fELF\x02\x01\x01" + b"\xff" * 200):
        with pytest.raises(ValueError, match="cubin"):
            resources(data, "greedy")
    with pytest.raises(ValueError, match="no kernel named 'modest'"):
        resources(cubin, "modest")
    if find_nvdisasm():
        with pytest.raises(ValueError, match="refused"):
            disassemble(b"garbage")


@needs_nvdisasm
def test_sass_with_source_lines():
    kernel = compile_source(GREEDY, "greedy", arch="sm_80", line_info=True, cache=False)
    assert "greedy.cu" in disassemble(kernel.cubin, line_info=True)
    assert "EXIT" in disassemble(kernel.cubin)


@pytest.mark.parametrize("dims", [(2, 1, 1), (1, 2, 4), (1, 1, 1)])
def test_the_cubin_knows_its_clusters(dims):
    source = 'extern "C" __global__ void __cluster_dims__({}, {}, {}) alone(int* x) {{ *x = 1; }}'.format(*dims)
    for text in (source, source.replace("__cluster_dims__(1, 1, 1) ", "")):
        assert compile_source(text, "alone", arch="sm_90a", cache=False).resources.cluster == dims
