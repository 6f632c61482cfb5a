"""What can be inspected: a rung of attention or of gemm, a cubin, a file of SASS."""

from __future__ import annotations

from pathlib import Path

from warploom.core.errors import ConfigError
from warploom.ir.program import Program
from warploom.kernels.attention.problem import ArrayStrides, AttentionConfig, AttentionProblem, Even
from warploom.kernels.matmul.problem import MatmulConfig, contiguous_problem
from warploom_lab.inspect.report import SassReport, inspect_cubin, inspect_sass

HEADS, LENGTH = 16, 4096
"""Of the attention problem that is inspected (the seeds' 16 heads): whole tiles, and row strides to trace."""


def attention_program(config: AttentionConfig) -> Program:
    """The Program of an attention configuration: no mask, Q, K, V and O with the same strides."""
    problem = AttentionProblem(1, HEADS, HEADS, Even(LENGTH, LENGTH), config.head_dim, config.dtype)
    return config.calls(problem, ArrayStrides.contiguous(problem), 1)[0].source.program


SQUARE = 4096
"""Extents of the product whose kernel is inspected: whole tiles, and the stride of a configuration that traces it."""


def gemm_program(config: MatmulConfig) -> Program:
    """The Program of a matmul configuration for row-major matrices and no epilogue; of a split K, that of its parts."""
    problem = contiguous_problem(SQUARE, SQUARE, SQUARE, config.dtype, config.accumulate)
    return config.calls(problem, 1)[0].source.program


def inspect_file(path: Path, kernel: str | None = None) -> SassReport:
    """The report of a kernel in a file: a cubin (an ELF file, whatever its name) or SASS text.

    Raises ConfigError where it is neither, OSError where it cannot be read.
    """
    content = path.read_bytes()
    if content[:4] == b"\x7fELF":
        return inspect_cubin(content, kernel)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is neither a cubin nor SASS text (nvdisasm -c, cuobjdump -sass)") from None
    return inspect_sass(text, kernel)
