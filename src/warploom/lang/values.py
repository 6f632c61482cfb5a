"""Traced values: what a kernel function computes with. Each stands for one register of every thread."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import UnionType
from typing import Any, NoReturn, Protocol, TypeAlias, TypeGuard

from warploom.core.dtypes import DType
from warploom.core.errors import TraceError
from warploom.ir.statements import Const, Op, Operand, Register, SourceLine, TileRegion, Value


class ValueBuilder(Protocol):
    """The methods of the :class:`.builder.Builder` that its values call."""

    def here(self) -> SourceLine:
        """The author's line."""
        ...

    def constant(self, value: int | float | bool, dtype: DType) -> Traced:
        """An immediate of a type."""
        ...

    def operand(self, value: Number, dtype: DType) -> Traced:
        """A value, or a number as an immediate, that an instruction takes as ``dtype``."""
        ...

    def binary(self, op: str, a: Number, b: Number) -> Traced:
        """``a op b``, of which one is traced."""
        ...

    def unary(self, op: str, a: Number) -> Traced:
        """An operation of one operand."""
        ...

    def divide(self, a: Number, b: Number) -> Traced:
        """A quotient of floats."""
        ...

    def floor_divide(self, op: str, a: Number, b: Number) -> Traced:
        """A quotient or rest (``op``) of unsigned integers."""
        ...

    def read(self, source: Mutable) -> Traced:
        """A snapshot of a mutable register."""
        ...

    def write(self, target: Mutable, value: Number) -> None:
        """Overwrite a register."""
        ...


def _operator(op: str) -> Callable[[Traced, Number], Traced]:
    """The method of an operator of two operands, the traced value first."""
    return lambda self, other: self.builder.binary(op, self, other)


def _reflected(op: str) -> Callable[[Traced, Number], Traced]:
    """The method of an operator whose first operand is a Python number."""
    return lambda self, other: self.builder.binary(op, other, self)


def _in_place(method: Callable[[Traced, Number], Traced]) -> Callable[[Mutable, Number], Mutable]:
    """The method of an operator that overwrites a register, from that of its value."""

    def overwrite(self: Mutable, other: Number) -> Mutable:
        self.set(method(self.get(), other))
        return self

    return overwrite


