"""``warploom::matmul`` as a PyTorch operator: what ``torch.compile`` and ``torch.export`` see of a product.

:func:`warploom.matmul` takes this way by itself while a graph is traced, where tensors have no memory to point at.
An operator's arguments are tensors and numbers, so an ``epilogue`` (a Python function) cannot be part of it: such calls
break the graph (:mod:`warploom.operators.untraced`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from warploom.core.dtypes import dtype_of
from warploom.core.errors import ProblemError
from warploom.kernels.matmul.features import EpilogueFunction
from warploom.kernels.matmul.problem import MatmulConfig
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
    return eager.matmul(a, b, out_dtype=out_dtype, accumulate=accumulate, bias=bias, alpha=alpha, config=config)


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
    config: MatmulConfig | str | None = None,
) -> torch.Tensor:
    """:func:`warploom.matmul` inside a traced graph: one call of an operator.

    With arguments that no operator takes (``epilogue``, ``extras`` and ``out``) the graph is broken and the call runs
    as it is; with ``fullgraph=True`` PyTorch raises an error that says what to do instead.
    """
    if epilogue is not None or extras or out is not None:
        from warploom.operators import untraced

        return untraced.matmul(
            a, b, out_dtype=out_dtype, accumulate=accumulate, bias=bias, epilogue=epilogue, extras=extras, alpha=alpha,
            out=out, config=config,
        )  # fmt: skip
    words = None if out_dtype is None else dtype_of(out_dtype).name, dtype_of(accumulate).name
    notation = None if config is None else str(config)
    operators: Any = torch.ops.warploom
    return operators.matmul(a, b, bias, *words, alpha, notation)
