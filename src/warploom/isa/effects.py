"""What an instruction does beyond its lanes' registers: the vocabulary the emulator keeps time and order by.

An instruction lists its effects; it does not carry them out. One effect has one implementation in the emulator, so an
instruction that reads or writes memory, arrives at a barrier or starts an asynchronous copy needs no emulator code of
its own. Operand positions are indices into the instruction's operands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Space = Literal["shared", "global", "local"]
Scope = Literal["cta", "cluster", "gpu", "sys"]
ClusterScope = Literal["cta", "cluster"]
MemoryOrder = Literal["weak", "relaxed", "acquire", "release", "acq_rel"]


@dataclass(frozen=True, slots=True)
class Effect:
    """Base of all effects."""


@dataclass(frozen=True, slots=True)
class ReadSpecial(Effect):
    """Reads a special register; the emulator knows its value per thread (``tid.x``, ``ctaid.y``, ``clock64`` …)."""

    register: str


@dataclass(frozen=True, slots=True)
class Access(Effect):
    """A synchronous access through the generic proxy: ``bytes`` per lane at ``operand[address] + offset``.

    The first ``lanes`` lanes give addresses. ``collective`` means that the data belongs to other lanes than those that
    give the addresses (``ldmatrix``), so that the access conflicts with every unordered access of the warp itself.
    ``words`` is the count of parts the instruction's meaning sees, each ``bytes // words`` wide. ``read_only``: through
    a cache that does not see what the kernel writes (``.nc``). ``volatile``: each time anew, so that a loop may wait by
    it for what others write; it orders nothing. ``remote``: the shared address may be one of another CTA's (``mapa``).
    """

    space: Space
    mode: Literal["load", "store", "atomic"]
    address: int
    bytes: int
    offset: int = 0
    lanes: int = 32
    collective: bool = False
    words: int = 1
    order: MemoryOrder = "weak"
    scope: Scope = "gpu"
    read_only: bool = False
    volatile: bool = False
    remote: bool = False


@dataclass(frozen=True, slots=True)
class MatrixAccess(Access):
    """A warp's access to a matrix at ``operand[address] + offset``, ``bytes`` an element (``wmma``).

    ``stride`` is the operand of the leading dimension in elements; ``major`` says whether that counts from row to row
    or from column to column. The instruction's ``fragment`` says which lane holds which element; ``is_input``: it is
    A or B.
    """

    stride: int = 1
    major: Literal["row", "col"] = "row"
    is_input: bool = False


@dataclass(frozen=True, slots=True)
class AsyncCopy(Effect):
    """``cp.async``: ``bytes`` per lane, global to shared, unordered until the thread waits for its group.

    ``valid_bytes`` is the operand that gives how many bytes are read; the rest is zero-filled.
    """

    shared: int
    source: int
    bytes: int
    shared_offset: int
    source_offset: int
    valid_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class CommitGroup(Effect):
    """Closes the current group of asynchronous operations of the executing threads (``queue`` names the kind)."""

    queue: Literal["cp.async", "bulk", "wgmma"]


@dataclass(frozen=True, slots=True)
class WaitGroup(Effect):
    """Waits until at most ``pending`` of the newest groups are unfinished.

    ``reads_only``: for bulk stores, waits until the sources have been read, not until the writes are visible.
    """

    queue: Literal["cp.async", "bulk", "wgmma"]
    pending: int
    reads_only: bool = False


@dataclass(frozen=True, slots=True)
class CopyArrival(Effect):
    """Each executing thread arrives at the mbarrier at ``operand[address] + offset`` when its ``cp.async`` are done.

    ``counted``: the mbarrier was initialised for these arrivals; otherwise the phase counts one more for each.
    """

    address: int
    offset: int
    counted: bool


@dataclass(frozen=True, slots=True)
class WarpSync(Effect):
    """All threads in the member mask meet here. ``mask`` is the operand of the mask, None for a full ``.aligned`` warp.

    ``orders_memory``: memory accesses before it are visible to the members after it (``__syncwarp``).
    ``aligned``: every thread of the warp must execute it together (``mma.sync.aligned`` and its like).
    """

    mask: int | None = None
    orders_memory: bool = False
    aligned: bool = False


@dataclass(frozen=True, slots=True)
class Barrier(Effect):
    """``bar.sync`` / ``bar.arrive``: operand ``barrier`` is its number; ``threads`` the count that completes it.

    ``threads`` None means all threads of the CTA. ``holds`` is the operand of a predicate that is put together over all
    that come: the result is the instruction's meaning of how many threads it holds for, and how many came.
    """

    barrier: int
    threads: int | None
    waits: bool
    holds: int | None = None


@dataclass(frozen=True, slots=True)
class Fence(Effect):
    """A memory fence of a scope, or one of its halves; ``sc``: they are in one order with each other (``fence.sc``)."""

    scope: Scope
    sc: bool = False
    acquires: bool = True
    releases: bool = True


@dataclass(frozen=True, slots=True)
class LaunchWait(Effect):
    """Waits until the launches that the kernel's depends on are over and what they wrote is visible."""


