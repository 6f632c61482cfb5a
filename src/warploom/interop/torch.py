"""``warploom::attention`` as a PyTorch operator: what ``torch.compile`` and ``torch.export`` see of a call.

:func:`warploom.attention` takes this way by itself while a graph is traced, where tensors have no memory to point
at. Eager calls do not: the dispatcher costs more than the rest of the call. The operators allocate through PyTorch,
wait for nothing and work on the current stream, so compiled code may run in CUDA graphs.

Source: PyTorch, "Custom Python Operators" (``torch.library.custom_op``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from warploom.core.errors import ProblemError
from warploom.kernels.attention.choice import parse_config
from warploom.kernels.attention.problem import AnyConfig
from warploom.ops.attention import attention

if TYPE_CHECKING:
    from warploom.ops.attention import Layout, Window

_SEQUENCE_AXIS = {"bshd": 1, "bhsd": 2}


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    window: tuple[int | None, int | None],
    softcap: float | None,
    return_lse: bool,
    layout: str,
    config: str | None,
) -> Any:
    chosen = None if config is None else parse_config(config)
    with torch.no_grad():  # the operator's own backward answers for gradients
        return attention(
            q, k, v, causal=causal, scale=scale, window=window, softcap=softcap, return_lse=return_lse,
            layout=layout, config=chosen,  # pyright: ignore[reportArgumentType] - attention() checks the word
        )  # fmt: skip


# custom_op reads the signature: the annotations must be what its schema knows, evaluated at run time.
@torch.library.custom_op("warploom::attention", mutates_args=(), device_types=("cpu", "cuda"))
def attention_operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float | None = None,
    layout: str = "bshd",
    config: str | None = None,
) -> torch.Tensor:
    """The output of :func:`warploom.attention`; ``config`` in the notation that ``str(config)`` prints."""
    window = window_left, window_right
    return _run(q, k, v, causal, scale, window, softcap, False, layout, config)


@torch.library.custom_op("warploom::attention_lse", mutates_args=(), device_types=("cpu", "cuda"))
def attention_lse_operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float | None = None,
    layout: str = "bshd",
    config: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the log-sum-exp (float32, (batch, heads, q_len)) of :func:`warploom.attention`."""
    window = window_left, window_right
    return _run(q, k, v, causal, scale, window, softcap, True, layout, config)


def _empty_output(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(q.shape)  # row-major, whatever the strides of q


@attention_operator.register_fake
def _(q: torch.Tensor, *_args: Any, **_options: Any) -> torch.Tensor:
    return _empty_output(q)


@attention_lse_operator.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float | None = None,
    layout: str = "bshd",
    config: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    sequence = _SEQUENCE_AXIS.get(layout, 1)
    rows = q.shape[0], q.shape[3 - sequence], q.shape[sequence]
    return _empty_output(q), q.new_empty(rows, dtype=torch.float32)


def _no_backward(_context: Any, *_gradients: Any) -> Any:
    raise ProblemError(
        "warploom.attention has no backward pass yet: call it under torch.no_grad(), or pass tensors that require no "
        "gradient (tensor.detach())"
    )


attention_operator.register_autograd(_no_backward)
attention_lse_operator.register_autograd(_no_backward)


def traced_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None,
    window: Window | None,
    softcap: float | None,
    return_lse: bool,
    layout: Layout,
    config: AnyConfig | str | None,
) -> Any:
    """:func:`warploom.attention` inside a traced graph: one call of an operator, no graph break."""
    left, right = (None, None) if window is None else window
    notation = None if config is None else str(config)
    operators: Any = torch.ops.warploom
    chosen = operators.attention_lse if return_lse else operators.attention
    return chosen(q, k, v, causal, scale, left, right, softcap, layout, notation)
