"""``warploom::matmul`` as a PyTorch operator: what ``torch.compile`` and ``torch.export`` see of a product.

:func:`warploom.matmul` takes this way by itself while a graph is traced, where tensors have no memory to point at.
An operator's arguments are tensors and numbers, so an ``epilogue`` (a Python function) cannot be part of it: such calls
are refused while tracing.

Source: PyTorch, "Custom Python Operators" (``torch.library.custom_op``).
"""

from __future__ import annotations

from typing import Any

import torch

from warploom.core.dtypes import dtype_of
from warploom.core.errors import ProblemError
from warploom.kernels.gemm.choice import parse_config
from warploom.kernels.gemm.problem import AnyGemmConfig
from warploom.ops.matmul import matmul

_KINDS = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


# custom_op reads the signature: the annotations must be what its schema knows, evaluated at run time.
@torch.library.custom_op("warploom::matmul", mutates_args=(), device_types=("cpu", "cuda"))
def matmul_operator(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: str | None = None,
    accumulate: str = "f32",
    alpha: float = 1.0,
    config: str | None = None,
) -> torch.Tensor:
    """alpha · a·b + bias by :func:`warploom.matmul`; ``config`` in the notation that ``str(config)`` prints."""
    chosen = None if config is None else parse_config(config)
    with torch.no_grad():  # the operator's own backward answers for gradients
        return matmul(a, b, out_dtype=out_dtype, accumulate=accumulate, bias=bias, alpha=alpha, config=chosen)


@matmul_operator.register_fake
def _(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: str | None = None,
    accumulate: str = "f32",
    alpha: float = 1.0,
    config: str | None = None,
) -> torch.Tensor:
    if a.dim() < 2 or b.dim() < 2:
        raise ProblemError(f"matmul takes matrices, not shapes {tuple(a.shape)} and {tuple(b.shape)}: add a dimension")
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return a.new_empty((*batch, a.shape[-2], b.shape[-1]), dtype=_KINDS[out_dtype] if out_dtype else a.dtype)


def _no_backward(_context: Any, *_gradients: Any) -> Any:
    raise ProblemError(
        "warploom.matmul has no backward pass yet: call it under torch.no_grad(), or pass tensors that require no "
        "gradient (tensor.detach())"
    )


matmul_operator.register_autograd(_no_backward)


def traced_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out_dtype: Any,
    accumulate: Any,
    bias: torch.Tensor | None,
    alpha: float,
    config: AnyGemmConfig | str | None,
    refused: tuple[str, ...],
) -> torch.Tensor:
    """:func:`warploom.matmul` inside a traced graph: one call of an operator, no graph break.

    Raises ProblemError for arguments (``refused``: their names) that no operator takes.
    """
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
