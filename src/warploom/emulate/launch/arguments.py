"""Arguments bound to parameters, and what a program does to global memory through them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.core.arguments import scalar_value
from warploom.core.dtypes import DType
from warploom.core.errors import ProblemError
from warploom.emulate.control.frames import constant_array
from warploom.emulate.memory.buffers import ADDRESS_BITS, GlobalBuffer, buffer_of, settle
from warploom.emulate.order.launches import QueuedLaunch
from warploom.emulate.transactions.tensor_maps import TensorMapArgument
from warploom.ir.program import Parameter, Program, in_order
from warploom.ir.statements import Value
from warploom.isa.effects import Access, AsyncCopy, AsyncStore, BulkStore, BulkTensorCopy, Effect, TensorMapWrite

Array = NDArray[Any]


@dataclass(frozen=True)
class BoundArguments:
    """The buffers of a launch, the values of its parameters as (1, 1) arrays, tensor maps by their fake address."""

    buffers: list[GlobalBuffer]
    values: dict[Value, Array]
    maps: dict[int, TensorMapArgument]


def bind(launches: Sequence[QueuedLaunch]) -> list[BoundArguments]:
    """The arguments of launches, whose arrays are one memory.

    Raises ProblemError when an argument is missing, of the wrong kind, or of another element size than the kernel's.
    """
    numbers = count()
    given = [
        [(p, x, _buffer(p, x, next(numbers)) if p.kind != "scalar" else None) for p, x in zip(*each, strict=True)]
        for each in ((of.program.parameters, in_order(of.program, of.arguments, _layout)) for of in launches)
    ]
    settle(buffer for each in given for _, _, buffer in each if buffer is not None)
    return [_bound(each) for each in given]


def _bound(given: Sequence[tuple[Parameter, Any, GlobalBuffer | None]]) -> BoundArguments:
    found = BoundArguments([buffer for _, _, buffer in given if buffer is not None], {}, {})
    for parameter, argument, buffer in given:
        if buffer is None:
            found.values[parameter.value] = _scalar(parameter, argument)
            continue
        if parameter.kind == "tensor_map":
            found.maps[buffer.address] = _tensor_map(parameter, argument).bound(buffer)
        start = buffer.start if parameter.kind == "pointer" else buffer.address
        found.values[parameter.value] = np.array([[start]], np.uint64)
    return found


def _layout(parameter: Parameter, argument: Any) -> tuple[Sequence[int], Sequence[int]]:
    """(shape, strides in elements) of an array."""
    array, size = _array(parameter, argument), parameter.dtype.bytes
    if any(stride % size for stride in array.strides):
        raise ProblemError(
            f"argument {parameter.name} has strides that are no multiples of its elements' size: copy it"
        )
    return array.shape, [stride // size for stride in array.strides]


def _tensor_map(parameter: Parameter, argument: Any) -> TensorMapArgument:
    if isinstance(argument, tuple) and len(argument) == 2:
        argument = TensorMapArgument(*argument)
    if not isinstance(argument, TensorMapArgument):
        raise ProblemError(
            f"argument {parameter.name} must be a TensorMapArgument, or an (array, TensorMapSpec) pair, not "
            f"{type(argument).__name__}"
        )
    return argument


def _buffer(parameter: Parameter, argument: Any, index: int) -> GlobalBuffer:
    """The memory of a pointer or of a tensor map."""
    if parameter.kind == "tensor_map":
        return buffer_of(parameter.name, _tensor_map(parameter, argument).array, index)
    if isinstance(argument, GlobalBuffer):
        return GlobalBuffer(
            parameter.name, argument.data, (index + 1) << ADDRESS_BITS, argument.skew, argument.real, argument.writable
        )
    return buffer_of(parameter.name, _array(parameter, argument), index)


def _array(parameter: Parameter, argument: Any) -> Array:
    """The array of a pointer, of elements that the kernel takes."""
    if not isinstance(argument, np.ndarray) or isinstance(argument, np.ma.MaskedArray):
        raise ProblemError(f"argument {parameter.name} must be a NumPy array, not {type(argument).__name__}")
    if argument.dtype.itemsize != parameter.dtype.bytes:
        raise ProblemError(
            f"argument {parameter.name} has elements of {argument.dtype.itemsize} bytes ({argument.dtype}); "
            f"the kernel's are {parameter.dtype.name}"
        )
    if not _holds(argument.dtype, parameter.dtype):
        raise ProblemError(
            f"argument {parameter.name} is {argument.dtype.name} in memory, {argument.dtype.str}; the kernel reads "
            f"{parameter.dtype.name}: convert it, or pass its bits as unsigned integers (array.view)"
        )
    return argument


def _holds(given: np.dtype[Any], wanted: DType) -> bool:
    """Whether elements that are as large are of the kernel's type too. Unsigned integers may be any type's bits."""
    if not given.isnative:
        return False
    if wanted.kind == "unsigned" or given.kind == "u" or given == wanted.numpy:
        return True
    return not wanted.is_float and given.kind not in "fV"  # bfloat16 is a V to NumPy


def _scalar(parameter: Parameter, argument: Any) -> Array:
    return constant_array(parameter.dtype, scalar_value(parameter.name, parameter.dtype, argument))


def written_parameters(program: Program) -> set[str] | None:
    """The pointer parameters that a store or atomic may go through; None when an address comes from elsewhere.

    Follows each pointer through the arithmetic on it. Never too few: at worst more is tracked than is needed.
    """
    sources: dict[Value, frozenset[str]] = {
        p.value: frozenset([p.name]) for p in program.parameters if p.kind in ("pointer", "tensor_map")
    }
    ops = list(program.ops())
    changed = True
    while changed:
        changed = False
        for op in ops:
            found: frozenset[str] = frozenset()
            for operand in op.operands:
                if isinstance(operand, Value):
                    found |= sources.get(operand, frozenset())
            if not found:
                continue
            for result in op.results:
                if not found <= sources.get(result, frozenset()):
                    sources[result] = sources.get(result, frozenset()) | found
                    changed = True
    written: set[str] = set()
    for op, effect in program.effects:
        if isinstance(effect, TensorMapWrite):  # stores may go wherever the map that it makes says
            return None
        through = _writes_through(effect)
        if through is not None:
            address = op.operands[through]
            origin = sources.get(address) if isinstance(address, Value) else None
            if not origin:
                return None
            written |= origin
    return written


def _writes_through(effect: Effect) -> int | None:
    """The operand that says where an effect writes global memory."""
    if isinstance(effect, Access) and effect.space == "global" and effect.mode != "load":
        return effect.address
    if isinstance(effect, BulkTensorCopy) and effect.direction == "store":
        return effect.tensor_map
    if isinstance(effect, BulkStore):
        return effect.target
    return None


def granules(program: Program) -> tuple[int, int]:
    """The smallest access of the program to shared and to global memory, in bytes."""
    shared, everywhere = [16], [16]
    for _, effect in program.effects:
        if isinstance(effect, Access | TensorMapWrite) and effect.space != "local":
            (shared if effect.space == "shared" else everywhere).append(effect.bytes)
        elif isinstance(effect, AsyncStore):
            shared.append(len(effect.values) * effect.word_bytes)
        elif isinstance(effect, AsyncCopy):
            shared.append(effect.bytes)
            everywhere.append(effect.bytes if effect.valid_bytes is None else 1)
    return min(shared), min(everywhere)
