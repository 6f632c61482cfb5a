"""The builder behind ``k``: turns calls and operators of a traced kernel function into statements of a Program.

Written order is printed order. Pure integer values are shared within the blocks that dominate them; nothing else is
moved, merged or scheduled.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from numbers import Integral
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any, TypeVar, cast

from warploom.core.dtypes import DType, f32, pred, s32, u32
from warploom.core.errors import TraceError, shown
from warploom.ir.statements import (
    NOWHERE,
    Const,
    Loop,
    Op,
    Operand,
    Register,
    Role,
    Roles,
    SourceLine,
    Statement,
    TileRegion,
    Value,
    When,
)
from warploom.isa.conversion import move
from warploom.isa.form import RefusedError
from warploom.isa.instruction import Instruction, named
from warploom.isa.lanewise import binary, unary
from warploom.lang.fold import COMMUTATIVE, fold_binary, split_sum
from warploom.lang.source import refuse_rebinding, refuse_uncalled
from warploom.lang.values import Mutable, Number, TileAddress, Traced, holds_bits

_PACKAGE = __name__.partition(".")[0]
_PYTHON = "contextlib", "functools", "dataclasses"
"""Python's own modules whose functions call back."""
_OWN = *(f"{_PACKAGE}.{name}." for name in ("isa", "lang", "layout", "tile")), *_PYTHON
"""Modules whose frames are the language itself, never the author's."""
_OF_ARRAYS = "torch.", "numpy."
"""Modules of whose functions a traced value refuses to be an argument."""
_TRACER = f"{_PACKAGE}.lang.kernel"
"""The module that calls kernel functions: what lies beyond calls the trace."""
_BITWISE = ("and", "or", "xor", "shl", "shr", "eq", "ne")
_F32_BEYOND = 2.0**128 - 2.0**103  # from here on numbers round to infinity
_Key = tuple[Instruction, tuple[object, ...]]


