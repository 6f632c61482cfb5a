"""SASS text as instructions: what nvdisasm and ``cuobjdump -sass`` print, and bare listings without addresses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from warploom.core.errors import ConfigError
from warploom_lab.inspect.control import ControlBits, decode_control

_INSTRUCTION = re.compile(
    r"^\s*(?:/\*(?P<address>[0-9a-f]{4,})\*/)?\s*\{?\s*"
    r"(?:@(?P<predicate>!?U?P\w+)\s+)?"
    r"(?P<opcode>[A-Z][A-Z0-9_]*(?:\.\w+)*)"
    r"(?P<operands>(?:\s[^;]*)?);"
)
_KERNEL = re.compile(
    r"^\s*(?:\.section\s+\.text\.(?P<section>[^,\s]+)|\.text\.(?P<text>[^:\s]+):|Function\s*:\s*(?P<of>\S+))"
)
_UPPER_HALF = re.compile(r"/\* 0x(?P<bits>[0-9a-f]{16}) \*/$")
_LABEL = re.compile(r"^\s*(\.L_\w+|\$[\w$.]+):")
_SOURCE = re.compile(r'^\s*//## File "(?P<file>[^"]*)", line (?P<line>\d+)')
_ARCHITECTURE = re.compile(r"(?:\.target\s+|code for\s+)(sm_\d+\w?)|EF_CUDA_SM(\d+)")
_REGISTERS = re.compile(r"SHI_REGISTERS=(\d+)|REG:(\d+)")
_REGISTER = re.compile(r"\bR(\d+)\b")
_ADDRESS_REGISTER = re.compile(r"\bU?R\d+\b")
_BRACKET = re.compile(r"(?<![\]\w])(?:desc\[[^\]]*\])?\[([^\]]*)\]")
_INSTRUCTION_BYTES = 16


@dataclass(frozen=True, slots=True)
class SassInstruction:
    """One SASS instruction.

    ``address`` is in bytes from the kernel's start, ``predicate`` is ``"!P0"`` or ``""``, ``opcode`` has its modifiers
    (``"LDSM.16.M88.4"``), ``source`` is (file, line) of the CUDA text where the cubin has line information,
    ``control`` the scheduler's bits where the text has encodings (``nvdisasm -hex``).
    """

    address: int
    predicate: str
    opcode: str
    operands: tuple[str, ...]
    source: tuple[str, int] | None = None
    control: ControlBits | None = None

    @property
    def mnemonic(self) -> str:
        """The opcode without modifiers: ``"LDSM"``."""
        return self.opcode.partition(".")[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        """``("16", "M88", "4")`` of ``LDSM.16.M88.4``."""
        return tuple(self.opcode.split(".")[1:])

    @property
    def address_register(self) -> str | None:
        """The register (``"R12"``, ``"UR4"``) in the first bracketed operand, or None if the address has none.

        For LDSM that is the shared source, for LDGSTS the shared destination.
        """
        for operand in self.operands:
            bracket = _BRACKET.search(operand)
            if bracket is not None:
                found = _ADDRESS_REGISTER.search(bracket[1])
                return found[0] if found else None
        return None

    def __str__(self) -> str:
        guard = f"@{self.predicate} " if self.predicate else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)}".rstrip()


@dataclass(frozen=True)
class Listing:
    """The instructions of one kernel in address order; ``labels`` maps nvdisasm's labels to addresses.

    ``declared_registers`` is what the text says of registers per thread, None where it says nothing.
    """

    kernel: str
    architecture: str
    instructions: tuple[SassInstruction, ...]
    labels: dict[str, int] = field(default_factory=dict[str, int])
    declared_registers: int | None = None

    @cached_property
    def highest_register(self) -> int:
        """One more than the highest vector register named: what the kernel needs at least."""
        numbers = (
            int(number)
            for instruction in self.instructions
            for operand in instruction.operands
            for number in _REGISTER.findall(operand)
        )
        return max(numbers, default=-1) + 1


def parse_sass(text: str) -> tuple[Listing, ...]:
    """The kernels in the output of ``nvdisasm -c`` (with or without ``-g``) or ``cuobjdump -sass``.

    Text without a kernel's header becomes one kernel without a name; lines without an address get consecutive ones.
    Raises ConfigError if the text holds no instruction.
    """
    reader = _SassParser()
    for line in text.splitlines():
        reader.line(line)
    listings = tuple(reader.listings())
    if not listings:
        raise ConfigError("this text holds no SASS instruction; write it with nvdisasm -c or cuobjdump -sass")
    return listings


def choose(listings: tuple[Listing, ...], kernel: str | None) -> Listing:
    """The listing of ``kernel``, or the only one. Raises ConfigError that lists the kernels otherwise."""
    names = ", ".join(listing.kernel or "(no name)" for listing in listings)
    if kernel is None:
        if len(listings) == 1:
            return listings[0]
        raise ConfigError(f"the file holds several kernels, name one: {names}")
    for listing in listings:
        if listing.kernel == kernel:
            return listing
    raise ConfigError(f"the file holds no kernel {kernel!r}; it holds {names}")


@dataclass
class _Kernel:
    name: str
    architecture: str
    registers: int | None = None
    instructions: list[SassInstruction] = field(default_factory=list[SassInstruction])
    labels: dict[str, int] = field(default_factory=dict[str, int])
    waiting_labels: list[str] = field(default_factory=list[str])


class _SassParser:
    """Reads line by line; a kernel's header starts the next kernel."""

    def __init__(self) -> None:
        self._architecture = ""
        self._kernels: list[_Kernel] = []
        self._source: tuple[str, int] | None = None

    def line(self, line: str) -> None:
        """Take in one line of the text."""
        line = line.strip()  # the second half of an encoding stands behind a hundred blanks
        if found := _UPPER_HALF.match(line):
            self._upper_half(int(found["bits"], 16))
        elif found := _INSTRUCTION.match(line):
            self._instruction(found)
        elif found := _SOURCE.match(line):
            self._source = found["file"], int(found["line"])
        elif found := _KERNEL.match(line):
            self._start(found["section"] or found["text"] or found["of"])
        elif found := _LABEL.match(line):
            self._kernel().waiting_labels.append(found[1])
        elif found := _ARCHITECTURE.search(line):
            self._architecture = found[1] or f"sm_{found[2]}"
        if self._kernels and (found := _REGISTERS.search(line)):
            self._kernels[-1].registers = int(found[1] or found[2])

    def listings(self) -> Iterator[Listing]:
        """The kernels that have instructions."""
        for kernel in self._kernels:
            if kernel.instructions:
                end = kernel.instructions[-1].address + _INSTRUCTION_BYTES
                labels = kernel.labels | dict.fromkeys(kernel.waiting_labels, end)
                architecture = kernel.architecture or self._architecture
                yield Listing(kernel.name, architecture, tuple(kernel.instructions), labels, kernel.registers)

    def _start(self, name: str) -> None:
        if not self._kernels or self._kernels[-1].name != name:
            self._kernels.append(_Kernel(name, self._architecture))
            self._source = None

    def _kernel(self) -> _Kernel:
        if not self._kernels:
            self._start("")
        return self._kernels[-1]

    def _upper_half(self, bits: int) -> None:
        """The second line of an instruction printed with its encoding."""
        instructions = self._kernel().instructions
        if instructions and instructions[-1].control is None:
            instructions[-1] = replace(instructions[-1], control=decode_control(bits))

    def _instruction(self, found: re.Match[str]) -> None:
        kernel = self._kernel()
        if found["address"] is not None:
            address = int(found["address"], 16)
        else:
            address = kernel.instructions[-1].address + _INSTRUCTION_BYTES if kernel.instructions else 0
        for label in kernel.waiting_labels:
            kernel.labels[label] = address
        kernel.waiting_labels.clear()
        operands = tuple(_operands(found["operands"]))
        kernel.instructions.append(
            SassInstruction(address, found["predicate"] or "", found["opcode"], operands, self._source)
        )


def _operands(text: str) -> Iterator[str]:
    """The operands, without the hints of the register cache (``.reuse``)."""
    for part in text.split(","):
        if operand := part.strip():
            yield operand.replace(".reuse", "")
