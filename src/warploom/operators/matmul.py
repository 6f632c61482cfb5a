"""``warploom::matmul`` as a PyTorch operator: what ``torch.compile`` and ``torch.export`` see of a product.

:func:`warploom.matmul` takes this way by itself while a graph is traced, where tensors have no memory to point at.
An operator's arguments are tensors and numbers, so an ``epilogue`` (a Python function) cannot be part of it: such calls
are refused while tracing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from warploom.core.dtypes import dtype_of
from warploom.core.errors import ProblemError
from warploom.kernels.gemm.choice import parse_config
from warploom.kernels.gemm.features import EpilogueFunction
from warploom.kernels.gemm.problem import AnyGemmConfig
from warploom.operators.registration import define
from warploom.ops import matmul as eager

_KINDS = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
_SCHEMA = (
    "(Tensor a, Tensor b, Tensor? bias=None, str? out_dtype=None, str accumulate='f32', float alpha=1.0, "
    "str? config=None) -> Tensor"
)


def _run(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: str | None = None,
    accumulate: str = "f32",
    alpha: float = 1.0,
    config: str | None = None,
) -> torch.Tensor:
    chosen = None if config is None else parse_config(config)
    return eager.matmul(a, b, out_dtype=out_dtype, accumulate=accumulate, bias=bias, alpha=alpha, config=chosen)


def _fake(
    a: torch.Tensor, b: torch.Tensor, _bias: torch.Tensor | None = None, out_dtype: str | None = None, *_: Any
) -> torch.Tensor:
    if a.dim() < 2 or b.dim() < 2:
        raise ProblemError(f"matmul takes matrices, not shapes {tuple(a.shape)} and {tuple(b.shape)}: add a dimension")
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return a.new_empty((*batch, a.shape[-2], b.shape[-1]), dtype=_KINDS[out_dtype] if out_dtype else a.dtype)


matmul_operator = define("matmul", _SCHEMA, _run, _fake)
"""alpha · a·b + bias by :func:`warploom.matmul`; ``config`` in the notation that ``str(config)`` prints."""


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out_dtype: Any = None,
    accumulate: Any = "f32",
    bias: torch.Tensor | None = None,
    epilogue: EpilogueFunction | None = None,
    extras: Sequence[torch.Tensor] = (),
    alpha: float = 1.0,
    out: torch.Tensor | None = None,
    config: AnyGemmConfig | str | None = None,
) -> torch.Tensor:
    """:func:`warploom.matmul` inside a traced graph: one call of an operator, no graph break.

    Raises ProblemError for arguments that no operator takes: ``epilogue``, ``extras`` and ``out``.
    """
    given = {"epilogue": epilogue is not None, "extras": bool(extras), "out": out is not None}
    refused = [name for name, is_given in given.items() if is_given]
    if refused:
        raise ProblemError(
            f"warploom.matmul takes no {', '.join(refused)} under torch.compile: leave it to PyTorch there "
            "(torch.compile fuses what follows on its own), or call matmul outside the compiled function "
            "(torch.compiler.disable)"
        )
    words = None if out_dtype is None else dtype_of(out_dtype).name, dtype_of(accumulate).name
    notation = None if config is None else str(config)
    operators: Any = torch.ops.warploom
    return operators.matmul(a, b, bias, *words, alpha, notation)
