"""SASS text of several origins becomes instructions, blocks and loops."""

import pytest

from warploom.core.errors import ConfigError
from warploom_lab.inspect import inspect_sass, parse_sass
from warploom_lab.inspect import purpose as of
from warploom_lab.inspect.flow import control_flow
from warploom_lab.inspect.sass import choose

# An outer loop (0x20 … 0xa0) around an inner one (0x40 … 0x70), a branch in between, padding behind EXIT.
NESTED = """
	.target	sm_80
	.section	.text.nested,"ax",@progbits
	.sectioninfo	@"SHI_REGISTERS=40"
.text.nested:
	//## File "kernel.cu", line 7
        /*0000*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;
        /*0010*/                   CS2R R8, SRZ ;
.L_x_2:
        /*0020*/                   LDGSTS.E.BYPASS.128 [R20+0x4000], [R30.64+0x80] ;
        /*0030*/              @!P1 BRA `(.L_x_1) ;
.L_x_0:
	//## File "kernel.cu", line 9
        /*0040*/                   LDSM.16.M88.4 R4, [R21.X4+UR4+0x20] ;
        /*0050*/                   LDSM.16.MT88.4 R12, [R21] ;
        /*0060*/                   HMMA.16816.F32 R8, R4.reuse, R12, R8 ;
        /*0070*/               @P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0080*/                   STL.64 [R1+0x8], R8 ;
        /*0090*/                   LDL R9, [R1+0xc] ;
        /*00a0*/               @P2 CALL.REL.NOINC `(.L_x_2) ;
        /*00b0*/                   EXIT ;
.L_x_3:
        /*00c0*/                   BRA `(.L_x_3);
        /*00d0*/                   NOP;
.L_x_4:
"""
CUOBJDUMP = """
	code for sm_90a
		Function : first
	.headerflags	@"EF_CUDA_SM90 EF_CUDA_PTX_SM(EF_CUDA_SM90)"
        /*0000*/                   LDC R1, c[0x0][0x28] ;                /* 0x00000a00ff017b82 */
                                                                         /* 0x000fe20000000800 */
        /*0010*/              @!P0 BRA 0x30 ;                            /* 0x0000000000008947 */
        /*0020*/                   STG.E desc[UR4][R2.64], R5 ;          /* 0x0000000502007986 */
        /*0030*/                   EXIT ;                                /* 0x000000000000794d */
		Function : second
        /*0000*/                   LDSM.16.M88.4 R4, [UR7+0x10] ;
        /*0010*/                   EXIT ;
"""


def one(text: str):
    (listing,) = parse_sass(text)
    (instruction,) = listing.instructions
    return instruction


def test_the_parts_of_an_instruction():
    instruction = one("        /*1f40*/              @!UP1 LDSM.16.M88.4 R24, [R207+0x4000] ;  /* 0x00 */")
    assert instruction.address == 0x1F40
    assert instruction.predicate == "!UP1"
    assert instruction.mnemonic == "LDSM"
    assert instruction.modifiers == ("16", "M88", "4")
    assert instruction.operands == ("R24", "[R207+0x4000]")
    assert str(instruction) == "@!UP1 LDSM.16.M88.4 R24, [R207+0x4000]"


@pytest.mark.parametrize(
    ("text", "register"),
    [
        ("LDSM.16.M88.4 R24, [R207+0x4000] ;", "R207"),
        ("LDSM.16.M88.4 R24, [R3.X4+UR5+-0x40] ;", "R3"),
        ("LDSM.16.M88.4 R24, [UR5+0x40] ;", "UR5"),
        ("LDSM.16.M88.4 R24, [0x40] ;", None),
        ("LDS R24, [RZ+0x40] ;", None),
        ("LDGSTS.E.BYPASS.128 [R10], desc[UR20][R20.64+0x80] ;", "R10"),
        ("LDG.E.128 R4, desc[UR20][R20.64] ;", "R20"),
        ("LDC.64 R2, c[0x0][R5+0x28] ;", None),
        ("HGMMA.64x176x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;", None),
    ],
)
def test_address_registers(text, register):
    assert one(text).address_register == register


def test_lines_without_addresses():
    (listing,) = parse_sass("// a remark\n  SHF.L.U32 R215, R215, 0x1, RZ ;\n  EXIT ;\nnot an instruction\n")
    assert [(i.address, i.opcode) for i in listing.instructions] == [(0, "SHF.L.U32"), (16, "EXIT")]
    assert listing.kernel == ""


def test_cuobjdump_text():
    first, second = parse_sass(CUOBJDUMP)
    assert (first.kernel, first.architecture, len(first.instructions)) == ("first", "sm_90a", 4)
    assert (second.kernel, len(second.instructions)) == ("second", 2)
    assert first.declared_registers is None
    assert first.highest_register == 6
    flow = control_flow(first)
    assert len(flow.reachable) == 3
    assert flow.blocks[0].successors == (1, 2)


def test_choosing_a_kernel():
    listings = parse_sass(CUOBJDUMP)
    assert choose(listings, "second").kernel == "second"
    with pytest.raises(ConfigError, match="first, second"):
        choose(listings, None)
    with pytest.raises(ConfigError, match=r"'third'.*first, second"):
        choose(listings, "third")


@pytest.mark.parametrize("text", ["", "int main() { return 0; }\n", ".text.empty:\n"])
def test_text_without_instructions(text):
    with pytest.raises(ConfigError, match="nvdisasm"):
        parse_sass(text)


