"""What an attention problem asks for beyond the plain product: each feature costs a kernel only where it is used."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from warploom.core.dtypes import F32_MAX
from warploom.core.errors import ProblemError

Window = tuple[int | None, int | None]
"""Keys that a query sees to the left and to the right of its own; None: all."""
MOST_SCALE = F32_MAX / math.log2(math.e)
"""The largest scale whose product with log2(e) is a float32."""
CAPS = 2 * math.log2(math.e) / F32_MAX, F32_MAX / 2
"""The smallest and the largest soft cap whose tanh a float32 kernel can form."""


class HeadSizes:
    """What has the ``head_dim`` of Q and K, and the ``v_dim`` of V and O: 0 where it is the same."""

    head_dim: int
    v_dim: int

    @property
    def value_dim(self) -> int:
        """Elements per head of V and O."""
        return self.v_dim or self.head_dim


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """What every problem and kernel of attention asks of the scores, beside its ``window``.

    ``scale`` None is 1/√head_dim; ``softcap`` c replaces a score s by c·tanh(s/c). ``lse``: log-sum-exps are written.
    ``sinks``: each query head has a logit that joins its rows' sums of exponentials.
    """

    scale: float | None = None
    softcap: float | None = None
    lse: bool = False
    sinks: bool = False

    @property
    def asked(self) -> dict[str, Any]:
        """These and the window, by name: for another problem, or the kernel, of which the same is asked."""
        return {name: getattr(self, name) for name in ("window", "scale", "softcap", "lse", "sinks")}


@dataclass(frozen=True)
class AttentionFeatures(ScoreOptions):
    """Trace-time features of a kernel.

    A query row i sees the keys j with ``i + offset - window[0] <= j <= i + offset + window[1]``, where offset =
    kv_len - q_len aligns the last query with the last key (as FlashAttention-2 does); None leaves a side open, and
    causal is ``(None, 0)``. ``ragged_q``/``ragged_kv``: the lengths are no multiples of the tiles. ``group``: query
    heads per key head.
    """

    window: Window = (None, None)
    ragged_q: bool = False
    ragged_kv: bool = False
    group: int = 1

    def __post_init__(self) -> None:
        for name, side in zip(("left", "right"), self.window, strict=True):
            if side is not None and side < 0:
                raise ProblemError(f"the window's {name} side is {side}; give a count of keys from 0, or None")
        if self.scale is not None and not abs(self.scale) <= MOST_SCALE:
            raise ProblemError(f"scale must be a finite float32 within ±{MOST_SCALE:.3g}, not {self.scale}")
        least, most = CAPS
        if self.softcap is not None and not least <= self.softcap <= most:
            raise ProblemError(
                f"softcap must be positive and finite, from {least:.2g} to {most:.2g}, not {self.softcap}; None leaves "
                "scores uncapped"
            )

    def softmax_scale(self, head_dim: int) -> float:
        """The factor of the scores; 0 where it is 0 in float32, which times a masked score would be NaN."""
        scale = 1.0 / math.sqrt(head_dim) if self.scale is None else self.scale
        return scale if np.float32(scale) else 0.0

    @property
    def windowed(self) -> bool:
        """Whether rows see different keys."""
        return self.window != (None, None)

    @property
    def by_row(self) -> bool:
        """Whether later rows see more keys."""
        left, right = self.window
        return right is not None and left is None

    @property
    def masked(self) -> bool:
        """Whether some scores are masked, so that a row may have none left."""
        return self.windowed or self.ragged_kv


PLAIN = AttentionFeatures()
