"""Words of ``k`` for the warp and the CTA: indices, shuffles, votes, barriers, control flow."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeVar

from warploom.core.dtypes import pred, u32
from warploom.core.errors import TraceError
from warploom.isa.barriers import bar_arrive, bar_sync
from warploom.isa.collective import Mode, shuffle
from warploom.isa.conversion import FULL_MASK, special
from warploom.lang.builder import word
from warploom.lang.memory import MemoryWords
from warploom.lang.values import Number, Traced

_T = TypeVar("_T")


class _WithBlock(AbstractContextManager[_T]):
    """The context manager that a word of control flow returns; without ``with`` it is an error."""

    def __init__(self, words: WarpWords, word: str, body: AbstractContextManager[_T]) -> None:
        self._words, self._word, self._body = words, word, body
        words.unfinished[self] = TraceError(
            f"k.{word}(…) has no `with` before it: write it, and indent what the block holds"
        ).at(words.here())

    def __enter__(self) -> _T:
        self._words.unfinished.pop(self, None)
        return self._body.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._body.__exit__(*error)

    def __iter__(self) -> NoReturn:
        raise TraceError(
            "a loop of the running kernel is `with k.loop(stop) as i:`; "
            "`for i in range(stop):` is one that is unrolled while tracing"
        )


class _Given(int):
    """The number of a barrier that ``k.named_barriers`` gave, or a sum with it: other numbers are written by hand."""

    def __add__(self, other: int) -> _Given:
        found = super().__add__(other)
        return _Given(found) if isinstance(other, int) else found  # pyright: ignore[reportUnnecessaryIsInstance]

    __radd__ = __add__


class WarpWords(MemoryWords):
    """Indices of a thread, shuffles and votes of a warp, barriers, and blocks of control flow."""

    _barriers_given = _barriers_written = frozenset[int]()

    def special(self, register: str) -> Traced:
        """A special register by PTX's name: ``tid.x``, ``ctaid.y``, ``nctaid.z`` …"""
        return self.emit(special(register), ())[0]

    @property
    def thread(self) -> Traced:
        """The thread's index in its CTA (u32)."""
        return self.special("tid.x")

    @property
    def lane(self) -> Traced:
        """The thread's lane in its warp, 0 … 31."""
        return self.thread & 31

    @property
    def warp(self) -> Traced:
        """The warp's index in its CTA."""
        return self.thread >> 5

    @property
    def warpgroup(self) -> Traced:
        """The index of the thread's warpgroup (four warps), as a value the compiler knows to be uniform in a warp."""
        return self.uniform(self.thread >> 7)

    @property
    def cta_x(self) -> Traced:
        """The CTA's x index in the grid."""
        return self.special("ctaid.x")

    @property
    def cta_y(self) -> Traced:
        """The CTA's y index in the grid."""
        return self.special("ctaid.y")

    @property
    def cta_z(self) -> Traced:
        """The CTA's z index in the grid."""
        return self.special("ctaid.z")

    @property
    def grid_x(self) -> Traced:
        """CTAs in the grid along x."""
        return self.special("nctaid.x")

    @word("mov.u64.clock64", ptx=False)
    def clock(self) -> Traced:
        """The SM's cycle counter (u64), read where it is written."""
        ...

    # -- shuffles and votes
    def shfl_xor(self, x: Number, lane_mask: Number, member_mask: Number = FULL_MASK) -> Traced:
        """The value of lane ``lane ^ lane_mask``."""
        return self._shuffle("xor", x, lane_mask, member_mask)

    def shfl_idx(self, x: Number, lane: Number, member_mask: Number = FULL_MASK) -> Traced:
        """The value of lane ``lane``."""
        return self._shuffle("idx", x, lane, member_mask)

    def uniform(self, x: Number) -> Traced:
        """``x``, which all lanes of the warp have the same of, as a value that the compiler knows to be uniform."""
        return self.shfl_idx(x, 0)

    def shfl_up(self, x: Number, delta: Number, member_mask: Number = FULL_MASK) -> Traced:
        """The value of the lane ``delta`` below; the lane's own where there is none."""
        return self._shuffle("up", x, delta, member_mask)

    def shfl_down(self, x: Number, delta: Number, member_mask: Number = FULL_MASK) -> Traced:
        """The value of the lane ``delta`` above; the lane's own where there is none."""
        return self._shuffle("down", x, delta, member_mask)

    def _shuffle(self, mode: Mode, x: Number, lane: Number, member_mask: Number) -> Traced:
        known, x = x, self.operand(x, x.dtype if isinstance(x, Traced) else self._common_type("shfl", x, x))
        if x.dtype.bits != 32:
            raise TraceError(f"shfl moves 32-bit values, not {x.dtype}")
        if isinstance(lane, int) and not 0 <= lane < 32:
            raise TraceError(f"shfl names one of 32 lanes, 0 to 31, not {lane}")
        if not isinstance(known, Traced):
            return x  # every lane has the same
        return self.issue(shuffle(mode, x.dtype), x, lane, member_mask)[0]

    @word("vote.sync.any.pred")
    def vote_any(self, condition: Traced, member_mask: Number = FULL_MASK) -> Traced:
        """Whether the predicate holds in any member lane; the same in all of them."""
        ...

    @word("vote.sync.all.pred")
    def vote_all(self, condition: Traced, member_mask: Number = FULL_MASK) -> Traced:
        """Whether the predicate holds in every member lane."""
        ...

    @word("vote.sync.ballot.b32")
    def ballot(self, condition: Traced, member_mask: Number = FULL_MASK) -> Traced:
        """One bit per member lane in which the predicate holds (u32)."""
        ...

    # -- meeting points
    @word("bar.warp.sync")
    def syncwarp(self, member_mask: Number = FULL_MASK) -> None:
        """``__syncwarp``: the member lanes meet and see each other's memory accesses."""

    def syncthreads(self) -> None:
        """``__syncthreads`` (``bar.sync 0``): all threads of the CTA meet and see each other's memory accesses."""
        self.issue(bar_sync(), 0)

    def named_barriers(self, count: int = 1) -> int:
        """The number of the first of ``count`` barriers that were given to nobody else."""
        if not isinstance(count, int) or count < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TraceError(f"named_barriers takes how many there are to be, not {count!r}")
        taken = self._barriers_given | self._barriers_written
        ranges = (range(first, first + count) for first in range(1, 17 - count))
        given = next(filter(taken.isdisjoint, ranges), None)
        if given is None:
            raise TraceError(f"a CTA has 15 named barriers, not {max(taken, default=0) + count}")
        self._barriers_given |= {*given}
        return _Given(given[0])

    def _barrier(self, number: Number) -> Traced:
        """A barrier's number: one written by hand is nobody else's."""
        if isinstance(number, int) and not isinstance(number, _Given):
            if number in self._barriers_given:
                raise TraceError(
                    f"barrier {number} is one that k.named_barriers gave, and this number did not come from there"
                    ": write given + i, in a loop over range(count) too, or another number"
                )
            self._barriers_written |= {number}
        return self.operand(number, u32)

    def bar_sync(self, barrier: Number, threads: int | None = None) -> None:
        """``bar.sync``: ``threads`` (a multiple of 32) threads meet at a numbered barrier, 0 … 15."""
        self.issue(bar_sync(threads), self._barrier(barrier))

    def bar_arrive(self, barrier: Number, threads: int) -> None:
        """``bar.arrive``: counts toward the barrier without waiting for it."""
        self.issue(bar_arrive(threads), self._barrier(barrier))

    # -- control flow
    def loop(self, stop: Number, *, start: Number = 0, step: Number = 1) -> AbstractContextManager[Traced]:
        """``with k.loop(stop, start=1) as i:``: a dynamic loop over u32 ``i`` = start, start + step … below stop."""
        for name, bound, least in (("start", start, 0), ("stop", stop, 0), ("step", step, 1)):
            if isinstance(bound, int) and bound < least:
                raise TraceError(f"k.loop counts upwards from 0: its {name} is {bound}")
        bounds = [self.operand(x, u32) for x in (start, stop, step)]
        return _WithBlock(self, "loop", self.loop_block(bounds[0].ir, bounds[1].ir, bounds[2].ir, u32))

    def when(self, condition: Traced, *, uniform: bool = False) -> AbstractContextManager[None]:
        """``with k.when(condition):``: the body runs in the lanes where the predicate holds.

        ``uniform=True`` claims that the lanes of a warp agree; the emulator checks it.
        """
        return _WithBlock(self, "when", self.when_block(self.operand(condition, pred).ir, uniform))

    def otherwise(self) -> AbstractContextManager[None]:
        """The other branch, directly after a ``with k.when(…):``."""
        return _WithBlock(self, "otherwise", self.otherwise_block())

    def warps(self, first: int, last: int, *, registers: int | None = None) -> AbstractContextManager[None]:
        """``with k.warps(0, 4):``: what warps first ≤ w < last do; ``registers`` is their budget (``setmaxnreg``).

        Roles written one after another are one if/else chain.
        """
        if not 0 <= first < last:
            raise TraceError(f"k.warps({first}, {last}) is an empty range of warps")
        return _WithBlock(self, "warps", self.role_block(first, last, registers))
