"""What the formulas of ``wmma``'s fragments rest on: ptxas makes ``mma.sync`` of it, two that share an operand."""

from __future__ import annotations

import pytest

from warploom.core.errors import UnsupportedDeviceError
from warploom.isa.instruction import Instruction
from warploom_lab.discover.kernels import trace_registers
from warploom_lab.discover.tracers import wmma_products
from warploom_lab.inspect.purpose import is_tensor
from warploom_lab.inspect.report import inspect_program
from warploom_lab.inspect.sass import SassInstruction

pytest.importorskip("cuda.core")

BECOMES = {
    "f16": "HMMA.16816",
    "bf16": "HMMA.16816",
    "s8": "IMMA.16816",
    "u8": "IMMA.16816",
    "tf32": "HMMA.1684",
    "f64": "DMMA.8",
}
"""Type of A and B → how SASS calls ``mma.m16n8k16``, the halves of ``m16n8k8`` and ``m8n8k4``."""
SHARED = {"m16n16k16": "A", "m32n8k16": "B", "m8n32k16": "B"}
"""Shape → the operand of ``mma.sync`` that both products share; of m8n32k16, which is transposed, it is wmma's A."""
ONE_OF_A_KIND = {
    (i.shape, BECOMES[i.inputs.name]): i for i in wmma_products() if (i.a_order, i.b_order) == ("row", "col")
}
"""Fragments depend on the shape and on the width of the inputs."""


def products(instruction: Instruction) -> list[SassInstruction]:
    """The tensor instructions of one ``wmma.mma`` for sm_80."""
    try:
        report = inspect_program(trace_registers.trace(instruction=instruction), "sm_80")
    except UnsupportedDeviceError:
        pytest.skip("NVRTC or nvdisasm is missing")
    return [i for i in report.instructions if is_tensor(i)]


@pytest.mark.parametrize("instruction", ONE_OF_A_KIND.values(), ids=lambda i: i.mnemonic)
def test_wmma_is_two_products_of_mma_sync(instruction: Instruction) -> None:
    found = products(instruction)
    assert all(i.opcode.startswith(BECOMES[instruction.inputs.name]) for i in found)
    assert len(found) == {"f64": 1, "tf32": 4}.get(instruction.inputs.name, 2)  # tf32: two halves of k each
    if len(found) == 2:  # operands are D, A, B, C
        first, second = (i.operands for i in found)
        shared = "DAB".index(SHARED[instruction.shape])
        assert first[shared] == second[shared]
        assert first[3 - shared] != second[3 - shared]
