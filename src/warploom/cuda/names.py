"""Names of the printed kernel: the author's where they gave one, made valid, unique C++ identifiers."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

from warploom.ir.statements import Value

# C++ keywords and alternative tokens; then functions and variables that expressions name, and predefined macros.
_RESERVED_WORDS = """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class compl
    concept const consteval constexpr constinit const_cast continue co_await co_return co_yield decltype default delete
    do double dynamic_cast else enum explicit export extern false float for friend goto if inline int long mutable
    namespace new noexcept not not_eq nullptr operator or or_eq private protected public register reinterpret_cast
    requires return short signed sizeof static static_assert static_cast struct switch template this thread_local throw
    true try typedef typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq

    abs llabs fabs fabsf fmax fmaxf fmin fminf max min clock64 threadIdx blockIdx blockDim gridDim warpSize elected
    shared_memory TensorMap NULL NAN INFINITY linux unix
"""
RESERVED = frozenset(_RESERVED_WORDS.split())

# Functions that NVRTC declares by itself: no kernel can have their names.
_FUNCTIONS = """
    acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh cospi erf erfc erfcinv erfcx erfinv exp exp10
    exp2 expm1 fdim floor fma fmod frexp hypot ilogb j0 j1 jn ldexp lgamma llrint llround log log10 log1p log2 logb
    lrint lround modf nan nearbyint nextafter norm norm3d norm4d normcdf normcdfinv pow powi rcbrt remainder remquo
    rhypot rint rnorm rnorm3d rnorm4d round rsqrt scalbln scalbn signbit sin sincos sincospi sinh sinpi sqrt tan
    tanh tgamma trunc y0 y1 yn isfinite isinf isnan labs assert clock free main malloc memcpy memset printf std dim3
    size_t
"""
FUNCTIONS = frozenset(name + end for name in _FUNCTIONS.split() for end in ("", "f"))


def identifier(name: str) -> str:
    """``name`` as a C++ identifier: letters outside ASCII are spelled out (``α`` → ``alpha``), the rest is ``_``."""

    def spell(match: re.Match[str]) -> str:
        words = unicodedata.name(match.group(), "").split(" LETTER ")
        return words[1].lower().replace(" ", "_") if len(words) == 2 else "_"

    text = re.sub(r"_{2,}", "_", re.sub(r"[^0-9A-Za-z_]", spell, name)).lstrip("_")
    if not text or text[0].isdigit():
        text = f"v{text}"
    return f"{text}_" if text in RESERVED else text


def entry_name(kernel: str) -> str:
    """The name of a kernel's function in CUDA C++: the kernel's own wherever that is possible."""
    name = identifier(kernel)
    return f"{name}_" if name in FUNCTIONS else name


class VariableNames:
    """Gives each value one name. Unnamed values become ``t0``, ``t1`` … in the order in which they are asked for."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._names: dict[Value, str] = {}
        self._temporaries = 0
        self._repeats: dict[str, int] = {}

    def fresh(self, wanted: str) -> str:
        """A name nothing else has: ``wanted``, or ``wanted`` with the lowest free number behind it."""
        base = name = identifier(wanted)
        while name in self._taken:
            self._repeats[base] = self._repeats.get(base, 0) + 1
            name = f"{base}_{self._repeats[base]}"
        self._taken.add(name)
        return name

    def of(self, value: Value) -> str:
        """The name of ``value``."""
        if value not in self._names:
            if value.name:
                self._names[value] = self.fresh(value.name)
            else:
                self._names[value] = self.fresh(f"t{self._temporaries}")
                self._temporaries += 1
        return self._names[value]

    def bind(self, value: Value, name: str) -> None:
        """Gives ``value`` a name that :meth:`fresh` returned."""
        self._names[value] = name
