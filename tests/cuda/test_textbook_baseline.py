"""The reduction paper's baseline in textbook CUDA: what compilers make of it, beside the ladder's rungs 1 and 1w."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.project import load

from warploom.core.errors import UnsupportedDeviceError

pytest.importorskip("cuda.core")

from warploom.cuda.cubin import disassemble
from warploom.kernels.reduce.ladder import LADDER, LOOP
from warploom.kernels.reduce.tile import matmul_row_max
from warploom.ops.backends import compiled

TEXTBOOK = load("textbook")


def accesses(cubin: bytes) -> Counter[str]:
    """Accesses of shared memory by opcode."""
    try:
        sass = disassemble(cubin)
    except UnsupportedDeviceError:
        pytest.skip("nvdisasm is missing")
    return Counter(word for line in sass.splitlines() for word in line.split() if word.startswith(("LDS", "STS")))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_textbook_kernels_reads_are_joined_as_those_of_rung_1w(arch):
    textbook = TEXTBOOK.compiled(1, arch)
    ours = {key: compiled(matmul_row_max.trace(config=LADDER.rung(key).config), arch) for key in ("1", "1w")}
    assert accesses(textbook.cubin) == accesses(ours["1w"].cubin) == {"STS.64": 4, "LDS.128": 4}
    assert accesses(ours["1"].cubin) == {"STS.64": 4, "LDS": 16}
    needs = textbook.resources
    assert (needs.static_shared_bytes, needs.barriers, needs.spill_bytes) == (1024, 1, 0)  # the paper's Table 2
    assert abs(needs.registers - 23) <= 2
    assert abs(needs.registers - ours["1w"].resources.registers) <= 2


def test_repeated_operations_take_turns_on_two_tiles_as_the_rungs_do():
    program = matmul_row_max.trace(config=LOOP.of(LADDER.rung("1w").config))
    textbook, ours = TEXTBOOK.compiled(LOOP.repeats, "sm_90a"), compiled(program, "sm_90a")
    assert accesses(textbook.cubin) == accesses(ours.cubin) == {"STS.64": 8, "LDS.128": 8}
    assert textbook.resources.static_shared_bytes == program.shared_bytes == 2048
    assert textbook.resources.spill_bytes == 0
