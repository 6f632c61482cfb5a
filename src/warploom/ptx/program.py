"""A PTX kernel as a Program: parameters, shared memory, and its blocks as a Flow.

A Program is one kernel for one launch configuration: the threads of a CTA, the cluster and the bytes of dynamic shared
memory come from outside, as do the kinds of the arguments, which PTX does not tell (a ``.u64`` may be a pointer).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from warploom.core.dtypes import DType, pred, s8, s16, u8, u16, u32, u64
from warploom.core.errors import PtxError
from warploom.core.targets import TARGETS
from warploom.ir.program import Parameter, Program
from warploom.ir.statements import Flow, TileRegion, Value
from warploom.isa.form import REGISTER, TYPE_BITS
from warploom.ptx import accesses, lowering  # noqa: F401 (their import registers what they lower)
from warploom.ptx.blocks import basic_blocks
from warploom.ptx.builder import FlowBuilder, VariablePlaces
from warploom.ptx.emitter import Specials
from warploom.ptx.inline import inlined
from warploom.ptx.mangled import readable_name
from warploom.ptx.syntax import ENVIRONMENT, WORKSPACE, Function, Module, PtxRegister, Symbol, Variable, leaves
from warploom.ptx.usage import usage

_TENSOR_MAP_BYTES = 128
_LOCAL_BYTES = 512 << 10
_OF_BYTES = {pred: u16, u8: u16, s8: s16}
"""Types of 8 bits in memory → the registers that hold one."""


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a launch: a pointer to elements of ``dtype``, a scalar of it, or a tensor map, and its name.

    A structure has ``members``, pointers and scalars.
    """

    kind: Literal["pointer", "scalar", "tensor_map"]
    dtype: DType
    name: str = ""
    members: tuple[Argument, ...] = ()


def entry_of(module: Module, name: str | None = None) -> Function:
    """The kernel of that name, mangled or as C++ has it, or the only one. Raises PtxError with the names there are."""
    called = {f.name: f for f in module.entries}
    for function in module.entries:
        called.setdefault(readable_name(function.name), function)
    if name is None and len(module.entries) == 1:
        return module.entries[0]
    if name not in called:
        if not called:
            raise PtxError(f"{module.name} has no kernel: none of its functions is an .entry")
        listed = ", ".join(readable_name(f.name) for f in module.entries)
        raise PtxError(
            f"{module.name} has {f'no kernel {name}; it has ' if name else 'several kernels, name one: '}{listed}"
        )
    return called[name]