class Builder:
    """Blocks under construction, sharing of pure values, source lines. :class:`warploom.lang.Kernel` adds the words."""

    def __init__(self, *, share: bool = True) -> None:
        self._numbers = 0
        self._blocks: list[list[Statement]] = [[]]
        self._shared: list[dict[_Key, tuple[Traced, ...]]] = [{}]
        self._share = share
        self._lines: dict[tuple[tuple[str, int, str], ...], SourceLine] = {}
        self.unfinished: dict[object, TraceError] = {}
        """What must come before the end of the kernel, such as a block's ``with``: the error that it is otherwise."""
        self._conditions: list[tuple[int, int] | None] = []
        """The roles, as warps, and the conditions (None) around what is written now."""
        self._reason = ""

    # -- source lines
    @staticmethod
    def author() -> FrameType | None:
        """The frame of the author's line."""
        frame: FrameType | None = inspect.currentframe()
        while frame is not None and _is_of(frame, _OWN):
            frame = frame.f_back
        return frame

    def here(self) -> SourceLine:
        """The author's line, the innermost frame outside the language, and the calls of the author's that led there."""
        frame = self.author()
        calls: list[tuple[str, int, str]] = []
        codes: list[CodeType] = []
        while frame is not None and frame.f_globals.get("__name__") != _TRACER:
            line = frame.f_code.co_filename, frame.f_lineno
            if not calls or not (_is_of(frame, _OWN) or line == calls[-1][:2]):  # a lambda is called where it stands
                calls.append((*line, frame.f_code.co_name))
                codes.append(frame.f_code)
            frame = frame.f_back
        key = tuple(calls)
        found = self._lines.get(key)
        if found is None:
            for code in codes if frame is not None else ():
                refuse_uncalled(code)
            where, *callers = (SourceLine(*call) for call in key or (("", 0, ""),))
            found = self._lines[key] = replace(where, callers=tuple(callers))
        return found

    def line_of(self, error: BaseException) -> SourceLine:
        """The author's line that an error came through, and the calls of the author's that led there."""
        lines = dict[tuple[str, int], tuple[SourceLine, bool]]()  # a lambda is called where it stands
        for frame, line in walk_tb(error.__traceback__):
            if not _is_of(frame, (*_OWN, *_OF_ARRAYS)):
                code = frame.f_code
                where = SourceLine(code.co_filename, line, code.co_name)
                lines[code.co_filename, line] = where, _is_of(frame, (f"{_PACKAGE}.",))
        found = list(lines.values())[::-1] or [(NOWHERE, True)]
        if not found[0][1]:  # of a function that a kernel of the package calls, an epilogue
            found = [*takewhile(lambda line: not line[1], found)]
        (where, _), *callers = found
        return replace(where, callers=tuple([line for line, _ in callers]))

    # -- values
    def constant(self, value: int | float | bool, dtype: DType) -> Traced:
        """An immediate of a type. Floats given for an integer type are an error."""
        if dtype.is_integer and isinstance(value, Integral):
            value = int(value)  # NumPy's integers too
        if dtype.is_integer and not isinstance(value, int):
            raise TraceError(f"{value!r} is not an integer, but the other operand is {dtype}")
        if dtype.is_float:
            value = self._as_float(value, dtype)
        elif dtype is pred:
            if not isinstance(value, bool | int):
                raise TraceError(f"{shown(value)} is no condition: write a comparison, True or False")
        elif not -(2 ** (dtype.bits - 1)) <= value < 2**dtype.bits:
            raise TraceError(f"{value} does not fit {dtype}")
        return Traced(self, Const(dtype, value))

    def _as_float(self, value: Any, dtype: DType) -> float:
        try:
            if isinstance(value, str | bytes):
                raise TypeError
            number = float(value)
            if dtype is f32 and _F32_BEYOND <= abs(number) < math.inf:
                raise OverflowError
            return number
        except (TypeError, ValueError, OverflowError):
            raise TraceError(f"{shown(value)} is no number that {dtype} can hold") from None

    def operand(self, value: Number, dtype: DType) -> Traced:
        """``value`` as an operand of type ``dtype``: numbers become immediates, registers are read."""
        if isinstance(value, Mutable):
            value = value.get()
        if not isinstance(value, Traced):
            return self.constant(value, dtype)
        if value.dtype is not dtype:
            if value.constant is not None and dtype.is_integer and value.dtype.is_integer:
                return self.constant(int(value.constant), dtype)
            raise TraceError(
                f"expected {dtype}, got {value!r}; convert it with k.convert(x, {dtype}) "
                f"(by value) or k.bitcast(x, {dtype}) (the same bits)"
            )
        return value

    def new_value(self, dtype: DType, name: str = "") -> Value:
        """A fresh single-assignment value."""
        self._numbers += 1
        return Value(self._numbers, dtype, name)

    def new_register(self, dtype: DType, name: str = "") -> Register:
        """A fresh mutable register."""
        self._numbers += 1
        return Register(self._numbers, dtype, name)

    # -- emission
    def append(self, statement: Statement) -> None:
        """Add a statement to the innermost open block."""
        self._blocks[-1].append(statement)

    def emit(self, instruction: Instruction, operands: Sequence[Traced]) -> tuple[Traced, ...]:
        """Emit an instruction; returns its results. Pure integer instructions are shared."""
        key = self._key(instruction, operands)
        if key is not None:
            for known in self._shared:
                if key in known:
                    return known[key]
        values = tuple(self.new_value(t) for t in instruction.result_types)
        op = self._append_op(instruction, operands, values)
        results = tuple(Traced(self, v, op, tuple(operands)) for v in values)
        if key is not None:
            self._shared[-1][key] = results
        return results

    def issue(self, instruction: Instruction, *values: Number) -> tuple[Traced, ...]:
        """Emit an instruction on values: numbers become immediates of the types that its form gives its operands.

        The constant part of an address becomes its displacement.
        """
        operands, offsets = list[Traced](), dict[str, int]()
        for position, (value, dtype) in enumerate(zip(values, instruction.operand_types, strict=True)):
            if displacement := instruction.addresses.get(position):
                base, offsets[displacement] = split_sum(cast("Traced", value))
                operands.append(base)
            else:
                operands.append(self.operand(value, dtype))
        return self.emit(instruction.at(**offsets) if offsets else instruction, operands)

    def emit_into(self, instruction: Instruction, operands: Sequence[Traced], targets: Sequence[Mutable]) -> None:
        """Emit an instruction that overwrites mutable registers (accumulators in place)."""
        self._append_op(instruction, operands, [t.register for t in targets])

    def _append_op(self, instruction: Instruction, operands: Sequence[Traced], results: Sequence[Value]) -> Op:
        given, tiles = tuple(x.ir for x in operands), _tiles(instruction, operands)
        op = Op(instruction, given, tuple(results), self.here(), tiles, self._reason)
        self.append(op)
        return op

    def _key(self, instruction: Instruction, operands: Sequence[Traced]) -> _Key | None:
        if not (self._share and instruction.pure and all(not t.is_float for t in instruction.result_types)):
            return None
        parts: list[object] = []
        for x in operands:
            if isinstance(x.ir, Register):
                return None
            parts.append(x.ir)
        return instruction, tuple(parts)

    def binary(self, op: str, a: Number, b: Number) -> Traced:
        """``a op b`` with one common type; folded where nothing needs to run."""
        if op not in _BITWISE:
            self._refuse_bits(a, b)
        dtype = self._common_type(op, a, b)
        x = self.operand(a, dtype)
        y = self.operand(b, u32 if op in ("shl", "shr") else dtype)
        if op in COMMUTATIVE and x.constant is not None:
            x, y = y, x
        self._refuse_undefined(op, dtype, y)
        folded = fold_binary(self, op, x, y)
        return folded if folded is not None else self.emit(binary(op, dtype), (x, y))[0]

    def _refuse_bits(self, *values: Number) -> None:
        """Arithmetic on a 16-bit float or a short signed integer as it was loaded would compute with its bits."""
        for x in values:
            if holds_bits(x):
                kind, pairs = s32, ""
                if x.element.is_float:
                    kind, pairs = f32, f"; pairs are read with dtype=u32 and k.unpack(pair, {x.element})"
                raise TraceError(
                    f"{x!r} holds the bits of one {x.element} in {x.dtype}: k.convert(x, {kind}) gives its value{pairs}"
                )

    def _refuse_undefined(self, op: str, dtype: DType, y: Traced) -> None:
        """Refuse a known operand for which the printed C++ is undefined; the emulator finds those of the run."""
        if y.constant is None or not dtype.is_integer:
            return
        if op in ("div", "rem") and y.constant == 0:
            raise TraceError("division by 0")
        if op in ("shl", "shr") and not 0 <= y.constant < dtype.bits:
            raise TraceError(f"a shift of {dtype} is by 0 to {dtype.bits - 1} bits, not by {y.constant}")

    def _common_type(self, op: str, a: Number, b: Number) -> DType:
        for value in (a,) if op in ("shl", "shr") and isinstance(a, Traced) else (a, b):
            if isinstance(value, Traced) and value.constant is None:
                return value.dtype
        for value in (a, b):
            if isinstance(value, Traced):
                return value.dtype
        numbers = [x for x in (a, b) if not isinstance(x, Traced)]
        if any(isinstance(x, float) for x in numbers):
            return f32
        return s32 if min(numbers, default=0) < 0 else u32  # as indices are

    def unary(self, op: str, a: Number) -> Traced:
        """The operator ``op`` of one operand, as ``neg`` or ``popc``."""
        dtype = a.dtype if isinstance(a, Traced) else f32
        x = self.operand(a, dtype)
        return self.emit(unary(op, dtype), (x,))[0]

    def divide(self, a: Number, b: Number) -> Traced:
        """``a / b`` of floats, rounded to nearest."""
        dtype = self._common_type("div", a, b)
        if not dtype.is_float:
            raise TraceError("`/` divides floats; integers take `//`")
        return self.binary("div", a, b)

    def floor_divide(self, op: str, a: Number, b: Number) -> Traced:
        """``//`` and ``%`` of unsigned integers (signed ones truncate toward zero in hardware, so they are refused)."""
        dtype = self._common_type(op, a, b)
        if dtype.kind != "unsigned":
            raise TraceError(f"`//` and `%` take unsigned integers, not {dtype}")
        return self.binary(op, a, b)

    # -- mutable registers
    def read(self, source: Mutable) -> Traced:
        """A snapshot of a mutable register."""
        return self.emit(move(source.dtype), (Traced(self, source.register),))[0]

    def write(self, target: Mutable, value: Number) -> None:
        """Overwrite a mutable register."""
        x = self.operand(value, target.dtype)
        self.append(Op(move(target.dtype), (x.ir,), (target.register,), self.here()))

    # -- blocks
    @contextmanager
    def relies_on(self, reason: str) -> Generator[None, None, None]:
        """State, in a sentence, why reads in the body have ended when their memory is given back to the TMA.

        PTX asks for ``k.fence_async()`` there, and the emulator shows its absence for review, except of these reads.
        """
        before, self._reason = self._reason, reason
        try:
            yield
        finally:
            self._reason = before

    @contextmanager
    def block(self) -> Generator[list[Statement], None, None]:
        """A nested block; values shared inside it stay inside."""
        body: list[Statement] = []
        self._blocks.append(body)
        self._shared.append({})
        try:
            yield body
        finally:
            self._blocks.pop()
            self._shared.pop()

    @contextmanager
    def _within(self, warps: tuple[int, int] | None) -> Generator[None, None, None]:
        self._conditions.append(warps)
        try:
            yield
        finally:
            self._conditions.pop()

    def block_here(self) -> object:
        """Return an object that identifies the block that is being written."""
        return self._blocks[-1]

    def warps_here(self, count: int) -> range | None:
        """Which of the ``count`` warps of a CTA execute what is written now; None under a condition."""
        if None in self._conditions:
            return None
        return range(*(self._conditions[-1] or ())) if self._conditions else range(count)

    @contextmanager
    def loop_block(self, start: Operand, stop: Operand, step: Operand, dtype: DType) -> Generator[Traced, None, None]:
        """A dynamic loop's body."""
        where = self.here()
        index = self.new_value(dtype)
        with refuse_rebinding(self.author(), loop=True), self.block() as body:
            yield Traced(self, index)
        self.append(Loop(index, start, stop, step, tuple(body), where))

    @contextmanager
    def when_block(self, condition: Operand, uniform: bool) -> Generator[None, None, None]:
        """The body of a condition."""
        where = self.here()
        with refuse_rebinding(self.author(), loop=False), self.block() as body, self._within(None):
            yield
        self.append(When(condition, tuple(body), (), uniform, where))

    @contextmanager
    def otherwise_block(self) -> Generator[None, None, None]:
        """The other branch of the ``when`` just closed."""
        previous = self._blocks[-1][-1] if self._blocks[-1] else None
        if not isinstance(previous, When) or previous.otherwise:
            raise TraceError("`k.otherwise()` follows directly after a `with k.when(…):`")
        with refuse_rebinding(self.author(), loop=False), self.block() as body, self._within(None):
            yield
        last = self._blocks[-1][-1]
        if last is not previous:
            raise TraceError("statements stand between `k.when` and `k.otherwise`")
        self._blocks[-1][-1] = When(previous.condition, previous.body, tuple(body), previous.uniform, previous.where)

    @contextmanager
    def role_block(self, first: int, last: int, registers: int | None) -> Generator[None, None, None]:
        """One warp role; roles written one after another form one if/else chain."""
        where = self.here()
        with self.block() as body, self._within((first, last)):
            yield
        role = Role(first, last, tuple(body), registers, where)
        previous = self._blocks[-1][-1] if self._blocks[-1] else None
        if isinstance(previous, Roles) and all(r.last <= first or last <= r.first for r in previous.branches):
            self._blocks[-1][-1] = Roles((*previous.branches, role), previous.where)
        else:
            self.append(Roles((role,), where))

    def finished_body(self) -> tuple[Statement, ...]:
        """The outermost block."""
        if len(self._blocks) != 1:
            raise TraceError("a block is still open at the end of the kernel")
        for wrong in self.unfinished.values():
            raise wrong
        return tuple(self._blocks[0])


