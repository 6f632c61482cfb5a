"""An attention problem: shapes, type and strides; and how a configuration is launched on it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from warploom.core.dtypes import DType
from warploom.core.errors import ConfigError
from warploom.kernels.attention.config import AttentionConfig
from warploom.kernels.attention.features import AttentionFeatures
from warploom.kernels.attention.hopper_config import HopperConfig
from warploom.kernels.attention.schedule import FLOPS_PER_SECOND, Work, planes_together
from warploom.kernels.settings import broken_flags

MOST_GRID_ROWS = 65535  # CTAs along y and z
MOST_POSITIONS = 2**30  # positions and their differences are s32 in the kernel

AnyConfig = AttentionConfig | HopperConfig
"""A configuration of either generator: ``mma.sync`` or ``wgmma``."""

TensorStrides = tuple[int, int, int]
"""(batch, head, sequence) in elements."""


@dataclass(frozen=True)
class AttentionProblem:
    """What is asked: Q and O (batch, q_len, heads, head_dim), K and V (batch, kv_len, kv_heads, head_dim), and options.

    ``window`` as in :class:`AttentionFeatures`; ``scale`` None is 1/√head_dim.
    """

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: DType
    window: tuple[int | None, int | None] = (None, None)
    scale: float | None = None
    softcap: float | None = None
    lse: bool = False

    @property
    def flops(self) -> int:
        """Floating-point operations of the two products: 4 · batch · heads · head_dim · visible scores."""
        return 4 * self.batch * self.heads * self.head_dim * self.visible_scores

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

    def features(self, config: AnyConfig) -> AttentionFeatures:
        """What a kernel of this configuration must be able to do, and nothing more."""
        return AttentionFeatures(
            window=self.window,
            ragged_q=self.q_len % config.tile_m != 0,
            ragged_kv=self.kv_len % config.tile_n != 0,
            group=self.heads // self.kv_heads,
            scale=self.scale,
            softcap=self.softcap,
            lse=self.lse,
        )

    def misfits(self, config: AnyConfig) -> list[str]:
        """Every reason why ``config`` cannot run this problem; empty if it can."""
        found = broken_flags(config)
        if found:
            return found
        if config.head_dim != self.head_dim:
            found.append(f"head_dim is {self.head_dim}, the configuration's {config.head_dim}")
        if config.dtype is not self.dtype:
            found.append(f"the arrays are {self.dtype}, the configuration {config.dtype}")
        if isinstance(config, AttentionConfig) and max(self.heads, self.batch) > MOST_GRID_ROWS:
            found.append(f"{self.heads} heads and {self.batch} batches: each may be at most {MOST_GRID_ROWS}")
        if self.tiles(config) >= MOST_POSITIONS:
            found.append(f"{self.tiles(config)} tiles of query rows reach {MOST_POSITIONS}")
        if max(self.q_len, self.kv_len) >= MOST_POSITIONS:
            found.append(f"lengths {self.q_len} and {self.kv_len} reach {MOST_POSITIONS} positions")
        return found

    def grid(self, config: AnyConfig, multiprocessors: int = 1) -> tuple[int, int, int]:
        """CTAs along x, y and z.

        ``mma.sync``: query blocks (so that neighbours share K and V in the L2), heads, batches. ``wgmma``: one tile of
        query rows per CTA, or with a persistent kernel one CTA per multiprocessor.
        """
        misfits = self.misfits(config)
        if misfits:
            raise ConfigError(f"{config} does not fit: " + "; ".join(misfits))
        if isinstance(config, AttentionConfig):
            q_blocks = -(-self.q_len // config.tile_m)
            return (self.heads, q_blocks, self.batch) if config.heads_first else (q_blocks, self.heads, self.batch)
        tiles = self.tiles(config)
        return (min(tiles, multiprocessors) if config.flat else tiles), 1, 1

    def tiles(self, config: AnyConfig) -> int:
        """Tiles of query rows in all."""
        return -(-self.q_len // config.tile_m) * self.heads * self.batch

    def planes_together(self, config: AnyConfig, multiprocessors: int) -> int:
        """Heads (of all batches) whose tiles run together, where tiles differ in work; elsewhere it means nothing."""
        planes = self.heads * self.batch
        if not isinstance(config, HopperConfig) or self.window[1] is None:
            return max(1, planes)
        flops = 4 * config.tile_m * config.tile_n * self.head_dim
        keys = 2 * config.tile_n * self.head_dim * self.dtype.bytes
        work = Work(
            planes, self.visited_blocks(config), flops / FLOPS_PER_SECOND, keys * self.kv_heads / self.heads,
            2 * config.tile_m * self.head_dim * self.dtype.bytes, config.flat, multiprocessors,
        )  # fmt: skip
        return planes_together(work)

    def visited_blocks(self, config: AnyConfig) -> tuple[int, ...]:
        """Key blocks that each tile of query rows of a plane visits: what the kernel's ``Mask.blocks`` counts."""
        left, right = self.window
        first_row = np.arange(-(-self.q_len // config.tile_m), dtype=np.int64) * config.tile_m
        top = first_row + (self.kv_len - self.q_len)
        end = np.full_like(top, -(-self.kv_len // config.tile_n))
        if right is not None:
            end = np.minimum(end, -(-np.maximum(top + config.tile_m + right, 1) // config.tile_n))
        first = np.zeros_like(top)
        if left is not None:
            first = np.minimum(np.maximum(top - left, 0) // config.tile_n, end - 1)
        return tuple((end - first).tolist())

    def scalars(
        self,
        config: AnyConfig,
        q: TensorStrides,
        k: TensorStrides,
        v: TensorStrides,
        o: TensorStrides,
        multiprocessors: int = 1,
    ) -> dict[str, int]:
        """The kernel's scalar arguments by name; a Program takes those among its parameters."""
        strides = {
            f"{tensor}_{axis}": stride
            for tensor, of_tensor in (("q", q), ("k", k), ("v", v), ("o", o))
            for axis, stride in zip(("batch", "head", "seq"), of_tensor, strict=True)
        }
        counts = {
            "q_len": self.q_len,
            "kv_len": self.kv_len,
            "q_blocks": -(-self.q_len // config.tile_m),
            "kv_blocks": -(-self.kv_len // config.tile_n),
            "heads": self.heads,
            "tiles": self.tiles(config),
            "planes_together": self.planes_together(config, multiprocessors),
        }
        return strides | counts
