"""Reports of compiled rungs, and what differs between two of them."""

from dataclasses import replace
from functools import cache

import pytest

from tests.project import needs_nvdisasm
from warploom.core.errors import ConfigError
from warploom.cuda.compile import compile_source
from warploom.cuda.cubin import disassemble
from warploom.cuda.printer import print_cuda
from warploom_lab.inspect import SassReport, compare, inspect_program
from warploom_lab.inspect.purpose import BARRIERS, LOGIC, OTHER, TENSOR, ZEROING, purpose
from warploom_lab.inspect.subjects import attention_program, inspect_file
from warploom_lab.kernels.attention.ladder import LADDER

pytestmark = needs_nvdisasm


@cache
def rung(key: str, arch: str = "sm_80", *, with_source: bool = False) -> SassReport:
    return inspect_program(attention_program(LADDER.rung(key).config), arch, with_source=with_source)


@pytest.mark.parametrize("arch", ["sm_80", "sm_120a"])
def test_what_the_program_asks_for_is_in_the_sass(arch):
    """(64, 64), 4 warps, head_dim 128: per warp and step 8·8 mma for S and 4·16 for O, 32 ldmatrix each for K and V."""
    report = rung("1", arch)
    assert report.counts["HMMA"] == report.loop_counts["HMMA"] == 128
    assert report.counts["LDSM"] == 72, "8 of Q before the loop"
    assert report.loop_counts["LDSM"] == 64
    assert report.counts["LDGSTS"] == 24
    assert report.loop_counts["LDGSTS"] == 16
    assert report.mma_per_ldmatrix == 2.0
    assert len(report.ldmatrix_to_mma) == 64, "each of K's and V's is used"
    assert report.groups[TENSOR] == 128
    assert report.groups[ZEROING] >= report.counts["CS2R"] > 60, "O starts at zero: 64 registers, two at a time"
    assert report.loop_groups.get(ZEROING, 0) <= 2, "S starts as the zero register"
    assert report.groups[BARRIERS] > 0
    assert {i.predicate for i in report.instructions if purpose(i) == OTHER} <= {"!PT"}, "what never runs"
    assert sum(report.groups.values()) == len(report.instructions)
    assert report.arch == arch


def test_the_swizzle_costs_address_registers():
    before, after = rung("1"), rung("2")
    for name in ("LDSM", "LDGSTS"):
        assert len(after.address_registers(name)) > 2 * len(before.address_registers(name))
        assert sum(after.address_registers(name).values()) == after.counts[name]
        assert sum(u * n for u, n in after.address_histogram(name).items()) == after.counts[name]
    assert after.groups[LOGIC] > 2 * before.groups[LOGIC]
    assert after.registers > before.registers


def test_resources_and_occupancy():
    report = rung("1")
    assert (report.threads, report.dynamic_shared_bytes, report.spill_bytes) == (128, 3 * 64 * 128 * 2, 0)
    found = report.known_occupancy()
    assert found is not None
    assert (found.ctas_per_sm, found.limited_by) == (2, ("registers",))
    more = replace(report, dynamic_shared_bytes=100 * 1024).known_occupancy()
    assert more is not None
    assert more.limited_by == ("shared memory",)


def test_a_cubin_and_its_text_say_the_same(tmp_path):
    program = attention_program(LADDER.rung("1").config)
    cubin = compile_source(print_cuda(program), program.name, arch="sm_80").cubin
    binary, text, neither = (tmp_path / name for name in ("a.cubin", "a.sass", "a.bin"))
    binary.write_bytes(cubin)
    text.write_text(disassemble(cubin))
    from_cubin, from_text, from_program = inspect_file(binary), inspect_file(text), rung("1")
    assert from_cubin.counts == from_text.counts == from_program.counts
    assert from_cubin.registers == from_text.registers == from_program.registers
    assert from_cubin.threads is None
    assert from_cubin.known_occupancy() is None
    told = replace(from_cubin, threads=128, dynamic_shared_bytes=49152)
    assert told.known_occupancy() == from_program.known_occupancy()
    for content, says in ((b"\xff\xfe\x00", "neither a cubin nor SASS"), (cubin[:200], "no cubin")):
        neither.write_bytes(content)
        with pytest.raises(ConfigError, match=says):
            inspect_file(neither)


def test_the_sass_beside_the_python():
    report = rung("1", with_source=True)
    assert report.counts == rung("1").counts, "line information changes no code"
    with_line = [i for i in report.instructions if report.python_line(i)]
    assert len(with_line) > 0.95 * len(report.instructions)
    for instruction in report.instructions:
        if instruction.mnemonic in ("HMMA", "LDSM", "LDGSTS"):
            where = report.python_line(instruction)
            assert where is not None
            assert "kernels" in where.file
    lines = {report.python_line(i) for i in report.instructions if i.mnemonic == "HMMA"}
    assert len(lines) == 2, "one line multiplies Q·Kᵀ, one P·V"


def test_differences():
    found = compare(rung("1"), rung("2"))
    assert not found.same_code
    by_name = {change.name: change for change in found.figures}
    registers = by_name["registers per thread"]
    assert registers.difference == rung("2").registers - rung("1").registers
    assert found.counts[0].name in ("LOP3", "MOV", "IMAD.MOV"), "the largest change comes first"
    sizes = [abs(change.difference or 0) for change in found.counts]
    assert sizes == sorted(sizes, reverse=True)
    assert {change.name for change in found.groups} == {*rung("1").groups, *rung("2").groups}
    same = compare(rung("1"), rung("1"))
    assert same.same_code
    assert not any(c.differs for c in (*same.figures, *same.groups, *same.counts))


def test_warp_roles_find_the_consumers_loop():
    ring = pytest.importorskip("tests.hopper.ring")
    report = inspect_program(ring.ring_matmul.trace(steps=8), "sm_90a")
    assert report.loop_counts["HGMMA"] == 4
    assert "UTMALDG" not in report.loop_counts
    assert "UTMALDG" in report.counts
