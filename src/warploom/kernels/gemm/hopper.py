# pyright: reportInvalidTypeForm=false
"""The GEMM kernel fed by the TMA (sm_90a): one producer warpgroup, consumers that multiply and store.

The producer runs ahead through a ring of stages, over the ends of tiles too where the kernel is persistent, so that the
first k-tiles of the next tile arrive while the consumers store this one.
"""

from __future__ import annotations

from collections.abc import Callable

from warploom.core.dtypes import f32, u16, u32
from warploom.kernels.gemm.epilogue import Output
from warploom.kernels.gemm.features import PLAIN, GemmFeatures
from warploom.kernels.gemm.hopper_config import HopperGemmConfig
from warploom.kernels.gemm.hopper_consumer import Consumer
from warploom.kernels.gemm.hopper_epilogue import Store
from warploom.kernels.gemm.hopper_fragments import WarpConsumer
from warploom.kernels.gemm.hopper_parts import Extents, Maps, Parts, Place, Producer, TileOrder
from warploom.lang import Global, GlobalPointer, Kernel, TensorMap, Traced, kernel


@kernel(
    threads=lambda config, **_: config.threads, cluster=lambda config, **_: config.cluster, requires="sm_90a",
    drop_unused=True,
)  # fmt: skip
def gemm_hopper(
    k: Kernel,
    a_map: TensorMap,
    b_map: TensorMap,
    c_map: TensorMap,
    out: Global[u16],
    out_f32: Global[f32],
    bias: Global[u16],
    extra0: Global[u16],
    extra1: Global[u16],
    m: u32, n: u32,
    c_stride: u32, extra_stride: u32, c_batch: u32, extra_batch: u32,
    k_tiles: u32, tiles_per_split: u32, tiles: u32, alpha: u32,
    *,
    config: HopperGemmConfig,
    features: GemmFeatures = PLAIN,
) -> None:  # fmt: skip
    """C = epilogue(A·B); tensor maps of rank 2, batched ones 3, of A and B as they are stored.

    A 16-bit C whose lines are aligned leaves through ``c_map``; others through ``out`` (16-bit) or ``out_f32``, whose
    strides and extents count elements. ``tiles`` are those of all parts of a split K and of all batches; the grid is
    as many CTAs, or for a persistent kernel at most one per multiprocessor. Parameters that a configuration does not
    use are left out.
    """
    config.require()
    extents = Extents(m, n, k_tiles, tiles_per_split, tiles)
    parts = Parts(k, config, features)
    order = TileOrder(k, config, features, extents)
    store = Store(k, config, features, c_map if features.bulk_out else None)
    parts.initialise()
    with k.warps(0, 4, registers=config.producer_registers):
        Producer(k, config, features, Maps(a_map, b_map), parts, order).run()
    with k.warps(4, 4 * (config.consumers + 1), registers=config.consumer_registers):
        if config.mma_sync:
            consumer = WarpConsumer(k, config, parts, extents)
        else:
            consumer = Consumer(k, config, features, parts, order)
        store.prepare(consumer)
        pointers = out_f32 if features.out_dtype is f32 else out, bias, extra0, extra1

        def finish(place: Place) -> None:
            output = _output(k, config, features, place, pointers, (m, n, alpha),
                             (c_stride, extra_stride, c_batch, extra_batch))  # fmt: skip
            store.run(consumer, place, output)

        each_tile(k, config, order, consumer, finish)
        store.wait()
    parts.leave()


def each_tile(
    k: Kernel,
    config: HopperGemmConfig,
    order: TileOrder,
    consumer: Consumer | WarpConsumer,
    finish: Callable[[Place], None],
) -> None:
    """Multiply and ``finish`` every tile of this consumer."""
    consumer.begin_turns()
    count = order.count()
    if not config.pingpong:
        with k.loop(count) as turn:
            place = order.place(turn)
            consumer.multiply(place)
            finish(place)
        return
    with k.when(consumer.number == 1, uniform=True):
        consumer.skip(order.place(0))
    with k.loop(count, start=consumer.number, step=2) as turn:
        place = order.place(turn)
        consumer.multiply(place)
        finish(place)
        consumer.skip(order.place(turn + 1))
    consumer.end_turns(count)


def _output(
    k: Kernel,
    config: HopperGemmConfig,
    features: GemmFeatures,
    place: Place,
    pointers: tuple[GlobalPointer, GlobalPointer, GlobalPointer, GlobalPointer],
    numbers: tuple[Traced, Traced, Traced],
    strides: tuple[Traced, Traced, Traced, Traced],
) -> Output:
    """C and what is combined with it, of a tile's matrix."""
    target, bias, *extras = pointers
    m, n, alpha = numbers
    c_stride, extra_stride, c_batch, extra_batch = strides
    if features.batched or config.split_k > 1:
        target = target + k.mul_wide(place.matrix, c_batch)
    if features.batched:
        extras = [x + k.mul_wide(place.batch, extra_batch) for x in extras]
    used = tuple(extras[: features.epilogue.extras])
    return Output(target, c_stride, m, n, alpha, bias, used, extra_stride)
