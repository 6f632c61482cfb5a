"""One kernel's SASS, counted: by opcode, by purpose, in its main loop; its registers, spills, addresses, occupancy."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from warploom.core.errors import ConfigError, WarploomError
from warploom.core.targets import target
from warploom.cuda.cubin import Resources, compute_capability, disassemble, local_memory_bytes, resources
from warploom.cuda.occupancy import Occupancy, occupancy
from warploom.ir.program import Program
from warploom.ir.statements import SourceLine
from warploom_lab.inspect.flow import SassFlow, SassLoop, control_flow
from warploom_lab.inspect.purpose import count_groups, count_opcodes, is_tensor
from warploom_lab.inspect.sass import Listing, SassInstruction, choose, parse_sass
from warploom_lab.inspect.waits import load_use_distances

ADDRESSED = ("LDSM", "LDGSTS")
"""The instructions whose address registers part 8 of the seeds counts."""


@dataclass(frozen=True)
class SassReport:
    """Static figures of one compiled kernel.

    Counts are of instructions in the listing that can be reached (the padding behind the last ``EXIT`` is not), each
    once; those of the main loop are per iteration of the compiled loop, with every branch inside taken. Bytes are per
    CTA for shared memory, per thread for stack and spills; what the input does not tell is None.
    """

    name: str
    listing: Listing = field(repr=False)
    registers: int
    registers_are_exact: bool = True
    stack_bytes: int | None = None
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    static_shared_bytes: int | None = None
    dynamic_shared_bytes: int | None = None
    threads: int | None = None
    python_lines: Mapping[int, SourceLine] = field(default_factory=dict[int, SourceLine], repr=False)

    @property
    def arch(self) -> str:
        """``"sm_80"``, or ``""`` if the listing does not say."""
        return self.listing.architecture

    # -- the code

    @cached_property
    def flow(self) -> SassFlow:
        """Blocks and loops."""
        return control_flow(self.listing)

    @property
    def instructions(self) -> tuple[SassInstruction, ...]:
        """Every instruction that can be reached, in address order."""
        return self.flow.instructions

    @cached_property
    def main_loop(self) -> SassLoop | None:
        """The loop in which the kernel does its work (:meth:`SassFlow.main_loop`)."""
        return self.flow.main_loop(is_tensor)

    @cached_property
    def loop_instructions(self) -> tuple[SassInstruction, ...]:
        """The instructions of the main loop; none without a loop."""
        return self.flow.of_loop(self.main_loop) if self.main_loop else ()

    # -- counts

    @cached_property
    def counts(self) -> dict[str, int]:
        """Instructions by opcode (IMAD with the modifier that tells its use), most frequent first."""
        return count_opcodes(self.instructions)

    @cached_property
    def groups(self) -> dict[str, int]:
        """Instructions by purpose."""
        return count_groups(self.instructions)

    @cached_property
    def loop_counts(self) -> dict[str, int]:
        """Instructions of one main-loop iteration by opcode."""
        return count_opcodes(self.loop_instructions)

    @cached_property
    def loop_groups(self) -> dict[str, int]:
        """Instructions of one main-loop iteration by purpose."""
        return count_groups(self.loop_instructions)

    @cached_property
    def depth_groups(self) -> dict[int, dict[str, int]]:
        """Loop depth → instructions by purpose at exactly that depth; 0 is outside of all loops."""
        by_depth: dict[int, list[SassInstruction]] = {}
        for block in sorted(self.flow.reachable):
            by_depth.setdefault(self.flow.depth(block), []).extend(self.flow.blocks[block].instructions)
        return {depth: count_groups(by_depth[depth]) for depth in sorted(by_depth)}

    # -- fragments

    @cached_property
    def mma_per_ldmatrix(self) -> float | None:
        """HMMA over LDSM in one main-loop iteration, part 5's "fragment intensity"; None without LDSM."""
        loads = self.loop_counts.get("LDSM", 0)
        return self.loop_counts.get("HMMA", 0) / loads if loads else None

    @cached_property
    def ldmatrix_to_mma(self) -> tuple[int, ...]:
        """For each LDSM of the main loop, the instructions that stand before the first HMMA that reads it."""
        return load_use_distances(self.loop_instructions)

    # -- registers

    def address_registers(self, mnemonic: str) -> dict[str, int]:
        """Register → how many instructions of ``mnemonic`` ("LDSM", "LDGSTS") form their shared address with it.

        A name may hold different values at different places of the listing; as in part 8 of the seeds, names count.
        """
        used = (i.address_register for i in self.instructions if i.mnemonic == mnemonic)
        return dict(Counter(r for r in used if r is not None).most_common())

    def address_histogram(self, mnemonic: str) -> dict[int, int]:
        """Number of uses → how many address registers of ``mnemonic`` have it: part 8's figure."""
        return dict(sorted(Counter(self.address_registers(mnemonic).values()).items()))

    @property
    def spill_bytes(self) -> int:
        """Spill stores plus loads, in bytes per thread, each instruction once."""
        return self.spill_store_bytes + self.spill_load_bytes

    def known_occupancy(self) -> Occupancy | None:
        """Theoretical occupancy; None where the threads per CTA or the architecture are not known."""
        if self.threads is None:
            return None
        shared = (self.static_shared_bytes or 0) + (self.dynamic_shared_bytes or 0)
        try:
            return occupancy(target(self.arch), threads=self.threads, registers=self.registers, shared_bytes=shared)
        except ConfigError:
            return None

    # -- source

    def python_line(self, instruction: SassInstruction) -> SourceLine | None:
        """The author's line an instruction came from; None without line information."""
        return self.python_lines.get(instruction.source[1]) if instruction.source else None

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain values."""
        known = self.known_occupancy()
        return {
            "kernel": self.name,
            "arch": self.arch,
            "instructions": len(self.instructions),
            "loop_instructions": len(self.loop_instructions),
            "registers": self.registers,
            "registers_are_exact": self.registers_are_exact,
            "stack_bytes": self.stack_bytes,
            "spill_store_bytes": self.spill_store_bytes,
            "spill_load_bytes": self.spill_load_bytes,
            "static_shared_bytes": self.static_shared_bytes,
            "dynamic_shared_bytes": self.dynamic_shared_bytes,
            "threads": self.threads,
            "occupancy": known
            and {
                "fraction": round(known.fraction, 4),
                "ctas_per_sm": known.ctas_per_sm,
                "warps_per_sm": known.warps_per_sm,
                "limits": known.limits,
                "limited_by": list(known.limited_by),
            },
            "groups": self.groups,
            "loop_groups": self.loop_groups,
            "mma_per_ldmatrix": self.mma_per_ldmatrix,
            "ldmatrix_to_mma": statistics.median(self.ldmatrix_to_mma) if self.ldmatrix_to_mma else None,
            "depth_groups": {str(depth): groups for depth, groups in self.depth_groups.items()},
            "counts": self.counts,
            "loop_counts": self.loop_counts,
            "address_registers": {name: self.address_registers(name) for name in ADDRESSED},
            "address_histograms": {
                name: {str(uses): count for uses, count in self.address_histogram(name).items()} for name in ADDRESSED
            },
        }


def inspect_sass(text: str, kernel: str | None = None) -> SassReport:
    """The report of a kernel in SASS text (see :func:`parse_sass`); ``kernel`` may be left out if there is one.

    Where the text does not declare registers, the highest one named stands in (``registers_are_exact`` is False).
    Raises ConfigError if there is no instruction or no such kernel.
    """
    listing = choose(parse_sass(text), kernel)
    stored, loaded = _local_bytes(listing)
    exact = listing.declared_registers
    registers = exact if exact is not None else listing.highest_register
    return SassReport(listing.kernel, listing, registers, exact is not None, None, stored, loaded)


def inspect_cubin(cubin: bytes, kernel: str | None = None) -> SassReport:
    """The report of a kernel in a cubin; ``kernel`` may be left out if there is one.

    Raises UnsupportedDeviceError where nvdisasm is missing, ConfigError for bytes that are no cubin or hold no such
    kernel.
    """
    try:
        listing = choose(parse_sass(disassemble(cubin, encoding=True)), kernel)
        needs = resources(cubin, listing.kernel)
        major, minor = compute_capability(cubin)
    except WarploomError:
        raise
    except ValueError as error:
        raise ConfigError(f"this is no cubin that can be inspected: {error}") from error
    return _report(listing, needs, f"sm_{major}{minor}")


def inspect_program(
    program: Program, arch: str, opt_level: int | None = None, *, with_source: bool = False
) -> SassReport:
    """Compile ``program`` for ``arch`` ("sm_80", …) at ptxas's ``opt_level`` (0 … 3; the program's own if None).

    ``with_source`` maps each instruction to the author's line. Raises CompileError, ConfigError for an architecture
    that is unknown or older than the program needs, UnsupportedDeviceError where NVRTC or nvdisasm is missing.
    """
    from warploom.cuda.compile import compile_source
    from warploom.cuda.names import entry_name
    from warploom.cuda.printer import print_cuda, source_map

    if target(program.requires).compute_capability > target(arch).compute_capability:
        raise ConfigError(f"{program.name} needs {program.requires}; it cannot be compiled for {arch}")
    kernel = compile_source(
        print_cuda(program),
        entry_name(program.name),
        arch=arch,
        opt_level=program.opt_level if opt_level is None else opt_level,
        max_registers=program.max_registers,
        line_info=with_source,
    )
    text = disassemble(kernel.cubin, line_info=with_source, encoding=True)
    listing = choose(parse_sass(text), entry_name(program.name))
    lines = source_map(program) if with_source else {}
    return _report(listing, kernel.resources, kernel.arch, program, lines)


def _report(
    listing: Listing,
    needs: Resources,
    arch: str,
    program: Program | None = None,
    lines: Mapping[int, SourceLine] | None = None,
) -> SassReport:
    stored, loaded = needs.spill_store_bytes, needs.spill_load_bytes
    if stored is None or loaded is None:
        stored, loaded = _local_bytes(listing)
    return SassReport(
        name=listing.kernel,
        listing=listing if listing.architecture else replace(listing, architecture=arch),
        registers=needs.registers,
        stack_bytes=needs.stack_bytes,
        spill_store_bytes=stored,
        spill_load_bytes=loaded,
        static_shared_bytes=needs.static_shared_bytes,
        dynamic_shared_bytes=program.shared_bytes if program else None,
        threads=program.threads if program else None,
        python_lines=lines or {},
    )


def _local_bytes(listing: Listing) -> tuple[int, int]:
    text = "\n".join([".text.kernel:", *(f"{i} ;" for i in listing.instructions)])
    return local_memory_bytes(text, "kernel")