@dataclass(frozen=True, slots=True)
class ProxyFence(Effect):
    """Orders the thread's generic-proxy accesses to a memory space before later async-proxy ones."""

    space: Literal["shared", "global", "all"] = "shared"


@dataclass(frozen=True, slots=True)
class MbarrierInit(Effect):
    """Makes the 8 bytes at ``operand[address] + offset`` an mbarrier that expects ``count`` arrivals a phase.

    ``counted`` is the operand that gives the count in its place.
    """

    address: int
    offset: int
    count: int
    counted: int | None = None


@dataclass(frozen=True, slots=True)
class MbarrierFence(Effect):
    """Makes initialised mbarriers visible to the async proxy (``fence.mbarrier_init``)."""


@dataclass(frozen=True, slots=True)
class MbarrierArrive(Effect):
    """``count`` arrivals per executing thread; ``expected_bytes`` raises the phase's transaction count first.

    ``guard`` is the operand of a predicate that selects the threads that arrive. ``remote``: the address is one of the
    cluster's (``mapa``), in any of its CTAs. A count of 0 only expects bytes. ``drops``: who arrives takes no part in
    later phases. Without ``completes`` the phase must not end by it. ``scope`` is how
    far the arrival releases what was done before it: with
    ``"cta"`` a remote arrival orders accesses to shared memory, but publishes no writes to global memory; without
    ``releases`` it counts, and releases nothing. ``counted`` and ``expects`` are the operands that give the count and
    the bytes in the place of numbers.
    """

    address: int
    offset: int
    expected_bytes: int | None = None
    guard: int | None = None
    remote: bool = False
    scope: ClusterScope = "cta"
    count: int = 1
    drops: bool = False
    completes: bool = True
    releases: bool = True
    counted: int | None = None
    expects: int | None = None


@dataclass(frozen=True, slots=True)
class MbarrierInvalidate(Effect):
    """The mbarrier at ``operand[address] + offset`` is none any more."""

    address: int
    offset: int


@dataclass(frozen=True, slots=True)
class MbarrierWait(Effect):
    """Blocks until the phase with the parity in operand ``parity`` has completed; without ``blocks``, tells whether.

    With ``scope`` ``"cluster"`` it acquires what arrivals of other CTAs released at that scope. Without ``acquires`` a
    fence must follow to that end, and what does not block is no more than a look.
    """

    address: int
    offset: int
    parity: int
    scope: ClusterScope = "cta"
    blocks: bool = True
    acquires: bool = True


@dataclass(frozen=True, slots=True)
class ClusterBarrier(Effect):
    """``barrier.cluster``: one of its halves. All threads of the cluster's CTAs that have not exited take part.

    The arrival releases, the wait acquires; shared and global memory alike, at the scope of the cluster. A ``relaxed``
    arrival releases only what fences of mbarriers' initialisation have published.
    """

    waits: bool
    relaxed: bool = False


