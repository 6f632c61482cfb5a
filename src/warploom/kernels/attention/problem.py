"""An attention problem: shapes, type and options; and how its arrays lie."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from warploom.core.arguments import strides
from warploom.core.dtypes import F32_MAX, DType, bf16, f16
from warploom.core.errors import ProblemError
from warploom.core.targets import Target
from warploom.kernels.classes import size_class
from warploom.kernels.settings import AnyConfiguration, Configuration, broken_flags, shared_excess, violated
from warploom.kernels.source import KernelCall, MappedArray
from warploom.tile.panels import padded_cols

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

MOST_GRID_ROWS = 65535  # CTAs along y and z
MOST_HEAD_DIM = 256
MOST_POSITIONS = 2**30  # positions and their differences are s32 in the kernel

TensorStrides = tuple[int, int, int]
"""(batch, head, sequence) in elements."""


class HeadDims(HeadSizes, Configuration):
    """A configuration of kernels for heads of these sizes."""

    requires: ClassVar[str]
    shares_keys: ClassVar[Literal[False]] = False
    """A tile has all keys of its queries or all queries of its keys."""
    most: ClassVar[int] = MOST_HEAD_DIM
    """The largest head_dim that the kernels take."""
    dtype: DType

    @property
    def query_cols(self) -> int:
        """Columns of the tile that Q comes in and O leaves through."""
        return padded_cols(max(self.head_dim, self.value_dim))

    @property
    def dims(self) -> str:
        """Both in a kernel's name."""
        return f"{self.head_dim}x{self.v_dim}" if self.v_dim else str(self.head_dim)

    @property
    @abstractmethod
    def shared_bytes(self) -> int:
        """Shared memory of the largest kernel, in bytes."""

    @property
    @abstractmethod
    def _constraints(self) -> Sequence[tuple[bool, str]]:
        """(whether it holds, what is wrong if not) of flags, which are valid each by itself."""

    def check(self, target: Target | None = None) -> list[str]:
        """The violated constraints (of ``target``, if given); empty if the configuration is valid."""
        return broken_flags(self) or violated(
            [
                (self.dtype in (bf16, f16), f"dtype {self.dtype} is not f16 or bf16"),
                (
                    self.head_dim % 8 == 0 and 8 <= self.head_dim <= self.most,
                    f"head_dim {self.head_dim} is no multiple of 8 from 8 to {self.most}",
                ),
                (
                    self.v_dim % 8 == 0 and 0 <= self.v_dim <= self.most,
                    f"v_dim {self.v_dim} is no multiple of 8 up to {self.most}",
                ),
                *self._constraints,
                (
                    target is None or target.has_wgmma or self.requires != "sm_90a",
                    f"{target and target.name} has no wgmma: this kernel needs sm_90a",
                ),
            ]
        ) + shared_excess(self.shared_bytes, target)


class HeadConfig(AnyConfiguration, Protocol):
    """A configuration of any kernel of attention."""

    @property
    def head_dim(self) -> int:
        """Elements per head."""
        ...

    @property
    def value_dim(self) -> int:
        """Elements per head of V and O."""
        ...


class AttentionConfig(HeadConfig, Protocol):
    """A configuration of one of the attention kernels: what it takes, and what it makes of a problem."""

    @property
    def tile_m(self) -> int:
        """Query rows per tile."""
        ...

    @property
    def tile_n(self) -> int:
        """Keys per step."""
        ...

    def violations(self, problem: AttentionProblem) -> list[str]:
        """The constraints that a problem violates; empty if the kernel takes it."""
        ...

    def calls(self, problem: AttentionProblem, operands: Operands, multiprocessors: int) -> tuple[KernelCall, ...]:
        """The kernels and their launches, in order."""
        ...