def to_program(
    module: Module,
    function: Function,
    *,
    block: tuple[int, int, int],
    arguments: Sequence[Argument] | None = None,
    shared_bytes: int = 0,
    cluster: tuple[int, int, int] | None = None,
) -> Program:
    """The Program of a kernel for CTAs of ``block`` threads and ``shared_bytes`` of dynamic shared memory.

    ``cluster`` is that of the launch, None for what the kernel was compiled for.
    ``arguments`` tell in the order of the parameters what is passed; without them those of 64 bits are pointers. Raises
    PtxError, with the lines, for what cannot be run.
    """
    threads = block[0] * block[1] * block[2]
    if not 0 < threads <= 1024:
        raise PtxError(f"{function.name} with CTAs of {threads} threads: a CTA has 1 to 1024")
    _check_threads(function, block)
    cluster = _cluster(function, cluster)
    function = inlined(module, function)
    blocks = basic_blocks(function)
    operands = [x for b in blocks for i in b.body for operand in i.operands for x in leaves(operand)]
    used = {x.name for x in operands if isinstance(x, Symbol)}
    if any(isinstance(x, PtxRegister) and x.name in ENVIRONMENT for x in operands):
        module.variables[WORKSPACE.name] = WORKSPACE
        used.add(WORKSPACE.name)
    regions, total = _shared(module, function, used, shared_bytes)
    local, local_bytes = _placed(v for v in function.variables if v.space == "local")
    _check_memory(function, total, local_bytes)
    parameters, members = _parameters(function, arguments)
    pointers = [
        Parameter(v.name, "pointer", u8, Value(len(parameters) + i, u64, v.name))
        for i, v in enumerate(variables_of(module, used))
    ]
    maps = frozenset(
        v.name
        for v in function.parameters
        if v.name in members and members[v.name][0].dtype is u64 and v.bytes == _TENSOR_MAP_BYTES
    )
    names = VariablePlaces(regions, local, members, maps, {p.name: p.value for p in pointers})
    builder = FlowBuilder(
        function, usage(function, blocks, regions), Specials(block, cluster, shared_bytes, total), names
    )
    flow = Flow(builder.flow(blocks, threads), function.where)
    return Program(
        name=function.name,
        parameters=(*parameters, *pointers),
        threads=-(-threads // 32) * 32,
        body=(flow,),
        shared=tuple(regions.values()),
        shared_bytes=total,
        requires=_required(module),
        cluster=cluster,
        local_bytes=local_bytes,
        where=function.where,
    )


def _check_memory(function: Function, shared: int, local: int) -> None:
    """Whether any GPU has the shared memory of a CTA and the local memory of a thread."""
    most = max(target.shared_per_block for target in TARGETS.values())
    for what, needed, limit in (("shared memory a CTA", shared, most), ("local memory a thread", local, _LOCAL_BYTES)):
        if needed > limit:
            raise PtxError(f"{function.name} needs {needed} bytes of {what}, GPUs have {limit}")


def variables_of(module: Module, used: Iterable[str]) -> list[Variable]:
    """The variables in global and constant memory among names: a Program's last parameters are pointers to them."""
    named = set(used)
    return [v for v in module.variables.values() if v.name in named and v.space in ("global", "const")]


def _placed(variables: Iterable[Variable]) -> tuple[dict[str, int], int]:
    """Where each variable lies, one after another as their alignments allow, and where the last one ends."""
    places: dict[str, int] = {}
    end = 0
    for v in variables:
        places[v.name] = -(-end // v.align) * v.align
        end = places[v.name] + v.bytes
    return places, end


def _required(module: Module) -> str:
    """The least architecture: that of the file, or the first that Programs know."""
    number = module.target.removeprefix("sm_").rstrip("af")
    return module.target if number.isdigit() and int(number) >= 80 else "sm_80"


def _cluster(function: Function, launched: tuple[int, int, int] | None) -> tuple[int, int, int]:
    """The CTAs of a cluster: ``.reqnctapercluster``, or what the launch says."""
    compiled = function.directives.get("reqnctapercluster")
    x, y, z = (*(compiled or launched or ()), 1, 1, 1)[:3]
    if launched is not None and launched != (x, y, z):
        raise PtxError(f"{function.name} was compiled for clusters of {(x, y, z)} CTAs, not of {launched}")
    if compiled is None and launched is None and "explicitcluster" in function.directives:
        raise PtxError(
            f"{function.name} is for clusters whose CTAs its launch counts: pass cluster=, or "
            "compile it for a size (__cluster_dims__)"
        )
    return x, y, z


def _check_threads(function: Function, block: tuple[int, int, int]) -> None:
    """``.reqntid`` and ``.maxntid``: for how many threads a kernel was compiled."""
    threads = block[0] * block[1] * block[2]
    for name, values in function.directives.items():
        given = (*values, 1, 1, 1)[:3]
        if name == "reqntid" and given != block:
            raise PtxError(f"{function.name} was compiled for CTAs of {given} threads, not of {block}")
        if name == "maxntid" and given[0] * given[1] * given[2] < threads:
            raise PtxError(f"{function.name} was compiled for CTAs of at most {given} threads, not of {block}")


def _shared(module: Module, function: Function, used: set[str], dynamic: int) -> tuple[dict[str, TileRegion], int]:
    """The regions of the shared variables that a kernel names, those of fixed size first, and the bytes of all."""
    named = (v for v in (*module.variables.values(), *function.variables) if v.space == "shared" and v.name in used)
    known = sorted(named, key=lambda v: not v.bytes)
    short = {v.name: _author_name(v) for v in known}
    times = Counter(short.values())
    called = {name: of if times[of] == 1 else name for name, of in short.items()}
    places, end = _placed(v for v in known if v.bytes)
    align = max((v.align for v in known if not v.bytes), default=1)
    end = -(-end // align) * align
    regions = {v.name: TileRegion(called[v.name], places.get(v.name, end), v.bytes or dynamic) for v in known}
    return regions, end + dynamic


def _author_name(variable: Variable) -> str:
    """The name in C++ of a variable of a function: ``full`` for ``_ZZ4gemmPfE4full``."""
    mangled = re.fullmatch(r"_ZZ.*E(\d+)(\w+)", variable.name)
    return mangled[2] if mangled and len(mangled[2]) == int(mangled[1]) else variable.name


def _parameters(
    function: Function, arguments: Sequence[Argument] | None
) -> tuple[list[Parameter], dict[str, dict[int, Value]]]:
    """A Program's parameters, and of each of the function's the values of its members by their places."""
    declared = function.parameters
    if arguments is None:
        arguments = [
            Argument("tensor_map", u64)
            if v.bytes == _TENSOR_MAP_BYTES
            else Argument("pointer", u32)
            if TYPE_BITS[v.type] == 64
            else Argument("scalar", REGISTER.get(v.type, u32))
            for v in declared
        ]
    if len(arguments) != len(declared):
        named = ", ".join(v.name for v in declared)
        raise PtxError(f"{function.name} takes {len(declared)} arguments ({named}), not {len(arguments)}")
    found: list[Parameter] = []
    members: dict[str, dict[int, Value]] = {}
    for variable, given in zip(declared, arguments, strict=True):
        parts = _members(variable, given) if given.members else {0: _parameter(variable, given)}
        places = members[variable.name] = dict[int, Value]()
        for place, part in parts.items():
            number = len(found)
            found.append(replace(part, value=replace(part.value, number=number)))
            places[place] = found[-1].value
    return found, members


def _members(variable: Variable, given: Argument) -> dict[int, Parameter]:
    """The members of a structure, each at its natural alignment."""
    name = given.name or variable.name
    parts: dict[int, Parameter] = {}
    end = 0
    for i, member in enumerate(given.members):
        pointer, dtype = member.kind == "pointer", member.dtype
        size = 8 if pointer else dtype.bytes
        place = -(-end // size) * size
        dtype = dtype if pointer else _OF_BYTES.get(dtype, dtype)
        value = Value(0, u64 if pointer else dtype, f"{name}.{i}")
        parts[place] = Parameter(value.name, member.kind, dtype, value)
        end = place + size
    if end > variable.bytes:
        raise PtxError(f"the members given for the structure {name} have {end} bytes, it has {variable.bytes}")
    return parts


def _parameter(variable: Variable, given: Argument) -> Parameter:
    """A kernel's parameter; its declared type is that of its bits."""
    name = given.name or variable.name
    if variable.bytes > 8:
        if given.kind != "tensor_map" or variable.bytes != _TENSOR_MAP_BYTES:
            raise PtxError(
                f"the parameter {name} is a structure of {variable.bytes} bytes: give a list of its members, or for a "
                "tensor map an (array, TensorMapSpec) pair"
            )
        return Parameter(name, "tensor_map", u64, Value(0, u64, name))
    bits = TYPE_BITS[variable.type]
    if given.kind == "pointer":
        if bits != 64:
            raise PtxError(f"an array is passed for the parameter {name}, which has {bits} bits")
        return Parameter(name, "pointer", given.dtype, Value(0, u64, name))
    dtype = given.dtype
    if max(dtype.bits, 16) != max(bits, 16) and not (bits == 8 and dtype in (u16, u32)):
        raise PtxError(f"a {dtype} is passed for the parameter {name}, which has {bits} bits")
    return Parameter(name, "scalar", dtype, Value(0, dtype, name))
