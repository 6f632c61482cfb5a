"""Operations from PTX instructions: how registers, constants and symbols become operands of a Program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from warploom.core.dtypes import DType, pred, u32, u64
from warploom.core.errors import VerifyError
from warploom.ir import statements as ir
from warploom.ir.statements import Const, Op, Statement, TileRegion, Value, When
from warploom.isa.async_copy import POLICIES
from warploom.isa.conversion import bitcast, convert, half_of, move, special
from warploom.isa.effects import Space
from warploom.isa.form import TYPE_BITS
from warploom.isa.instruction import Instruction, named
from warploom.isa.lanewise import binary, select, unary
from warploom.isa.memory import Window, from_generic
from warploom.ptx.blocks import BasicBlock
from warploom.ptx.emitter import Emitter, Specials, constant, unsigned
from warploom.ptx.reading import CARRY, find
from warploom.ptx.syntax import (
    ENVIRONMENT,
    WORKSPACE,
    Address,
    Float,
    Function,
    Guard,
    Integer,
    Not,
    Operand,
    PtxInstruction,
    PtxRegister,
    Symbol,
)
from warploom.ptx.usage import Usage, by_guard, completed_registers

_PARAMETER_BYTES = 4096
_HINT = "L2::cache_hint"
Make: TypeAlias = Callable[[Space], Instruction]
"""An access for a space."""


@dataclass(frozen=True, slots=True)
class VariablePlaces:
    """Where the variables of a function lie, by their names.

    ``shared``: where a shared variable lies, ``local``: how many bytes into a thread's local memory; ``parameters``:
    the members of each parameter by their places in it, ``tensor_maps`` those that are one; ``pointers`` to variables
    in global and constant memory.
    """

    shared: Mapping[str, TileRegion]
    local: Mapping[str, int]
    parameters: Mapping[str, Mapping[int, Value]]
    tensor_maps: frozenset[str]
    pointers: Mapping[str, Value]


class FlowBuilder(Emitter):
    """Makes the statements of one function's blocks.

    ``windows`` are the spaces besides global memory of which the function makes generic addresses.
    """

    def __init__(self, function: Function, usage: Usage, specials: Specials, names: VariablePlaces) -> None:
        super().__init__(sum(map(len, names.parameters.values())) + len(names.pointers))
        self.function, self.usage, self.specials, self.names = function, usage, specials, names
        self.parameters = names.parameters
        code = [i for i in function.body if isinstance(i, PtxInstruction)]
        made = {m for i in code if i.opcode == "cvta" and "to" not in i.modifiers for m in i.modifiers}
        shared = made & {"shared", "shared::cta"}
        self.windows: tuple[Window, ...] = ("shared",) * bool(shared) + ("local",) * ("local" in made)
        self.maps_generic = any(i.opcode == "mapa" and "u64" in i.modifiers for i in code)
        self.blocks, self.number = list[BasicBlock](), 0
        self.blocks, self.number = list[BasicBlock](), 0
        self.current: PtxInstruction
        self.current: PtxInstruction
        self.completed: dict[int, tuple[str, ...]] = {}
        self.completed: dict[int, tuple[str, ...]] = {}
        self._registers: dict[str, ir.Register] = {}
        self._values: dict[str, ir.Operand] = {}  # of the current block

    # -- blocks ------------------------------------------------------------------------------------------------------

    def flow(self, blocks: list[BasicBlock], threads: int) -> tuple[tuple[Statement, ...], ...]:
        """The statements of all blocks, for CTAs of so many threads: of whole warps, those beyond end at once."""
        if threads % 32:
            blocks = [
                BasicBlock(targets=(1, len(blocks) + 1), where=blocks[0].where),
                *(replace(block, targets=tuple(target + 1 for target in block.targets)) for block in blocks),
                BasicBlock(where=blocks[0].where),
            ]
        self.blocks, self.completed, self.threads = blocks, completed_registers(blocks), threads
        found: list[tuple[Statement, ...]] = []
        for self.number, block in enumerate(blocks):
            found.append(self.block(block))
        return tuple(found)

    def loops_until(self, holds: Operand) -> bool:
        """Whether the current block is a loop around its only instruction until a predicate holds."""
        block = self.blocks[self.number] if self.blocks else BasicBlock()
        if len(block.body) != 1 or block.guard is None or block.guard.register != holds:
            return False
        again = block.targets[0 if block.guard.negated else 1]
        while again != self.number and not self.blocks[again].body and len(self.blocks[again].targets) == 1:
            again = self.blocks[again].targets[0]
        return again == self.number

    def block(self, block: BasicBlock) -> tuple[Statement, ...]:
        """The statements of a block, its branch last."""
        self._values, self._out, self._known = {}, [], {}
        for guard, group in by_guard(block.body):
            if guard is None:
                for i in group:
                    self._instruction(i)
            else:
                self._guarded(guard, group)
        self.where = block.where
        condition = None
        if block.guard is not None:
            condition = self.guard(block.guard)
        elif block.index is not None:
            condition = self.read(block.index, u32)
        elif len(block.targets) == 2:
            condition = self.binary("lt", self.once(special("tid.x")), self.threads)
        return (*self._out, ir.Branch(block.targets, condition, block.uniform, block.where))

    def _guarded(self, guard: Guard, group: list[PtxInstruction]) -> None:
        self.where = group[0].where
        condition = self.guard(guard)
        outer, known = self._out, self._known
        self._out, self._known = [], dict(known)
        for i in group:
            self._instruction(i)
        outer.append(When(condition, tuple(self._out), where=group[0].where))
        self._out, self._known = outer, known

    def _instruction(self, i: PtxInstruction) -> None:
        self.where, self.current = i.where, i
        target = i.operands[0] if i.opcode == "mov" and i.operands else None
        try:
            found = find(self._unhinted(i), self.home, self.known, self.usage.read)
            if isinstance(target, PtxRegister) and target.name in self.usage.constants:
                self._typed(i.operands[1], found[0].result_types[0])
                return
            if not (found[0].result_types or found[0].effects()):  # it changes scheduling or caches alone
                return
            LOWERINGS.get(i.opcode, FlowBuilder.declared)(self, *found)
        except VerifyError as error:  # no instruction of Programs, as its types or counts are
            raise i.refusal(str(error)) from None

    def _unhinted(self, i: PtxInstruction) -> PtxInstruction:
        """Without a cache policy, as it changes speed alone; but tensor copies' loads keep those that Programs know."""
        if _HINT not in i.modifiers:
            return i
        policy = self.known(i.operands[-1])
        kept = {"tensor", "mbarrier::complete_tx::bytes"} <= {*i.modifiers}
        if kept and isinstance(policy, Integer) and policy.value in POLICIES.values():
            return i
        return replace(i, modifiers=tuple(m for m in i.modifiers if m != _HINT), operands=i.operands[:-1])

    def known(self, x: Operand) -> Operand:
        """The number that a register stands for; anything else as it is."""
        if not isinstance(x, PtxRegister):
            return x
        value = self._values.get(x.name)
        if isinstance(value, Const) and value.dtype.is_integer:
            return Integer(int(value.value))
        return self.usage.constants.get(x.name, x)

    def declared(self, made: Instruction, targets: Sequence[Operand], sources: Sequence[Operand]) -> None:
        """An instruction that a table declares, as it is."""
        if made.form.scalar:
            self.set_all(targets, made, [self.read(x, t) for x, t in zip(sources, made.operand_types, strict=True)])
            return
        values, within, offsets = list[ir.Operand](), None, dict[str, int]()
        types = zip(sources, made.operand_types, made.ptx_types[len(made.result_types) :], strict=True)
        for position, (x, dtype, written) in enumerate(types):
            if isinstance(x, Address) and position not in made.addresses:  # a tensor map
                base = self.read(x.base, dtype)
                values.append(self.binary("add", base, x.offset))
            elif isinstance(x, Address):
                space = str(made.fields.get("space", "global" if dtype is u64 else "shared")).partition("::")[0]
                if not space and self.windows:
                    raise self.refusal("a generic address is not supported here")
                base, offsets[made.addresses[position]], tile = self.address(x, space or "global")
                within = tile if position == 0 else within
                values.append(base)
            else:
                value = self.register(CARRY.name) if x is CARRY else self.read(x, written)
                values.append(value if written is dtype else self.extend(value, dtype))
        if offsets:
            made = made.at(**offsets)
        if not targets or targets[-1] is not CARRY:
            self.set_all(targets, made, values, within)
            return
        result, carry = (self.fresh(t) for t in made.result_types)
        self.emit(made, values, (result, carry))
        self.emit(move(u32), (carry,), (self.register(CARRY.name),))
        self.assign(targets[0], result)

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, operand: Operand, dtype: DType) -> ir.Operand:
        """An operand's low bits as ``dtype``."""
        if isinstance(operand, PtxRegister):
            known = self.usage.constants.get(operand.name)
            return self.cast(self.value(operand), dtype) if known is None else self._constant(known, dtype)
        if isinstance(operand, Not):
            if dtype is not pred:
                raise self.refusal(f"{operand} stands where a {dtype} is needed: predicates alone are negated")
            return self.guard(Guard(operand.register, negated=True))
        if isinstance(operand, Float) is not dtype.is_float:
            self._typed(operand, dtype)
        return self._constant(operand, dtype)

    def _constant(self, operand: Operand, dtype: DType) -> ir.Operand:
        """Return the value of a number or a symbol, which the operand is or which its register is set to once."""
        if isinstance(operand, Integer):
            return constant(operand.value, dtype)
        if isinstance(operand, Float):
            return self._float(operand, dtype)
        if isinstance(operand, Symbol):
            return self.extend(self.symbol(operand), dtype)
        raise self.refusal(f"{operand} is no operand of one value")

    def _typed(self, operand: Operand, dtype: DType) -> None:
        """Refuse an integer for instructions of floats alone, and a float for those of integers: none is converted."""
        is_float = isinstance(operand, Float)
        if is_float == dtype.is_float or not isinstance(operand, Integer | Float):
            return
        types = [m for m in self.current.modifiers if m in TYPE_BITS]
        if types and all(t[0] in ("us" if is_float else "f") for t in types):
            needed = "an integer" if is_float else "a float"
            raise self.refusal(f"the constant {operand} stands where {self.current.form} has {needed}")

    def value(self, register: PtxRegister) -> ir.Operand:
        """The value of a register in its home type."""
        name = register.name
        if name in self._values:
            return self._values[name]
        if name in self.usage.home:
            if name in self.usage.local:
                raise self.refusal(f"{name} is read before it is written")
            return self.register(name)
        if name in ENVIRONMENT:
            return self.once(half_of(u64, ENVIRONMENT[name]), self.names.pointers[WORKSPACE.name])
        return self.specials.read(self, name)

    def register(self, name: str) -> ir.Register:
        """The mutable register of a PTX register that is used in several blocks, or of the carry."""
        if name not in self._registers:
            label = name.lstrip("%").replace("@", "_")
            self._registers[name] = ir.Register(next(self.numbers), self.usage.home.get(name, u32), label)
        return self._registers[name]

    def guard(self, guard: Guard) -> ir.Operand:
        """The predicate of a guard."""
        if self.usage.home.get(guard.register.name) is not pred:
            raise self.refusal(f"{guard.register} is no predicate")
        holds = self.read(guard.register, pred)
        return self.op(unary("not", pred), holds) if guard.negated else holds

    def _float(self, operand: Float, dtype: DType) -> ir.Operand:
        if dtype.is_integer:
            return constant(operand.pattern(dtype.bits), dtype)
        if np.isnan(operand.value) and operand.width == dtype.bits:  # keep its bits
            bits = u32 if dtype.bits == 32 else u64
            return self.once(bitcast(bits, dtype), constant(operand.bits, bits))
        return Const(dtype, float(dtype.numpy.type(operand.value)))

    def cast(self, x: ir.Operand, dtype: DType) -> ir.Operand:
        """Reinterpret the bits of a value as ``dtype``; of a wider value the low bits."""
        if x.dtype is dtype:
            return x
        if isinstance(x, Const) and x.dtype.is_integer and dtype.is_integer:
            return constant(int(x.value), dtype)
        if x.dtype.bits == dtype.bits:
            return self.once(bitcast(x.dtype, dtype), x)
        if dtype.is_integer and x.dtype.bits > dtype.bits:
            return self.once(convert(unsigned(x.dtype), dtype), self.cast(x, unsigned(x.dtype)))
        raise self.refusal(f"a register of {x.dtype.bits} bits is read as {dtype}")

    def symbol(self, symbol: Symbol) -> ir.Operand:
        """The address of a variable: of a shared or local one u32."""
        found = self._window(symbol.name)
        if found is not None:
            return self.binary("add", found[0], found[1] + symbol.offset)
        if symbol.name in self.names.pointers:
            return self.binary("add", self.names.pointers[symbol.name], symbol.offset)
        if symbol.name == "WARP_SZ":  # the one constant that PTX defines
            return Const(u32, 32)
        if symbol.name in self.parameters:
            return Const(u64, self.parameter_address(symbol.name) + symbol.offset)
        raise self.refusal(f"the address of {symbol.name} is not supported")

    def parameter_address(self, name: str) -> int:
        """Where a parameter is in its own state space: a number that stands for it until it becomes generic."""
        return _PARAMETER_BYTES * (1 + list(self.parameters).index(name))

    def generic(self, x: ir.Operand) -> ir.Operand:
        """``cvta.param``: the generic address of a tensor map that is a parameter."""
        found: ir.Operand | None = None
        for name in sorted(self.names.tensor_maps):
            value = self.parameters[name][0]
            place = Const(u64, self.parameter_address(name))
            if x == place:
                return value
            found = value if found is None else self.op(select(u64), self.op(binary("eq", u64), x, place), value, found)
        if found is None or isinstance(x, Const):
            raise self.refusal("the address of a parameter is supported for tensor maps alone")
        return found

    def address(self, address: Operand, space: str) -> tuple[ir.Operand, int, TileRegion | None]:
        """(base, displacement, the variable if it is known) of an address: u64 in global memory, else u32."""
        if not isinstance(address, Address):
            raise self.refusal(f"{address} is no address")
        base = address.base
        if isinstance(base, Symbol):
            found = self._window(base.name)
            if found is not None and space == ("shared" if base.name in self.names.shared else "local"):
                return found[0], found[1] + base.offset + address.offset, self.names.shared.get(base.name)
            if found is None and space == "global" and base.name in self.names.pointers:
                return self.names.pointers[base.name], base.offset + address.offset, None
            raise self.refusal(f"{base.name} is no variable in {space} memory")
        variable = self.usage.variables.get(base.name, "") if isinstance(base, PtxRegister) else ""
        within = self.names.shared.get(variable) if space == "shared" else None
        return self.read(base, u64 if space == "global" else u32), address.offset, within

    def _window(self, name: str) -> tuple[ir.Operand, int] | None:
        """Where the space of a shared or local variable begins, and the variable's place in it."""
        if name in self.names.shared:
            return self.once(special("shared_base")), self.names.shared[name].offset
        if name in self.names.local:
            return self.once(special("local_base")), self.names.local[name]
        return None

    def access(
        self, address: Operand, make: Make, operands: Sequence[ir.Operand], results: Sequence[DType]
    ) -> list[ir.Register]:
        """An access at a generic address, to the space in which each thread's lies."""
        base, offset, _ = self.address(address, "global")
        base = self.binary("add", base, offset)
        found = [ir.Register(next(self.numbers), t, "generic") for t in results]
        for register in found:
            self.emit(move(register.dtype), (constant(0, register.dtype),), (register,))
        elsewhere: ir.Operand = Const(pred, True)
        for window in self.windows:
            inside = self.op(named(f"isspacep.{window}"), base)
            elsewhere = self.op(binary("and", pred), elsewhere, self.op(unary("not", pred), inside))
            place = self.op(from_generic(window), base)
            self._when(inside, make(window), (place, *operands), found)
        self._when(elsewhere, make("global"), (base, *operands), found)
        return found

    def _when(
        self, holds: ir.Operand, made: Instruction, operands: tuple[ir.Operand, ...], results: Sequence[Value]
    ) -> None:
        self._out.append(When(holds, (Op(made, operands, tuple(results), self.where),), where=self.where))

    def home(self, operand: Operand, default: DType) -> DType:
        """The type in which a register is at home, if it has the width of ``default``; else ``default``."""
        if isinstance(operand, PtxRegister):
            home = self.usage.home.get(operand.name, default)
            return home if home.bits == default.bits else default
        return default

    # -- writing -----------------------------------------------------------------------------------------------------

    def set_all(
        self,
        targets: Sequence[Operand],
        instruction: Instruction,
        operands: Sequence[ir.Operand],
        within: TileRegion | None = None,
    ) -> None:
        """Emit an instruction that writes several PTX registers."""
        if len(targets) != len(instruction.result_types):
            raise VerifyError(f"it gives {len(instruction.result_types)} registers, not {len(targets)}")
        results: list[Value] = []
        later: list[tuple[str, Value]] = []
        for target, dtype in zip(targets, instruction.result_types, strict=True):
            if not isinstance(target, PtxRegister):
                raise self.refusal(f"{target} is no register to write")
            home = self.usage.home.get(target.name)
            if home is dtype:
                results.append(self._target(target.name))
                continue
            results.append(self.fresh(dtype))
            if home is not None:
                later.append((target.name, results[-1]))
            elif target.name:
                raise self.refusal(f"{target} cannot be written")
        self.emit(instruction, operands, results, within)
        for name, value in later:
            self._put(name, self._widened(value, self.usage.home[name]))

    def assign(self, target: Operand, x: ir.Operand) -> None:
        """``target = x``: its low bits, or zero-extended (sign-extended, if it is signed)."""
        if not isinstance(target, PtxRegister):
            raise self.refusal(f"{target} is no register to write")
        if not target.name:
            return
        if target.name not in self.usage.home:
            raise self.refusal(f"{target} cannot be written")
        self._put(target.name, self._widened(x, self.usage.home[target.name]))

    def _widened(self, x: ir.Operand, home: DType) -> ir.Operand:
        if x.dtype.bits >= home.bits:
            return self.cast(x, home)
        if x.dtype.is_float:  # its bits, not its number
            x = self.cast(x, unsigned(x.dtype))
        return self.cast(self.extend(x, unsigned(home)), home)

    def extend(self, x: ir.Operand, dtype: DType) -> ir.Operand:
        """An integer as one of another width: extended by its sign if it has one, or its low bits."""
        if isinstance(x, Const):
            return constant(int(x.value), dtype)
        return x if x.dtype is dtype else self.once(convert(x.dtype, dtype), x)

    def _put(self, name: str, x: ir.Operand) -> None:
        if name in self.usage.local and not isinstance(x, ir.Register):
            self._values[name] = x
        else:
            target = self._target(name)
            self.emit(move(target.dtype), (x,), (target,))

    def _target(self, name: str) -> Value:
        if name not in self.usage.local:
            return self.register(name)
        label = name.lstrip("%").replace("@", "_")
        value = self._values[name] = self.fresh(self.usage.home[name], label)
        return value


Lowering = Callable[[FlowBuilder, Instruction, Sequence[Operand], Sequence[Operand]], None]
LOWERINGS: dict[str, Lowering] = {}
"""Opcode → what makes other operations of a declared instruction, of what it writes and of what it reads."""


def lowered(*opcodes: str) -> Callable[[Lowering], Lowering]:
    """Register what makes other operations of the declared instructions of some opcodes."""

    def register(lowering: Lowering) -> Lowering:
        LOWERINGS.update(dict.fromkeys(opcodes, lowering))
        return lowering

    return register
