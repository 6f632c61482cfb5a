"""Words of ``k`` for sm_90: clusters, mbarriers, TMA copies, ``wgmma``, rings, elected threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from warploom.core.dtypes import DType, bf16, f32, pred, s32, u32, u64
from warploom.core.errors import LayoutError, TraceError
from warploom.isa.async_copy import Eviction, bulk_store, tensor_load, tensor_store
from warploom.isa.barriers import mbarrier_arrival, mbarrier_init, mbarrier_wait
from warploom.isa.conversion import FULL_MASK
from warploom.isa.effects import ClusterScope
from warploom.isa.instruction import named
from warploom.isa.matrix import wgmma, wgmma_wait
from warploom.lang.builder import Builder, word
from warploom.lang.fragments import Fragment, FragmentWords
from warploom.lang.memory import GlobalPointer, SharedTile
from warploom.lang.printing import PrintWords
from warploom.lang.source import name_at
from warploom.lang.values import Mutable, Number, TileAddress, Traced
from warploom.layout.catalogue import wgmma_accumulator
from warploom.layout.wgmma import MatrixDescriptor


@dataclass(frozen=True, eq=False)
class TensorMapHandle:
    """A TMA descriptor parameter; its address, for ``k.tma_load`` and ``k.tma_store``."""

    address: Traced


@dataclass(frozen=True, eq=False)
class MbarrierArray:
    """An array of mbarriers in shared memory."""

    words: HopperWords
    tile: SharedTile
    count: int

    def address(self, index: Number = 0) -> Traced:
        """The shared address of the mbarrier with this index."""
        if isinstance(index, int) and not 0 <= index < self.count:
            raise TraceError(f"{self.tile.name} has {self.count} mbarriers; there is no number {index}")
        return self.tile.at(index * 8)

    def init(self, arrivals: int, index: Number | None = None) -> None:
        """Initialise one or all, each by one thread; ``arrivals`` complete a phase. Then it fences, and all meet.

        ``full.init(1, k.thread)`` under ``k.when(k.thread < full.count)`` lets as many threads take one each.
        """
        self.words.unfinished.pop(self, None)
        for i in range(self.count) if index is None else (index,):
            self.words.issue(mbarrier_init(arrivals), self.address(i))

    def arrive(
        self, index: Number = 0, *, when: Number = True, cta: Number | None = None, scope: ClusterScope = "cta"
    ) -> None:
        """Arrive once for each thread whose predicate holds; ``cta``: at the same mbarrier of the CTA of that rank.

        ``scope="cluster"`` also publishes this thread's writes to other CTAs (a costly fence); without it a remote
        arrival says that shared memory has been read and may be overwritten, which is what a ring needs.
        """
        address = self.address(index)
        if cta is not None:
            address = self.words.map_shared(address, cta)
        self.words.issue(mbarrier_arrival(None, cta is not None, scope), address, when)

    def arrive_cluster(self, index: Number = 0, *, when: Number = True) -> None:
        """Arrive once a warp at this mbarrier of every CTA of the cluster: lane r at that of rank r.

        What consumers of a multicast tile do: every producer that writes into their CTA must know that it was read.
        ``when`` is a condition on the whole warp.
        """
        k = self.words
        mine = k.lane < k.cluster_ctas
        self.arrive(index, when=mine if when is True else mine & k.operand(when, pred), cta=k.lane)

    def expect(self, transaction_bytes: int, index: Number = 0, *, when: Number = True) -> None:
        """Arrive and expect so many bytes of bulk copies in this phase (``arrive.expect_tx``)."""
        self.words.issue(mbarrier_arrival(transaction_bytes), self.address(index), when)

    def wait(self, parity: Number, index: Number = 0, *, scope: ClusterScope = "cta") -> None:
        """Block until the phase of that parity has completed (0 the first, then alternating).

        ``scope="cluster"`` is the other half of arrivals at that scope: it makes other CTAs' writes visible.
        """
        self.words.issue(mbarrier_wait(scope), self.address(index), parity)


@dataclass(eq=False)
class Ring:
    """A position in a ring of ``stages``: the stage index and the parity of its phase, carried in two registers."""

    words: HopperWords
    stages: int
    stage: Mutable
    phase: Mutable

    def advance(self) -> None:
        """Move on to the next stage; the parity flips on wrapping."""
        k = self.words
        following = self.stage.get() + 1
        wraps = following == self.stages
        self.stage.set(k.select(wraps, 0, following))
        self.phase.set(k.select(wraps, self.phase.get() ^ 1, self.phase.get()))


class HopperWords(FragmentWords):
    """Clusters, mbarriers, TMA copies and ``wgmma`` (sm_90). ``cluster`` counts its CTAs along x, y and z."""

    cluster: tuple[int, int, int] = (1, 1, 1)

    def __init__(
        self, *, share: bool = True, cluster: tuple[int, int, int] = (1, 1, 1), threads: int | None = None
    ) -> None:
        super().__init__(share=share)
        self.cluster, self.cta_threads = cluster, threads
        """``cta_threads``: of the kernel, None while only its parameters are looked at."""

    @property
    def cluster_ctas(self) -> int:
        """CTAs of the cluster, known while tracing."""
        return self.cluster[0] * self.cluster[1] * self.cluster[2]

    @property
    def cluster_rank(self) -> Traced:
        """The CTA's number in its cluster (u32), x fastest."""
        return self.special("cluster_ctarank") if self.cluster_ctas > 1 else self.value(0, u32)

    @word("barrier.cluster.arrive.release.aligned")
    def cluster_arrive(self) -> None:
        """``barrier.cluster.arrive``: all threads arrive, once before each :meth:`cluster_wait`, and may go on."""

    @word("barrier.cluster.wait.acquire.aligned")
    def cluster_wait(self) -> None:
        """``barrier.cluster.wait``: all threads wait until those of every CTA of the cluster have arrived or exited."""

    def cluster_sync(self) -> None:
        """All threads of the cluster meet and see each other's memory accesses.

        Needed before the first access to another CTA's shared memory (its mbarriers must be initialised), and at the
        end of a kernel, unless something else tells that no CTA leaves while others still reach into it.
        """
        self.cluster_arrive()
        self.cluster_wait()

    def map_shared(self, address: Traced, rank: Number) -> Traced:
        """``mapa``: where a shared address (u32) of this CTA lies in the CTA of a rank, for remote arrivals."""
        if isinstance(rank, int) and not 0 <= rank < self.cluster_ctas:
            raise TraceError(
                f"there is no CTA of rank {rank} in a cluster of {self.cluster_ctas}; "
                "@kernel(cluster=…) says how many there are"
            )
        mapped = self.issue(named("mapa.shared::cluster.u32"), address, rank)[0]
        return TileAddress(mapped, address.within) if isinstance(address, TileAddress) else mapped

    # -- mbarriers, and what waits for other launches

    def mbarriers(self, count: int, name: str = "") -> MbarrierArray:
        """Room for ``count`` mbarriers in shared memory."""
        where = self.here()
        taken = any(region.name == "mbarriers" for region in self.regions)
        default = f"mbarriers{len(self.regions)}" if taken else "mbarriers"
        name = name or name_at(where.file, where.line) or default
        return MbarrierArray(self, self.shared(u64, count, name=name), count)

    @word("fence.mbarrier_init.release.cluster")
    def mbarrier_fence(self) -> None:
        """Make initialised mbarriers visible to the async proxy."""

    def ring(self, stages: int, name: str = "ring", *, phase: int = 0) -> Ring:
        """A fresh position in a ring, at stage 0; a producer that waits for empty stages starts with ``phase=1``."""
        stage = self.register(u32, 0, f"{name}_stage")
        return Ring(self, stages, stage, self.register(u32, phase, f"{name}_phase"))

    @word("griddepcontrol.wait")
    def await_launch_before(self) -> None:
        """``griddepcontrol.wait``: until the launch before is done, and what it wrote is there.

        For launches that overlap with the one before (:attr:`KernelCall.overlaps
        <warploom.kernels.source.KernelCall.overlaps>`): every thread does this once, before it reads or writes memory
        that the other launch has to do with.
        """

    @word("griddepcontrol.launch_dependents")
    def allow_next_launch(self) -> None:
        """``griddepcontrol.launch_dependents``: an overlapping next launch may begin once every CTA has said so."""

    @word("elect.sync", mask=FULL_MASK)
    def elect(self) -> Traced:
        """A predicate that holds in one lane of the warp (``elect.sync``)."""
        ...

    @word("fence.proxy.async{space}", space={"shared": ".shared::cta", "global": ".global", "all": ""})
    def fence_async(self, space: Literal["shared", "global", "all"] = "shared") -> None:
        """``fence.proxy.async``: this thread's ordinary accesses to ``space`` come before later TMA and wgmma ones.

        In the writing threads, before they signal, and in those that have read what the TMA is to overwrite.
        ``"global"`` is for arrays that the kernel itself has written and then loads through the TMA.
        """

    # -- TMA
    def tma_load(
        self,
        tile: SharedTile,
        tensor_map: TensorMapHandle,
        coordinates: Sequence[Number],
        barriers: MbarrierArray,
        index: Number = 0,
        *,
        when: Number = True,
        offset: Number = 0,
        eviction: Eviction = "",
        multicast: Number | None = None,
    ) -> None:
        """Copy a box to ``offset`` bytes into a tile; its bytes complete on the mbarrier. One thread issues it.

        ``multicast`` is a mask of the cluster's CTAs (bit r: rank r). The box then goes to the same place in each of
        them and completes there on its own mbarrier of that number, which must expect these bytes; the stage must be
        free in all of them.
        """
        self._one_stage(tile)
        to, barrier = tile.at(offset), barriers.address(index)
        places = [self._coordinate(c) for c in coordinates]
        receivers = () if multicast is None else (self._mask(multicast),)
        copy = tensor_load(len(coordinates), eviction, bool(receivers))
        self.issue(copy, to, tensor_map.address, barrier, when, *places, *receivers)

    def _one_stage(self, tile: SharedTile) -> None:
        if tile.stages > 1 and not tile.chosen:
            raise TraceError(f"{tile.name} has {tile.stages} stages: choose one with {tile.name}.stage(ring.stage)")

    def _mask(self, ctas: Number) -> Traced:
        most = (1 << self.cluster_ctas) - 1
        if isinstance(ctas, int) and not 0 < ctas <= most:
            raise TraceError(
                f"multicast={ctas:#b} names CTAs outside of the cluster, which has {self.cluster_ctas}"
                f": masks are 0b1 to {most:#b}; @kernel(cluster=…) says how many CTAs there are"
            )
        return self.operand(ctas, u32)

    def tma_store(
        self,
        tensor_map: TensorMapHandle,
        coordinates: Sequence[Number],
        tile: SharedTile,
        *,
        when: Number = True,
        offset: Number = 0,
    ) -> None:
        """Copy a tile, from ``offset`` bytes on, out to a box; belongs to the thread's bulk group."""
        self._one_stage(tile)
        to, places = tile.at(offset), [self._coordinate(c) for c in coordinates]
        self.issue(tensor_store(len(coordinates)), to, tensor_map.address, when, *places)

    def bulk_store(self, pointer: GlobalPointer, tile: SharedTile, *, adds: bool = False, when: Number = True) -> None:
        """Copy a tile's bytes to consecutive ones of global memory; belongs to the thread's bulk group.

        ``adds``: a tile of f32 is added to what is there, element by element. One thread issues it; the pointer is a
        multiple of 16 bytes.
        """
        self._one_stage(tile)
        if adds and tile.dtype is not f32:
            raise TraceError(f"bulk_store adds f32, and {tile.name} holds {tile.dtype}")
        self.issue(bulk_store(tile.layout.bytes, adds), tile.at(0), pointer.address, when)

    def _coordinate(self, x: Number) -> Traced:
        if isinstance(x, Mutable):
            x = x.get()
        return self.bitcast(x, s32) if isinstance(x, Traced) and x.dtype is u32 else self.operand(x, s32)

    @word("cp.async.bulk.commit_group")
    def commit_bulk(self) -> None:
        """Close the thread's group of bulk stores."""

    @word("cp.async.bulk.wait_group{reads_only}", reads_only={True: ".read", False: ""})
    def wait_bulk(self, pending: int = 0, *, reads_only: bool = False) -> None:
        """Wait for bulk-store groups; ``reads_only``: until their shared memory may be overwritten."""

    # -- wgmma
    def descriptor(self, address: Traced, shape: MatrixDescriptor) -> Traced:
        """The 64-bit matrix descriptor of an operand that starts at a shared address."""
        found = self.descriptor_of(shape.low_word(address), shape)
        return TileAddress(found, address.within) if isinstance(address, TileAddress) else found

    def wgmma_operand(self, tile: SharedTile, row: int = 0, col: int = 0, *, transposed: bool = False) -> Traced:
        """The descriptor of the operand of ``wgmma`` that starts at element (row, col) of a swizzled tile.

        The tile's rows are those of A, or columns of B, and its columns run along K; ``transposed``: the other way
        round, for ``k.wgmma(…, transposed_a=True)`` or ``transposed_b=True``.
        """
        self._one_stage(tile)
        try:
            shape = tile.layout.matrix_descriptor(transposed=transposed)
            offset = tile.layout.matrix_offset(row, col, transposed=transposed)
        except LayoutError as error:
            raise TraceError(f"{tile.name}: {error}") from error
        return self.descriptor(tile.at(offset), shape)

    def descriptor_of(self, low: Traced, shape: MatrixDescriptor) -> Traced:
        """The descriptor with this low word (start address and leading offset)."""
        return self.convert(low, u64) + (shape.high_word << 32)

    def warpgroup_accumulator(self, n: int, name: str = "") -> Fragment:
        """An uninitialised m64n{n} f32 accumulator of a warpgroup."""
        return self.accumulator(wgmma_accumulator(n), None, name)

    @word("wgmma.fence.sync.aligned")
    def wgmma_fence(self) -> None:
        """``wgmma.fence``: before the first wgmma, and whenever its registers were written by other instructions."""

    def wgmma(
        self,
        accumulator: Fragment,
        a: Traced | Sequence[Traced],
        b: Traced,
        *,
        inputs: DType = bf16,
        accumulate: Number = True,
        transposed_b: bool = False,
        transposed_a: bool = False,
    ) -> None:
        """Issue one m64nNk16 step: A a descriptor or four registers, B a descriptor.

        ``transposed_b`` and ``transposed_a`` (a descriptor): the shared tile's rows run along N (M), not along K.
        """
        if isinstance(a, SharedTile) or isinstance(b, SharedTile):
            raise TraceError("wgmma takes descriptors, not tiles: k.wgmma_operand(tile, row, col) makes one")
        n = accumulator.layout.shape[1]
        instruction = wgmma(n, inputs, "shared" if isinstance(a, Traced) else "registers", transposed_b, transposed_a)
        head, sums = [a] if isinstance(a, Traced) else list(a), accumulator.mutable
        self.emit_into(instruction, [*head, b, self.operand(accumulate, pred), *sums], sums)

    @word("wgmma.commit_group.sync.aligned")
    def wgmma_commit(self) -> None:
        """Close the group of ``wgmma`` instructions issued since the last commit (``wgmma.commit_group``)."""

    def wgmma_wait(self, pending: int, *complete: Fragment) -> None:
        """``wgmma.wait_group``; ``complete`` are the accumulators that may be read from here on."""
        sums = [r for f in complete for r in f.mutable]
        if any(r.dtype is not f32 for r in sums):
            raise TraceError("wgmma accumulators are f32")
        self.emit_into(wgmma_wait(pending, len(sums)), sums, sums)


class Kernel(HopperWords, PrintWords):
    """``k``: the first argument of every kernel function. Its methods are the language; see the base classes."""

    def __dir__(self) -> list[str]:
        """The words of the language, as a prompt completes them: without what builds a Program underneath."""
        return [name for name in dir(type(self)) if not hasattr(Builder, name)]
