"""An operation as its public function declares it: arrays, options and results are said once, in its signature.

The annotations of the function's parameters say what each is: ``q: Annotated[Any, ArrayArgument("batch q_len heads
head_dim")]`` is an array, ``scale: float | None`` an option; what the function returns is annotated with its results.
Checks of arrays, the shapes of results, arrays' names for the kernels, how options are read, PyTorch's schema and what
autocast leaves alone are all taken from here.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from warploom.core.dtypes import DTYPES, DType, dtype_of
from warploom.core.errors import ProblemError, shown
from warploom.interop.arrays import ArrayView, empty, filled, same_device
from warploom.interop.overlap import same_elements, share_memory
from warploom.interop.refusals import refuse_watched
from warploom.kernels.attention.scores import OPTIONS
from warploom.ops.arrays import ArrayArgument, Binding, Copy, ResultArray, Shapes, said_of

Views = dict[str, ArrayView]
"""Arrays by the kernels' names."""
_TURNED = {"bhsd": (0, 2, 1, 3)}
"""The order of four dimensions, by layout, where it is not the declared one."""


class CudaArray(Protocol):
    """An array of torch, CuPy or Numba: NumPy's have no such interface."""

    @property
    def __cuda_array_interface__(self) -> Any: ...


class JaxArray(Protocol):
    """An array of JAX: NumPy's have no such method."""

    def block_until_ready(self) -> Any:
        """Wait for the array."""
        ...


# For type checkers, a result has the first array's type, and NumPy's arrays the dtype where it is known. Overloads for
# NumPy come after those for others, so that an array of unknown type gives a result of unknown type.
Array = TypeVar("Array", bound=CudaArray | JaxArray)
NumpyArray = TypeVar("NumpyArray", bound="np.ndarray[Any, Any]")
Out = TypeVar("Out")


# -- options
# What a call is looked up by must be hashable and fixed: an array of one number is read, once. As a part of a key it
# would be looked up by its identity, and changing it would go unseen.
def number(name: str, value: Any) -> float:
    """``value`` as a float: a number, or an array or tensor of one number. Raises ProblemError for anything else."""
    found = single(name, value)
    if not isinstance(found, Real) or isinstance(found, bool):
        raise ProblemError(f"{name} is a number, not {shown(value)}")
    try:
        return float(found) + 0.0  # -0.0 and 0.0 are one key of the calls that are kept
    except OverflowError:
        raise ProblemError(f"{name} must be a finite float32, not {shown(value)}") from None


def flag(name: str, value: Any) -> bool:
    """``value`` as True or False, given as such or as 0 or 1. Raises ProblemError for anything else."""
    found = single(name, value)
    if isinstance(found, Real | np.bool_) and found in (0, 1):
        return bool(found)
    raise ProblemError(f"{name} is True or False, not {shown(value)}")


def whole(name: str, value: Any) -> int:
    """``value`` as an int: an integer, or an array or tensor of one. Raises ProblemError for anything else."""
    found = single(name, value)
    if not isinstance(found, Integral):
        raise ProblemError(f"{name} is an integer, not {shown(value)}")
    return int(found)


def window_sides(name: str, value: Any) -> tuple[int | None, int | None]:
    """(left, right) as ints and None. Raises ProblemError for anything that is no pair of them."""
    refuse_watched(name, value)
    sides: Any = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(sides, tuple | list) and len(sides) == 2:  # pyright: ignore[reportUnknownArgumentType]
        found = [single(name, side) for side in sides]  # pyright: ignore[reportUnknownVariableType]
        if all(side is None or isinstance(side, Integral) for side in found):
            left, right = (None if side is None else int(side) for side in found)
            return left, right
    raise ProblemError(f"{name} is (left, right) counts of keys, None or -1 for an open side; not {shown(value)}")


def extra_matrices(extras: Any) -> tuple[Any, ...]:
    """The ``extras`` of a product as a tuple. Raises ProblemError for what is no tuple or list of matrices."""
    if extras is None:
        return ()
    if isinstance(extras, tuple | list):
        return tuple(extras)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    raise ProblemError(f"extras is a tuple of matrices, not {shown(extras)}: for one matrix write extras=(matrix,)")


