"""Attention forward on sm_80 and newer: the configuration of its kernel, what it takes, and the ones to choose from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from warploom.core.dtypes import DType, bf16, f16
from warploom.core.targets import Target
from warploom.kernels.attention.lists import list_tiles
from warploom.kernels.attention.problem import FORWARD, ArrayStrides, AttentionProblem, HeadDims
from warploom.kernels.settings import flag, violated
from warploom.kernels.source import KernelCall, KernelSource
from warploom.tile.planning import CopyPlan, padded_cols


@dataclass(frozen=True)
class ForwardSm80(HeadDims):
    """The kernel of :mod:`.device.forward_sm80`: all warps copy, and each owns ``tile_m / num_warps`` query rows."""

    word: ClassVar[str] = "attention_sm80"
    requires: ClassVar[str] = "sm_80"
    always: ClassVar[tuple[str, ...]] = ("tile_m", "tile_n", "num_warps", "stages", "head_dim", "dtype")

    tile_m: int = flag(256, "query rows per CTA", (64, 128, 256))
    tile_n: int = flag(64, "keys per step", (32, 64, 128))
    num_warps: int = flag(8, "warps per CTA", (4, 8))
    stages: int = flag(2, "K and V tiles in flight", (2, 3))
    head_dim: int = flag(128, "elements per head", (64, 128, 256))
    dtype: DType = flag(bf16, "element type of Q, K, V and O", (bf16, f16))
    v_dim: int = flag(0, "elements per head of V and O, if they are not head_dim", (0,))

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 32 * self.num_warps

    @property
    def narrow(self) -> Self:
        """The configuration itself: a warp's steps are as long whatever others the CTA has."""
        return self

    @property
    def once(self) -> Self:
        """The configuration itself: a CTA has one tile."""
        return self

    @property
    def warp_rows(self) -> int:
        """Query rows of one warp."""
        return self.tile_m // self.num_warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: Q (O leaves through it), then K and V of each stage."""
        keys = self.stages * self.tile_n * (padded_cols(self.head_dim) + padded_cols(self.value_dim))
        return (self.tile_m * self.query_cols + keys) * self.dtype.bytes

    @property
    def _constraints(self) -> list[tuple[bool, str]]:
        return [
            (
                self.tile_m % (16 * self.num_warps) == 0,
                f"tile_m {self.tile_m} is no multiple of 16 rows for each of {self.num_warps} warps",
            ),
            (self.tile_n % 16 == 0, f"tile_n {self.tile_n} is no multiple of 16"),
            (self.stages >= 2, "the ring has at least 2 stages"),
        ]

    def check(self, target: Target | None = None) -> list[str]:
        """The violated constraints (of ``target``, if given); empty if the configuration is valid."""
        return super().check(target) or [
            f"{what}: {problem}"
            for what, rows, cols in (
                ("tile_m", self.tile_m, self.query_cols),
                ("tile_n", self.tile_n, padded_cols(self.head_dim)),
                ("tile_n", self.tile_n, padded_cols(self.value_dim)),
            )
            for problem in CopyPlan(rows, cols, self.num_warps, True).problems()
        ]

    def violations(self, problem: AttentionProblem) -> list[str]:
        """The constraints of the kernel that a problem violates; empty if it takes it."""
        return problem.differences(self) + violated([problem.grid_constraint(self.tile_m)])

    def calls(self, problem: AttentionProblem, operands: ArrayStrides, multiprocessors: int) -> tuple[KernelCall, ...]:
        """The kernel for a problem, on arrays with these strides: one CTA per block of query rows.

        Before it the kernel that lists the blocks of packed sequences.
        """
        p = problem
        source = KernelSource.of(
            "warploom.kernels.attention.device.forward_sm80:attention_sm80",
            f"attention_{'packed_' if p.listed else ''}{self.tile_m}x{self.tile_n}x{self.dims}",
            config=self,
            features=p.features(self.tile_m, self.tile_n),
            row_strides=operands.rows(*FORWARD),
            listed=p.listed,
        )
        lengths = {"total_q": p.q_len} if p.listed else {"q_len": p.q_len, "kv_len": p.kv_len}
        grid, scalars = p.grid(self.tile_m, p.heads, p.q_len), {**lengths, **operands.starts(*FORWARD)}
        return *list_tiles(p, self.tile_m, multiprocessors), KernelCall(source, grid, scalars, arrays=p.arrays)