@dataclass(frozen=True)
class AttentionProblem(HeadSizes, ScoreOptions):
    """What is asked: Q and O (batch, q_len, heads, head_dim), K and V (batch, kv_len, kv_heads, head_dim), and options.

    ``v_dim``: the head_dim of V and O, where it is another. ``window`` as in :class:`AttentionFeatures`.
    """

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: DType
    window: Window = (None, None)
    v_dim: int = 0

    @property
    def arrays(self) -> tuple[str, ...]:
        """Those that a kernel takes, in its order."""
        return *Operands.names, *(("lse",) if self.lse else ()), *(("sinks",) if self.sinks else ())

    @property
    def planes(self) -> int:
        """Heads of all batches."""
        return self.heads * self.batch

    @property
    def flops(self) -> int:
        """Floating-point operations of the two products: 2 · batch · heads · (d of Q and V) · visible scores."""
        return 2 * self.planes * (self.head_dim + self.value_dim) * self.visible_scores

    @property
    def size_class(self) -> str:
        """Which problems share a tuned configuration."""
        mask = {(None, None): "full", (None, 0): "causal"}.get(self.window, "window")
        fixed = {"dtype": self.dtype, "head_dim": self.head_dim, "mask": mask, "softcap": self.softcap is not None}
        fixed |= {"v_dim": self.v_dim} if self.v_dim else {}
        sizes = {
            "q_len": (self.q_len, 0, 14),
            "kv_len": (self.kv_len, 4, 14),
            "batch_heads": (self.planes, 0, 10),
            "group": (self.heads // self.kv_heads, 0, 4),
        }
        return size_class("attention", fixed, sizes)

    @property
    def visible_scores(self) -> int:
        """Pairs of a query and a key it sees, per head."""
        if self.window == (None, None):
            return self.q_len * self.kv_len
        rows = np.arange(self.q_len, dtype=np.int64) + (self.kv_len - self.q_len)
        left, right = self.window
        first = np.zeros_like(rows) if left is None else np.clip(rows - left, 0, self.kv_len)
        end = np.full_like(rows, self.kv_len) if right is None else np.clip(rows + right + 1, 0, self.kv_len)
        return int(np.maximum(end - first, 0).sum())

    def features(self, tile_m: int, tile_n: int) -> AttentionFeatures:
        """What a kernel with such tiles must be able to do, and nothing more."""
        return AttentionFeatures(
            ragged_q=self.q_len % tile_m != 0,
            ragged_kv=self.kv_len % tile_n != 0,
            group=self.heads // self.kv_heads,
            **self.asked,
        )

    @property
    def grid_constraint(self) -> tuple[bool, str]:
        """Of kernels whose grid has heads and batches along y and z: whether it holds, and what is wrong if not."""
        most = max(self.heads, self.batch)
        return most <= MOST_GRID_ROWS, f"{self.heads} heads and {self.batch} batches: at most {MOST_GRID_ROWS} of each"

    def differences(self, config: HeadConfig) -> list[str]:
        """How a configuration differs from the problem, and what no kernel takes; empty if nothing does."""
        return broken_flags(config) or violated(
            [
                (
                    config.head_dim == self.head_dim,
                    f"head_dim is {self.head_dim}, the configuration's {config.head_dim}",
                ),
                (
                    config.value_dim == self.value_dim,
                    f"V's head_dim is {self.value_dim}, the configuration's {config.value_dim}",
                ),
                (config.dtype is self.dtype, f"the arrays are {self.dtype}, the configuration {config.dtype}"),
                (
                    max(self.q_len, self.kv_len) < MOST_POSITIONS,
                    f"lengths {self.q_len} and {self.kv_len} reach {MOST_POSITIONS} positions",
                ),
            ]
        )

    def visited_blocks(self, tile_m: int, tile_n: int) -> tuple[int, ...]:
        """Key blocks that each tile of query rows of a plane visits: what the kernels' ``Mask.blocks`` counts."""
        left, right = self.window
        first_row = np.arange(-(-self.q_len // tile_m), dtype=np.int64) * tile_m
        top = first_row + (self.kv_len - self.q_len)
        end = np.full_like(top, -(-self.kv_len // tile_n))
        if right is not None:
            end = np.minimum(end, -(-np.maximum(top + tile_m + right, 1) // tile_n))
        first = np.zeros_like(top)
        if left is not None:
            first = np.minimum(np.maximum(top - left, 0) // tile_n, end - 1)
        return tuple((end - first).tolist())


def stride_scalars(arrays: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The strides of arrays as launches take them: kernels, whose ``k`` is the language, spell K and V out."""
    return strides(**{{"k": "key", "v": "value"}.get(name, name): of for name, of in arrays.items()})


@dataclass(frozen=True)
class Operands:
    """How arrays lie: strides (batch, head, sequence) in elements of each of ``names``, in layout "bshd" or "bhsd"."""

    names: ClassVar[tuple[str, ...]] = ("q", "k", "v", "out")
    strides: tuple[TensorStrides, ...]
    layout: str

    @classmethod
    def contiguous(cls, problem: AttentionProblem) -> Operands:
        """Row-major tensors (batch, sequence, heads, head_dim)."""
        p = problem
        q, k, v, out = (
            (length * heads * cols, cols, heads * cols)
            for length, heads, cols in (
                (p.q_len, p.heads, p.head_dim),
                (p.kv_len, p.kv_heads, p.head_dim),
                (p.kv_len, p.kv_heads, p.value_dim),
                (p.q_len, p.heads, p.value_dim),
            )
        )
        return cls((q, k, v, out), "bshd")

    @property
    def heads_inside(self) -> bool:
        """Whether the heads of a position lie side by side."""
        return self.layout == "bshd"

    def of(self, *names: str) -> dict[str, TensorStrides]:
        """The strides of some arrays, or of all, by their names."""
        return {name: self.strides[self.names.index(name)] for name in names or self.names}

    def rows(self, *names: str) -> tuple[int, ...]:
        """The strides between positions."""
        return tuple(row for _, _, row in self.of(*names).values())

    def scalars(self, *names: str) -> dict[str, int]:
        """The strides by the kernels' names of them."""
        return stride_scalars(self.of(*names))

    def mapped(self, name: str, problem: AttentionProblem, rows: int, cols: int) -> MappedArray:
        """How the TMA sees an array, as one of four dimensions: in boxes of so many rows and columns of a head."""
        p, axes = problem, (0, 2, 1) if self.heads_inside else (0, 1, 2)
        of_keys, of_values = name in ("k", "v", "dk", "dv"), name in ("v", "dv", "out", "dout")
        sizes = (p.batch, p.kv_heads, p.kv_len) if of_keys else (p.batch, p.heads, p.q_len)
        (strides,) = self.of(name).values()
        shape = *(sizes[i] for i in axes), p.value_dim if of_values else p.head_dim
        box = (1, rows, 1, cols) if self.heads_inside else (1, 1, rows, cols)
        return MappedArray(p.dtype, shape, (*(strides[i] for i in axes), 1), box)
