"""The sum over K of kernels without roles: copies, fragments and products of a ring of k-tiles, one over the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from warploom.core.dtypes import u32
from warploom.lang import Fragment, Kernel, SharedTile, Traced
from warploom.tile.copies import CopyRing, Place
from warploom.tile.operands import DEPTH, Registers
from warploom.tile.product import zero


class SteppedProduct(Protocol):
    """A product whose fragments load a k-step at a time, such as :class:`~warploom.tile.product.MmaSyncProduct`."""

    @property
    def sums(self) -> Fragment:
        """The accumulators."""
        ...

    @property
    def depth(self) -> int:
        """Of a k-tile."""
        ...

    def fragments(self, a: SharedTile, b: SharedTile, depth: int) -> list[Registers]:
        """What the loads of a k-step bring."""
        ...

    def multiply_loaded(self, fragments: Sequence[Registers]) -> None:
        """Add the products of one k-step."""
        ...


def accumulate(
    k: Kernel, ring: CopyRing, product: SteppedProduct, count: Traced, places: Callable[[Traced], Sequence[Place]]
) -> None:
    """The product's sums over ``count`` k-tiles, at least one, whose copies :meth:`CopyRing.begin` has started.

    Fragments load a k-step ahead, over the ends of tiles too; a tile's copy starts in the middle of another's products;
    one barrier a tile. At the end every copy has arrived, and no warp reads a stage any more.
    """

    def fragments(tiles: Sequence[SharedTile], depth: int) -> list[Registers]:
        a, b = tiles
        return product.fragments(a, b, depth)

    zero(product.sums)
    steps = range(0, product.depth, DEPTH)
    ring.wait(ring.stages - 2)
    ahead = [[k.register(u32, x, "ahead") for x in loaded] for loaded in fragments(ring.at(0), 0)]
    read, write = ring.consumer(), ring.producer()
    with k.loop(count) as tile:
        current: list[Sequence[Traced]] = [[r.get() for r in registers] for registers in ahead]
        for step in steps[1:]:
            following = fragments(read.tiles, step)
            product.multiply_loaded(current)
            if step == steps[len(steps) // 2]:  # over the tile before this one, which no warp reads since the barrier
                later = tile + (ring.stages - 1)
                write.put(*places(later), when=later < count)
            current = following
        read.release()
        read.wait()
        with k.when(tile + 1 < count, uniform=True):
            for registers, loaded in zip(ahead, fragments(read.tiles, 0), strict=True):
                for register, value in zip(registers, loaded, strict=True):
                    register.set(value)
        product.multiply_loaded(current)
