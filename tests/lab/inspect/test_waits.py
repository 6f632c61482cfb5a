"""Who waits for whom: control bits, and the holders of counters on every way back."""

import pytest

from tests.project import needs_nvdisasm
from warploom_lab.inspect import inspect_program, inspect_sass
from warploom_lab.inspect.control import ControlBits, decode_control
from warploom_lab.inspect.waits import read, waits, written
from warploom_lab.kernels.attention.ladder import FULL_LADDER

FREE = 7


def encoded(text: str, *, stall: int = 1, written: int = FREE, read: int = FREE, waits: int = 0) -> str:
    """One instruction as ``nvdisasm -hex`` prints it; ``waits`` is a mask."""
    upper = (stall | written << 5 | read << 8 | waits << 11) << 41
    return f"{text} ; /* 0x0000000000007919 */\n  /* 0x{upper:016x} */"


def of(lines: list[str]):
    report = inspect_sass("\n".join(lines))
    return report, waits(report.flow)


def test_control_bits_of_instructions_that_nvdisasm_printed():
    assert decode_control(0x000F220000002600) == ControlBits(1, 4, None, ()), "S2UR UR6 holds counter 4"
    assert decode_control(0x010FE2000F8E0004) == ControlBits(1, None, None, (4,)), "UIMAD of UR6 waits for it"
    assert decode_control(0x000FE200078E00FF) == ControlBits(1, None, None, ())


PRODUCT = "HMMA.16816.F32.BF16 R12, R4, R8, R12"
EXIT = encoded("EXIT")


@pytest.mark.parametrize(
    ("lines", "at", "producers"),
    [
        pytest.param(
            [
                encoded("LDSM.16.M88.4 R8, [R2]", written=0),
                encoded("LDSM.16.M88.4 R40, [R3]", written=0),
                encoded(PRODUCT, waits=0b1),
                EXIT,
            ],
            0x20,
            [("LDSM.16.M88.4 R8, [R2]", 1, True, False)],
            id="what writes the register, though another load is nearer",
        ),
        pytest.param(
            [
                encoded("LDS R0, [R1]", written=2),
                encoded("STS [R9], R8", read=2),
                encoded("MOV R8, R7", waits=0b100),
                EXIT,
            ],
            0x20,
            [("STS [R9], R8", 0, False, False)],
            id="without a register in common the nearest holder",
        ),
        pytest.param(
            [
                encoded("LDS R0, [R1]", written=1),
                encoded("IADD3 R2, R0, 0x1, RZ", waits=0b10),
                encoded("IADD3 R3, R0, 0x2, RZ", waits=0b10),
                EXIT,
            ],
            0x10,
            [("LDS R0, [R1]", 0, True, False)],
            id="a wait ends the way back: the second one finds the counter free",
        ),
        pytest.param(
            [
                "MOV R0, RZ ;",
                ".L_x_0:",
                encoded(PRODUCT, waits=0b1),
                encoded("IADD3 R0, R0, 0x1, RZ"),
                encoded("LDSM.16.M88.4 R8, [R2]", written=0),
                encoded("@P0 BRA `(.L_x_0)"),
                EXIT,
            ],
            0x10,
            [("LDSM.16.M88.4 R8, [R2]", 1, True, False)],
            id="a loop is followed around",
        ),
        pytest.param(
            [
                encoded("LDL R4, [R1]", written=2),
                encoded("LDSM.16.M88.4 R8, [R3]", written=0),
                encoded(PRODUCT, waits=0b101),
                EXIT,
            ],
            0x20,
            [("LDSM.16.M88.4 R8, [R3]", 0, True, False), ("LDL R4, [R1]", 1, True, True)],
            id="two counters have a producer each",
        ),
        pytest.param(
            [encoded("LDGDEPBAR", written=0), encoded("DEPBAR.LE SB0, 0x0"), EXIT],
            0x10,
            [("LDGDEPBAR", 0, False, True)],
            id="depbar names the counter of the copies",
        ),
    ],
)
def test_who_waits_for_whom(lines, at, producers):
    _, found = of(lines)
    assert list(found) == [at]
    first = found[at][: len(producers)]
    assert [(str(w.producer), w.between, w.by_register, w.is_long) for w in first] == producers


def test_registers_written_and_read():
    report, _ = of(
        [
            "LDSM.16.MT88.4 R8, [R2+0x10] ;",
            "HMMA.16816.F32 R20, R4, R8, R20 ;",
            "LDS.64 R30, [R31] ;",
            "STG.E.128 [R2.64+0x8], R40 ;",
            "HMMA.16816.F16 R20, R4, R8, R20 ;",
        ]
    )
    load, product, wide, store, halves = report.listing.instructions
    assert written(product) == {"R20", "R21", "R22", "R23"}
    assert written(halves) == {"R20", "R21"}
    assert read(halves) == {f"R{n}" for n in (4, 5, 6, 7, 8, 9, 20, 21)}
    assert written(load) == {"R8", "R9", "R10", "R11"}
    assert read(product) == {f"R{n}" for n in (4, 5, 6, 7, 8, 9, 20, 21, 22, 23)}
    assert written(wide) == {"R30", "R31"}
    assert read(store) >= {"R40", "R41", "R42", "R43", "R2", "R3"}
    assert not written(store)


def test_text_without_encodings_tells_nothing():
    _, found = of(["LDSM.16.M88.4 R8, [R2] ;", "HMMA.16816.F32 R20, R4, R8, R20 ;", "EXIT ;"])
    assert found == {}


@needs_nvdisasm
def test_the_products_of_a_compiled_rung_wait_for_ldmatrix():
    from warploom_lab.inspect.subjects import attention_program

    report = inspect_program(attention_program(FULL_LADDER.rung("2").config), "sm_80")
    found = waits(report.flow)
    products = [i for i in report.loop_instructions if i.mnemonic == "HMMA" and i.address in found]
    producers = {wait.producer.mnemonic for i in products for wait in found[i.address] if wait.by_register}
    assert producers == {"LDSM"}
    assert len(products) > 8
