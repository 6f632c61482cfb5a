"""Words of ``k`` for clusters (sm_90): CTAs that run together, meet, and reach each other's shared memory."""

from __future__ import annotations

from warploom.core.dtypes import u32
from warploom.core.errors import TraceError
from warploom.isa import cluster as isa
from warploom.lang.declared import word
from warploom.lang.fragments import FragmentWords
from warploom.lang.values import Number, TileAddress, Traced


class ClusterWords(FragmentWords):
    """Who a CTA is in its cluster, and how the CTAs of one meet. ``cluster`` are their counts along x, y and z."""

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
                f"there is no CTA of rank {rank} in a cluster of {self.cluster_ctas} ({self.here()}); "
                "@kernel(cluster=…) says how many there are"
            )
        mapped = self.emit(isa.map_shared(), (address, self.operand(rank, u32)))[0]
        return TileAddress(mapped, address.within) if isinstance(address, TileAddress) else mapped
