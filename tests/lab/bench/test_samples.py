"""Samples of warp states: what ncu's source page says, on the listing of the same code."""

import pytest

from tests.lab.inspect.test_waits import encoded
from warploom.core.errors import ConfigError
from warploom_lab.bench.samples import REST, Sampled, locate, parse_source_page
from warploom_lab.inspect import inspect_sass

PAGE = """"Kernel Name","attention",
"Address","Source","# Samples","Instructions Executed","stall_long_sb","stall_short_sb","stall_selected",\
"stall_short_sb (Not Issued)"
"0x7f00","      LDL R4, [R1]","1","8","0","0","1","0"
"0x7f10","      LDSM.16.M88.4 R8, [R3]","4","8","0","0","4","0"
"0x7f20","      MOV R30, RZ","0","8","0","0","0","0"
"0x7f30","      HMMA.16816.F32.BF16 R12, R4, R8, R12","1,095","8","20","60","10","999"
"0x7f40","      EXIT","0","8","0","0","0","0"
"Kernel Name","second",
"Address","Source","# Samples","stall_wait"
"0x8000","      EXIT","7","7\""""
LISTING = "\n".join(
    [
        encoded("LDL R4, [R1]", written=2),
        encoded("LDSM.16.M88.4 R8, [R3]", written=0),
        encoded("MOV R30, RZ"),
        encoded("HMMA.16816.F32.BF16 R12, R4, R8, R12", waits=0b101),
        encoded("EXIT"),
        encoded("NOP"),
    ]
)


def test_kernels_follow_each_other_on_a_page():
    first, second = parse_source_page(PAGE)
    assert first[3].samples == {"long_scoreboard": 20, "short_scoreboard": 60, "selected": 10, REST: 1005}
    assert first[3].executed == 8
    assert second == [Sampled("EXIT", {"wait": 7})]


@pytest.mark.parametrize("text", ["", '"Kernel Name","x",\n"Address","Source"\n"0","EXIT"'])
def test_a_page_without_samples_is_refused(text):
    with pytest.raises(ConfigError, match="samples"):
        parse_source_page(text)


def test_each_reason_has_its_own_producer():
    found = locate(parse_source_page(PAGE)[0], inspect_sass(LISTING))
    rows = {(row["reason"], row["waits"], row["for"]): row for row in found.pairs()}
    assert set(rows) == {("short_scoreboard", "HMMA", "LDSM"), ("long_scoreboard", "HMMA", "LDL")}
    assert rows["short_scoreboard", "HMMA", "LDSM"]["between"] == 1
    assert rows["short_scoreboard", "HMMA", "LDSM"]["share, %"] == round(100 * 60 / 1100, 2)
    assert rows["long_scoreboard", "HMMA", "LDL"]["between"] == 2
    hottest = found.hottest()[0]
    assert hottest["waits for"] == "LDSM.16.M88.4 R8, [R3]"
    assert found.groups == {"tensor": 8, "shared/global memory": 8, "zeroing": 8, "control flow": 8, "local memory": 8}


@pytest.mark.parametrize("listing", [None, LISTING.replace("HMMA", "DMMA"), "EXIT ;"])
def test_without_the_listing_of_what_ran_nothing_is_said_of_producers(listing):
    found = locate(parse_source_page(PAGE)[0], None if listing is None else inspect_sass(listing))
    assert found.pairs() == []
    assert found.total == 1100
    assert found.hottest()[0]["sass"].startswith("HMMA")


def test_a_line_that_is_no_sass_is_kept():
    page = PAGE.replace("      MOV R30, RZ", "      ?? 0x123")
    found = locate(parse_source_page(page)[0], None)
    assert [spot.instruction.mnemonic for spot in found.spots] == ["LDL", "LDSM", "??", "HMMA", "EXIT"]
    assert [spot.instruction.address for spot in found.spots] == [0, 16, 32, 48, 64]


def test_a_disassembler_may_call_some_instructions_otherwise():
    renamed = PAGE.replace("MOV R30, RZ", "CS2R R30, SRZ")
    many = "\n".join(encoded(f"IADD3 R{n}, R{n}, 0x1, RZ") for n in range(40, 60))
    page = renamed.replace(
        '"0x7f40",',
        "".join(f'"0","IADD3 R{n}, R{n}, 0x1, RZ","0","8","0","0","0","0"\n' for n in range(40, 60)) + '"0x7f40",',
    )
    listing = LISTING.replace(encoded("EXIT"), f"{many}\n{encoded('EXIT')}")
    assert locate(parse_source_page(page)[0], inspect_sass(listing)).pairs()
