"""The arrays of an operation as it declares them: the names of their dimensions, their types and their memory.

Every check of an array, and the shapes of the results, follow from these declarations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, reduce
from operator import or_
from typing import Any, NamedTuple

from warploom.core.arguments import MOST_STRIDE
from warploom.core.dtypes import DTYPES, DType, bf16, f16, f32, u16
from warploom.core.errors import ProblemError
from warploom.interop.arrays import ArrayView, settled
from warploom.interop.overlap import overlaps_itself

Copy = Callable[..., ArrayView]
Shapes = Mapping[str, tuple[tuple[int, ...], DType]]
FP8 = "float8_e4m3fn"
_ALIGNED_BYTES = 16  # what one cp.async moves


# -- memory
Demand = Callable[[str, ArrayView], str]
"""Says what of an array's memory no kernel takes, with the array's name; nothing of one that they take."""


@dataclass(frozen=True)
class MemoryDemands:
    """The demands of kernels on an array's memory.

    An array that one of ``demands`` says something of is refused, with the ``cure``. One that does not ``fit`` is
    copied, and so is one of halves where ``in_float32`` are wanted. Kernels see the others in place, as ``seen`` says.
    """

    demands: tuple[Demand, ...] = ()
    fit: Callable[[ArrayView], bool] | None = None
    seen: Callable[[ArrayView], ArrayView] = settled
    cure: str = "copy it"
    in_float32: bool = False

    def take(self, name: str, view: ArrayView, copy: Copy | None) -> ArrayView:
        """The array as kernels take it, by ``copy`` where they cannot read it in place; without one as it is.

        Raises ProblemError that names an array which no kernel takes.
        """
        for demand in self.demands:
            if wrong := demand(name, view):
                raise ProblemError(f"{wrong}: {self.cure}")
        if copy is None:
            return view
        view = self.seen(view)
        if self.in_float32 and view.dtype in (bf16, f16):
            return copy(view, f32)
        return view if self.fit is None or self.fit(view) else copy(view)


def _whole(name: str, view: ArrayView) -> str:
    odd = view.pointer % view.dtype.bytes and 0 not in view.shape
    return f"{name} starts at an odd address, no multiple of its elements' {view.dtype.bytes} bytes" if odd else ""


def _last(name: str, view: ArrayView) -> str:
    if view.strides[-1] == 1 or view.shape[-1] <= 1 or 0 in view.shape:  # of no elements the strides say nothing
        return ""
    return f"the last dimension of {name} is not contiguous (stride {view.strides[-1]})"


def misaligned(view: ArrayView) -> str:
    """The fault of rows that kernels cannot take where they lie; empty where they can."""
    outer, size = view.strides[:-1], view.dtype.bytes
    if 0 in view.shape or not outer:
        return ""
    if min(outer) < 0 or max(outer) * size > 2 * MOST_STRIDE:
        return f"has a stride that is negative or beyond {2 * MOST_STRIDE // size} elements"
    odd = (view.pointer | reduce(or_, outer) * size) % _ALIGNED_BYTES
    return f"has rows that do not start at multiples of {_ALIGNED_BYTES} bytes" if odd else ""


def _rows(name: str, view: ArrayView) -> str:
    why = misaligned(settled(view))
    return f"{name} {why}" if why else ""


def _near(name: str, view: ArrayView) -> str:
    near = len(view.shape) != 2 or 0 <= settled(view).strides[0] <= MOST_STRIDE
    return "" if near else f"the rows of {name} are {view.strides[0]} elements apart"


def _row_major(name: str, view: ArrayView) -> str:
    lying = f"{name} of shape {tuple(view.shape)} and strides {view.strides}"
    return "" if view.contiguous else f"{lying} is not row-major"


def _start(name: str, view: ArrayView) -> str:
    odd = view.pointer % _ALIGNED_BYTES
    return f"{name} does not start at a multiple of {_ALIGNED_BYTES} bytes" if odd else ""


def _apart(name: str, view: ArrayView) -> str:
    lying = f"{name} has strides {tuple(view.strides)} for shape {tuple(view.shape)}"
    return f"{lying}: some of its elements lie on each other" if overlaps_itself(view) else ""


def _lines(name: str, view: ArrayView) -> str:
    if 0 in view.shape:
        return ""
    outer, lying = _outer_strides(view), f"{name} has strides {view.strides}"
    if max(outer, default=0) > MOST_STRIDE:
        return f"{lying}: {MOST_STRIDE + 1} elements or more are too far"
    plain = (view.strides[-1] == 1 or view.shape[-1] == 1) and min(outer, default=1) > 0
    return "" if plain else f"{lying}: it must be row-major with a contiguous last dimension"


def _outer_strides(view: ArrayView) -> list[int]:
    return [s for size, s in zip(view.shape, view.strides, strict=True) if size > 1]


def _is_aligned(view: ArrayView) -> bool:
    return not misaligned(view)


def _is_row_major(view: ArrayView) -> bool:
    return view.contiguous


def _is_dense(view: ArrayView) -> bool:
    spread = 0 in view.strides and 0 in _outer_strides(view)
    return not spread and view.strides[-1] == 1 and _is_aligned(view)


def _is_matrix(view: ArrayView) -> bool:
    if 0 in view.shape:
        return True
    plain = view.strides[-1] == 1 or view.strides[-2] == 1 or view.shape[-1] == 1 or view.shape[-2] == 1
    return plain and all(0 <= s <= MOST_STRIDE for s in _outer_strides(view))


def is_fp8(view: ArrayView) -> bool:
    """Whether elements are ``float8_e4m3fn``, or the pairs of them that kernels read."""
    return view.dtype.name == FP8 or view.dtype is u16


def as_elements(view: ArrayView, dtype: DType) -> ArrayView:
    """The view with its elements read as those of another type; the last dimension is contiguous."""
    own, size = view.dtype.bytes, dtype.bytes
    if own == size:
        return view
    *outer, last = view.shape
    owner = view.owner.view(dtype.numpy) if view.kind == "numpy" and view.owner is not None else view.owner
    strides = (*[s * own // size for s in view.strides[:-1]], 1)
    return view._replace(shape=(*outer, last * own // size), strides=strides, dtype=dtype, owner=owner)


def in_pairs(view: ArrayView) -> ArrayView:
    """A cache as kernels see it: of fp8 elements pairs."""
    view = settled(view)
    return as_elements(view, u16) if view.dtype.name == FP8 else view


def _as_it_is(view: ArrayView) -> ArrayView:
    return view


ROWS = MemoryDemands((_last,), _is_aligned)
"""Rows are contiguous, and copied where they do not start at multiples of 16 bytes."""
GRADIENT = MemoryDemands((), _is_dense)
"""As :data:`ROWS`; what autograd makes, such as one number that is shown everywhere, is copied as well."""
FEW = MemoryDemands((_whole,), _is_row_major)
"""A few numbers, copied where they are not row-major."""
FLOAT32 = replace(FEW, in_float32=True)
"""As :data:`FEW`, and in float32."""
MATRIX = MemoryDemands((_whole,), _is_matrix, lambda view: settled(view) if 0 in view.shape else view)
"""Rows or columns are contiguous; others are copied."""
LINES = MemoryDemands((_whole,), lambda view: view.strides[-1] == 1 and _is_matrix(view))
"""Rows are contiguous; others are copied."""
CACHE = MemoryDemands((_last, _rows), seen=in_pairs, cure="a cache is never copied, allocate it otherwise")
"""Rows start at multiples of 16 bytes; nothing is copied."""
WRITTEN_CACHE = replace(CACHE, demands=(*CACHE.demands, _apart))
"""As :data:`CACHE`, and each element is a place of its own."""
IN_PLACE = MemoryDemands((_whole, _last, _near))
"""Numbers that a replayed CUDA graph reads anew, so that they are not copied."""
ROW_MAJOR = MemoryDemands((_whole, _row_major))
"""A few row-major numbers; nothing is copied."""
TABLE = MemoryDemands((_row_major, _start))
"""A row-major table that starts at a multiple of 16 bytes; nothing is copied."""
OUTPUT = MemoryDemands((_last, _rows, _apart), cure="pass another array")
"""Rows that a result of attention can be written to."""
RESULT = MemoryDemands((_whole, _lines, _apart), seen=_as_it_is, cure="pass another array")
"""Rows that a product can be written to, at any distance from each other."""


# -- declarations
HALVES = "f16", "bf16"
"""The types that ``T`` stands for."""


@dataclass(frozen=True)
class ArrayArgument:
    """An array argument.

    ``dims`` names its dimensions, ``"batch+1"`` one more than another's, ``...`` any number that broadcast; empty: the
    operation itself looks at its shape. Alternatives stand apart by ``|``, and ``… if x`` holds where an array x is
    given. ``types`` it may have: names, or ``T`` for one 16-bit float type that
    all such arrays of a call share, or the name of an array before it for that one's type. ``memory`` is what kernels
    ask of it. ``kernel`` is the kernels' name for it, where that is another.

    A ``written`` array takes a result, and shares no memory with others, except that it may lie exactly ``over`` the
    array of that name. ``many`` arrays come as a tuple, and are numbered. ``hint`` ends messages about its shape.
    A ``late`` one is the result of another call: its shape follows from the other arrays, and messages about its type
    have the hint too.
    """

    dims: str = ""
    types: str = "T"
    memory: MemoryDemands = ROWS
    kernel: str = ""
    written: bool = False
    over: str = ""
    many: bool = False
    hint: str = ""
    late: bool = False
    name: str = ""

    @property
    def exact(self) -> bool:
        """Whether autocast leaves the array as it is."""
        return "T" not in self.types.split()

    def numbered(self, count: int) -> list[str]:
        """The names of so many arrays under this one."""
        return [f"{self.name.removesuffix('s')}{i}" for i in range(count)]


@dataclass(frozen=True)
class ResultArray:
    """A new array that a call returns, with these ``dims`` and the type of the array ``like``, or the type so named.

    Without ``dims`` it has the shape of that array, if there is one, and another type where the option ``typed`` gives
    one. It is made ``when`` that option is set, that array is given, or with ``option=a|b`` the option is one of these;
    and not where an array of its own name is given. Where there is nothing to compute, its elements are ``empty``, or
    anything. An ``inner`` one is for the backward pass alone.
    """

    name: str
    dims: str
    like: str
    when: str = ""
    typed: str = ""
    empty: float | None = None
    inner: bool = False

    def is_made(self, given: Mapping[str, Any]) -> bool:
        """Whether a call with these arrays and options makes it."""
        name, _, values = self.when.partition("=")
        value = given.get(name)
        if values:
            return value in values.split("|")
        return not name or not (value is None or value is False)


class Dimension(NamedTuple):
    """A dimension as ``word`` declares it: ``more`` than the size called ``name``; without a name that many."""

    word: str
    name: str
    more: int

    @classmethod
    def of(cls, word: str) -> Dimension:
        """Read a dimension as signatures write it: ``batch``, ``batch+1``, ``1`` or ``...``."""
        name, _, more = word.partition("+")
        return cls(word, "", int(word)) if word.isdigit() else cls(word, name, int(more or 0))


@cache
def _forms(dims: str, given: tuple[str, ...], turned: tuple[int, ...] | None) -> tuple[tuple[Dimension, ...], ...]:
    """The alternatives of dimensions that hold where these arrays are given, in the order of a layout."""
    parts = [part.partition(" if ") for part in dims.split("|")]
    forms = [([*map(Dimension.of, words.split())], by.strip()) for words, _, by in parts]
    found = [form for form, by in forms if by in given] or [form for form, by in forms if not by]
    return tuple([tuple([x[i] for i in turned]) if turned and len(x) == len(turned) else tuple(x) for x in found])


def said_of(dims: str, given: tuple[str, ...], turned: tuple[int, ...] | None = None) -> str:
    """``(batch, heads) or (heads,)``: the alternatives of dimensions where these arrays are given."""
    forms = [[dim.word for dim in form] for form in _forms(dims, given, turned)]
    return " or ".join(f"({', '.join(form)}{',' * (len(form) == 1)})" for form in forms) if dims else ""


_LEADING = Dimension.of("...")


class Binding:
    """Sizes of dimensions and types of arrays, which become known from one array after another.

    ``given`` are the names of the arrays. ``turned`` is the order of four dimensions, where the layout has another.
    """

    def __init__(self, given: tuple[str, ...], turned: tuple[int, ...] | None = None) -> None:
        self.given, self.turned = given, turned
        self.sizes: dict[str, Any] = {}
        self._setters: dict[str, str] = {}
        self._types: dict[str, tuple[str, DType]] = {}

    def _known(self, dim: Dimension) -> Any:
        """The size of a dimension; None where no array has told it yet."""
        size = self.sizes.get(dim.name) if dim.name else 0
        return size + dim.more if dim.more and size is not None else size

    def shape(self, dims: str) -> tuple[Any, ...]:
        """The shape of a result with these dimensions."""
        form = _forms(dims, self.given, self.turned)[0]
        outer = self.sizes["..."] if form[:1] == (_LEADING,) else ()
        return (*outer, *[self._known(dim) for dim in form if dim != _LEADING])

    def take(self, array: ArrayArgument, view: ArrayView, copy: Copy | None) -> ArrayView:
        """The array as :meth:`MemoryDemands.take` gives it to kernels. Raises ProblemError for one not as declared."""
        self.take_shape(array, view)
        self._take_type(array, view)
        return array.memory.take(array.name, view, copy)

    def take_shape(self, array: ArrayArgument, view: ArrayView, *, checked: bool = True) -> None:
        """Take the sizes of an array's dimensions. Raises ProblemError where they are others, if ``checked``."""
        if not array.dims:
            return
        shape, forms = tuple(view.shape), _forms(array.dims, self.given, self.turned)
        if forms[0][:1] == (_LEADING,) and len(shape) >= len(forms[0]) - 1:
            inner = len(shape) - len(forms[0]) + 1
            self._take_leading(array, shape[:inner], checked)
            shape, forms = shape[inner:], (forms[0][1:],)
        fitting = [form for form in forms if len(form) == len(shape)]
        form = next((x for x in fitting if not checked or self._fits(x, shape)), None)
        if form is None:
            raise ProblemError(self._shape_message(array, tuple(view.shape), [*fitting, *forms][0], bool(fitting)))
        for dim, size in zip(form, shape, strict=True):
            if dim.name and dim.name not in self.sizes:
                self.sizes[dim.name], self._setters[dim.name] = size - dim.more, array.name

    def _take_leading(self, array: ArrayArgument, outer: tuple[Any, ...], checked: bool) -> None:
        """Broadcast leading dimensions with those before; what is written to has all of them."""
        known = self.sizes.setdefault("...", outer)
        if known is outer or not checked:
            return
        rank = max(len(known), len(outer))
        one, two = ((1,) * (rank - len(x)) + x for x in (known, outer))
        if array.written and outer != known:
            raise ProblemError(f"{array.name} has the leading dimensions {outer}, the result {known}")
        if any(x != y and 1 not in (x, y) for x, y in zip(one, two, strict=True)):
            raise ProblemError(f"the leading dimensions {known} and {outer} of {array.name} do not broadcast")
        self.sizes["..."] = tuple(y if x == 1 else x for x, y in zip(one, two, strict=True))

    def _fits(self, form: tuple[Dimension, ...], shape: tuple[Any, ...]) -> bool:
        for dim, size in zip(form, shape, strict=True):
            known = self._known(dim)
            if (size < dim.more) if known is None else (size != known):
                return False
        return True

    def _shape_message(
        self, array: ArrayArgument, shape: tuple[Any, ...], form: tuple[Dimension, ...], fits: bool
    ) -> str:
        """Why a shape is refused; ``form`` is the likeliest one, which ``fits`` in the number of dimensions."""
        said = said_of(array.dims, self.given, self.turned)
        by = next((f"with {x} " for x in self.given if f" if {x}" in array.dims), "")
        form = tuple([dim for dim in form if dim != _LEADING])
        found = shape[-len(form) :] if fits else [None] * len(form)
        wrong = dict[str, list[str]]()
        for dim, size in zip(form, found, strict=True):
            known = self._known(dim)
            if dim.name and known is not None and known != size:
                wrong.setdefault(self._setters[dim.name], []).append(f"{dim.word} = {known}")
        sizes = ", ".join([f"{' and '.join(sizes)}, as {name} has" for name, sizes in wrong.items()])
        more = (f" with {sizes}" if wrong else "") + (f"; {array.hint}" if array.hint else "")
        return f"{array.name} has shape {shape}; {by}it must be {said}{more}"

    def _take_type(self, array: ArrayArgument, view: ArrayView) -> None:
        """Take an array's type. Raises ProblemError where it is none of those declared."""
        dtype, allowed = view.dtype, list[str]()
        for word in array.types.split():
            shared = self._types.get(word)
            if shared is None and word == "T" and dtype.name in HALVES:
                shared = self._types["T"] = array.name, dtype
            names = [word] if shared is None else [shared[1].name]
            allowed += HALVES if names == ["T"] else names
            if dtype.name in allowed:
                self._types[array.name] = array.name, dtype
                return
            if shared is not None and (dtype.name in HALVES or array.types == word):
                taken = ", f16 or bf16" if word == "T" and dtype.name not in HALVES else ""
                raise ProblemError(
                    f"{shared[0]} is {shared[1].array_name} and {array.name} is {dtype.array_name}: convert them to "
                    f"one type{taken}"
                )
        taken = " or ".join([DTYPES[x].array_name if x in DTYPES else x for x in allowed])
        hint = f" ({array.hint})" if array.late and array.hint else ""
        raise ProblemError(
            f"{array.name} is {dtype.array_name}, which this operation does not take: convert it to {taken}{hint}"
        )
