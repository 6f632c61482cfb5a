"""warploom: tensor-core kernels that a person can write, check and understand in Python.

``attention(q, k, v)`` and ``matmul(a, b)`` run the kernels that come with it, ``plan`` tells what would run. The
language to write kernels in is :mod:`warploom.lang`, the emulator that checks them :mod:`warploom.emulate`; ``launch``
runs them. Importing this package loads neither a GPU library nor a framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from warploom.core import above
from warploom.operators import operator_of

__version__ = "0.1.0"

if TYPE_CHECKING:
    from warploom.checking.foreign import CheckedPtx, check_cuda, check_ptx, check_triton
    from warploom.checking.sequence import LaunchSequence, sequence
    from warploom.core.uninitialised import uninitialised
    from warploom.ops.attention import (
        AttentionBackwardPlan,
        AttentionPlan,
        attention,
        attention_backward,
        plan,
        plan_attention_backward,
    )
    from warploom.ops.attention_paged import AttentionPagedPlan, append_to_cache, attention_paged, plan_attention_paged
    from warploom.ops.attention_varlen import attention_varlen
    from warploom.ops.launch import launch
    from warploom.ops.loss import linear_cross_entropy, plan_linear_cross_entropy
    from warploom.ops.matmul import MatmulPlan, matmul, plan_matmul
    from warploom.ops.reduce import ReducePlan, matmul_reduce, plan_matmul_reduce
    from warploom.ops.warmup import warmup


def _launch(*given: Any, **configuration: Any) -> None:
    from warploom.ops.launch import launch

    launch(*given, **configuration)


# The packages below call what stands on them, and cannot import it.
above.operator_of, above.launch = operator_of, _launch

_NAMES = {
    "ops.attention": "attention plan AttentionPlan attention_backward plan_attention_backward AttentionBackwardPlan",
    "ops.attention_paged": "attention_paged plan_attention_paged AttentionPagedPlan append_to_cache",
    "ops.attention_varlen": "attention_varlen",
    "ops.matmul": "matmul plan_matmul MatmulPlan",
    "ops.reduce": "matmul_reduce plan_matmul_reduce ReducePlan",
    "ops.loss": "linear_cross_entropy plan_linear_cross_entropy",
    "ops.launch": "launch",
    "ops.warmup": "warmup",
    "checking.foreign": "check_ptx CheckedPtx check_cuda check_triton",
    "checking.sequence": "sequence LaunchSequence",
    "core.uninitialised": "uninitialised",
}
"""Module of the package → the public names in it."""
_PUBLIC = {name: f"warploom.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "AttentionBackwardPlan",
    "AttentionPagedPlan",
    "AttentionPlan",
    "CheckedPtx",
    "LaunchSequence",
    "MatmulPlan",
    "ReducePlan",
    "append_to_cache",
    "attention",
    "attention_backward",
    "attention_paged",
    "attention_varlen",
    "check_cuda",
    "check_ptx",
    "check_triton",
    "launch",
    "linear_cross_entropy",
    "matmul",
    "matmul_reduce",
    "plan",
    "plan_attention_backward",
    "plan_attention_paged",
    "plan_linear_cross_entropy",
    "plan_matmul",
    "plan_matmul_reduce",
    "sequence",
    "uninitialised",
    "warmup",
]


if not TYPE_CHECKING:  # for a type checker the names above are all there is

    def __getattr__(name: str) -> Any:
        """Load a public name on first use, so that ``import warploom`` stays quick."""
        if name not in _PUBLIC:
            raise AttributeError(f"module 'warploom' has no attribute {name!r}; it has {', '.join(_PUBLIC)}")
        from importlib import import_module

        value = globals()[name] = getattr(import_module(_PUBLIC[name]), name)
        return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
