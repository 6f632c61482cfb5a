"""What a Program becomes when it is compiled: registers, spills, stack, instructions, per target."""

from __future__ import annotations

import re
from typing import Any

from warploom.core.errors import CompileError, UnsupportedDeviceError, WarploomError
from warploom.core.targets import target
from warploom.ir.program import Program
from warploom.ops.backends import compiled

TargetEntry = dict[str, Any]
_SASS_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)


def missing_compiler() -> str | None:
    """Why nothing can be compiled here, with what to do; None where NVRTC is at hand."""
    from warploom.cuda.device import nvrtc_version

    try:
        nvrtc_version()
    except UnsupportedDeviceError as error:
        return f"not compiled: {error}"
    return None


def compile_for(program: Program, arch: str) -> TargetEntry:
    """``registers`` and ``stack_bytes`` per thread, ``spill_bytes`` (stores plus loads), ``shared_bytes`` per CTA and,
    with nvdisasm, the number of SASS ``instructions``; or ``{"error"}`` (no compiler, say) or ``{"not_for"}`` with the
    reason.
    """
    limits = target(arch)
    if target(program.requires).compute_capability > limits.compute_capability:
        return {"not_for": f"the kernel needs {program.requires}"}
    if program.shared_bytes > limits.shared_per_block:
        return {"not_for": f"{program.shared_bytes} bytes of shared memory, {arch} has {limits.shared_per_block}"}
    try:
        kernel = compiled(program, arch)
    except (CompileError, UnsupportedDeviceError) as error:
        return {"error": str(error)}
    needs = kernel.resources
    entry: TargetEntry = {
        "registers": needs.registers,
        "spill_bytes": needs.spill_bytes,
        "stack_bytes": needs.stack_bytes,
        "shared_bytes": needs.static_shared_bytes + program.shared_bytes,
    }
    count = instruction_count(kernel.cubin)
    return entry if count is None else entry | {"instructions": count}


def instruction_count(cubin: bytes) -> int | None:
    """SASS instructions of a cubin without the padding behind the last; None without nvdisasm."""
    from warploom.cuda.cubin import disassemble

    try:
        sass = disassemble(cubin)
    except (WarploomError, ValueError):
        return None
    return count_instructions(sass)


def count_instructions(sass: str) -> int:
    """Instructions in nvdisasm's text; the ``NOP`` that pad the end do not count."""
    return sum(name != "NOP" for name in _SASS_INSTRUCTION.findall(sass))
