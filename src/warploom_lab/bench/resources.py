"""What a Program becomes when it is compiled: registers, spills, stack, instructions, per target."""

from __future__ import annotations

from typing import Any

from warploom.core.errors import CompileError, UnsupportedDeviceError, WarploomError
from warploom.core.targets import target
from warploom.cuda.cubin import disassemble
from warploom.ir.program import Program
from warploom.ops.backends import compiled
from warploom_lab.inspect.flow import control_flow
from warploom_lab.inspect.sass import parse_sass

TargetEntry = dict[str, Any]


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
    try:
        (listing,) = parse_sass(disassemble(kernel.cubin))
    except (WarploomError, ValueError):
        return entry
    return entry | {"instructions": len(control_flow(listing).instructions)}
