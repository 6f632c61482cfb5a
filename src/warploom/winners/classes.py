"""Classes of problems that share a fastest configuration: what must agree, and what may be a little off."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from warploom.kernels.attention.problem import AttentionProblem
from warploom.kernels.gemm.problem import GemmProblem

Fixed = tuple[tuple[str, str | int], ...]
Sizes = tuple[tuple[str, int], ...]

OTHER_DTYPE = 0.5
"""The distance between problems that differ in their 16-bit type alone: the tensor cores run both at one speed."""


@dataclass(frozen=True)
class ProblemClass:
    """One class of problems of a kernel family.

    ``fixed`` must agree for a winner to be of use; ``sizes`` are base-2 logarithms, rounded, and may be near.
    """

    family: str
    dtype: str
    fixed: Fixed
    sizes: Sizes

    def __str__(self) -> str:
        fixed = " ".join(f"{name}={value}" for name, value in self.fixed)
        sizes = " ".join(f"{name}=2^{value}" for name, value in self.sizes)
        return f"{self.family} {self.dtype} {fixed} {sizes}"

    def distance(self, other: ProblemClass) -> float | None:
        """How far ``other`` is: 0 for the same class, None where its winner says nothing about this one.

        A factor of 2 in a size counts 1; in the number of independent pieces, which only fills the GPU, a half.
        """
        if (self.family, self.fixed) != (other.family, other.fixed) or len(self.sizes) != len(other.sizes):
            return None
        total = 0.0 if self.dtype == other.dtype else OTHER_DTYPE
        for (name, mine), (other_name, theirs) in zip(self.sizes, other.sizes, strict=True):
            if name != other_name:
                return None
            total += abs(mine - theirs) * (0.5 if name in _ONLY_COUNTS else 1.0)
        return total

    def json(self) -> dict[str, Any]:
        """For a file; :meth:`from_json` reads it."""
        return {"family": self.family, "dtype": self.dtype, "fixed": dict(self.fixed), "sizes": dict(self.sizes)}

    @classmethod
    def from_json(cls, value: Any) -> ProblemClass:
        """From :meth:`json`. Raises KeyError, TypeError, ValueError or AttributeError for anything else."""
        sizes = tuple((str(name), int(size)) for name, size in value["sizes"].items())
        if any(abs(size) > 64 for _, size in sizes):
            raise ValueError("sizes are logarithms of 64-bit numbers")
        fixed = tuple((str(name), v if isinstance(v, int) else str(v)) for name, v in value["fixed"].items())
        return cls(str(value["family"]), str(value["dtype"]), fixed, sizes)


_ONLY_COUNTS = frozenset({"batch_heads", "group", "batch"})


def bucket(size: int, least: int, most: int) -> int:
    """log2 of ``size``, rounded, from ``least`` to ``most``: beyond them nothing changes."""
    return min(max(round(math.log2(max(size, 1))), least), most)


def attention_class(problem: AttentionProblem) -> ProblemClass:
    """The class of an attention problem.

    head_dim counts as the width of the shared tiles (64, 128 or 256): 96 runs as 128 does.
    """
    left, right = problem.window
    mask = "full" if problem.window == (None, None) else "causal" if (left, right) == (None, 0) else "window"
    width = max(64, 1 << (problem.head_dim - 1).bit_length())
    return ProblemClass(
        "attention",
        problem.dtype.name,
        (("head_dim", width), ("mask", mask), ("softcap", int(problem.softcap is not None))),
        (
            ("q_len", bucket(problem.q_len, 0, 14)),
            ("kv_len", bucket(problem.kv_len, 4, 14)),
            ("batch_heads", bucket(problem.batch * problem.heads, 0, 10)),
            ("group", bucket(problem.heads // problem.kv_heads, 0, 4)),
        ),
    )


def gemm_class(problem: GemmProblem) -> ProblemClass:
    """The class of a matrix product.

    What must agree: the layout in the words of BLAS (n: row-major, t: transposed), the accumulators, the width of C's
    elements, and how lines of A and B are aligned, which decides how they are copied.
    """
    layout = ("n" if problem.a.k_contiguous else "t") + ("t" if problem.b.k_contiguous else "n")
    return ProblemClass(
        "gemm",
        problem.dtype.name,
        (
            ("layout", layout),
            ("accumulate", problem.accumulate.name),
            ("out_bits", problem.out_dtype.bits),
            ("aligned", min(problem.a.chunk, problem.b.chunk)),
        ),
        (
            ("m", bucket(problem.m, 4, 15)),
            ("n", bucket(problem.n, 4, 17)),
            ("k", bucket(problem.k, 5, 16)),
            ("batch", bucket(problem.batch, 0, 10)),
        ),
    )
