"""Steps of the instructions that touch memory: loads, stores, atomics and asynchronous copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.core.dtypes import u32
from warploom.emulate.barriers.barriers import Wait
from warploom.emulate.control.context import Context
from warploom.emulate.control.frames import (
    ASCENDING,
    Frame,
    Origin,
    Turns,
    apply_in_turn,
    displaced,
    in_turn,
    shadow_dtype,
)
from warploom.emulate.control.tasks import Step
from warploom.emulate.findings.traffic import access_class
from warploom.emulate.memory.access import Place
from warploom.emulate.memory.global_memory import Target
from warploom.emulate.memory.matrix_accesses import MatrixSteps
from warploom.ir.statements import Op
from warploom.isa.effects import Access, AsyncCopy, GlobalWait, MatrixAccess, TensorMapWrite
from warploom.isa.memory import MOST_BYTES
from warploom.isa.tensor_map import MAP_BYTES

Array = NDArray[Any]


def _typed(shadow: Array, dtype: np.dtype[Any]) -> Array:
    return shadow.view(dtype)


def _unsigned(array: Array) -> Array:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


@dataclass(eq=False)
class Polled(Wait):
    """A wait that ends when ``reached`` says so."""

    reached: Callable[[], bool] = lambda: True

    @property
    def ready(self) -> bool:
        """Whether it does now."""
        return self.reached()


class AccessSteps:
    """Builds the steps of memory instructions."""

    def __init__(self, context: Context) -> None:
        self.run = context

    def step(self, op: Op, access: Access) -> Step:
        """The step of a synchronous access."""
        if isinstance(access, MatrixAccess):
            return MatrixSteps(self.run).step(op, access)
        if access.space == "local":
            return self._local_load(op, access) if access.mode == "load" else self._local_store(op, access)
        if access.space == "shared":
            return {"load": self._shared_load, "store": self._shared_store, "atomic": self._shared_atomic}[access.mode](
                op, access
            )
        return {"load": self._global_load, "store": self._global_store, "atomic": self._global_atomic}[access.mode](
            op, access
        )

    # -- common --------------------------------------------------------------------------------------------------

    def _count_shared(self, place: Place, name: str) -> None:
        counter, frame, addresses = self.run.counter, place.frame, place.addresses
        if place.active is None:
            repeat = frame.n // (addresses.shape[0] * addresses.shape[1])
            counter.shared(name, place.op.where, addresses, place.size, None, repeat)
        else:
            wide = np.broadcast_to(addresses, (*frame.shape, addresses.shape[2])).reshape(frame.n, -1)
            counter.shared(name, place.op.where, wide, place.size, place.active, 1)

    def _values(self, frame: Frame, op: Op, keys: tuple[Any, ...]) -> Array:
        """The words a store writes, (warps, lanes, words)."""
        return op.instruction.meaning(*[frame.full(frame.env[k]) for k in keys])[0]

    def _value_shadow(self, frame: Frame, op: Op, keys: tuple[Any, ...]) -> tuple[Array | None, Origin | None]:
        """The shadow of those words, if any of it is poison, and where that comes from."""
        poisoned = [k for k in keys if k in frame.shadows]
        if not poisoned:
            return None, None
        typed: list[Array] = []
        for k in keys:
            dtype = frame.env[k].dtype
            none = np.zeros((1, 1, 1), shadow_dtype(dtype))
            typed.append(_typed(np.ascontiguousarray(frame.full(frame.shadows.get(k, none))), dtype))
        words = _unsigned(op.instruction.meaning(*typed)[0])
        return (words, frame.origins.get(poisoned[0])) if words.any() else (None, None)

    def _put(self, frame: Frame, op: Op, words: Array, shadow: Array | None, origin: Origin | None) -> None:
        """Registers from the words read."""
        results = op.instruction.meaning(words)
        shadows = None if shadow is None else op.instruction.meaning(shadow)
        for i, (value, array) in enumerate(zip(op.results, results, strict=True)):
            mine = None if shadows is None else frame.shaped(_unsigned(shadows[i]))
            self.run.put(frame, value, frame.shaped(array), mine, origin)

    # -- shared --------------------------------------------------------------------------------------------------

    def _shared_load(self, op: Op, access: Access) -> Step:
        run, (key,) = self.run, self.run.keys(op)
        name, strong = access_class(op.instruction.mnemonic), access.order != "weak"

        def step(frame: Frame) -> None:
            run.observe(frame, key, op, "an address")
            place = run.shared.locate(
                frame,
                frame.env[key],
                access.offset,
                access.bytes,
                access.lanes,
                op,
                remote=access.remote,
                collective=access.collective,
            )
            if run.checks:
                self._count_shared(place, name)
                self._strong_shared(frame, access, place)
            words, shadow, origin = run.shared.load(place, access.words, strong=strong)
            if place.active is not None:
                words = np.where(place.active[:, :, None], words, words.dtype.type(0))
            self._put(frame, op, words, shadow, origin)

        return step

    def _shared_store(self, op: Op, access: Access) -> Step:
        run, (key, *rest) = self.run, self.run.keys(op)
        name, values, strong = access_class(op.instruction.mnemonic), tuple(rest), access.order != "weak"

        def step(frame: Frame) -> None:
            run.observe(frame, key, op, "an address")
            place = run.shared.locate(
                frame,
                frame.env[key],
                access.offset,
                access.bytes,
                access.lanes,
                op,
                remote=access.remote,
                collective=access.collective,
            )
            if run.checks:
                self._count_shared(place, name)
            data = self._values(frame, op, values)
            shadow, origin = self._value_shadow(frame, op, values) if frame.shadows else (None, None)
            run.shared.store(place, data, shadow, origin, strong=strong)
            self._strong_shared(frame, access, place)

        return step

    def _shared_atomic(self, op: Op, access: Access) -> Step:
        run, (key, *rest) = self.run, self.run.keys(op)
        name, instruction = access_class(op.instruction.mnemonic), op.instruction

        def step(frame: Frame) -> None:
            for k in (key, *rest):
                run.observe(frame, k, op, "an atomic")
            place = run.shared.locate(frame, frame.env[key], access.offset, access.bytes, 32, op, remote=access.remote)
            turns = run.turns()
            if run.checks:
                self._count_shared(place, name)
                self._strong_shared(frame, access, place, turns)
            run.shared.begin_strong(place, what="atomic")
            view = run.shared.data.view(instruction.operand_types[1].numpy)
            acting = np.arange(frame.n * 32) if place.active is None else np.nonzero(place.active.reshape(-1))[0]
            values = [frame.full(frame.env[k]) for k in rest]
            old = apply_in_turn(instruction, view, place.index, values, acting[in_turn(acting, turns)])
            run.put(frame, op.results[0], frame.shaped(old), None, None)

        return step

    # -- local ---------------------------------------------------------------------------------------------------

    def _local_load(self, op: Op, access: Access) -> Step:
        run, (key,) = self.run, self.run.keys(op)

        def step(frame: Frame) -> None:
            run.observe(frame, key, op, "an address")
            cells = run.local.locate(frame, frame.env[key], access.offset, access.bytes, op)
            self._put(frame, op, *run.local.load(cells, access.bytes, access.words, op))

        return step

    def _local_store(self, op: Op, access: Access) -> Step:
        run, (key, *rest) = self.run, self.run.keys(op)
        values = tuple(rest)

        def step(frame: Frame) -> None:
            run.observe(frame, key, op, "an address")
            cells = run.local.locate(frame, frame.env[key], access.offset, access.bytes, op)
            shadow, _ = self._value_shadow(frame, op, values) if frame.shadows else (None, None)
            run.local.store(cells, self._values(frame, op, values), shadow)

        return step

    # -- global --------------------------------------------------------------------------------------------------

    def _address(self, frame: Frame, key: Any, offset: int) -> Array:
        return frame.full(displaced(frame.env[key], offset))

    def _strong(self, frame: Frame, access: Access, address: Array, turns: Turns = ASCENDING) -> None:
        if access.order != "weak" and self.run.across:
            self.run.ordering.strong_access(frame, access, address, turns)

    def _strong_shared(self, frame: Frame, access: Access, place: Place, turns: Turns = ASCENDING) -> None:
        if access.order != "weak" and self.run.across and self.run.checks:
            # Below all addresses of global memory; no two CTAs of the grid have the same.
            start = self.run.shared.stride * (self.run.report.first // self.run.report.warps_per_cta)
            self.run.ordering.strong_access(frame, access, -1 - start - place.index * access.bytes, turns)

    def _global_load(self, op: Op, access: Access) -> Step:
        run, (key,) = self.run, self.run.keys(op)
        name, strong = access_class(op.instruction.mnemonic), access.order != "weak"
        word = np.dtype(f"u{access.bytes // access.words}")

        def step(frame: Frame) -> None:
            run.observe(frame, key, op, "an address")
            address = self._address(frame, key, access.offset)
            targets = run.memory.resolve(frame, address, access.bytes, op, frame.active, access.bytes)
            if run.checks:
                run.counter.global_access(name, op.where, address.view(np.int64), access.bytes, frame.active)
                self._strong(frame, access, address)
                run.memory.track(
                    frame,
                    targets,
                    access.bytes,
                    op,
                    "read",
                    strong=strong,
                    cta_only=access.scope == "cta",
                    read_only=access.read_only,
                )
            words = run.memory.load(frame, targets, word, access.words)
            self._put(frame, op, words, None, None)

        return step

    def _global_store(self, op: Op, access: Access) -> Step:
        run, (key, *rest) = self.run, self.run.keys(op)
        name, strong, values = access_class(op.instruction.mnemonic), access.order != "weak", tuple(rest)
        mode = "atomic" if strong else "write"

        def step(frame: Frame) -> None:
            run.observe(frame, key, op, "an address")
            for k in values:
                run.observe(frame, k, op, "a value stored to global memory")
            address = self._address(frame, key, access.offset)
            data = self._values(frame, op, values)
            targets = run.memory.resolve(frame, address, access.bytes, op, frame.active, access.bytes)
            if run.checks:
                run.counter.global_access(name, op.where, address.view(np.int64), access.bytes, frame.active)
                run.memory.track(
                    frame, targets, access.bytes, op, mode, strong=strong, cta_only=access.scope == "cta", data=data
                )
                self._strong(frame, access, address)
            run.memory.store(frame, targets, data, op)

        return step

    def _global_atomic(self, op: Op, access: Access) -> Step:
        run, (key, *rest) = self.run, self.run.keys(op)
        name, instruction = access_class(op.instruction.mnemonic), op.instruction
        element, count = instruction.operand_types[1].numpy, access.words

        def step(frame: Frame) -> None:
            for k in (key, *rest):
                run.observe(frame, k, op, "an atomic")
            address = self._address(frame, key, access.offset)
            values = [frame.full(frame.env[k]) for k in rest]
            targets = run.memory.resolve(frame, address, access.bytes, op, frame.active, access.bytes)
            turns = run.turns()
            if run.checks:
                run.counter.global_access(name, op.where, address.view(np.int64), access.bytes, frame.active)
                run.memory.track(
                    frame, targets, access.bytes, op, "atomic", strong=True, cta_only=access.scope == "cta"
                )
                self._strong(frame, access, address, turns)
            old = np.zeros((count, frame.n * 32), element)
            for target in targets:
                if not run.memory.may_write(frame, target, op):
                    continue
                rows, first = run.memory.words(target.buffer, element, 1)
                where = slice(None) if target.positions is None else target.positions
                picked = [v.reshape(-1)[where] for v in values]
                index = (target.offsets - first) // rows.itemsize
                order = in_turn(np.arange(frame.n * 32)[where], turns)
                for i in range(count):  # each element of a vector is one operation
                    old[i][where] = apply_in_turn(instruction, rows[:, 0], index + i, picked[i::count], order)
            for i, result in enumerate(op.results):
                run.put(frame, result, frame.shaped(old[i].reshape(frame.n, 32)), None, None)

        return step

    def wait_step(self, op: Op, wait: GlobalWait) -> Step:
        """The step of a wait for a counter: it is looked at whenever its warps could go on."""
        run, (key, least) = self.run, self.run.keys(op)
        access = Access("global", "load", wait.address, u32.bytes, wait.offset, order="acquire")

        def step(frame: Frame) -> Wait:
            run.observe(frame, key, op, "an address")
            run.observe(frame, least, op, "the value to wait for")
            address = self._address(frame, key, wait.offset)
            targets = run.memory.resolve(frame, address, u32.bytes, op, frame.active, u32.bytes)
            wanted = frame.full(frame.env[least]).reshape(-1)

            def reached() -> bool:
                for target in targets:
                    where = slice(None) if target.positions is None else target.positions
                    now = run.memory.load(frame, [target], np.dtype("u4"), 1).reshape(-1)
                    if (now[where] < wanted[where]).any():
                        return False
                return True

            def then(frame: Frame) -> None:
                run.memory.track(frame, targets, u32.bytes, op, "read", strong=True)
                self._strong(frame, access, self._address(frame, key, wait.offset))

            return Polled(op, set(frame.flat.tolist()), then=then if run.checks else None, reached=reached)

        return step

    # -- tensor maps -----------------------------------------------------------------------------------------------

    def map_step(self, op: Op, write: TensorMapWrite) -> Step:
        """The step of a ``tensormap.replace``: it reads the whole map, and writes one field."""
        run, key = self.run, self.run.key(op.operands[write.address])
        store = self.step(op, Access(write.space, "store", write.address, write.bytes, write.place))

        def step(frame: Frame) -> None:
            for chunk in range(0, MAP_BYTES, MOST_BYTES) if run.checks else ():
                if write.space == "shared":
                    place = run.shared.locate(frame, frame.env[key], chunk, MOST_BYTES, 32, op)
                    run.shared.load(place, MOST_BYTES // u32.bytes)
                else:
                    address = self._address(frame, key, chunk)
                    targets = run.memory.resolve(frame, address, MOST_BYTES, op, frame.active, MOST_BYTES)
                    run.memory.track(frame, targets, MOST_BYTES, op, "read")
            store(frame)

        return step

    # -- cp.async ------------------------------------------------------------------------------------------------

    def copy_step(self, op: Op, copy: AsyncCopy) -> Step:
        """The step of a ``cp.async``: its data is taken now and arrives when it is waited for."""
        run, keys = self.run, self.run.keys(op)
        name = access_class(op.instruction.mnemonic)
        word, words = (np.dtype("u4"), copy.bytes // 4)

        def step(frame: Frame) -> None:
            for k in keys:
                run.observe(frame, k, op, "an address or size of a copy")
            place = run.shared.locate(frame, frame.env[keys[copy.shared]], copy.shared_offset, copy.bytes, 32, op)
            address = self._address(frame, keys[copy.source], copy.source_offset)
            size: Array | int = copy.bytes
            if copy.valid_bytes is not None:
                size = np.minimum(frame.full(frame.env[keys[copy.valid_bytes]]), copy.bytes).astype(np.int64)
            reads: list[tuple[list[Target], int]] = []
            data = self._source(frame, op, address, size, word, words, reads)
            if run.checks:
                self._count_shared(place, name)
                run.counter.global_access(name, op.where, address.view(np.int64), size, frame.active)
                run.copies.start(place, data, reads)
            else:
                run.shared.store(place, data)

        return step

    def _source(
        self,
        frame: Frame,
        op: Op,
        address: Array,
        size: Array | int,
        word: np.dtype[Any],
        words: int,
        reads: list[tuple[list[Target], int]],
    ) -> Array:
        """The bytes a copy takes now; ``reads`` receives what it will be checked for once more when it lands."""
        run, whole = self.run, word.itemsize * words
        if isinstance(size, int) or bool((size == whole).all()):
            targets = run.memory.resolve(frame, address, whole, op, frame.active, whole)
            run.memory.track(frame, targets, whole, op, "read")
            reads.append((targets, whole))
            return run.memory.load(frame, targets, word, words)
        targets = run.memory.resolve(frame, address, size, op, frame.active, whole)
        data = np.zeros((frame.n * 32, whole), np.uint8)
        sizes = np.broadcast_to(size, address.shape).reshape(-1)
        for target in targets:
            positions = np.arange(data.shape[0]) if target.positions is None else target.positions
            for byte in range(whole):
                have = sizes[positions] > byte
                data[positions[have], byte] = target.buffer.data[target.offsets[have] + byte]
            for length in np.unique(sizes[positions]):
                part = type(target)(
                    target.buffer, positions[sizes[positions] == length], target.offsets[sizes[positions] == length]
                )
                if length:
                    run.memory.track(frame, [part], int(length), op, "read")
                    reads.append(([part], int(length)))
        return data.view(word).reshape(frame.n, 32, words)
