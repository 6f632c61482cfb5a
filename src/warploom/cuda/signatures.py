"""The kernels of a CUDA source, as its text shows them: names, parameters, what these point to."""

from __future__ import annotations

import re
from typing import NamedTuple

from warploom.core.dtypes import DType, bf16, f16, f32, f64, s16, s32, s64, u16, u32, u64

_IGNORED = re.compile(r"/\*.*?\*/|//[^\n]*|\b__\w+__\s*\([^()]*\)", re.DOTALL)
"""Comments, and attributes with arguments (``__launch_bounds__(128)``)."""
_KERNEL = re.compile(r"__global__[^;{}()]*?(\w+)\s*\(([^()]*)\)")
_PARAMETER = re.compile(r"\w.*[\s*&>](\w+)\s*(?:\[\s*\])?\s*", re.DOTALL)
_TYPE_WORDS = {"bool", "char", "const", "double", "float", "half", "int", "long", "short", "signed", "unsigned"}
_NOT_OF_A_TYPE = {"const", "volatile", "restrict", "__restrict", "__restrict__", "__grid_constant__"}
_C_NUMBERS = {
    "float": f32,
    "double": f64,
    "short": s16,
    "unsigned short": u16,
    "int": s32,
    "unsigned": u32,
    "unsigned int": u32,
    "long long": s64,
    "unsigned long long": u64,
    "half": f16,
    "__half": f16,
    "__nv_bfloat16": bf16,
} | {dtype.numpy.name + "_t": dtype for dtype in (s16, u16, s32, u32, s64, u64)}
"""Names of numbers in C++. Bytes are missing: they stand for memory of any type."""


class CudaParameter(NamedTuple):
    """A kernel's parameter: its name, and the number type that it points to, None where the text does not tell."""

    name: str
    pointed: DType | None


def kernels_in(source: str) -> dict[str, tuple[CudaParameter, ...]]:
    """The kernels of a source and their parameters, as far as a search for ``__global__`` shows them.

    A kernel whose parameters cannot be read, and one that is there twice with others, has none.
    """
    found: dict[str, tuple[CudaParameter, ...]] = {}
    for name, text in _KERNEL.findall(_IGNORED.sub(" ", source)):
        parts = [part.strip() for part in text.split(",")]
        matches = [_PARAMETER.fullmatch(part) for part in parts]
        parameters = tuple(
            CudaParameter(match[1], _pointed(part[: match.start(1)]))
            for part, match in zip(parts, matches, strict=True)
            if match and match[1] not in _TYPE_WORDS
        )
        readable = len({p.name for p in parameters}) == len(matches)
        same = [p.name for p in found.get(name, parameters)] == [p.name for p in parameters]
        found[name] = parameters if readable and same else ()
    return found


def _pointed(written: str) -> DType | None:
    """The number type that a parameter's type, as it is written, points to."""
    words = [word for word in re.findall(r"\w+|[^\w\s]", written) if word not in _NOT_OF_A_TYPE]
    return _C_NUMBERS.get(" ".join(words[:-1])) if words[-1:] == ["*"] else None


def plain_name(name: str) -> str:
    """A kernel's name without its namespace and template arguments."""
    return name.partition("<")[0].rpartition("::")[2].strip()