def single(name: str, value: Any) -> Any:
    """The element of an array or tensor that has one; other values as they are.

    Raises ProblemError for one that carries a derivative or a trace, which reading it would lose.
    """
    refuse_watched(name, value)
    shape = getattr(value, "shape", None)
    if not isinstance(shape, tuple) or not hasattr(value, "item") or any(size != 1 for size in shape):
        return value
    return value.item()


class Word:
    """Marks an option that is passed on as it is; a graph has it by its name."""


@dataclass(frozen=True)
class Option:
    """A keyword argument that is no array: ``kind`` is bool, float, int, window, choice or word."""

    name: str
    kind: str
    default: Any
    optional: bool = False
    choices: tuple[str, ...] = ()

    def plain(self, value: Any) -> Any:
        """The value as Python's own: arrays of one number are read. Raises ProblemError for other kinds."""
        if value is None and self.optional:
            return None
        if self.kind == "choice":
            if not isinstance(value, str) or value not in self.choices:
                *first, last = [f"{x!r}{_SAID.get(x, '')}" for x in self.choices]
                said = f"{', '.join(first)} or {last}"
                instead = f": {INSTEAD[value]}" if isinstance(value, str) and value in INSTEAD else ""
                raise ProblemError(f"{self.name} is {said}, not {shown(value)}{instead}")
            return value
        read = _READERS.get(self.kind)
        return value if read is None else read(self.name, value)


_READERS: dict[str, Callable[[str, Any], Any]] = {"bool": flag, "float": number, "int": whole, "window": window_sides}
_SAID = {"bshd": " (batch, sequence, heads, head_dim)"}


# -- words of other libraries
_OURS = {
    **{word: name for name, kind in OPTIONS.items() for word in kind.elsewhere},
    "is_causal": "causal",
    "scale": "alpha",
    "return_attn_probs": "return_lse",
    "return_softmax_lse": "return_lse",
    "kv_layout": "layout",
    "tensor_layout": "layout",
    "cache_seqlens": "kv_lens",
    "page_table": "block_table",
    "cu_seqlens": "cu_seqlens_q",
    "seqlen_k_per_split": "fixed_split",
    "rotary_cos": "cos",
    "rotary_sin": "sin",
    "rotary_interleaved": "interleaved",
    "k_descale": "k_scale",
    "v_descale": "v_scale",
    "activation": "epilogue",
    "acc_dtype": "accumulate",
    "lse_square_scale": "z_loss",
    "return_indices": "return_index",
}
"""An option's name in PyTorch, FlashAttention, FlashInfer, SageAttention, Transformers or Liger → its name here."""
_MASKS = "causal= and window= are the masks there are"
_SCHEDULE = "leave it out, the plan divides the work"
_BLOCKS = "pass packed sequences, or gather the keys before"
INSTEAD = {
    "attn_mask": _MASKS,
    "attn_bias": _MASKS,
    "mask_mod": _MASKS,
    "mask_mod_bwd": _MASKS,
    "score_mod": "softcap and windows are what there is for scores",
    "score_mod_bwd": "softcap and windows are what there is for scores",
    "alibi_slopes": "there is no ALiBi, leave it out",
    "dropout_p": "there is no dropout, leave it out",
    "enable_gqa": "leave it out, the arrays' heads tell",
    "deterministic": "torch.use_deterministic_algorithms(True) asks for gradients with equal bits",
    "num_splits": _SCHEDULE,
    "pack_gqa": _SCHEDULE,
    "qv": "concatenate it to q, and v to k, along the head_dim",
    "attention_chunk": "pass each chunk as a sequence of a packed call, or a window",
    "block_sparse_tensors": _BLOCKS,
    "gather_kv_indices": _BLOCKS,
    "transpose_a": "pass a.T, which is read in place",
    "transpose_b": "pass b.T, which is read in place",
    "beta": "extras and an epilogue add a matrix: epilogue=lambda x, c: x + beta * c",
    "weight": "classes have no weights of their own; the vocabulary's rows are w",
    "min": "the minimum is the negated max of -a and b",
    "mean": "the mean is the sum divided by the columns",
}
"""What to do instead of an option or a choice that other libraries have."""


def by_our_names(**given: Any) -> dict[str, Any]:
    """Options by their names here."""
    return {_OURS.get(name, name): x for name, x in given.items()}


class _Text(str):
    """An annotation that ``help()`` shows without quotes."""

    __repr__ = str.__str__


