"""The options of attention's scores. Each is declared here once: check, formulas, gradient, reference, names elsewhere.

A score scale · q·k goes through the options that change scores, in the order of :data:`OPTIONS`; those that the window
hides count as -inf; the softmax follows, to whose row sums a sink may be added. Problems, kernels, choices and the
references in float64 ask the list of options of a problem, and name none. A new option is a class here, a field of
:class:`ScoreOptions`, and a parameter of the public functions.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from warploom.core.dtypes import F32_MAX
from warploom.core.errors import ProblemError
from warploom.kernels.source import KernelCall, KernelSource
from warploom.tile.mask import Visible

if TYPE_CHECKING:
    from collections.abc import Mapping

    from warploom.core.dtypes import DType
    from warploom.lang import Kernel, Traced

Window = tuple[int | None, int | None]
"""Keys that a query sees to the left and to the right of its own; None: all."""
MOST_SCALE = F32_MAX / math.log2(math.e)
"""The largest scale whose product with log2(e) is a float32."""
CAPS = 2 * math.log2(math.e) / F32_MAX, F32_MAX / 2
"""The smallest and the largest soft cap whose tanh a float32 kernel can form."""


@dataclass(frozen=True)
class HeadRows:
    """The query rows of a backward pass, as a launch that sums over the rows of each head finds them.

    ``shift`` and ``delta`` have ``tile[1]`` places for a block of ``tile[0]`` rows, and ``lengths`` tell how many rows
    there are: ``q_len`` of each of ``batches``, with ``plane`` places. Rows of packed sequences are counted by their
    places. ``strides`` are those of the arrays q and dq, which have ``rows`` of each sequence, of packed ones in all.
    """

    heads: int
    rows: int
    head_dim: int
    dtype: DType
    packed: bool
    tile: tuple[int, int]
    lengths: Mapping[str, int]
    strides: Mapping[str, int]


@dataclass(frozen=True)
class ScoreOption:
    """An option of a problem and its ``value``.

    The value of an option with an ``array`` is True: the array holds one float32 number for each query head. Kernels
    pass the number of a score's head to the formulas below, and None for an option without an array.
    """

    value: Any
    elsewhere: ClassVar[tuple[str, ...]] = ()
    """What other libraries call the option."""
    array: ClassVar[bool] = False
    changes: ClassVar[bool] = False
    """Whether kernels replace each score by :meth:`score`."""
    joins: ClassVar[bool] = False
    """Whether the number is one more logit of every row of its head, which has no value: it joins the row's sum."""

    def check(self) -> None:
        """Raise ProblemError for a value that no kernel computes with."""

    def score(self, k: Kernel, score: Traced, number: Traced | None) -> Traced:
        """The score after this option; ``score`` is the scaled one, after the options before this one."""
        raise NotImplementedError

    def slope(self, k: Kernel, exponent: Traced, number: Traced | None) -> Traced:
        """The derivative of :meth:`score`; ``exponent`` is log2(e) times the score that the softmax gets."""
        raise NotImplementedError

    def gradient(self, rows: HeadRows) -> KernelCall:
        """The launch that forms the gradient of the option's array, behind all other launches of a backward pass."""
        raise NotImplementedError

    @staticmethod
    def float64(scores: Any, value: Any) -> Any:
        """The scaled scores (…, q_len, kv_len) after this option, in float64 of NumPy or PyTorch."""
        return scores


class KeyWindow(ScoreOption):
    """A query sees the keys from ``window[0]`` before its own to ``window[1]`` behind it; causal is (None, 0).

    Query i stands at key i + kv_len - q_len, so that the last query stands at the last key (as in FlashAttention-2).
    :class:`warploom.tile.mask.Visible` has the predicate, which decides what blocks are visited and masked;
    :func:`seen_of` is the same in float64's reference.
    """

    elsewhere = "window_size", "sliding_window"

    def check(self) -> None:
        """Raise ProblemError for a side that is no count of keys."""
        for name, side in zip(("left", "right"), self.value, strict=True):
            if side is not None and side < 0:
                raise ProblemError(f"the window's {name} side is {side}; give a count of keys from 0, or None")


def seen_of(
    q_len: int, kv_len: int, window: Window = (None, None), *, rows: Any = slice(None), device: Any = None
) -> Any:
    """Which scores count, (rows, kv_len): the last query stands at the last key, and sees a window of keys around it.

    ``rows``: those of some queries alone. With a PyTorch ``device`` the result lies there, else it is NumPy's.
    """
    left, right = (math.inf if side is None else side for side in window)
    if device is None:
        query, key = np.arange(q_len), np.arange(kv_len)
    else:
        query, key = (sys.modules["torch"].arange(n, device=device) for n in (q_len, kv_len))
    ahead = key[None] - (query[rows][:, None] + (kv_len - q_len))
    return (ahead >= -left) & (ahead <= right)


class Scale(ScoreOption):
    """The factor of q·k, by default 1/√head_dim. Kernels fold it into the exponent where no option changes scores."""

    elsewhere = "softmax_scale", "sm_scale", "scaling"

    def check(self) -> None:
        """Raise ProblemError for a factor whose product with log2(e) is no float32."""
        if not abs(self.value) <= MOST_SCALE:
            raise ProblemError(f"scale must be a finite float32 within ±{MOST_SCALE:.3g}, not {self.value}")


