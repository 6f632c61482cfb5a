"""The arrays of an operation as it declares them: the names of their dimensions, their types and their memory.

Every check of an array, and the shapes of the results, follow from these declarations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from warploom.core.arguments import MOST_STRIDE
from warploom.core.dtypes import DTYPES, DType, bf16, f16, f32, u16
from warploom.core.errors import ProblemError
from warploom.interop.arrays import ArrayView, compact, in_float32, settled
from warploom.interop.overlap import overlaps_itself

Copy = Callable[[ArrayView], ArrayView]
Shapes = Mapping[str, tuple[tuple[int, ...], DType]]
FP8 = "float8_e4m3fn"
_ALIGNED_ELEMENTS = 8  # 16 bytes: what one cp.async moves


# -- memory
@dataclass(frozen=True)
class Memory:
    """The demands of kernels on an array's memory.

    ``refuse`` raises ProblemError for an array, by its name, that no kernel takes. ``lay`` gives the array as kernels
    take it, with a copy where they cannot read it in place.
    """

    refuse: Callable[[str, ArrayView], None]
    lay: Callable[[ArrayView, Copy], ArrayView]


def _anything(_name: str, _view: ArrayView) -> None:
    """Refuse nothing: what does not fit is copied."""


def check_last(name: str, view: ArrayView) -> None:
    """Raises ProblemError for an array whose last dimension is not contiguous."""
    if view.strides[-1] != 1 and view.shape[-1] > 1 and 0 not in view.shape:  # of no elements the strides say nothing
        raise ProblemError(f"the last dimension of {name} is not contiguous (stride {view.strides[-1]}): copy it")


def misaligned(view: ArrayView) -> str:
    """The reason why kernels cannot take the rows of an array where they lie; empty if they can."""
    if 0 in view.shape:
        return ""
    if any(not 0 <= s <= MOST_STRIDE for s in view.strides[:-1]):
        return f"has a stride that is negative or beyond {MOST_STRIDE} elements"
    odd = view.pointer % 16 or any(s % _ALIGNED_ELEMENTS for s in view.strides[:-1])
    return "has rows that do not start at multiples of 16 bytes" if odd else ""


def _aligned(view: ArrayView, copy: Copy) -> ArrayView:
    view = settled(view)
    return copy(view) if misaligned(view) else view


def _row_major(view: ArrayView, copy: Copy) -> ArrayView:
    view = settled(view)
    return view if view.contiguous else copy(view)


def _gradient(view: ArrayView, copy: Copy) -> ArrayView:
    spread = any(stride == 0 < size - 1 for size, stride in zip(view.shape, view.strides, strict=True))
    return copy(view) if spread or view.strides[-1] != 1 else _aligned(view, copy)


def _in_float32(view: ArrayView, copy: Copy) -> ArrayView:
    if view.dtype not in (bf16, f16):
        return _row_major(view, copy)
    return in_float32(view) if copy is compact else copy(view._replace(dtype=f32))


def _matrix(view: ArrayView, copy: Copy) -> ArrayView:
    if 0 in view.shape:
        return settled(view)
    outer = [s for size, s in zip(view.shape, view.strides, strict=True) if size > 1]
    plain = view.strides[-1] == 1 or view.strides[-2] == 1 or view.shape[-1] == 1 or view.shape[-2] == 1
    return view if plain and all(0 <= s <= MOST_STRIDE for s in outer) else copy(view)


def _lines(view: ArrayView, copy: Copy) -> ArrayView:
    view = settled(view)
    return _matrix(view if view.strides[-1] == 1 else copy(view), copy)


def is_fp8(view: ArrayView) -> bool:
    """Whether elements are ``float8_e4m3fn``, or the pairs of them that kernels read."""
    return view.dtype.name == FP8 or view.dtype is u16


def in_pairs(view: ArrayView) -> ArrayView:
    """A cache as kernels see it: of fp8 elements pairs. Raises ProblemError where its rows hold none."""
    view = settled(view)
    if view.dtype.name != FP8:
        return view
    if any(stride % 2 for stride in view.strides[:3]) or view.shape[3] % 2:
        raise ProblemError("the rows of an fp8 cache do not start at multiples of 16 bytes: allocate it so")
    owner = view.owner.view(np.uint16) if view.kind == "numpy" else view.owner
    shape, strides = (*view.shape[:3], view.shape[3] // 2), (*(s // 2 for s in view.strides[:3]), 1)
    return view._replace(shape=shape, strides=strides, dtype=u16, owner=owner)


def _check_cache(name: str, view: ArrayView) -> None:
    check_last(name, view)
    if why := misaligned(in_pairs(view)):
        raise ProblemError(f"{name} {why}: a cache is never copied, allocate it otherwise")


def _check_in_place(name: str, view: ArrayView) -> None:
    check_last(name, view)
    if len(view.shape) == 2 and not 0 <= settled(view).strides[0] <= MOST_STRIDE:
        raise ProblemError(f"the rows of {name} are {view.strides[0]} elements apart: copy it")


def _check_row_major(name: str, view: ArrayView) -> None:
    if not view.contiguous:
        raise ProblemError(f"{name} of shape {tuple(view.shape)} and strides {view.strides} is not row-major: copy it")


def _check_table(name: str, view: ArrayView) -> None:
    _check_row_major(name, view)
    if view.pointer % 16:
        raise ProblemError(f"{name} does not start at a multiple of 16 bytes: copy it")


def _check_output(name: str, view: ArrayView) -> None:
    plain = settled(view)
    check_last(name, plain)
    if why := misaligned(plain):
        raise ProblemError(f"{name} {why}: pass another array")
    if overlaps_itself(plain):
        raise ProblemError(f"{name} has rows that lie in each other: pass one whose elements are apart")


def _check_result(name: str, view: ArrayView) -> None:
    if 0 in view.shape:  # of no elements the strides say nothing
        return
    outer = [s for size, s in zip(view.shape, view.strides, strict=True) if size > 1]
    if max(outer, default=0) > MOST_STRIDE:
        raise ProblemError(
            f"{name} has strides {view.strides}: {MOST_STRIDE + 1} elements or more are too far, pass another"
        )
    if (view.shape[-1] > 1 and view.strides[-1] != 1) or min(outer, default=1) <= 0:
        raise ProblemError(f"{name} has strides {view.strides}: it must be row-major with a contiguous last dimension")
    if overlaps_itself(view):
        shape = tuple(view.shape)
        raise ProblemError(
            f"{name} has strides {view.strides} for shape {shape}: some of its elements lie on each other"
        )


def _in_place(view: ArrayView, _: Copy) -> ArrayView:
    return settled(view)


ROWS = Memory(check_last, _aligned)
"""Rows are contiguous, and copied where they do not start at multiples of 16 bytes."""
GRADIENT = Memory(_anything, _gradient)
"""As :data:`ROWS`; what autograd makes, such as one number that is shown everywhere, is copied as well."""
FEW = Memory(_anything, _row_major)
"""A few numbers, copied where they are not row-major."""
FLOAT32 = Memory(_anything, _in_float32)
"""As :data:`FEW`, and in float32."""
MATRIX = Memory(_anything, _matrix)
"""Rows or columns are contiguous; others are copied."""
LINES = Memory(_anything, _lines)
"""Rows are contiguous; others are copied."""
CACHE = Memory(_check_cache, lambda view, _: in_pairs(view))
"""Rows start at multiples of 16 bytes; nothing is copied."""
IN_PLACE = Memory(_check_in_place, _in_place)
"""Numbers that a replayed CUDA graph reads anew, so that they are not copied."""
ROW_MAJOR = Memory(_check_row_major, _in_place)
"""A few row-major numbers; nothing is copied."""
TABLE = Memory(_check_table, _in_place)
"""A row-major table that starts at a multiple of 16 bytes; nothing is copied."""
OUTPUT = Memory(_check_output, _in_place)
"""Rows that a result of attention can be written to."""
RESULT = Memory(_check_result, lambda view, _: view)
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
    array of that name. ``many`` arrays come as a tuple, and are numbered. ``hint`` ends messages about shape and type.
    A ``late`` one is the result of another call: its shape follows from the other arrays.
    """

    dims: str = ""
    types: str = "T"
    memory: Memory = ROWS
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

    Without ``dims`` it has the shape of that array. It is made ``when`` that option is set, or that array is given; and
    not where an array of its own name is given.
    """

    name: str
    dims: str
    like: str
    when: str = ""


@cache
def _alternatives(dims: str) -> tuple[tuple[tuple[str, ...], str], ...]:
    """The alternatives of dimensions, each with the name of the array by which it holds, if there is one."""
    parts = [part.partition(" if ") for part in dims.split("|")]
    return tuple([(tuple(words.split()), by.strip()) for words, _, by in parts])


@cache
def _dimension(word: str) -> tuple[str, int]:
    """The name of a dimension, and how many more there are."""
    dim, _, more = word.partition("+")
    return dim, int(more or 0)


class Binding:
    """Sizes of dimensions and types of arrays, which become known from one array after another.

    ``given`` are the names of the arrays. ``turned`` is the order of four dimensions, where the layout has another.
    """

    def __init__(self, given: Collection[str], turned: tuple[int, ...] | None = None) -> None:
        self.given, self.turned = given, turned
        self.sizes: dict[str, Any] = {}
        self._setters: dict[str, str] = {}
        self._types: dict[str, tuple[str, DType]] = {}

    def forms(self, dims: str) -> list[tuple[str, ...]]:
        """The alternatives of an array's dimensions."""
        alternatives, turned = _alternatives(dims), self.turned
        certain = [words for words, by in alternatives if by and by in self.given]
        found = certain or [words for words, by in alternatives if not by]
        return [tuple([x[i] for i in turned]) if turned and len(x) == len(turned) else x for x in found]

    def known(self, word: str) -> Any:
        """The size that a word stands for; None where no array has told it yet."""
        dim, more = _dimension(word)
        size = self.sizes.get(dim)
        if size is None:
            return int(dim) if dim.isdigit() else None
        return size + more if more else size

    def shape(self, dims: str) -> tuple[Any, ...]:
        """The shape of a result with these dimensions."""
        form = self.forms(dims)[0]
        outer = self.sizes["..."] if form[:1] == ("...",) else ()
        return (*outer, *[self.known(word) for word in form if word != "..."])

    def take_shape(self, array: ArrayArgument, view: ArrayView, *, checked: bool = True) -> None:
        """Take the sizes of an array's dimensions. Raises ProblemError where they are others, if ``checked``."""
        shape, forms = tuple(view.shape), self.forms(array.dims)
        if not array.dims:
            return
        if forms[0][:1] == ("...",) and len(shape) >= len(forms[0]) - 1:
            inner = len(shape) - len(forms[0]) + 1
            self._take_leading(array, shape[:inner], checked)
            shape, forms = shape[inner:], [forms[0][1:]]
        fitting = [form for form in forms if len(form) == len(shape)]
        form = next((x for x in fitting if not checked or self._fits(x, shape)), None)
        if form is None:
            raise ProblemError(self._shape_message(array, tuple(view.shape), fitting))
        for word, size in zip(form, shape, strict=True):
            dim, more = _dimension(word)
            if dim not in self.sizes and not dim.isdigit():
                self.sizes[dim], self._setters[dim] = size - more, array.name

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

    def _fits(self, form: tuple[str, ...], shape: tuple[Any, ...]) -> bool:
        for word, size in zip(form, shape, strict=True):
            known = self.known(word)
            if (size < _dimension(word)[1]) if known is None else (size != known):
                return False
        return True

    def _shape_message(self, array: ArrayArgument, shape: tuple[Any, ...], fitting: list[tuple[str, ...]]) -> str:
        said = " or ".join(f"({', '.join(x)}{',' * (len(x) == 1)})" for x in self.forms(array.dims))
        by = next((f"with {x} " for x in self.given if f" if {x}" in array.dims), "")
        form = [x for x in (fitting or self.forms(array.dims))[0] if x != "..."]
        found = shape[-len(form) :] if fitting else [None] * len(form)
        wrong = dict[str, list[str]]()
        for word, size in zip(form, found, strict=True):
            known = self.known(word)
            if known is not None and known != size and not word.isdigit():
                wrong.setdefault(self._setters[_dimension(word)[0]], []).append(f"{word} = {known}")
        sizes = ", ".join([f"{' and '.join(sizes)}, as {name} has" for name, sizes in wrong.items()])
        more = (f" with {sizes}" if wrong else "") + (f"; {array.hint}" if array.hint else "")
        return f"{array.name} has shape {shape}; {by}it must be {said}{more}"

    def take_type(self, array: ArrayArgument, view: ArrayView) -> None:
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
        hint = f" ({array.hint})" if array.hint else ""
        raise ProblemError(
            f"{array.name} is {dtype.array_name}, which this operation does not take: convert it to {taken}{hint}"
        )
