"""An attention problem: its sequences, shapes, type and options; and how its arrays lie."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from warploom.core.arguments import strides
from warploom.core.dtypes import DType, bf16, f16
from warploom.core.targets import Target
from warploom.kernels.attention.scores import ScoreOptions
from warploom.kernels.classes import size_class
from warploom.kernels.settings import AnyConfiguration, Configuration, broken_flags, shared_excess, violated
from warploom.kernels.source import Grid, KernelCall, MappedArray
from warploom.tile.mask import Visible
from warploom.tile.planning import ENTRY_WORDS, PANEL_COLS, most_pieces, padded_cols

MOST_GRID_ROWS = 65535  # CTAs along y and z
MOST_HEAD_DIM = 256
MOST_POSITIONS = 2**30  # positions and their differences are s32 in the kernel
MOST_LIST_WORDS = 1 << 31
TYPICAL_LENGTH = 4096
"""The length that a configuration for packed sequences is chosen by: the host does not know theirs."""


# -- what is asked
class HeadSizes:
    """A base with the sizes of heads: ``head_dim`` of Q and K, ``v_dim`` of V and O, 0 where it is the same."""

    head_dim: int
    v_dim: int

    @property
    def value_dim(self) -> int:
        """Elements per head of V and O."""
        return self.v_dim or self.head_dim


@dataclass(frozen=True, kw_only=True)
class AttentionFeatures(ScoreOptions):
    """Trace-time features of a kernel: the problem's options, and what lengths ask of it.

    ``ragged_q``/``ragged_kv``: the lengths are no multiples of the tiles. ``group``: query heads per key head.
    """

    ragged_q: bool = False
    ragged_kv: bool = False
    group: int = 1

    def __post_init__(self) -> None:
        self.check()

    @property
    def mask(self) -> Visible:
        """The predicate of the keys that a row sees."""
        return self.visible(ragged=self.ragged_kv)

    @property
    def masked(self) -> bool:
        """Whether some scores are masked, so that a row may have none left."""
        return self.mask.masks


PLAIN = AttentionFeatures()


@dataclass(frozen=True)
class Even:
    """Sequences of one length: ``q_len`` queries and ``kv_len`` keys each."""

    q_len: int
    kv_len: int


@dataclass(frozen=True)
class Packed:
    """Sequences one behind the other, ``q_len`` queries and ``kv_len`` keys in all; where each begins, the GPU knows.

    ``used``: whether the queries' and the keys' sequences use only a first part of their rows.
    """

    q_len: int
    kv_len: int
    used: tuple[bool, bool] = (False, False)

    def places(self, *sides: str) -> tuple[str, ...]:
        """The arrays that say where sequences of "q" and "k" lie."""
        used = dict(zip("qk", self.used, strict=True))
        return tuple(x for side in sides for x in (f"{side}_starts", *([f"{side}_used"] if used[side] else [])))


@dataclass(frozen=True)
class Cached:
    """New queries, ``q_len`` of each sequence or ``packed`` in all, on a cache with room for ``kv_len`` keys of each.

    ``page_size``: keys of one of ``pages`` pages, of which a row of the block table names ``table_pages``; 0 where each
    sequence's keys lie side by side. ``lengths``: the GPU knows how many keys a sequence has; else it has ``kv_len``.
    ``split``: keys of a piece whose bounds depend on nothing else. ``fp8``: keys and values are ``e4m3``, with
    ``scaled`` times a scale of each sequence and key head.
    """

    q_len: int
    kv_len: int
    page_size: int = 0
    pages: int = 0
    table_pages: int = 0
    lengths: bool = True
    packed: bool = False
    split: int | None = None
    fp8: bool = False
    scaled: bool = False


Sequences = Even | Packed | Cached


@dataclass(frozen=True)
class AttentionProblem(HeadSizes, ScoreOptions):
    """A forward pass of attention: Q and O of ``heads``, K and V of ``kv_heads``, in these ``sequences``.

    ``v_dim``: the head_dim of V and O, where it is another. The options of scores are keyword arguments.
    """

    batch: int
    heads: int
    kv_heads: int
    sequences: Sequences
    head_dim: int
    dtype: DType
    v_dim: int = 0

    @property
    def q_len(self) -> int:
        """Queries of a sequence, of packed ones in all."""
        return self.sequences.q_len

    @property
    def kv_len(self) -> int:
        """Keys of a sequence at most, of packed ones in all."""
        return self.sequences.kv_len

    @property
    def listed(self) -> bool:
        """Whether sequences are packed, so that a kernel lists their tiles."""
        return isinstance(self.sequences, Packed)

    def of_lengths(self, q_len: int, kv_len: int, **changes: Any) -> AttentionProblem:
        """The problem with sequences of one length, and other ``changes``."""
        return replace(self, sequences=Even(q_len, kv_len), **changes)

    @property
    def typical(self) -> AttentionProblem:
        """The problem of one length that a configuration is chosen by; packed sequences count as long ones."""
        return self.of_lengths(TYPICAL_LENGTH, TYPICAL_LENGTH, batch=1) if self.listed else self

    @property
    def of_long_ones(self) -> AttentionProblem:
        """The problem of half as many sequences twice as long as the mean, where they are packed: long ones decide."""
        batch = -(-self.batch // 2)
        lengths = (-(-n // max(1, batch)) for n in (self.q_len, self.kv_len))
        return self.of_lengths(*lengths, batch=batch) if self.listed else self

    @property
    def on_cache(self) -> AttentionProblem:
        """The problem with its keys in a cache; sequences of one length fill theirs."""
        if isinstance(self.sequences, Even):
            return replace(self, sequences=Cached(self.q_len, self.kv_len, lengths=False))
        return self

    @property
    def cache(self) -> Cached:
        """The sequences of a problem on a cache."""
        assert isinstance(self.sequences, Cached)
        return self.sequences

    @property
    def lse_strides(self) -> tuple[int, int]:
        """The strides of sequences and heads in log-sum-exps on a cache; those of packed queries lie together."""
        return 0 if self.cache.packed else self.heads * self.q_len, self.q_len

    @property
    def arrays(self) -> tuple[str, ...]:
        """The arrays that a kernel takes, in its order."""
        return (
            *FORWARD,
            *(["lse"] if self.lse else ()),
            *self.head_arrays,
            *(() if isinstance(self.sequences, Even) else ("tiles",)),
        )

    @property
    def group(self) -> int:
        """Query heads of a head of keys."""
        return self.heads // self.kv_heads

    @property
    def planes(self) -> int:
        """Heads of all batches."""
        return self.heads * self.batch

    @property
    def pairs(self) -> int:
        """Queries times the keys that they see, of one head of all sequences.

        Of packed sequences an estimate by their mean length, of cached ones by full caches.
        """
        if isinstance(self.sequences, Even):
            return self.batch * self.visible_scores
        if isinstance(self.sequences, Packed):
            return self.q_len * -(-self.kv_len // max(1, self.batch))
        return self.q_len * self.kv_len * (1 if self.sequences.packed else self.batch)

    @property
    def flops(self) -> int:
        """Floating-point operations of the two products."""
        return 2 * self.heads * (self.head_dim + self.value_dim) * self.pairs

    @property
    def size_class(self) -> str:
        """The text of problems that share a tuned configuration."""
        fixed = {"dtype": self.dtype, "head_dim": self.head_dim} | self.tuned_by
        fixed |= {"v_dim": self.v_dim} if self.v_dim else {}
        sizes = {
            "q_len": (self.q_len, 0, 14),
            "kv_len": (self.kv_len, 4, 14),
            "batch_heads": (self.planes, 0, 10),
            "group": (self.group, 0, 4),
        }
        return size_class("attention", fixed, sizes)

    @property
    def visible_scores(self) -> int:
        """Pairs of a query and a key it sees, per head of a sequence."""
        if not self.windowed:
            return self.q_len * self.kv_len
        rows = np.arange(self.q_len, dtype=np.int64) + (self.kv_len - self.q_len)
        left, right = self.left, self.right
        first = np.zeros_like(rows) if left is None else np.clip(rows - left, 0, self.kv_len)
        end = np.full_like(rows, self.kv_len) if right is None else np.clip(rows + right + 1, 0, self.kv_len)
        return int(np.maximum(end - first, 0).sum())

    def features(self, tile_m: int = 1, tile_n: int = 1) -> AttentionFeatures:
        """The features that a kernel with such tiles needs; packed sequences may have any lengths."""
        return AttentionFeatures(
            ragged_q=self.listed or self.q_len % tile_m != 0,
            ragged_kv=self.listed or self.kv_len % tile_n != 0,
            group=self.group,
            **self.asked,
        )

    def tiles(self, tile_m: int) -> int:
        """Tiles of ``tile_m`` queries that there are at most, of all heads."""
        if self.listed:
            return most_pieces(self.q_len, self.batch, tile_m) * self.heads
        return -(-self.q_len // tile_m) * self.planes

    def grid(self, tile: int, heads: int, rows: int) -> Grid:
        """A CTA for each tile of ``tile`` of so many ``rows``: (tiles, heads, batch), or a CTA for each listed one."""
        if self.listed:
            return most_pieces(rows, self.batch, tile) * heads, 1, 1
        return -(-rows // tile), heads, self.batch

    def grid_constraint(self, tile_m: int) -> tuple[bool, str]:
        """Whether the launch can have such a :meth:`grid`, and the reason if not."""
        if self.listed:
            return self.tiles(tile_m) * ENTRY_WORDS < MOST_LIST_WORDS, "the tiles do not fit into 32 bits"
        most = max(self.heads, self.batch)
        return most <= MOST_GRID_ROWS, f"{self.heads} heads and {self.batch} batches: at most {MOST_GRID_ROWS} of each"

    def differences(self, config: HeadConfig) -> list[str]:
        """The reasons why a configuration, or any, does not take the problem; empty if there is none."""
        of_cache = isinstance(self.sequences, Cached)
        longest = max(self.q_len * self.group if of_cache else self.q_len, self.kv_len)
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
                    longest < MOST_POSITIONS,
                    f"lengths {self.q_len} and {self.kv_len} reach {MOST_POSITIONS} positions",
                ),
            ]
        )

    def visited_blocks(self, tile_m: int, tile_n: int) -> tuple[int, ...]:
        """Key blocks that each tile of query rows of a plane visits: what the kernels' ``Mask.blocks`` counts."""
        left, right = self.left, self.right
        first_row = np.arange(-(-self.q_len // tile_m), dtype=np.int64) * tile_m
        top = first_row + (self.kv_len - self.q_len)
        end = np.full_like(top, -(-self.kv_len // tile_n))
        if right is not None:
            end = np.minimum(end, -(-np.maximum(top + tile_m + right, 1) // tile_n))
        first = np.zeros_like(top)
        if left is not None:
            first = np.minimum(np.maximum(top - left, 0) // tile_n, end - 1)
        return tuple((end - first).tolist())

    def visiting_blocks(self, tile_m: int, tile_n: int) -> NDArray[np.int64]:
        """Blocks of query rows that see each tile of keys of a plane: what the kernels' ``SeenBy.blocks`` counts."""
        left, right, offset = self.left, self.right, self.kv_len - self.q_len
        first_key = np.arange(-(-self.kv_len // tile_n), dtype=np.int64) * tile_n
        end = np.full_like(first_key, self.q_len)
        if left is not None:
            end = np.clip(np.minimum(first_key + tile_n, self.kv_len) - offset + left, 0, self.q_len)
        begin = np.zeros_like(first_key)
        if right is not None:
            begin = np.clip(first_key - offset - right, 0, self.q_len)
        return np.where(begin < end, -(-end // tile_m) - begin // tile_m, 0)


@dataclass(frozen=True)
class BackwardProblem:
    """A backward pass of the problem ``forward``, whose ``lse`` means nothing here.

    ``lse_gradient``: the log-sum-exp has a gradient. ``deterministic``: equal bits from run to run.

    With P = softmax(S), S = scale · Q·Kᵀ, dP = dO·Vᵀ and delta = rowsum(dO∘O) - dLSE::

        dV = Pᵀ·dO        dS = P∘(dP - delta)        dQ = scale · dS·K        dK = scale · dSᵀ·Q

    Options that change scores multiply dS by their slope.
    """

    forward: AttentionProblem
    lse_gradient: bool = False
    deterministic: bool = False

    @property
    def typical(self) -> BackwardProblem:
        """The problem of one length that a configuration is chosen by."""
        return replace(self, forward=self.forward.typical)

    @property
    def flops(self) -> int:
        """Floating-point operations of the five products."""
        p = self.forward
        return 2 * p.heads * (3 * p.head_dim + 2 * p.value_dim) * p.pairs

    def features(self, tile_m: int, tile_n: int) -> AttentionFeatures:
        """The features that the kernels of the products need."""
        return replace(self.forward.features(tile_m, tile_n), **self.forward.of_gradients)

    def differences(self, config: HeadConfig, tile_m: int) -> list[str]:
        """The reasons why a configuration, or any, does not take the problem; empty if there is none."""
        return self.forward.differences(config) + violated([self.forward.grid_constraint(tile_m)])


# -- what configurations have in common
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


class GradientDims(HeadDims):
    """A configuration of a backward pass, whose shared tiles are whole panels of 64 columns, with zeros beyond."""

    @property
    def width(self) -> int:
        """Columns of the shared tiles of Q and K."""
        return -(-self.head_dim // PANEL_COLS) * PANEL_COLS

    @property
    def value_width(self) -> int:
        """Columns of the shared tiles of V and dO."""
        return -(-self.value_dim // PANEL_COLS) * PANEL_COLS

    @property
    def sum_cols(self) -> int:
        """Columns of an accumulator of dQ or dK: head_dim in steps of 16."""
        return -(-self.head_dim // 16) * 16

    @property
    def value_sum_cols(self) -> int:
        """Columns of an accumulator of dV."""
        return -(-self.value_dim // 16) * 16


class HeadConfig(Protocol):
    """A configuration of any kernel of attention."""

    @property
    def dtype(self) -> DType:
        """The element type of the arrays."""
        ...

    @property
    def head_dim(self) -> int:
        """Elements per head."""
        ...

    @property
    def value_dim(self) -> int:
        """Elements per head of V and O."""
        ...


class AttentionConfig(HeadConfig, AnyConfiguration, Protocol):
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

    def calls(self, problem: AttentionProblem, operands: ArrayStrides, multiprocessors: int) -> tuple[KernelCall, ...]:
        """The kernels and their launches, in order."""
        ...


# -- how arrays lie
FORWARD = ("q", "k", "v", "out")
"""The arrays of the forward pass with rows of a head_dim, Q's or V's, in the kernels' order."""
BACKWARD = ("dout", "q", "k", "v", "out", "dq", "dk", "dv")
"""Those of the backward pass."""


def stride_scalars(arrays: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The strides of arrays as launches take them: kernels, whose ``k`` is the language, spell K and V out."""
    return strides(**{{"k": "key", "v": "value"}.get(name, name): of for name, of in arrays.items()})


@dataclass(frozen=True)
class ArrayStrides:
    """The strides of arrays in elements by their names: (batch, head, position), of packed ones (position, head).

    A cache has (batch or page, head, position). ``layout`` "bshd": the heads of a position lie side by side, "bhsd":
    the positions of a head.
    """

    strides: Mapping[str, tuple[int, ...]]
    layout: str = "bshd"

    @classmethod
    def contiguous(cls, problem: AttentionProblem) -> ArrayStrides:
        """Row-major tensors (batch, sequence, heads, head_dim)."""
        p = problem
        sizes = (
            (p.q_len, p.heads, p.head_dim),
            (p.kv_len, p.kv_heads, p.head_dim),
            (p.kv_len, p.kv_heads, p.value_dim),
            (p.q_len, p.heads, p.value_dim),
        )
        lying = [(length * heads * cols, cols, heads * cols) for length, heads, cols in sizes]
        return cls(dict(zip(FORWARD, lying, strict=True)))

    @property
    def heads_inside(self) -> bool:
        """Whether the heads of a position lie side by side."""
        return self.layout == "bshd"

    def rows(self, *names: str) -> tuple[int, ...]:
        """The strides between positions."""
        return tuple(self.strides[name][-1 if len(self.strides[name]) == 3 else 0] for name in names)

    def starts(self, *names: str) -> dict[str, int]:
        """The strides of batches and heads by the kernels' names, for kernels that know the others while tracing."""
        of = {name: self.strides[name] for name in names}
        return stride_scalars({name: x[:2] if len(x) == 3 else x[1:] for name, x in of.items()})

    def scalars(self, *names: str) -> dict[str, int]:
        """The strides by the kernels' names of them."""
        return stride_scalars({name: self.strides[name] for name in names})

    def mapped(self, name: str, problem: AttentionProblem, rows: int, cols: int) -> MappedArray:
        """The tensor map of an array, in boxes of so many rows and columns of a head.

        An array of packed sequences has three dimensions, others four.
        """
        p, lying = problem, self.strides[name]
        of_keys, of_values = name in ("k", "v", "dk", "dv"), name in ("v", "dv", "out", "dout")
        length, heads = (p.kv_len, p.kv_heads) if of_keys else (p.q_len, p.heads)
        width = p.value_dim if of_values else p.head_dim
        if p.listed:
            return MappedArray(p.dtype, (length, heads, width), (*lying, 1), (rows, 1, cols), ragged=True)
        axes, sizes = (0, 2, 1) if self.heads_inside else (0, 1, 2), (p.batch, heads, length)
        box = (1, rows, 1, cols) if self.heads_inside else (1, 1, rows, cols)
        return MappedArray(p.dtype, (*(sizes[i] for i in axes), width), (*(lying[i] for i in axes), 1), box)
