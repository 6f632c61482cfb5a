"""SASS: disassemble a kernel, group and count its instructions, and compare two kernels, without a GPU."""

from warploom.cuda.occupancy import Occupancy, occupancy
from warploom_lab.inspect.difference import Change, Comparison, compare
from warploom_lab.inspect.report import SassReport, inspect_cubin, inspect_program, inspect_sass
from warploom_lab.inspect.sass import Listing, SassInstruction, parse_sass

__all__ = [
    "Change",
    "Comparison",
    "Listing",
    "Occupancy",
    "SassInstruction",
    "SassReport",
    "compare",
    "inspect_cubin",
    "inspect_program",
    "inspect_sass",
    "occupancy",
    "parse_sass",
]