@dataclass(frozen=True, slots=True)
class BulkTensorCopy(Effect):
    """A TMA box between global and shared memory, through the async proxy.

    Loads complete on the mbarrier in operand ``barrier`` by their bytes (out-of-bounds elements are zero and count);
    stores belong to the thread's bulk group. ``coordinates`` are operand positions, innermost dimension first.
    ``guard`` selects the thread that issues it. ``multicast`` is the operand of a mask of CTAs of the cluster: the box
    goes to the same place of each of them, and completes there on the mbarrier at the same place. With ``reduction`` a
    store combines each element with what is there, by one atomic operation, in no order.
    """

    direction: Literal["load", "store"]
    tensor_map: int
    shared: int
    shared_offset: int
    coordinates: tuple[int, ...]
    barrier: int | None = None
    barrier_offset: int = 0
    guard: int | None = None
    multicast: int | None = None
    reduction: Literal["", "add", "min", "max"] = ""


@dataclass(frozen=True, slots=True)
class BulkStore(Effect):
    """``bytes`` consecutive bytes from shared to global memory, through the async proxy; part of the bulk group.

    ``shared`` and ``target`` are the operands of the addresses; ``guard`` selects the thread that issues it. ``adds``:
    f32 elements are added to what is there, each by one atomic operation, in no order. ``sized`` is the operand that
    gives the bytes in the place of the number.
    """

    shared: int
    target: int
    bytes: int
    shared_offset: int
    target_offset: int
    guard: int
    adds: bool
    sized: int | None = None


@dataclass(frozen=True, slots=True)
class BulkLoad(Effect):
    """Consecutive bytes from global to shared memory, through the async proxy; they complete on an mbarrier.

    ``shared``, ``source``, ``bytes`` (a multiple of 16), ``barrier`` and ``guard`` are operands, and so is the mask
    ``multicast`` of the CTAs of the cluster that receive them, as those of :class:`BulkTensorCopy`.
    """

    shared: int
    source: int
    bytes: int
    barrier: int
    guard: int
    shared_offset: int
    source_offset: int
    barrier_offset: int
    multicast: int | None = None


@dataclass(frozen=True, slots=True)
class AsyncStore(Effect):
    """Each thread stores words into a CTA of the cluster; they complete on an mbarrier of that CTA.

    ``target`` and ``barrier`` are operands, addresses of the cluster; the operands ``values`` are the words, each of
    ``word_bytes``.
    """

    target: int
    barrier: int
    values: tuple[int, ...]
    word_bytes: int
    target_offset: int
    barrier_offset: int


@dataclass(frozen=True, slots=True)
class TensorMapWrite(Effect):
    """Writes ``bytes`` at ``place`` within the tensor map at ``operand[address]``: a weak access to the whole map."""

    space: Literal["shared", "global"]
    address: int
    place: int
    bytes: int


@dataclass(frozen=True, slots=True)
class TensorMapFence(Effect):
    """A half of ``fence.proxy.tensormap::generic``: publishes what the thread knows, or takes in the map at an address.

    ``acquired`` is the operand of that address; None for the release.
    """

    acquired: int | None = None


@dataclass(frozen=True, slots=True)
class GlobalWait(Effect):
    """Blocks until the u32 at ``operand[address] + offset`` is at least operand ``least``; acquires at scope gpu."""

    address: int
    offset: int
    least: int


@dataclass(frozen=True, slots=True)
class Printed(Effect):
    """Prints the operands by a format; or ``format`` and ``arguments`` are operands that are generic addresses."""

    format: str | int
    arguments: int = 0


@dataclass(frozen=True, slots=True)
class Abort(Effect):
    """The launch fails. ``assertion``: the operands of message, file, line and function, if it is one that fails."""

    assertion: tuple[int, int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class WarpgroupFence(Effect):
    """``wgmma.fence``: orders register accesses of the warpgroup before its next ``wgmma``."""


@dataclass(frozen=True, slots=True)
class AsyncMatrix(Effect):
    """``wgmma.mma_async``: reads its operands and writes its accumulators at any time until its group is waited for."""


@dataclass(frozen=True, slots=True)
class RegisterBudget(Effect):
    """``setmaxnreg``: changes the per-thread register budget of the executing warpgroup."""

    registers: int
    direction: Literal["inc", "dec"]
