"""The arrays and options of attention: checked, aligned, and read as a problem."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from warploom.core.arguments import MOST_STRIDE
from warploom.core.dtypes import DType, bf16, f16, f32
from warploom.core.errors import ProblemError
from warploom.interop.arrays import (
    ArrayView,
    as_numpy,
    current_stream,
    filled,
    require_dtype,
    same_device,
)
from warploom.interop.copies import compact, in_float32, settled
from warploom.interop.overlap import overlaps_itself, same_elements, share_memory
from warploom.kernels.attention.problem import MOST_HEAD_DIM, AttentionProblem, Even
from warploom.kernels.attention.scores import ScoreOptions, Window

Layout = Literal["bshd", "bhsd"]
AXES: dict[str, tuple[int, int, int]] = {"bshd": (0, 2, 1), "bhsd": (0, 1, 2)}
"""Where (batch, head, sequence) stand among the dimensions."""
OF_FORWARD = {"lse": "lse, which the forward pass returns with return_lse=True"}
"""What callers of backward passes need to be told of an array."""

_ALIGNED_ELEMENTS = 8  # 16 bytes: what one cp.async moves
_OPEN_SIDE = 2**30
"""Keys on one side of a window from which on it is no window."""


@dataclass(frozen=True)
class Options:
    """The keyword arguments of :func:`attention` that shape its kernel."""

    causal: bool = False
    scale: float | None = None
    window: Window | None = None
    softcap: float | None = None
    return_lse: bool = False
    layout: str = "bshd"

    @classmethod
    def of(cls, asked: Mapping[str, Any]) -> Options:
        """Those among the options of a call, by their names."""
        return cls(**{x.name: asked[x.name] for x in fields(cls) if x.name in asked})

    def check(self) -> None:
        """Raises ProblemError for values that no kernel computes with."""
        ScoreOptions(window=self.sides(), scale=self.scale, softcap=self.softcap).check()

    def asked(self, head_dim: int) -> dict[str, Any]:
        """The options of a problem of attention beside its shapes, by name."""
        default = self.scale is not None and math.isclose(self.scale, head_dim**-0.5)  # whoever says it
        scale = None if default else self.scale  # no kernel of its own
        return {"window": self.sides(), "scale": scale, "softcap": self.softcap, "lse": self.return_lse}

    def sides(self) -> Window:
        """(left, right) keys a query sees around the one aligned with it; None is unbounded."""
        left, right = self.window or (None, None)
        # -1 is FlashAttention's open side; one of so many keys is open too, and sums with it would not fit in 32 bits
        left, right = (None if side is None or side == -1 or side >= _OPEN_SIDE else side for side in (left, right))
        if self.causal:
            right = 0 if right is None else min(right, 0)
        return left, right


def checked(views: Mapping[str, ArrayView], options: Options) -> AttentionProblem:
    """The problem of q, k, v and sinks (if given), by shapes, types and devices alone: memory is not looked at.

    Raises ProblemError with the first thing that is wrong.
    """
    options.check()
    named = {name: views[name] for name in (*"qkv", "sinks") if name in views}
    for name in "qkv":
        check_form(name, named[name], _FORMS[options.layout])
    check_types({name: named[name] for name in "qkv"})
    batch, head, seq = AXES[options.layout]
    q, k, v = (tuple(named[name].shape) for name in "qkv")
    check_sinks(named.get("sinks"), q[head])
    same_device(list(named.values()), list(named))
    if k[:3] != v[:3]:
        raise ProblemError(f"k has shape {k} and v {v}: they must be equal, but for the last dimension")
    if (q[batch], q[3]) != (k[batch], k[3]):
        raise ProblemError(f"q has shape {q} and k {k} ({options.layout}): batch and head_dim must be equal")
    check_heads(q[head], k[head], q[3], v[3])
    return AttentionProblem(
        q[batch],
        q[head],
        max(1, k[head]),
        Even(q[seq], k[seq]),
        q[3],
        named["q"].dtype,
        sinks="sinks" in named,
        v_dim=0 if v[3] == q[3] else v[3],
        **options.asked(q[3]),
    )


_FORMS = {"bshd": "(batch, sequence, heads, head_dim)", "bhsd": "(batch, heads, sequence, head_dim)"}


def check_form(name: str, view: ArrayView, form: str) -> None:
    """Raises ProblemError for an array without the dimensions that ``form`` names, or whose last is not contiguous."""
    if len(view.shape) != form.count(",") + 1:
        raise ProblemError(f"{name} has shape {tuple(view.shape)}; it must be {form}")
    check_last(name, view)


def check_last(name: str, view: ArrayView) -> None:
    """Raises ProblemError for an array whose last dimension is not contiguous."""
    if view.strides[-1] != 1 and view.shape[-1] > 1 and 0 not in view.shape:  # of no elements the strides say nothing
        raise ProblemError(f"the last dimension of {name} is not contiguous (stride {view.strides[-1]}): copy it")


def check_types(views: Mapping[str, ArrayView]) -> None:
    """Raises ProblemError for arrays, q first, that are not of one 16-bit type."""
    q = next(iter(views.values()))
    for name, view in views.items():
        require_dtype(view, name, (bf16, f16))
        if view.dtype is not q.dtype:
            raise ProblemError(f"q is {q.dtype} and {name} is {view.dtype}: convert them to one type")


def check_heads(heads: int, kv_heads: int, head_dim: int, v_dim: int) -> None:
    """Raises ProblemError for heads that do not share keys evenly, and sizes of heads that no kernel takes."""
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise ProblemError(f"q has {heads} heads, no multiple of the {kv_heads} of k and v: heads share keys in groups")
    own = f", pass scale={head_dim}**-0.5 where you gave none,"  # which goes by what is padded
    for whose, size, scale in (("", head_dim, own), (" of v", v_dim, "")):
        if size % 8 or not 8 <= size <= MOST_HEAD_DIM:
            pad = f": pad it with zeros{scale} and cut the result" if 0 < size < MOST_HEAD_DIM else ""
            raise ProblemError(
                f"head_dim{whose} is {size}; attention takes multiples of 8 from 8 to {MOST_HEAD_DIM}{pad}"
            )


def check_sinks(sinks: ArrayView | None, heads: int) -> None:
    """Raises ProblemError for sinks that are not one number for each of so many query heads."""
    if sinks is not None and (tuple(sinks.shape) != (heads,) or sinks.dtype not in (f32, bf16, f16)):
        raise ProblemError(
            f"sinks are {sinks.dtype.array_name} of shape {tuple(sinks.shape)}; they must be one float32 "
            f"(or 16-bit) number for each of {heads} query heads"
        )


def check_results(views: Mapping[str, ArrayView], shape: tuple[int, ...], rows: tuple[int, ...]) -> None:
    """Raises ProblemError for results of a forward pass, or gradients of them, that are not such.

    ``rows``: the shape of its log-sum-exps.
    """
    own = views["q"].dtype
    wanted = {"dout": (own, shape), "out": (own, shape), "lse": (f32, rows), "dlse": (f32, rows)}
    for name, (dtype, size) in wanted.items():
        view = views.get(name)
        if view is not None and (tuple(view.shape) != size or view.dtype is not dtype):
            raise ProblemError(
                f"{name} is {view.dtype.array_name} of shape {tuple(view.shape)}; it must be "
                f"{dtype} of {size}, as the forward pass returns it with return_lse=True"
            )


def result_shape(q: ArrayView, v: ArrayView) -> tuple[int, ...]:
    """The shape of the output: q's, with V's head_dim."""
    return (*q.shape[:3], v.shape[3])


def misaligned(view: ArrayView) -> str:
    """What keeps kernels from the rows of an array where they lie, if anything does; without elements nothing."""
    if 0 in view.shape:
        return ""
    if any(not 0 <= s <= MOST_STRIDE for s in view.strides[:-1]):
        return f"has a stride that is negative or beyond {MOST_STRIDE} elements"
    odd = view.pointer % 16 or any(s % _ALIGNED_ELEMENTS for s in view.strides[:-1])
    return "has rows that do not start at multiples of 16 bytes" if odd else ""


def aligned(view: ArrayView, copy: Callable[[ArrayView], ArrayView]) -> ArrayView:
    """The view, or a row-major copy where it is :func:`misaligned`."""
    return copy(view) if misaligned(view) else view


def check_output(out: ArrayView, like: ArrayView, shape: tuple[int, ...]) -> None:
    """Raises ProblemError for an ``out`` that no kernel writes a result of this shape to, of the type of ``like``."""
    if tuple(out.shape) != shape or out.dtype is not like.dtype:
        raise ProblemError(
            f"out is {out.dtype.array_name} of shape {tuple(out.shape)}; it must be {like.dtype} of {shape}"
        )
    plain = settled(out)
    check_last("out", plain)
    if why := misaligned(plain):
        raise ProblemError(f"out {why}: pass another array")
    if overlaps_itself(plain):
        raise ProblemError("out has rows that lie in each other: pass one whose elements are apart")


def refuse_output(out: ArrayView, read: Mapping[str, ArrayView], itself: str = "") -> None:
    """Raises ProblemError where ``out`` cannot be written to, or shares memory with an array that is ``read``.

    The one called ``itself`` may be ``out``.
    """
    if out.readonly:
        raise ProblemError("out is read-only: pass an array that can be written")
    for name, view in read.items():
        if share_memory(view, out) and not (name == itself and same_elements(view, out)):
            raise ProblemError(f"out shares memory with {name}, which is read: pass another array")


def without_keys(q: ArrayView, new: Mapping[str, tuple[tuple[int, ...], DType]], sinks: ArrayView | None) -> list[Any]:
    """The ``new`` results where there is nothing to compute: zeros, and for sums over no keys -inf or the sinks."""
    empty = {name: -math.inf if name == "lse" and sinks is None else 0.0 for name in new}
    made = {name: filled(q.kind, *form, q.device, empty[name]) for name, form in new.items()}
    if sinks is not None and "lse" in made:
        made["lse"] = made["lse"] + sinks.array[:, None]
    return list(made.values())


# -- lengths, where somebody asks
def on_host(view: ArrayView) -> np.ndarray[Any, Any]:
    """An array of int32 as int64 of NumPy; waits for what its framework has queued."""
    if view.device[0] == "cpu":
        return np.asarray(as_numpy(view)).astype(np.int64)
    from warploom.cuda.buffers import downloaded

    plain = view if view.contiguous else compact(view)
    stream, count = current_stream(view.kind, view.device[1]), math.prod(plain.shape)
    found = downloaded(plain.pointer, count, np.int32, view.device[1], stream)
    return found.astype(np.int64).reshape(plain.shape)


def refuse_first(name: str, wrong: Any, values: Any, why: str) -> None:
    """Raises ProblemError that names the first entry where ``wrong`` holds."""
    places: Any = np.argwhere(wrong)
    if len(places):
        place = tuple(int(i) for i in places[0])
        raise ProblemError(f"{name}[{', '.join(map(str, place))}] is {values[place]}: {why}")


def refuse_starts(name: str, starts: Any, total: int) -> None:
    """Raises ProblemError that names the first of some ``starts`` of sequences that cannot be."""
    wrong = (starts < 0) | (starts > total) | (np.diff(starts, prepend=0) < 0)
    refuse_first(name, wrong, starts, f"starts ascend from 0 to at most {total}, the rows of the array")


def laid_out(
    views: Mapping[str, ArrayView], copy: Callable[[ArrayView], ArrayView] = compact, *, written: str = ""
) -> dict[str, ArrayView]:
    """The arrays as kernels read them: by ``copy`` those whose rows, with as many dimensions as k has, they cannot.

    Sinks are float32 and side by side. A call with such copies is looked up by them, so that it is known when it comes
    again. The one that is ``written`` to stays as it is.
    """
    rank = max(3, len(views["k"].shape))
    found = {name: x if name == written else _laid_out(name, x, rank, copy) for name, x in views.items()}
    return with_sinks(found, copy)


def with_sinks(views: dict[str, ArrayView], copy: Callable[[ArrayView], ArrayView] = compact) -> dict[str, ArrayView]:
    """The arrays, of which sinks in 16-bit floats are float32, side by side."""
    sinks = views.get("sinks")
    if sinks is None or sinks.dtype not in (bf16, f16):
        return views
    return {**views, "sinks": in_float32(sinks) if copy is compact else copy(sinks._replace(dtype=f32))}


def _laid_out(name: str, view: ArrayView, rank: int, copy: Callable[[ArrayView], ArrayView]) -> ArrayView:
    if len(view.shape) != rank:
        return view if view.contiguous or len(view.shape) > rank else copy(view)
    if name in ("dout", "out"):  # a gradient may be one number that is shown everywhere
        spread = any(stride == 0 < size - 1 for size, stride in zip(view.shape, view.strides, strict=True))
        if spread or view.strides[-1] != 1:
            return copy(view)
    elif view.strides[-1] != 1 and view.shape[-1] > 1:  # refused
        return view
    return aligned(settled(view), copy)


def strides_of(view: ArrayView, layout: str) -> tuple[int, int, int]:
    """(batch, head, sequence) strides of a tensor in a layout, in elements."""
    batch, head, seq = AXES[layout]
    return view.strides[batch], view.strides[head], view.strides[seq]
