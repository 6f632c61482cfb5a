"""An attention problem: shapes, type and strides; and how a configuration is launched on it."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.core.dtypes import DType
from warploom.core.errors import ConfigError
from warploom.kernels.attention.config import AttentionConfig

TensorStrides = tuple[int, int, int]
"""(batch, head, sequence) in elements."""


@dataclass(frozen=True)
class AttentionProblem:
    """Shapes of ``softmax(scale · Q·Kᵀ)·V``: Q and O (batch, q_len, heads, head_dim), K and V (batch, kv_len, …)."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: DType

    @property
    def flops(self) -> int:
        """Floating-point operations of the two products: 4 · batch · heads · q_len · kv_len · head_dim."""
        return 4 * self.batch * self.heads * self.q_len * self.kv_len * self.head_dim

    def misfits(self, config: AttentionConfig) -> list[str]:
        """Every reason why ``config`` cannot run this problem; empty if it can."""
        found: list[str] = []
        if config.head_dim != self.head_dim:
            found.append(f"head_dim is {self.head_dim}, the configuration's {config.head_dim}")
        if config.dtype is not self.dtype:
            found.append(f"the arrays are {self.dtype}, the configuration {config.dtype}")
        if self.q_len % config.tile_m or self.q_len == 0:
            found.append(f"the query length {self.q_len} is no positive multiple of tile_m = {config.tile_m}")
        if self.kv_len % config.tile_n or self.kv_len == 0:
            found.append(f"the key length {self.kv_len} is no positive multiple of tile_n = {config.tile_n}")
        if max(self.heads, self.batch) > 65535:
            found.append(f"{self.heads} heads and {self.batch} batches: each may be at most 65535")
        return found

    def grid(self, config: AttentionConfig) -> tuple[int, int, int]:
        """CTAs along x (query blocks, so that neighbours share K and V in the L2), y (heads) and z (batches)."""
        misfits = self.misfits(config)
        if misfits:
            raise ConfigError(f"{config} does not fit: " + "; ".join(misfits))
        return self.q_len // config.tile_m, self.heads, self.batch

    def scalars(
        self, config: AttentionConfig, q: TensorStrides, k: TensorStrides, v: TensorStrides, o: TensorStrides
    ) -> dict[str, int]:
        """The kernel's scalar arguments by name; a Program takes those among its parameters."""
        strides = {
            f"{tensor}_{axis}": stride
            for tensor, of_tensor in (("q", q), ("k", k), ("v", v), ("o", o))
            for axis, stride in zip(("batch", "head", "seq"), of_tensor, strict=True)
        }
        return strides | {"kv_blocks": self.kv_len // config.tile_n}