def test_loops_of_a_listing():
    report = inspect_sass(NESTED)
    outer, inner = report.flow.loops
    assert inner.blocks < outer.blocks
    assert [i.address for i in report.flow.of_loop(inner)] == [0x40, 0x50, 0x60, 0x70]
    assert [i.address for i in report.flow.of_loop(outer)] == list(range(0x20, 0xB0, 0x10))
    assert report.main_loop == inner, "the tensor instructions are in the inner loop"
    assert len(report.instructions) == 12, "what stands behind EXIT is padding"
    assert report.loop_groups == {of.TENSOR: 1, of.MEMORY: 2, of.CONTROL: 1}
    assert report.depth_groups[2] == report.loop_groups
    assert report.depth_groups[1] == {of.MEMORY: 1, of.CONTROL: 2, of.LOCAL: 2}
    assert sum(report.groups.values()) == sum(sum(groups.values()) for groups in report.depth_groups.values()) == 12


def test_figures_of_a_listing():
    report = inspect_sass(NESTED)
    assert (report.name, report.arch, report.registers, report.registers_are_exact) == ("nested", "sm_80", 40, True)
    assert (report.spill_store_bytes, report.spill_load_bytes) == (8, 4)
    assert report.address_registers("LDSM") == {"R21": 2}
    assert report.address_histogram("LDSM") == {2: 1}
    assert report.address_registers("LDGSTS") == {"R20": 1}
    assert report.instructions[0].source == ("kernel.cu", 7)
    assert report.instructions[-1].source == ("kernel.cu", 9)


def test_a_kernel_without_loops():
    report = inspect_sass(CUOBJDUMP, "first")
    assert report.main_loop is None
    assert report.loop_groups == {}
    assert not report.registers_are_exact


def test_a_loop_without_tensor_instructions_is_the_longest_innermost():
    text = """
.text.k:
        /*0000*/                   NOP ;
.L_x_0:
        /*0010*/               @P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0020*/                   FADD R1, R1, R2 ;
        /*0030*/                   BRA.U UP0, `(.L_x_1) ;
        /*0040*/                   EXIT ;
"""
    assert inspect_sass(text).loop_counts == {"FADD": 1, "BRA": 1}


def test_where_threads_meet_again():
    text = """
.text.k:
        /*0000*/                   BSSY B0, `(.L_x_1) ;
        /*0010*/               @P0 BRA `(.L_x_0) ;
        /*0020*/                   BSYNC B0 ;
.L_x_0:
        /*0030*/                   BRX R2 -0x40 (*"BRANCH_TARGETS .L_x_1,.L_x_2"*) ;
.L_x_1:
        /*0040*/                   EXIT ;
.L_x_2:
        /*0050*/                   EXIT ;
        /*0060*/                   NOP ;
"""
    flow = control_flow(parse_sass(text)[0])
    assert [i.address for i in flow.instructions] == [0, 0x10, 0x20, 0x30, 0x40, 0x50]
    unknown = control_flow(parse_sass(text.replace("BRANCH_TARGETS", "").replace(".L_x_1,.L_x_2", ""))[0])
    assert len(unknown.instructions) == 7, "an indirect jump may go anywhere"


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("HMMA.16816.F32.BF16 R8, R4, R12, R8 ;", of.TENSOR),
        ("HGMMA.64x176x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;", of.TENSOR),
        ("UTMALDG.2D [UR12], [UR6] ;", of.MEMORY),
        ("LOP3.LUT R192, R125, R8, RZ, 0xfc, !PT ;", of.LOGIC),
        ("IMAD.SHL.U32 R191, R191, 0x2, RZ ;", of.LOGIC),
        ("IMAD.WIDE.U32 R2, R3, c[0x0][0x188], R204 ;", of.LOGIC),
        ("IMAD R2, R3, R4, RZ ;", of.LOGIC),
        ("MOV R200, R9 ;", of.COPIES),
        ("IMAD.MOV.U32 R201, RZ, RZ, R11 ;", of.COPIES),
        ("IMAD.U32 R21, RZ, RZ, UR22 ;", of.COPIES),
        ("MOV R185, 0xff800000 ;", of.CONSTANTS),
        ("IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;", of.CONSTANTS),
        ("HFMA2.MMA R18, -RZ, RZ, 1.875, 0 ;", of.CONSTANTS),
        ("HFMA2.MMA R18, -RZ, RZ, 0, 0 ;", of.ZEROING),
        ("IMAD.MOV.U32 R199, RZ, RZ, RZ ;", of.ZEROING),
        ("UMOV UR4, URZ ;", of.ZEROING),
        ("CS2R R194, SRZ ;", of.ZEROING),
        ("CS2R R2, SR_CLOCKLO ;", of.CONSTANTS),
        ("HFMA2 R18, R2, R3, R4 ;", of.FLOAT),
        ("MUFU.EX2 R3, R4 ;", of.SPECIAL_FUNCTION),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR15+0xf000], R3 ;", of.BARRIERS),
        ("DEPBAR.LE SB0, 0x0 ;", of.BARRIERS),
        ("FROBNICATE R1 ;", of.OTHER),
        ("@!PT LDS RZ, [RZ] ;", of.OTHER),  # never runs
    ],
)
def test_purposes(text, group):
    assert of.purpose(one(text)) == group


def test_no_mnemonic_has_two_purposes():
    listed = [name for names in of.GROUPS.values() for name in names.split()]
    assert len(listed) == len(set(listed))