def _is_of(frame: FrameType, modules: tuple[str, ...]) -> bool:
    """Whether a frame runs code of a module, or code that Python made up for a class (a dataclass's ``__init__``)."""
    if str(frame.f_globals.get("__name__", "")).startswith(modules):
        return True
    return frame.f_code.co_filename == "<string>" and frame.f_code.co_name.startswith("__")


def _tiles(instruction: Instruction, operands: Sequence[Traced]) -> tuple[TileRegion | None, ...]:
    """The tiles that operands of an instruction that does more than compute were formed from."""
    tiles = tuple(x.within if isinstance(x, TileAddress) else None for x in operands)
    return tiles if any(tiles) and not instruction.pure else ()


Method = TypeVar("Method", bound=Callable[..., Any])


def word(name: str, *, ptx: bool = True, **given: int | Mapping[Any, str]) -> Callable[[Method], Method]:
    """Give a method of ``k`` its body: one instruction, by PTX's name, on the method's parameters.

    Parameters of type ``int`` are the immediates of their names, those that ``name`` has in braces are words of the
    instruction (``fence.acq_rel.{scope}``), all others are its operands, in order. The form gives the types of operands
    and results, what is refused and the architecture. ``given`` are immediates that authors of kernels do not choose,
    and what a parameter's values are called in the name. Raises TypeError, as the module is imported, where the
    instruction has other operands than the method.
    """
    fixed = [(n, x) for n, x in given.items() if isinstance(x, int)]
    called = {n: x for n, x in given.items() if not isinstance(x, int)}

    def decorate(method: Method) -> Method:
        signature = inspect.signature(method)
        parameters = [*signature.parameters.values()][1:]
        names, count = [p.name for p in parameters], len(parameters)
        immediates = [p.name for p in parameters if p.annotation in (int, "int")]
        operands = [n for n in names if n not in immediates and f"{{{n}}}" not in name]

        def made(said: dict[str, Any]) -> Instruction:
            words = said | {n: texts[said[n]] for n, texts in called.items()}
            numbers = (*fixed, *((n, said[n]) for n in immediates))
            return named(name.format(**words), numbers=numbers, operands=len(operands), ptx=ptx)

        def check(k: Builder, said: dict[str, Any]) -> None:
            """Raise TraceError for an immediate that is not known, and for a value that has no name."""
            for n in (*immediates, *called):
                if not (isinstance(said[n], Integral) if n in immediates else said[n] in called[n]):
                    takes = "an integer known while tracing" if n in immediates else ", ".join(map(repr, called[n]))
                    raise TraceError(f"{method.__name__} takes {n} as {takes}, not {shown(said[n])}")

        try:
            usual = made({p.name: 0 if p.default is p.empty else p.default for p in parameters})
        except RefusedError as error:
            raise TypeError(f"{method.__qualname__}: {error}") from None
        changes, defaults = len(operands) < count, method.__defaults__ or ()

        def call(self: Any, *given: Any, **by_name: Any) -> Any:
            values = (*given, *defaults[len(given) - count :]) if len(given) < count else given
            if by_name or len(values) != count:
                method(self, *given, **by_name)  # Python's own message where the arguments do not fit
                bound = signature.bind(self, *given, **by_name)
                bound.apply_defaults()
                values = [*bound.arguments.values()][1:]
            instruction = usual
            if changes:
                said = dict(zip(names, values, strict=True))
                check(self, said)
                instruction, values = made(said), [said[n] for n in operands]
            results = self.issue(instruction, *values)
            return results[0] if len(results) == 1 else results or None

        for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(call, attribute, getattr(method, attribute))
        call.__code__ = call.__code__.replace(co_name=method.__name__, co_qualname=method.__qualname__)
        call.__wrapped__ = method  # type: ignore[attr-defined]
        return cast("Method", call)

    return decorate
