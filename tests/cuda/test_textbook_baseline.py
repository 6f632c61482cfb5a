"""The reduction paper's baseline in textbook CUDA: what compilers make of it, beside the ladder's rungs 1 and 1w."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.project import load

from warploom.core.errors import UnsupportedDeviceError

pytest.importorskip("cuda.core")

from warploom.cuda.cubin import disassemble
from warploom.ops.backends import compiled
from warploom_lab.kernels.reduce.ladder import LADDER, SETTINGS
from warploom_lab.kernels.reduce.tile import matmul_row_max

TEXTBOOK = load("textbook")


def accesses(cubin: bytes) -> Counter[str]:
    """Accesses of shared memory by opcode."""
    try:
        sass = disassemble(cubin)
    except UnsupportedDeviceError:
        pytest.skip("nvdisasm is missing")
    return Counter(word for line in sass.splitlines() for word in line.split() if word.startswith(("LDS", "STS")))


@pytest.mark.parametrize("setting", SETTINGS[:2], ids=["once", "repeated"])
def test_the_textbook_kernels_reads_are_joined_as_those_of_rung_1w(setting):
    """Repeated operations take turns on two tiles, in both."""
    program = matmul_row_max.trace(config=setting.of(LADDER.rung("1w").config))
    textbook, ours = TEXTBOOK.compiled(setting.repeats, "sm_90a"), compiled(program, "sm_90a")
    tiles = 2 if setting.repeats > 1 else 1
    assert accesses(textbook.cubin) == accesses(ours.cubin) == {"STS.64": 4 * tiles, "LDS.128": 4 * tiles}
    needs = textbook.resources
    assert needs.static_shared_bytes == program.shared_bytes == 1024 * tiles
    assert needs.spill_bytes == 0
    if tiles == 1:  # the paper's Table 2
        assert needs.barriers == 1
        assert abs(needs.registers - 23) <= 2
        assert abs(needs.registers - ours.resources.registers) <= 2
