"""Steps of the instructions that touch memory: loads, stores, atomics and asynchronous copies.

Shared, global and local memory are asked alike: for the place of an access, and then to load, store or update there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.core.dtypes import u32
from warploom.emulate.barriers.barriers import Wait
from warploom.emulate.control.context import Context, Step
from warploom.emulate.control.frames import ASCENDING, Frame, Origin, Turns
from warploom.emulate.findings.traffic import access_class
from warploom.emulate.memory.matrix_accesses import MatrixPlaces
from warploom.ir.statements import Op
from warploom.isa.async_copy import MAP_BYTES
from warploom.isa.effects import Access, AsyncCopy, GlobalWait, MatrixAccess, TensorMapWrite
from warploom.isa.memory import MOST_BYTES

Array = NDArray[Any]


def _unsigned(array: Array) -> Array:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


@dataclass(eq=False)
class Polled(Wait):
    """A wait that ends when ``reached`` says so."""

    reached: Callable[[], bool] = lambda: True

    @property
    def ready(self) -> bool:
        """Whether the counter in memory has reached the value that the warp waits for."""
        return self.reached()


class AccessSteps:
    """Builds the steps of memory instructions."""

    def __init__(self, context: Context) -> None:
        self.run = context

    def step(self, op: Op, access: Access) -> Step:
        """The step of a synchronous access."""
        return {"load": self._load, "store": self._store, "atomic": self._atomic}[access.mode](op, access)

    # -- common --------------------------------------------------------------------------------------------------

    def _place(self, op: Op, access: Access) -> Callable[[Frame], list[Any]]:
        """Where an access goes: one place, or one for each element of a matrix. Wavefronts and sectors are counted."""
        if isinstance(access, MatrixAccess):
            return MatrixPlaces(self.run, op, access)
        run, key = self.run, self.run.key(op.operands[access.address])

        def places(frame: Frame) -> list[Any]:
            address = run.observe(frame, key, op, "an address")
            place = run.memories[access.space].place(frame, address, op, access)
            if run.checks:
                place.count(run.counter, access_class(op.instruction.mnemonic))
            return [place]

        return places

    def _order(self, place: Any, access: Access, turns: Turns = ASCENDING) -> None:
        """Release what the warps know, or acquire, as the semantics of a strong access say."""
        if access.order != "weak" and self.run.across:
            names = self.run.memories[access.space].names(place)
            self.run.ordering.strong_access(place.frame, place.op, access, names, turns)

    def _values(self, frame: Frame, op: Op, keys: tuple[Any, ...]) -> Array:
        """The words a store writes, (warps, lanes, words)."""
        words = op.instruction.meaning(*[frame.full(frame.env[k]) for k in keys])[0]
        return words if keys else np.broadcast_to(words, (frame.n, *words.shape[1:]))  # an immediate

    def _value_shadow(self, frame: Frame, op: Op, keys: tuple[Any, ...]) -> tuple[Array | None, Origin | None]:
        """The shadow of those words, if any of it is poison, and where that comes from."""
        found = frame.poison(keys)
        if found is None:
            return None, None
        typed = [frame.full(x).view(frame.env[k].dtype) for x, k in zip(found[0], keys, strict=True)]
        words = _unsigned(op.instruction.meaning(*typed)[0])
        return (words, found[1]) if words.any() else (None, None)

    def _put(self, frame: Frame, op: Op, words: Array, shadow: Array | None, origin: Origin | None) -> None:
        """Registers from the words read."""
        results = op.instruction.meaning(words)
        shadows = None if shadow is None else op.instruction.meaning(shadow)
        for i, (value, array) in enumerate(zip(op.results, results, strict=True)):
            frame.write(value, array, None if shadows is None else _unsigned(shadows[i]), origin)

    # -- loads, stores, atomics ------------------------------------------------------------------------------------

    def _load(self, op: Op, access: Access) -> Step:
        run, place = self.run, self._place(op, access)

        def step(frame: Frame) -> None:
            places = place(frame)
            self._order(places[0], access)
            parts = [run.memories[access.space].load(place, access) for place in places]
            words, shadow, origin = parts[0]
            if len(parts) > 1:
                words = np.concatenate([part[0] for part in parts], axis=-1)
                poisoned = [part for part in parts if part[1] is not None]
                origin = poisoned[0][2] if poisoned else None
                marks = [np.zeros_like(part[0]) if part[1] is None else part[1] for part in parts]
                shadow = np.concatenate(marks, axis=-1) if poisoned else None
            self._put(frame, op, words, shadow, origin)

        return step

    def _store(self, op: Op, access: Access) -> Step:
        run, place, is_matrix = self.run, self._place(op, access), isinstance(access, MatrixAccess)
        keys, decides = run.keys(op)[2 if is_matrix else 1 :], is_matrix or access.space == "global"

        def step(frame: Frame) -> None:
            places, memory = place(frame), run.memories[access.space]
            for k in keys if decides else ():
                run.observe(frame, k, op, "a value stored to global memory, or as part of a matrix,")
            data = self._values(frame, op, keys)
            shadow, origin = self._value_shadow(frame, op, keys) if frame.shadows and not decides else (None, None)
            parts = [data] if len(places) == 1 else np.split(data, len(places), axis=-1)
            for part, words in zip(places, parts, strict=True):
                memory.store(part, access, np.ascontiguousarray(words), shadow, origin)
            self._order(places[0], access)

        return step

    def _atomic(self, op: Op, access: Access) -> Step:
        run, instruction, places, (key, *rest) = self.run, op.instruction, self._place(op, access), self.run.keys(op)
        decisive = (key, *rest) if access.space == "global" else ()

        def step(frame: Frame) -> None:
            for k in decisive:
                run.observe(frame, k, op, "an atomic")
            (place,), turns = places(frame), run.turns()
            values = [frame.full(frame.env[k]) for k in rest]
            memory = run.memories[access.space]
            place.turns = turns
            memory.begin_update(place)
            self._order(place, access, turns)
            old = memory.update(place, access, instruction, values)
            for result, array in zip(op.results, old, strict=False):  # red has no results
                frame.write(result, array)

        return step

    def wait_step(self, op: Op, wait: GlobalWait) -> Step:
        """The step of a wait for a counter: it is looked at whenever its warps could go on."""
        run, (key, least) = self.run, self.run.keys(op)
        access = Access("global", "load", wait.address, u32.bytes, wait.offset, order="acquire")

        def step(frame: Frame) -> Wait:
            run.observe(frame, key, op, "an address")
            run.observe(frame, least, op, "the value to wait for")
            place = run.memory.place(frame, frame.env[key], op, access)
            wanted, acting = frame.full(frame.env[least]), True if place.active is None else place.active

            def reached() -> bool:
                return not (acting & (run.memory.words(run.memory.data, place, access)[..., 0] < wanted)).any()

            def then(frame: Frame) -> None:
                over = place if frame.n == place.frame.n else run.memory.place(frame, frame.env[key], op, access)
                at = run.memory.track(over)
                if at is not None and run.memory.history is not None:
                    run.memory.history.check_initialised(at)
                self._order(over, access)

            return Polled(op, set(frame.rows.tolist()), then=then if run.checks else None, reached=reached)

        return step

    # -- tensor maps -----------------------------------------------------------------------------------------------

    def map_step(self, op: Op, write: TensorMapWrite) -> Step:
        """The step of a ``tensormap.replace``: it reads the whole map, and writes one field."""
        run, key = self.run, self.run.key(op.operands[write.address])
        store = self.step(op, Access(write.space, "store", write.address, write.bytes, write.place))
        whole = Access(write.space, "load", write.address, MOST_BYTES, words=MOST_BYTES // u32.bytes)
        chunks = [replace(whole, offset=chunk) for chunk in range(0, MAP_BYTES, MOST_BYTES)]

        def step(frame: Frame) -> None:
            memory = run.memories[write.space]
            for chunk in chunks if run.checks else ():
                memory.load(memory.place(frame, frame.env[key], op, chunk), chunk)
            store(frame)

        return step

    # -- cp.async ------------------------------------------------------------------------------------------------

    def copy_step(self, op: Op, copy: AsyncCopy) -> Step:
        """The step of a ``cp.async``: its data is taken now and arrives when it is waited for."""
        run, keys, name = self.run, self.run.keys(op), access_class(op.instruction.mnemonic)
        to = Access("shared", "store", copy.shared, copy.bytes, copy.shared_offset)
        words = copy.bytes // u32.bytes
        decision = None if copy.valid_bytes is None else run.decision(op)
        source = Access("global", "load", copy.source, copy.bytes, copy.source_offset, words=words)

        def step(frame: Frame) -> None:
            for k in keys:
                run.observe(frame, k, op, "an address or size of a copy")
            size: Array | int = copy.bytes
            if copy.valid_bytes is not None:
                size = np.minimum(frame.full(frame.env[keys[copy.valid_bytes]]), copy.bytes).astype(np.int64)
                if decision is not None:
                    decision.note(frame, size == copy.bytes)
            place = run.shared.place(frame, frame.env[keys[copy.shared]], op, to)
            taken = run.memory.place(frame, frame.env[keys[copy.source]], op, source, size=size)
            run.memory.track(taken)
            data = run.memory.words(run.memory.data, taken, source)
            if run.checks:
                place.count(run.counter, name)
                taken.count(run.counter, name)
                run.copies.start(place, data, taken, run.memory.unwritten(taken, source))
            else:
                run.shared.store(place, to, data)

        return step
