"""What can be inspected: a rung of attention, a cubin, a file of SASS."""

from __future__ import annotations

from pathlib import Path

from warploom.core.errors import ConfigError
from warploom.inspect.report import SassReport, inspect_cubin, inspect_sass
from warploom.ir.program import Program
from warploom.kernels.attention.hopper_config import HopperConfig
from warploom.kernels.attention.problem import AnyConfig
from warploom.ops.attention import trace, trace_hopper

STATIC_STRIDE_HEADS = 16
"""Heads of the problem whose row strides are traced into a configuration with static strides (the seeds' 16)."""


def attention_program(config: AnyConfig) -> Program:
    """The Program of an attention configuration: no mask, Q, K, V and O with the same strides."""
    if isinstance(config, HopperConfig):
        return trace_hopper(config)
    row = STATIC_STRIDE_HEADS * config.head_dim
    return trace(config, row_strides=(row,) * 4 if config.static_strides else None)


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