def known_signature(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a function without the parameter that takes keywords which it does not know."""
    found = inspect.signature(function)
    return found.replace(parameters=[x for x in found.parameters.values() if x.kind is not x.VAR_KEYWORD])


def shown_signature(function: Callable[..., Any]) -> inspect.Signature:
    """The known signature of an operation as ``help()`` shows it: ``x: array (m, k)``, by the array's declaration."""
    found, hints = known_signature(function), get_type_hints(function, include_extras=True)
    given = tuple([x.name for x in found.parameters.values() if x.default is x.empty])

    def text(name: str, annotation: Any) -> str:
        said = next((x for x in get_args(hints[name]) if isinstance(x, ArrayArgument | ResultArray)), None)
        return _Text(annotation if said is None else f"array {said_of(said.dims, given)}".rstrip())

    parameters = [x.replace(annotation=text(x.name, x.annotation)) for x in found.parameters.values()]
    return found.replace(parameters=parameters, return_annotation=text("return", found.return_annotation))


def refuse_unknown(name: str, unknown: Iterable[str], known: Iterable[str]) -> NoReturn:
    """Raise the TypeError of a call of ``name`` with ``unknown`` keywords beside the ``known``: say what is meant."""
    word, known = next(iter(unknown)), list(known)
    said = [f"write {_OURS[word]}="] if _OURS.get(word) in known else []
    said += [INSTEAD[word]] if word in INSTEAD else []
    said += [f"write {x}=" for x in difflib.get_close_matches(word, known, 1)]
    said += [f"its parameters are {', '.join(known)}"]
    raise TypeError(f"{name}() got an unexpected keyword argument {word!r}: {said[0]}")


@dataclass(frozen=True)
class Declaration:
    """The arguments of an operation by their names, in order; ``needed``: the arrays without a default."""

    name: str
    arrays: dict[str, ArrayArgument]
    needed: frozenset[str]
    options: dict[str, Option]
    results: tuple[ResultArray, ...] = ()

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Declaration:
        """The arguments of a function with annotated parameters; several arrays under one name come last.

        Parameters annotated ``Any``, and ``config``, are no part.
        """
        hints = get_type_hints(function, include_extras=True)
        arrays, needed, options = dict[str, ArrayArgument](), set[str](), dict[str, Option]()
        for name, parameter in inspect.signature(function).parameters.items():
            hint, metadata = hints[name], tuple[Any, ...]()
            if get_origin(hint) is Annotated:
                hint, *metadata = get_args(hint)
            said = next((x for x in metadata if isinstance(x, ArrayArgument | Word)), None)
            if isinstance(said, ArrayArgument):
                arrays[name] = replace(said, name=name)
                if parameter.default is inspect.Parameter.empty:
                    needed.add(name)
            elif said is not None:
                options[name] = Option(name, "word", parameter.default)
            elif hint is not Any and name not in _ELSEWHERE:
                options[name] = _option(name, hint, parameter.default)
        arrays = dict(sorted(arrays.items(), key=lambda x: x[1].many))
        results = tuple([x for x in get_args(hints["return"]) if isinstance(x, ResultArray)])
        return cls(function.__name__, arrays, frozenset(needed), options, results)

    def plain(self, options: tuple[Any, ...]) -> dict[str, Any]:
        """The options by their names, as Python's own values. Raises ProblemError for one that is of another kind."""
        return {x.name: x.plain(value) for x, value in zip(self.options.values(), options, strict=True)}

    def named(self, arrays: tuple[Any, ...]) -> dict[str, Any]:
        """The arrays of a call by their names; those that are not given are None, and the last may be several."""
        names = list(self.arrays)
        if self.arrays[names[-1]].many:
            last = self.arrays[names.pop()]
            names += last.numbered(len(arrays) - len(names))
        return dict(zip(names, arrays, strict=True))

    def is_exact(self, name: str) -> bool:
        """Whether autocast leaves an array as it is."""
        return name in self.arrays and self.arrays[name].exact

    def kernels(self, name: str) -> str:
        """The kernels' name of an array."""
        array = self.arrays.get(name)
        return name if array is None else array.kernel or name

    def arguments_of(self, views: Mapping[str, ArrayView]) -> tuple[ArrayArgument, ...]:
        """The declarations of arrays, those of several under one name with their numbers."""
        names = tuple(views)
        found = self._known.get(names)
        if found is None:
            by_kernels = {x.kernel or x.name: x for x in self.arrays.values()}
            *_, last = by_kernels.values()
            plural = last.name.removesuffix("s")
            found = self._known[names] = tuple(
                [by_kernels.get(x) or replace(last, name=f"{last.name}[{x.removeprefix(plural)}]") for x in names]
            )
        return found

    @cached_property
    def _known(self) -> dict[tuple[str, ...], tuple[ArrayArgument, ...]]:
        return {}

    def bind(
        self, views: Views, options: Mapping[str, Any], copy: Copy | None = None, *, checked: bool = True
    ) -> Arguments:
        """The arguments of a call, with arrays as kernels take them, by ``copy`` those that are not read in place.

        Raises ProblemError, with the first thing wrong, for arrays not as declared: that is for shapes, types, memory
        and devices. Without a ``copy`` arrays stay as they are; of those that are not ``checked`` no sizes are compared
        either.
        """
        arrays, lying = self.arguments_of(views), dict(views)
        binding = Binding(tuple([x.name for x in arrays]), _TURNED.get(options.get("layout", "")))
        for array, (name, view) in sorted(zip(arrays, views.items(), strict=True), key=lambda x: x[0].late):
            if checked:
                lying[name] = binding.take(array, view, copy)
            else:
                binding.take_shape(array, view, checked=False)
        if checked:
            same_device(list(views.values()), binding.given)
        return Arguments(self, lying, dict(options), binding)

    def refuse_writes(self, views: Mapping[str, ArrayView]) -> None:
        """Raises ProblemError for an array that cannot be written to, or shares memory with another."""
        arrays = self.arguments_of(views)
        for array, view in zip(arrays, views.values(), strict=True):
            if array.written and view.readonly:
                raise ProblemError(f"{array.name} is read-only: pass an array that can be written")
            for other, read in zip(arrays, views.values(), strict=True) if array.written else ():
                if other is array or not share_memory(read, view):
                    continue
                may = bool(array.over) and other.name.startswith(array.over)
                if not (may and same_elements(read, view)):
                    raise ProblemError(
                        f"{array.name} shares memory with {other.name}, which would be overwritten: pass another array"
                        + ", or exactly that one" * may
                    )


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call: arrays as declared, by the kernels' names, and options by their names."""

    declaration: Declaration
    views: Views
    options: dict[str, Any]
    binding: Binding

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes of all dimensions by their names."""
        return self.binding.sizes

    @property
    def results(self) -> Shapes:
        """Shapes and types of the new arrays that the call returns."""
        found, known = dict[str, tuple[tuple[int, ...], DType]](), self.views | self.options
        for x in self.declaration.results:
            if x.name in self.views or not x.is_made(known):
                continue
            like, given = self.views.get(self.declaration.kernels(x.like)), self.options.get(x.typed)
            shape = self.binding.shape(x.dims) if x.dims or like is None else tuple(like.shape)
            dtype = DTYPES[x.like] if like is None else like.dtype
            found[x.name] = shape, dtype if given is None else dtype_of(given)
        return found

    def made(self, **values: float) -> dict[str, Any]:
        """The new arrays by name where there is nothing to compute: as declared, or with every element one of these."""
        first, found = next(iter(self.views.values())), dict[str, Any]()
        known = {x.name: x.empty for x in self.declaration.results} | values
        for name, form in self.results.items():
            like, value = (first.kind, *form, first.device), known[name]
            found[name] = empty(*like) if value is None else filled(*like, value)
        return found


_ELSEWHERE = "config", "check"
_KINDS = {bool: "bool", float: "float", int: "int", tuple: "window", Callable: "function"}


def type_name(dtype: Any) -> str:
    """A type's name; of what names none whatever it prints, for the operator to refuse."""
    if isinstance(dtype, str):
        return dtype
    try:
        return dtype.name if isinstance(dtype, DType) else dtype_of(dtype).name
    except ValueError:
        return str(dtype)


ElementType = Annotated[Any, Word()]


def _option(name: str, hint: Any, default: Any) -> Option:
    parts = list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]
    (kind,) = [x for x in parts if x is not NoneType]
    optional = NoneType in parts
    if get_origin(kind) is Literal:
        return Option(name, "choice", default, optional, get_args(kind))
    return Option(name, _KINDS[get_origin(kind) or kind], default, optional)