class Traced:
    """A value of every thread. Operators build instructions; Python numbers become immediates of its type.

    Both operands of an operator must have one type: convert explicitly with ``k.convert(x, f32)``. Comparisons give a
    predicate for ``k.when``, ``k.select`` and ``&``, ``|``. A traced value has no truth value.
    """

    __slots__ = ("builder", "definition", "ir", "sources")

    def __init__(
        self, builder: ValueBuilder, ir: Operand, definition: Op | None = None, sources: tuple[Traced, ...] = ()
    ) -> None:
        self.builder = builder
        self.ir = ir
        self.definition = definition
        self.sources = sources  # the traced operands of the definition, for folding

    @property
    def dtype(self) -> DType:
        """The register type."""
        return self.ir.dtype

    @property
    def constant(self) -> int | float | bool | None:
        """The value, if it is known while tracing."""
        return self.ir.value if isinstance(self.ir, Const) else None

    def __repr__(self) -> str:
        if isinstance(self.ir, Const):
            return f"{self.dtype}({self.ir.value})"
        return f"<{self.dtype} {self.ir.name or '%' + str(self.ir.number)}>"

    def __bool__(self) -> NoReturn:
        raise TraceError(
            f"{self!r} is a value of the running kernel: it has no truth value while the kernel is traced. "
            "Use `with k.when(condition):` for control flow or "
            "`k.select(condition, a, b)` for a value; `and`/`or` are `&`/`|`, `max`/`min` are `k.maximum`/`k.minimum`. "
            "Where there is no k, as in an epilogue: select, maximum, minimum of warploom.lang.functions."
        )

    def __index__(self) -> NoReturn:
        raise TraceError(
            f"{self!r} cannot be a Python index: a loop over it is "
            "`with k.loop(stop) as i:`, and register arrays are indexed by trace-time integers only"
        )

    def __float__(self) -> NoReturn:
        raise TraceError(
            f"{self!r} is no Python number while the kernel is traced: in place of math's "
            f"functions use k's, or warploom.lang.functions where there is no k"
        )

    __int__ = __round__ = __float__

    def __format__(self, spec: str) -> NoReturn:
        raise TraceError(
            f"{self!r} has no text while the kernel is traced: store values to see them; "
            "in a text, {x!r} is the type and name"
        )

    def __pow__(self, power: object) -> NoReturn:
        raise TraceError("a value of the running kernel has no **: write x * x, exp or log")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Arithmetic with a NumPy number on the left; other functions of NumPy are refused."""
        apply = getattr(operator, _OPERATORS.get(ufunc.__name__, ""), None)
        numbers = [x.item() if getattr(x, "shape", None) == () else x for x in inputs]
        if apply is None or method != "__call__" or options or any(hasattr(x, "shape") for x in numbers):
            self._refuse("numpy.", ufunc.__name__)
        return apply(*numbers)

    def __array_function__(self, function: Any, *_: object) -> NoReturn:
        self._refuse("numpy.", function.__name__)

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: object, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> NoReturn:
        traced = next(x for x in (*arguments, *(named or {}).values()) if isinstance(x, Traced))
        traced._refuse("torch's ", str(getattr(function, "__name__", function)))

    def _refuse(self, owner: str, name: str) -> NoReturn:
        cure = "use k's words, or warploom.lang.functions where there is no k (an epilogue)"
        if name in FUNCTIONS:
            cure = f"warploom.lang.functions.{FUNCTIONS[name]} is the one for it"
        raise TraceError(f"{owner}{name} computes with arrays, {self!r} is a value of the running kernel: {cure}")

    def __iter__(self) -> NoReturn:
        raise TraceError(f"{self!r} is one value, not a sequence")

    def __getitem__(self, _: object) -> NoReturn:
        self.__iter__()

    # -- arithmetic
    __add__ = __radd__ = _operator("add")
    __sub__, __rsub__ = _operator("sub"), _reflected("sub")
    __mul__ = __rmul__ = _operator("mul")

    def __truediv__(self, other: Number) -> Traced:
        return self.builder.divide(self, other)

    def __rtruediv__(self, other: Number) -> Traced:
        return self.builder.divide(other, self)

    def __floordiv__(self, other: Number) -> Traced:
        return self.builder.floor_divide("div", self, other)

    def __mod__(self, other: Number) -> Traced:
        return self.builder.floor_divide("rem", self, other)

    def __divmod__(self, other: Number) -> tuple[Traced, Traced]:
        return self // other, self % other

    def __neg__(self) -> Traced:
        return self.builder.unary("neg", self) if self.dtype.is_float else self.builder.binary("sub", 0, self)

    def __abs__(self) -> Traced:
        return self.builder.unary("abs", self)

    # -- bits and predicates
    __and__ = __rand__ = _operator("and")
    __or__ = __ror__ = _operator("or")
    __xor__ = __rxor__ = _operator("xor")
    __lshift__, __rlshift__ = _operator("shl"), _reflected("shl")
    __rshift__, __rrshift__ = _operator("shr"), _reflected("shr")

    def __invert__(self) -> Traced:
        return self.builder.unary("not", self)

    # -- comparisons
    __lt__, __le__ = _operator("lt"), _operator("le")
    __gt__, __ge__ = _operator("gt"), _operator("ge")

    def __eq__(self, other: object) -> Traced:  # type: ignore[override]
        return self.builder.binary("eq", self, other)  # type: ignore[arg-type]

    def __ne__(self, other: object) -> Traced:  # type: ignore[override]
        return self.builder.binary("ne", self, other)  # type: ignore[arg-type]

    __hash__ = object.__hash__


class TileAddress(Traced):
    """A shared address formed from a tile, or a descriptor of one. It stays one when something is added to it."""

    __slots__ = ("within",)

    def __init__(self, address: Traced, within: TileRegion) -> None:
        super().__init__(address.builder, address.ir, address.definition, address.sources)
        self.within = within

    def __add__(self, other: Number) -> TileAddress:
        return TileAddress(super().__add__(other), self.within)

    __radd__ = __add__


class Mutable(Traced):
    """A mutable register: read it like a value (each read is a snapshot), write it with :meth:`set` or ``+=``."""

    __slots__ = ("register",)

    def __init__(self, builder: ValueBuilder, register: Register) -> None:
        super().__init__(builder, register)
        self.register = register

    def __repr__(self) -> str:
        return f"<mutable {self.dtype} {self.register.name or self.register.number}>"

    def get(self) -> Traced:
        """The value it holds now; later writes do not change what was read."""
        return self.builder.read(self)

    def set(self, value: Number) -> None:
        """Overwrite it (in the active lanes)."""
        self.builder.write(self, value)

    __iadd__, __isub__ = _in_place(Traced.__add__), _in_place(Traced.__sub__)
    __imul__, __ixor__ = _in_place(Traced.__mul__), _in_place(Traced.__xor__)


Number: TypeAlias = Traced | int | float | bool
"""An operand of arithmetic: a traced value, or a Python number, which becomes an immediate."""


_OPERATORS = {
    "add": "add",
    "subtract": "sub",
    "multiply": "mul",
    "divide": "truediv",
    "floor_divide": "floordiv",
    "remainder": "mod",
    "bitwise_and": "and_",
    "bitwise_or": "or_",
    "bitwise_xor": "xor",
    "left_shift": "lshift",
    "right_shift": "rshift",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "equal": "eq",
    "not_equal": "ne",
}
"""NumPy's function for an operator → the operator's method, where a NumPy number stands on the left."""


_SAME = (
    "maximum",
    "minimum",
    "exp2",
    "exp",
    "log",
    "tanh",
    "reciprocal",
    "sqrt",
    "absolute",
    "relu",
    "sigmoid",
    "silu",
    "gelu",
)
FUNCTIONS = {name: name for name in _SAME} | {"where": "select", "abs": "absolute", "fabs": "absolute"}
"""NumPy's and torch's function → that of ``warploom.lang.functions``, which takes traced values."""


def defining_op(value: Traced) -> Op | None:
    """The instruction that defined a single-assignment value, if it is known."""
    return value.definition if isinstance(value.ir, Value) and not isinstance(value.ir, Register) else None


class Element(Traced):
    """One element of memory in a register, a value; ``element`` is its type in memory.

    An element of fewer than 32 bits arrives as bits in u32: ``k.convert(x, f32)`` gives its value.
    """

    __slots__ = ("element",)

    def __init__(self, value: Traced, element: DType) -> None:
        super().__init__(value.builder, value.ir, value.definition, value.sources)
        self.element = element


def holds_bits(value: object) -> TypeGuard[Element]:
    """Whether ``value`` was loaded as the bits of a 16-bit float or a short signed integer, which u32 is not."""
    return isinstance(value, Element) and value.dtype is not value.element and value.element.kind in ("float", "signed")


def is_a(value: object, kind: type | UnionType) -> bool:
    """``isinstance`` for arguments that callers without a type checker may get wrong."""
    return isinstance(value, kind)


class Vector(list[Traced]):
    """The values of one access to several elements. It is no value: arithmetic goes element by element."""

    def _refuse(self, *_: object) -> NoReturn:
        raise TraceError(
            f"a load of {len(self)} elements gives {len(self)} values, which have no arithmetic together: "
            "compute with each, as in [x * 2.0 for x in values]"
        )

    __add__ = __iadd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __imul__ = _refuse
    __truediv__ = __rtruediv__ = __neg__ = __and__ = __or__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
