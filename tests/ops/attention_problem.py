"""Problems of ``attention`` and its gradients: random arrays in any layout and stride, and which scores count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from warploom.core.dtypes import DType
from warploom.kernels.attention.scores import seen_of


@dataclass(frozen=True)
class Problem:
    """What is asked; ``stride`` is the step through a longer array at which positions lie."""

    q_len: int
    kv_len: int
    batch: int
    kv_heads: int
    group: int
    head_dim: int
    dtype: DType
    causal: bool = False
    window: Any = None
    softcap: float | None = None
    scale: float | None = None
    layout: str = "bshd"
    stride: int = 1
    sinks: bool = False
    v_dim: int = 0
    lse_gradient: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the calls."""
        return {name: getattr(self, name) for name in ("causal", "window", "softcap", "scale", "layout")}

    @property
    def heads(self) -> int:
        """Of queries."""
        return self.kv_heads * self.group

    @property
    def logits(self) -> Any:
        """The sinks, if there are any: one that is none, and others around the scores."""
        return np.array([-np.inf, 1.5, -1.0, 9.0, 0.0, 3.0], np.float32)[: self.heads] if self.sinks else None

    def array(self, seed: int, length: int, heads: int, cols: int = 0) -> Any:
        """Random numbers in the layout; a view of a longer array where ``stride`` is 2."""
        shape = [self.batch, length * self.stride, heads, cols or self.head_dim]
        whole = np.random.default_rng(seed).standard_normal(shape, np.float32).astype(self.dtype.numpy)
        return self.turned(whole[:, :: self.stride], of="bshd")

    def inputs(self) -> tuple[Any, Any, Any]:
        """Q, K and V."""
        k, v = (self.array(seed, self.kv_len, self.kv_heads, cols) for seed, cols in ((2, 0), (3, self.v_dim)))
        return self.array(1, self.q_len, self.heads), k, v

    def turned(self, x: Any, of: str = "bhsd") -> Any:
        """From a layout into the problem's own, and back."""
        return x if self.layout == of else x.swapaxes(1, 2)

    @property
    def seen(self) -> Any:
        """Which scores count, (q_len, kv_len)."""
        left, right = self.window or (None, None)
        if self.causal:
            right = 0 if right is None else min(right, 0)
        return seen_of(self.q_len, self.kv_len, (left, right))
