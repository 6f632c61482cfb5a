# pyright: reportInvalidTypeForm=false
"""The attention forward kernel for ``wgmma`` and TMA (sm_90a): one producer warpgroup, consumers of 64 query rows each.

Consumers walk the key blocks from the last to the first, so that the masked ones come first. With ``flat`` the kernel
is persistent and its pipeline does not end with a tile: the first Q·Kᵀ of the next tile is issued together with the
last P·V of this one, while the finished output leaves through the buffer that held this tile's Q.
"""

from __future__ import annotations

from dataclasses import replace

from warploom.core.dtypes import f32, u32
from warploom.kernels.attention.features import PLAIN, AttentionFeatures
from warploom.kernels.attention.hopper_config import HopperConfig
from warploom.kernels.attention.hopper_consumer import Consumer
from warploom.kernels.attention.hopper_parts import Maps, Parts, Shape
from warploom.kernels.attention.hopper_producer import Producer
from warploom.lang import Global, Kernel, TensorMap, kernel


@kernel(threads=lambda config, **_: config.threads, requires="sm_90a", drop_unused=True)
def attention_hopper(
    k: Kernel,
    q_map: TensorMap,
    k_map: TensorMap,
    v_map: TensorMap,
    o_map: TensorMap,
    lse: Global[f32],
    q_len: u32,
    kv_len: u32,
    q_blocks: u32,
    kv_blocks: u32,
    heads: u32,
    tiles: u32,
    planes_together: u32,
    *,
    config: HopperConfig,
    features: AttentionFeatures = PLAIN,
    heads_inside: bool = True,
) -> None:
    """O = softmax(scale · Q·Kᵀ)·V; tensor maps of rank 4, boxes of 64 columns × tile rows.

    ``heads_inside``: the arrays are (batch, sequence, heads, head_dim), else (batch, heads, sequence, head_dim).
    ``tiles`` = q_blocks · heads · batches; the grid is tiles, or with ``flat`` as many CTAs as there are SMs. Where
    tiles differ in work, those of ``planes_together`` heads run together, the longest first (``schedule.py``).
    """
    config.require()
    if features.lse:  # of rounded P the sums are good enough to divide by, which are rounded as well, but not to tell
        config = replace(config, sum_column=False)
    shape = Shape(q_len, kv_len, q_blocks, kv_blocks, heads, tiles, planes_together)
    maps = Maps(q_map, k_map, v_map, o_map, heads_inside)
    parts = Parts(k, config)
    parts.initialise()
    with k.warps(0, 4, registers=config.producer_registers):
        Producer(k, config, features, shape, maps, parts).run()
    with k.warps(4, 4 * (config.consumers + 1), registers=config.consumer_registers):
        Consumer(k, config, features, shape, maps, parts, lse).run()
