"""The configuration of the ladder's ``mma.sync`` attention kernels: each flag is one idea of the seeds' ladder."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from warploom.core.dtypes import DType, bf16, f16
from warploom.core.errors import ConfigError
from warploom.core.targets import Target
from warploom.kernels.attention.problem import FORWARD, MOST_GRID_ROWS, ArrayStrides, AttentionProblem, HeadDims
from warploom.kernels.settings import element_type, flag, type_name, violated
from warploom.kernels.source import KernelCall, KernelSource
from warploom.tile.planning import CopyPlan

if TYPE_CHECKING:
    from warploom.lang.fragments import Addressing


@dataclass(frozen=True)
class RungSm80(HeadDims):
    """One attention kernel. The seeds' names: tile_m is B_r, tile_n is B_c, num_warps n_warps, head_dim d_head."""

    word: ClassVar[str] = "attention"
    requires: ClassVar[str] = "sm_80"
    v_dim = 0

    tile_m: int = flag(64, "query rows per CTA (B_r)", (64, 128, 256))
    tile_n: int = flag(64, "keys per step (B_c)", (32, 64, 128))
    num_warps: int = flag(4, "warps per CTA; each owns tile_m / num_warps query rows", (4, 8))
    head_dim: int = flag(128, "elements per head (d_head)", (64, 128, 256))
    dtype: DType = flag(bf16, "element type of Q, K, V and O", (bf16, f16))
    softmax_in_shared: bool = flag(False, "softmax by a round trip through shared memory (the paper's baseline)")
    async_copy: bool = flag(True, "global → shared by cp.async instead of through registers")
    swizzle: bool = flag(False, "XOR-swizzled shared tiles (kernel 2)")
    eager: bool = flag(False, "start the next K and V copies before they are needed (kernel 3)")
    load_q: int = flag(0, "Q fragments loaded per step: 0 the whole tile once, 2 a k-slice of 16 (kernel 4)", (0, 2))
    load_k: int = flag(0, "K fragments loaded per step", (0, 2))
    load_v: int = flag(0, "V fragments loaded per step", (0, 2))
    k_slices: bool = flag(True, "fragments loaded along the inner dimension, not row by column (part 5)")
    double_buffer: bool = flag(False, "load the next fragments while this slice multiplies (kernel 5)")
    folded_scale: bool = flag(False, "scale folded into exp2: one FMA per element (kernel 6)")
    cooperative: bool = flag(False, "the CTA copies tiles together instead of warp by warp (kernel 8)")
    strided: bool = flag(False, "swizzled addresses as base + signed strides instead of recomputed (kernel 8)")
    k_row_major: bool = flag(False, "K fragments loaded so that each B operand is contiguous (kernel 9)")
    peel: bool = flag(False, "first step peeled: no zeroing, no rescaling (kernel 10)")
    strided_epilogue: bool = flag(False, "strided addresses for registers → shared as well (kernel 11)")
    block_index: bool = flag(False, "K/V addresses from the block's index, not advancing pointers (kernel 12)")
    backward: bool = flag(False, "K/V blocks from the last to the first (kernel 13)")
    output_hint: bool = flag(False, "output stores do not allocate in L1 (kernel 14)")
    head_dim_panels: bool = flag(False, "shared tiles as panels of 64 columns (kernel 15)")
    static_strides: bool = flag(False, "distances between sequence positions known while tracing (kernel 16)")
    heads_first: bool = flag(False, "neighbouring CTAs have different heads: the unoptimised grid order (part 3)")
    opt_level: int = flag(3, "ptxas's optimisation level", (1, 3))

    # -- derived
    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 32 * self.num_warps

    @property
    def warp_rows(self) -> int:
        """Query rows of one warp."""
        return self.tile_m // self.num_warps

    @property
    def addressing(self) -> Addressing:
        """The way of forming swizzled addresses, of global ↔ shared copies and of fragments."""
        return "strided" if self.strided or not self.swizzle else "recomputed"

    @property
    def epilogue_addressing(self) -> Addressing:
        """The way of forming the addresses of the output on its way from registers to shared memory."""
        return "strided" if self.strided_epilogue or not self.swizzle else "recomputed"

    @property
    def tile_cols(self) -> int:
        """Columns of the shared tiles: head_dim rounded up to 64, 128 or 256 (the rest is neither copied nor read)."""
        return max(64, 1 << (self.head_dim - 1).bit_length())

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: Q (O goes over it), then K and V; scores, if they go through it."""
        tiles = (self.tile_m + 2 * self.tile_n) * self.tile_cols * self.dtype.bytes
        return tiles + (4 * self.tile_m * (self.tile_n + 1) if self.softmax_in_shared else 0)

    def copy_plan(self, rows: int) -> CopyPlan:
        """Return the copy of a tile of ``rows`` sequence positions by the threads of a CTA."""
        return CopyPlan(rows, self.tile_cols, self.num_warps, self.cooperative)

    @property
    def _row_by_column(self) -> bool:
        return not self.k_slices

    # -- whether it fits
    @property
    def _constraints(self) -> list[tuple[bool, str]]:
        loads = self.load_q, self.load_k, self.load_v
        return [
            (
                self.num_warps <= 32 and self.tile_m % (16 * self.num_warps) == 0,
                f"tile_m {self.tile_m} is no multiple of 16 rows for each of {self.num_warps} warps",
            ),
            (self.tile_n % 16 == 0, f"tile_n {self.tile_n} is no multiple of 16"),
            *(
                (load in (0, 2), f"load_{of} is 0 (the whole tile) or 2 (slices of 16), not {load}")
                for of, load in zip("qkv", loads, strict=True)
            ),
            (
                not self.softmax_in_shared or not (self.folded_scale or self.peel or self.warp_rows > 32),
                "softmax_in_shared takes no folded scale, no peeling and at most 32 rows per warp",
            ),
            (
                self.k_slices or not (self.double_buffer or 0 in loads),
                "row by column (k_slices off) needs load_q = load_k = load_v = 2 and no double buffer",
            ),
            (self.async_copy or not self.eager, "eager copies are asynchronous ones"),
        ]

    def check(self, target: Target | None = None) -> list[str]:
        """The violated constraints (of ``target``, if given); empty if the configuration is valid."""
        return super().check(target) or [
            f"{what}: {problem}"
            for what, rows in (("tile_m", self.tile_m), ("tile_n", self.tile_n))
            for problem in self.copy_plan(rows).problems()
        ]

    def violations(self, problem: AttentionProblem) -> list[str]:
        """The constraints of the kernel that a problem violates; empty if it takes it."""
        masked = problem.features(self.tile_m, self.tile_n).masked
        more = [*problem.changes, *problem.head_arrays, *["log-sum-exps"] * problem.lse]
        return problem.differences(self) + violated(
            [
                (not more, f"a rung of the ladder has no {', '.join(more)}"),
                (
                    not (self.softmax_in_shared and masked),
                    "softmax_in_shared is the plain product's baseline: no masks",
                ),
                problem.grid_constraint(self.tile_m),
                (not problem.listed, "a rung of the ladder takes no packed sequences"),
                (
                    not self.heads_first or problem.q_len <= MOST_GRID_ROWS * self.tile_m,
                    f"heads_first has query blocks along y: at most {MOST_GRID_ROWS} of them",
                ),
                (not (self.heads_first and problem.right is not None), "heads_first has no causal masks"),
            ]
        )

    def calls(self, problem: AttentionProblem, operands: ArrayStrides, multiprocessors: int) -> tuple[KernelCall]:
        """The kernel for a problem, on arrays with these strides; one CTA per block of query rows."""
        source = KernelSource.of(
            "warploom_lab.kernels.attention.ladder_kernel:attention_forward",
            f"attention_{self.tile_m}x{self.tile_n}x{self.head_dim}",
            opt_level=self.opt_level,
            config=self,
            features=problem.features(self.tile_m, self.tile_n),
            same_strides=len({operands.strides[name] for name in FORWARD}) == 1,
            row_strides=operands.rows(*FORWARD) if self.static_strides else None,
        )
        blocks = -(-problem.q_len // self.tile_m)
        along = (problem.heads, blocks) if self.heads_first else (blocks, problem.heads)
        scalars = {"q_len": problem.q_len, "kv_len": problem.kv_len, **operands.scalars(*FORWARD)}
        return (KernelCall(source, (*along, problem.batch), scalars, arrays=problem.arrays),)

    # -- notation
    def __str__(self) -> str:
        """The seeds' notation: ``(BF16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_fragments+…``."""
        words = [word for word, name in _WORDS.items() if getattr(self, name)]
        loads = f"load_{self.load_q}_{self.load_k}_{self.load_v}_fragments"
        words.insert(len([w for w in ("async", "eager", "swizzled") if w in words]), loads)
        words += [f"opt_level={self.opt_level}"] * (self.opt_level != 3)
        kind = type_name(self.dtype)
        name = {"bf16": "BF16", "f16": "FP16"}.get(kind, kind)
        return f"({name}, {self.head_dim}, {self.tile_m}, {self.tile_n}, {self.num_warps}): " + "+".join(words)

    @classmethod
    def reads(cls, text: str) -> bool:
        """Whether a text is in the seeds' notation, by how it begins."""
        return text.lstrip().startswith("(")

    @classmethod
    def parse(cls, text: str) -> RungSm80:
        """A config from the seeds' notation (what :meth:`__str__` prints). Raises ConfigError for words not known."""
        match = re.fullmatch(
            r"\(\s*(\w+)\s*,\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*\)\s*:?\s*(.*)", text.strip()
        )
        if match is None:
            raise ConfigError(f"{text!r} is no configuration; write (FP16, 128, 64, 64, 4): async+eager+swizzled+…")
        kind, head_dim, tile_m, tile_n, warps, rest = match.groups()
        dtype = element_type("the type", kind)
        base = cls(int(tile_m), int(tile_n), int(warps), int(head_dim), dtype, async_copy=False)
        changes: dict[str, Any] = {}
        for word in filter(None, (w.strip() for w in rest.split("+"))):
            loads = re.fullmatch(r"load_(\d+)_(\d+)_(\d+)_fragments", word)
            level = re.fullmatch(r"opt_level=(\d+)", word)
            if loads:
                changes |= dict(zip(("load_q", "load_k", "load_v"), map(int, loads.groups()), strict=True))
            elif level:
                changes["opt_level"] = int(level[1])
            elif word == "row_by_column":
                changes["k_slices"] = False
            elif word in _WORDS:
                changes[_WORDS[word]] = True
            else:
                raise ConfigError(f"{word!r} is no flag of attention; known: {', '.join(_WORDS)}, load_q_k_v_fragments")
        return replace(base, **changes)


_WORDS = {
    "async": "async_copy",
    "eager": "eager",
    "swizzled": "swizzle",
    "buffer": "double_buffer",
    "opt_softmax": "folded_scale",
    "cooperative": "cooperative",
    "strided": "strided",
    "k_row_major": "k_row_major",
    "peel": "peel",
    "strided_epilogue": "strided_epilogue",
    "block_index": "block_index",
    "backward": "backward",
    "output_hint": "output_hint",
    "panels": "head_dim_panels",
    "static_strides": "static_strides",
    "shared_softmax": "softmax_in_shared",
    "row_by_column": "_row_by_column",
    "heads_first": "heads_first",
}
