"""What an instruction is there for.

Compilers spell one purpose in several ways (a register copy is ``MOV`` or ``IMAD.MOV.U32``, a zero is ``CS2R`` or a
move of ``RZ``), so counts are compared by purpose first, as part 8 of the seeds on FlashAttention does, and by opcode
below it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from warploom_lab.inspect.sass import SassInstruction

TENSOR = "tensor"
MEMORY = "shared/global memory"
LOGIC = "address & logic"
COPIES = "register copies"
ZEROING = "zeroing"
FLOAT = "float"
SPECIAL_FUNCTION = "special function"
CONVERSIONS = "conversions"
SHUFFLES = "warp shuffles"
BARRIERS = "barriers & waits"
CONTROL = "control flow"
CONSTANTS = "constants & ids"
LOCAL = "local memory"
OTHER = "other"

GROUPS: dict[str, str] = {
    TENSOR: "HMMA IMMA DMMA BMMA QMMA OMMA HGMMA IGMMA QGMMA BGMMA UTCHMMA UTCIMMA UTCQMMA UTCOMMA",
    MEMORY: "LDSM STSM LDS STS STAS ATOMS LDGSTS LDG STG LD ST ATOM ATOMG RED REDG REDAS UTMALDG UTMASTG UTMAREDG "
    "UTMAPF UTMACCTL UBLKCP UBLKPF UBLKRED CCTL CCTLL LDTM STTM UTCCP UTCATOMSWS LDGMC SULD SUST TEX TLD",
    LOGIC: "LOP3 LOP SHF SHL SHR LEA IADD3 IADD VIADD IMAD IMUL ISETP ISET IMNMX VIMNMX VIMNMX3 VIADDMNMX IABS PLOP3 "
    "PSETP SEL PRMT SGXT BMSK BREV FLO POPC R2P P2R LEPC IDP ULOP3 USHF ULEA UIADD3 UIMAD UISETP UPLOP3 USEL UPRMT "
    "USGXT UBMSK UBREV UFLO UPOPC UP2UR UR2UP UIMNMX UVIMNMX UVIADD UIABS UPSETP QSPC",
    COPIES: "MOV UMOV R2UR MOVM",
    ZEROING: "",
    FLOAT: "FADD FMUL FFMA FMNMX FMNMX3 FADD2 FMUL2 FFMA2 FSETP FSET FSEL FCHK HADD2 HMUL2 HFMA2 HMNMX2 HSETP2 HSET2 "
    "DADD DMUL DFMA DSETP UFADD UFMUL UFFMA UFMNMX UFSEL UFSETP",
    SPECIAL_FUNCTION: "MUFU",
    CONVERSIONS: "F2FP F2F F2I F2IP I2F I2FP I2I I2IP FRND UF2F UF2FP UF2I UI2F UI2FP UFRND",
    SHUFFLES: "SHFL VOTE VOTEU MATCH REDUX CREDUX ELECT",
    BARRIERS: "BAR B2R DEPBAR LDGDEPBAR UTMACMDFLUSH UTCBAR ARRIVES SYNCS WARPSYNC WARPGROUP MEMBAR FENCE ERRBAR "
    "ACQBULK PREEXIT UCGABAR_ARV UCGABAR_WAIT CGAERRBAR",
    CONTROL: "BRA BRX BRXU JMP JMX JMXU CALL RET EXIT KILL BREAK BMOV BPT BSSY BSYNC NOP YIELD NANOSLEEP USETMAXREG",
    CONSTANTS: "LDC ULDC LDCU S2R S2UR CS2R CS2UR",
    LOCAL: "STL LDL",
    OTHER: "",
}
"""Purpose → the mnemonics that serve it, in the order of tables. Moves and IMAD are told apart by their operands."""

_PURPOSE = {mnemonic: group for group, mnemonics in GROUPS.items() for mnemonic in mnemonics.split()}
_NEVER = "!PT"
_ZERO = re.compile(r"-?(U?RZ|SRZ|0x0|0)")
_NOT_A_REGISTER = re.compile(r"-?(0x[0-9a-f]+|\d[\d.e+-]*|c(x?)\[.*)")


def purpose(instruction: SassInstruction) -> str:
    """The group (a key of :data:`GROUPS`) of one instruction.

    A move (``MOV``, ``IMAD.MOV``, ``IMAD.U32`` with a zero factor, ``HFMA2`` of zeros) is a register copy, zeroing or a
    constant, as its source says; ``CS2R`` of ``SRZ`` is zeroing. What ``@!PT`` guards never runs (ptxas fills time with
    such loads), so it serves nothing.
    """
    if instruction.predicate == _NEVER:
        return OTHER
    source = moved_source(instruction)
    if source is not None:
        if _ZERO.fullmatch(source):
            return ZEROING
        return CONSTANTS if _NOT_A_REGISTER.match(source) else COPIES
    return _PURPOSE.get(instruction.mnemonic, OTHER)


def moved_source(instruction: SassInstruction) -> str | None:
    """Return the source operand of an instruction that only moves one value, None for every other instruction."""
    name, operands = instruction.mnemonic, instruction.operands
    if name in ("CS2R", "CS2UR"):
        return "SRZ" if operands[1:] == ("SRZ",) else None
    if name in ("MOV", "UMOV") and len(operands) >= 2:
        return operands[1]
    if (
        name in ("IMAD", "UIMAD")
        and len(operands) == 4
        and _ZERO.fullmatch(operands[1])
        and _ZERO.fullmatch(operands[2])
    ):
        return operands[3]
    if name == "HFMA2" and len(operands) == 5 and all(map(_ZERO.fullmatch, operands[1:3])):
        # ptxas makes constants on the half-precision pipe: 0 × 0 + (two halves).
        return "0x0" if all(map(_ZERO.fullmatch, operands[3:])) else "0x1"
    return None


def count_groups(instructions: Iterable[SassInstruction]) -> dict[str, int]:
    """Instructions by purpose: every group that occurs, in the order of :data:`GROUPS`."""
    return executed_groups((instruction, 1) for instruction in instructions)


def executed_groups(counted: Iterable[tuple[SassInstruction, int]]) -> dict[str, int]:
    """How often instructions of each purpose ran, in the order of :data:`GROUPS`; none that never did."""
    found: Counter[str] = Counter()
    for instruction, count in counted:
        found[purpose(instruction)] += count
    return {group: found[group] for group in GROUPS if found[group]}


def opcode_name(instruction: SassInstruction) -> str:
    """The name under which an opcode is counted: the mnemonic, for IMAD with the modifier that tells its use."""
    kinds = {"MOV", "SHL", "IADD", "WIDE", "HI", "X", "U32"}
    if instruction.predicate == _NEVER:
        return f"@{_NEVER} {instruction.mnemonic}"
    if instruction.mnemonic in ("IMAD", "UIMAD") and instruction.modifiers and instruction.modifiers[0] in kinds:
        return f"{instruction.mnemonic}.{instruction.modifiers[0]}"
    return instruction.mnemonic


def count_opcodes(instructions: Iterable[SassInstruction]) -> dict[str, int]:
    """Instructions by :func:`opcode_name`, most frequent first."""
    return dict(Counter(map(opcode_name, instructions)).most_common())


def is_tensor(instruction: SassInstruction) -> bool:
    """Whether the tensor cores run it."""
    return _PURPOSE.get(instruction.mnemonic) == TENSOR
