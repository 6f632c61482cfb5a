"""The types of elements, as a kernel names them: in annotations, ``n: u32``, and as values, ``k.register(f32, 0.0)``.

At run time each is the object of :mod:`warploom.core.dtypes`. A type checker takes no object in an annotation, so for
it each is a class: a :class:`~warploom.core.dtypes.DType` itself, whose instances are a kernel's values.
"""

# ruff: noqa: N801  # PTX's names
from typing import TYPE_CHECKING

__all__ = [
    "bf16",
    "e4m3",
    "e5m2",
    "f16",
    "f32",
    "f64",
    "pred",
    "s8",
    "s16",
    "s32",
    "s64",
    "tf32",
    "u8",
    "u16",
    "u32",
    "u64",
]

if TYPE_CHECKING:
    from warploom.core.dtypes import DType
    from warploom.lang.parameters import StridedPointer
    from warploom.lang.values import Number, Traced

    class _Element(DType, type):  # pyright: ignore[reportGeneralTypeIssues]
        """The type of the classes below: each is a DType."""

    class _Parameter(Traced, StridedPointer):  # pyright: ignore
        """A number that a kernel takes; or the array of ``Strided[f32, 2]``, which a checker reads as f32."""

        def __add__(self, other: Number) -> Traced: ...  # pyright: ignore

    class bf16(_Parameter, metaclass=_Element): ...

    class e4m3(_Parameter, metaclass=_Element): ...

    class e5m2(_Parameter, metaclass=_Element): ...

    class f16(_Parameter, metaclass=_Element): ...

    class f32(_Parameter, metaclass=_Element): ...

    class f64(_Parameter, metaclass=_Element): ...

    class pred(_Parameter, metaclass=_Element): ...

    class s8(_Parameter, metaclass=_Element): ...

    class s16(_Parameter, metaclass=_Element): ...

    class s32(_Parameter, metaclass=_Element): ...

    class s64(_Parameter, metaclass=_Element): ...

    class tf32(_Parameter, metaclass=_Element): ...

    class u8(_Parameter, metaclass=_Element): ...

    class u16(_Parameter, metaclass=_Element): ...

    class u32(_Parameter, metaclass=_Element): ...

    class u64(_Parameter, metaclass=_Element): ...

else:
    from warploom.core.dtypes import bf16, e4m3, e5m2, f16, f32, f64, pred, s8, s16, s32, s64, tf32, u8, u16, u32, u64
