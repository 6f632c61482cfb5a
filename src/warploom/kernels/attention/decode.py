"""Attention with few queries on long keys, side by side or in pages: problem, configuration, and the launches."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any, ClassVar, Literal

from warploom.core.arguments import fields, strides
from warploom.core.dtypes import DType, bf16, f16
from warploom.core.targets import Target
from warploom.kernels.attention.problem import ArrayStrides, AttentionProblem
from warploom.kernels.settings import Configuration, broken_flags, flag, shared_excess, violated
from warploom.kernels.source import KernelCall, KernelSource
from warploom.tile.planning import CopyPlan, padded_cols, page_table

RUN = 16
"""Keys that lie side by side whatever the pages: their size is a multiple of it."""
MOST_BLOCKS = 2**31
MOST_SPREAD = 2
COMBINE_WARPS = 1 << MOST_SPREAD
"""Of a CTA of the second kernel: so few that it has room beside one of the first."""
AT_ONCE = 5
"""Parts that a warp of the second kernel loads together: with many more it has no room beside the first kernel."""
GAP = 1
"""Blocks that a tile of query rows costs beyond its own, in time."""
LINE, MANY_TILES = 128, 1024
"""Bytes of a line of the L2, and tiles of one key head that are more than the SMs need."""
MOST_HEADS = 4
"""Key heads that are read together so that they end with a line."""
SPLIT = 128
"""Keys of which a given split is a multiple."""
WARP_BYTES = 2**13
"""Of keys and values that a warp reads at a time: two blocks of eight warps keep the memory busy."""


def rows_of(problem: AttentionProblem) -> int:
    """Query rows of a key head in one sequence; of packed ones about as many."""
    p = problem
    return (-(-p.q_len // max(1, p.batch)) if p.cache.packed else p.q_len) * p.group


@dataclass(frozen=True)
class CacheForm:
    """The form of a cache that a kernel is traced for: flags of :class:`.problem.Cached`; ``split``: one is given."""

    page_size: int
    lengths: bool
    packed: bool
    split: bool
    scaled: bool

    @property
    def foretold(self) -> bool:
        """Whether shares follow from lengths of keys alone, so that they can be found before it is their turn."""
        return self.lengths and not self.packed and not self.split


@dataclass(frozen=True)
class Decode(Configuration):
    """The kernels of :mod:`.device.decode`: each warp copies and multiplies ``keys`` keys of a block of all warps'.

    A tile has ``tile_m`` query rows of each of ``heads`` key heads; neighbouring warps have one of them each. The
    CTAs of a launch share the blocks of all sequences evenly.
    """

    word: ClassVar[str] = "attention_decode"
    shares_keys: ClassVar[Literal[True]] = True
    """All CTAs share the keys of a head."""
    always: ClassVar[tuple[str, ...]] = ("tile_m", "keys", "num_warps", "stages", "head_dim", "dtype")

    tile_m: int = flag(16, "query rows of a key head that are read together", (16, 32, 64))
    keys: int = flag(16, "keys of a warp per step", (16, 32, 64))
    num_warps: int = flag(4, "warps per CTA", (1, 2, 4, 8))
    stages: int = flag(3, "blocks of K and V in the ring", (2, 3, 4, 5))
    head_dim: int = flag(128, "elements per head", (64, 128, 256))
    dtype: DType = flag(bf16, "element type of Q, K, V and O", (bf16, f16))
    ctas: int = flag(2, "CTAs per SM", (1, 2, 3, 4))
    heads: int = flag(1, "neighbouring key heads whose keys are read together", (1, 2, 4, 8))
    overlap: bool = flag(False, "each kernel begins while the one before it ends (sm_90)")
    fp8: bool = flag(False, "K and V are e4m3, two elements in the place of a 16-bit one (sm_90)")

    @property
    def requires(self) -> str:
        """The oldest architecture that the kernels run on."""
        return "sm_90" if self.of_sm90 else "sm_80"

    @property
    def value_dim(self) -> int:
        """Elements per head of V and O: those of Q."""
        return self.head_dim

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 32 * self.num_warps

    @property
    def tile_n(self) -> int:
        """Keys of a block."""
        return self.keys * self.num_warps // self.heads

    @property
    def tile_rows(self) -> int:
        """Query rows of a tile, of all its key heads."""
        return self.tile_m * self.heads

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory, at most: Q, K and V of each stage, two numbers a row of every warp, and lengths."""
        keys = self.keys * self.num_warps
        rows = self.tile_rows * padded_cols(self.head_dim) + 2 * keys * padded_cols(self.key_cols)
        lengths = 4 * self.threads if self.overlap else 0
        return self.stages * rows * self.dtype.bytes + 8 * self.num_warps * self.tile_m + lengths

    @property
    def key_cols(self) -> int:
        """16-bit places of a row of K or V."""
        return self.head_dim // 2 if self.fp8 else self.head_dim

    @property
    def factors(self) -> DType:
        """The type that products take: the type of the arrays, of an fp8 cache f16."""
        return f16 if self.fp8 else self.dtype

    @property
    def holds_queries(self) -> bool:
        """Whether a warp has registers for its query rows, beside its sums."""
        return self.tile_m == 16 and self.head_dim <= 128

    @property
    def of_sm90(self) -> bool:
        """Whether the first kernel is that of sm_90, where keys and values leave the L2 first, too."""
        return self.fp8 or self.overlap

    def check(self, target: Target | None = None) -> list[str]:
        """The violated constraints (of ``target``, if given); empty if the configuration is valid."""
        found = broken_flags(self)
        if found:
            return found
        found = violated(
            [
                (self.dtype in (bf16, f16), f"dtype {self.dtype} is not f16 or bf16"),
                (
                    self.head_dim % 8 == 0 and 8 <= self.head_dim <= 256,
                    f"head_dim {self.head_dim} is no multiple of 8 from 8 to 256",
                ),
                (self.tile_m % 16 == 0, f"tile_m {self.tile_m} is no multiple of 16"),
                (self.keys % 16 == 0, f"keys {self.keys} is no multiple of 16"),
                (
                    self.tile_m <= self.keys,
                    f"tile_m {self.tile_m} is more than keys {self.keys}: a warp's sums leave through its keys' memory",
                ),
                (
                    not self.fp8 or (self.head_dim % 16 == 0 and self.head_dim >= 48),
                    f"head_dim {self.head_dim} of fp8 is no multiple of 16 from 48 on",
                ),
                (not self.overlap or target is None or target.has_tma, "overlap needs compute capability 9.0"),
                (not self.fp8 or target is None or target.has_tma, "fp8 needs compute capability 9.0"),
                (self.num_warps % self.heads == 0, f"{self.num_warps} warps are not shared by {self.heads} key heads"),
                (self.stages >= 2, "the ring has at least 2 stages"),
            ]
        )
        plan = CopyPlan(self.keys, padded_cols(self.key_cols), 1, False)
        return (found or plan.problems()) + shared_excess(self.shared_bytes, target)

    def violations(self, problem: AttentionProblem) -> list[str]:
        """The constraints of the kernels that a problem violates; empty if they take it."""
        if problem.listed:
            return ["packed sequences take attention_sm90 or attention_sm80"]
        if problem.value_dim != problem.head_dim:
            return [f"v has head_dim {problem.value_dim}, keys {problem.head_dim}: this kernel takes one"]
        p = problem.on_cache
        fp8, split = p.cache.fp8, p.cache.split
        return p.differences(self) + violated(
            [
                (self.fp8 == fp8, f"the cache is {'' if fp8 else 'not '}fp8, the configuration's fp8={self.fp8}"),
                (self._most_blocks(p) < MOST_BLOCKS, "there are more than 2^31 blocks of keys"),
                (p.kv_heads % self.heads == 0, f"{p.kv_heads} key heads are no multiple of {self.heads}"),
                (
                    split is None or split % self.tile_n == 0,
                    f"fixed_split {split} is no multiple of the {self.tile_n} keys that are read together",
                ),
            ]
        )

    def _tiles(self, p: AttentionProblem) -> int:
        """Tiles of query rows of all sequences, at most, for one key head."""
        if p.cache.packed:
            return p.q_len * p.group // self.tile_m + p.batch
        return p.batch * max(1, -(-rows_of(p) // self.tile_m))

    def _most_blocks(self, p: AttentionProblem) -> int:
        return self._tiles(p) * (p.kv_heads // self.heads) * (max(1, -(-p.kv_len // self.tile_n)) + GAP)

    def calls(self, problem: AttentionProblem, operands: ArrayStrides, multiprocessors: int) -> tuple[KernelCall, ...]:
        """The kernels for a problem on arrays with these strides: pieces, and what is put together of them."""
        p, lying = problem.on_cache, operands.strides
        cache, one = p.cache, {"k_scale": (0, 0), "v_scale": (0, 0), "table": (0,)} | {**lying}
        form = CacheForm(cache.page_size, cache.lengths, cache.packed, cache.split is not None, cache.scaled)
        ctas = min(self.ctas * multiprocessors, self._most_blocks(p))
        split = 0 if cache.split is None else cache.split // self.tile_n
        pieces = -(-p.kv_len // cache.split) if cache.split else 0
        tiles = self._tiles(p) * (p.kv_heads // self.heads)
        slots = tiles * max(1, pieces) if cache.split else 2 * ctas
        by_tile = not cache.packed and tiles <= ctas
        spread = MOST_SPREAD if cache.split else min(MOST_SPREAD, ((ctas // max(1, tiles) + 1) // AT_ONCE).bit_length())
        used = self.tile_m if cache.packed else min(self.tile_m, max(1, rows_of(p)))
        scalars = {
            **fields("batch", size=p.batch, kv_heads=p.kv_heads, q_len=p.q_len, capacity=p.kv_len),
            **page_table(one["table"][0], cache.table_pages, cache.pages),
            **strides(q=one["q"], cache_key=one["k"], cache_value=one["v"], cache_scale=one["k_scale"]),
            **strides(results_v_scale=one["v_scale"], results_out=one["out"], results_lse=p.lse_strides),
            **fields("split", ctas=ctas, blocks=split, pieces=max(1, pieces)),
            "spread": spread,
            "used": used,
            "by_tile": int(by_tile),
        }
        how: dict[str, Any] = {"config": self, "features": p.features(), "form": form}
        name, suffix = f"attention_decode_{self.tile_m}x{self.tile_n}x{self.head_dim}", "_sm90" if self.overlap else ""
        main = KernelSource.of(
            f"warploom.kernels.attention.device.decode:attention_decode{'_sm90' if self.of_sm90 else ''}",
            name,
            min_ctas=self.ctas,
            **how,
            row_strides=(one["k"][2], one["v"][2]),
        )
        combine = KernelSource.of(
            f"warploom.kernels.attention.device.decode_combine:attention_decode_combine{suffix}",
            f"{name}_combine",
            min_ctas=6 if self.head_dim <= 128 else 4,
            **how,
        )
        words = {"parts": slots * self.tile_rows * self.head_dim, "logs": slots * self.tile_rows}
        groups = tiles if cache.split or by_tile else ctas, -(-used * self.heads // (COMBINE_WARPS >> spread)), 1
        starts = (*(["lengths"] if cache.lengths else ()), *(["starts"] if cache.packed else ()))
        table, scales = ["table"] if cache.page_size else [], ["k_scale", "v_scale"] if cache.scaled else []
        out, joined = ("out", *(["lse"] if p.lse else ())), [p.sink] if p.sink else []
        return (
            KernelCall(
                main,
                (ctas, 1, 1),
                scalars,
                (),
                ("q", "k", "v", *scales[:1], *starts, *table, *scales[1:], *p.head_arrays, *out, *words),
                words,
                overlaps=self.overlap,
            ),
            KernelCall(
                combine, groups, scalars, (), (*starts, *words, *scales[1:], *joined, *out), overlaps=self.overlap
            ),
        )


def decode_configuration(problem: AttentionProblem, target: Target) -> Decode:
    """The configuration for a problem when nobody asks for another: by head_dim and rows alone, never by lengths."""
    p, cache = problem, problem.cache
    wide = padded_cols(p.head_dim)
    alone = cache.packed and cache.split is not None  # the same whatever queries other sequences have
    tile_m = 16 if alone or rows_of(p) <= 16 or wide > 128 else 32
    keys = WARP_BYTES // (2 * wide * (1 if cache.fp8 else p.dtype.bytes)) // RUN * RUN
    if cache.fp8 and wide > 128:  # no registers for query rows: twice the keys each time that they are read
        keys *= 2
    if cache.split is not None:
        keys = min(keys, SPLIT // 2)  # of two warps
    keys = max(tile_m, keys)
    overlap = target.has_tma
    tried = [
        Decode(tile_m, keys, warps, stages, p.head_dim, p.dtype, ctas, heads, overlap, cache.fp8)
        for warps, ctas, stages in (
            (8, 1, 2),
            *((w, n, s) for w in (4, 2) for n, s in ((2, 4), (2, 3), (2, 2), (1, 2))),
        )
        for heads in _heads(p, warps)
    ]
    fitting = [
        c
        for c in tried
        if not c.check(target) and _resident(c, target) and not (cache.split and cache.split % c.tile_n)
    ]
    return fitting[0] if fitting else tried[-1]


def _heads(p: AttentionProblem, warps: int) -> list[int]:
    """The numbers of key heads to read together, the best first.

    The memory reads whole lines, unless what is beside is wanted at about the same time: a head of 80 elements alone
    would be read at 160 / 256 of its rate. So heads are read together that end with a line, four at most, of rows
    shorter than a line those of two lines, and two where tiles are plenty: many tiles are short, and a block of two
    heads has half as many keys that are not there.
    """
    row = p.head_dim * (1 if p.cache.fp8 else 2)
    many = p.cache.split is None and p.head_dim <= 128 and p.batch * p.kv_heads >= MANY_TILES
    together = 2 * LINE // row if row < LINE else 1 + many
    together = max(together, min(MOST_HEADS, LINE // gcd(row, LINE)))
    most = gcd(p.kv_heads, warps, 1 << (together.bit_length() - 1))
    return [1 << i for i in reversed(range(most.bit_length()))]


def _resident(config: Decode, target: Target) -> bool:
    """Whether as many CTAs as it asks for have room on an SM."""
    return config.ctas * (config.shared_bytes + target.shared_reserved_per_block) <= target.shared_per_sm