class ScoreCap(ScoreOption):
    """A soft cap c replaces a score s by c·tanh(s/c).

    :meth:`slope` takes tanh from the score that the softmax gets, so no option that changes scores may follow this one.
    """

    elsewhere = ("logits_soft_cap",)
    changes = True

    def check(self) -> None:
        """Raise ProblemError for a cap whose tanh no float32 kernel can form."""
        least, most = CAPS
        if not least <= self.value <= most:
            raise ProblemError(
                f"softcap must be positive and finite, from {least:.2g} to {most:.2g}, not {self.value}; None leaves "
                "scores uncapped"
            )

    def score(self, k: Kernel, score: Traced, number: Traced | None) -> Traced:
        """The score c·tanh(s/c)."""
        from warploom.tile.softmax import capped

        return capped(k, score, self.value)

    def slope(self, k: Kernel, exponent: Traced, number: Traced | None) -> Traced:
        """The derivative 1 - tanh²."""
        from warploom.tile.softmax import capped_slope

        return capped_slope(k, exponent, self.value)

    @staticmethod
    def float64(scores: Any, value: Any) -> Any:
        """The scores c·tanh(s/c)."""
        tanh = np.tanh(scores / value) if isinstance(scores, np.ndarray) else (scores / value).tanh()
        return value * tanh


class Sinks(ScoreOption):
    """A logit s of each query head joins its rows' sums of exponentials.

    It is part of the log-sum-exp L, and so of P; it has no value, hence no dP: ds = -Σ e^(s - L)·delta over the rows of
    its head (delta as in :class:`.problem.BackwardProblem`).
    """

    elsewhere = "learnable_sink", "s_aux"
    array = True
    joins = True

    def gradient(self, rows: HeadRows) -> KernelCall:
        """The kernel that sums over the rows of a head."""
        source = KernelSource.of(
            "warploom.kernels.attention.device.scores:attention_backward_sinks",
            "attention_backward_sinks",
            tile=rows.tile,
        )
        arrays = "sinks", "shift", "delta", "dsinks"
        return KernelCall(source, (rows.heads, 1, 1), dict(rows.lengths), (), arrays)


OPTIONS: dict[str, type[ScoreOption]] = {"window": KeyWindow, "scale": Scale, "softcap": ScoreCap, "sinks": Sinks}
"""All options by their names; those that change scores do so in this order."""
HEAD_ARRAYS = tuple(name for name, kind in OPTIONS.items() if kind.array)
"""The names of the options with an array, of shape (heads,)."""
NUMBERS = tuple(name for name, kind in OPTIONS.items() if not kind.array)
"""The names of the others."""


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """The options of a problem of attention, or of a kernel; and ``lse``: whether log-sum-exps are written."""

    window: Window = (None, None)
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    lse: bool = False

    def check(self) -> None:
        """Raise ProblemError for a value that no kernel computes with."""
        for option in self.options.values():
            option.check()

    @property
    def options(self) -> dict[str, ScoreOption]:
        """The options that differ from their defaults, by name."""
        values = {name: getattr(self, name) for name in OPTIONS}
        return {name: OPTIONS[name](x) for name, x in values.items() if x != getattr(ScoreOptions, name)}

    @property
    def changes(self) -> dict[str, ScoreOption]:
        """The options that change single scores, in order."""
        return {name: x for name, x in self.options.items() if x.changes}

    @property
    def sink(self) -> str:
        """The name of the option whose logits join the rows' sums; empty if there is none."""
        return next((name for name, x in self.options.items() if x.joins), "")

    @property
    def asked(self) -> dict[str, Any]:
        """All options by name, and ``lse``: what another problem or a kernel is made with."""
        return {x.name: getattr(self, x.name) for x in fields(ScoreOptions)}

    @property
    def numbers(self) -> dict[str, Any]:
        """The options without an array by name, as the public functions take them."""
        return {name: getattr(self, name) for name in NUMBERS}

    @property
    def head_arrays(self) -> tuple[str, ...]:
        """The arrays with a number for each query head."""
        return tuple(name for name, x in self.options.items() if x.array)

    @property
    def changing_arrays(self) -> tuple[str, ...]:
        """The arrays of options that change single scores, which every kernel that forms scores takes."""
        return tuple(name for name, x in self.options.items() if x.array and x.changes)

    @property
    def of_gradients(self) -> dict[str, bool]:
        """The changes for kernels of a backward pass: log-sum-exps that they are given hold what joins rows' sums."""
        return {"lse": False} | {name: False for name, x in self.options.items() if x.joins}

    @property
    def tuned_by(self) -> dict[str, Any]:
        """The facts that a tuned configuration depends on: the form of the mask, and whether options change scores."""
        mask = {(None, None): "full", (None, 0): "causal"}.get(self.window, "window")
        return {"mask": mask, "softcap": bool(self.changes)}

    @property
    def left(self) -> int | None:
        """The count of keys before its own that a query sees; None: all."""
        return self.window[0]

    @property
    def right(self) -> int | None:
        """The count of keys behind its own that a query sees; None: all."""
        return self.window[1]

    def visible(self, *, ragged: bool) -> Visible:
        """The predicate of the keys that a row sees; ``ragged``: there is no whole number of blocks of them."""
        return Visible(self.window, ragged)

    @property
    def windowed(self) -> bool:
        """Whether rows see different keys."""
        return self.window != (None, None)

    @property
    def by_row(self) -> bool:
        """Whether later rows see more keys."""
        return self.right is not None and self.left is None

    def softmax_scale(self, head_dim: int) -> float:
        """The factor of q·k; 0 where it is 0 in float32, which times a masked score would be NaN."""
        scale = 1.0 / math.sqrt(head_dim) if self.scale is None else self.scale
        return scale if np.float32(scale) else 0.0
