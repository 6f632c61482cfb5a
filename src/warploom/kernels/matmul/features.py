"""What a matrix product asks for beyond the plain one: each feature costs a kernel only where it is used."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from warploom.core.dtypes import DType, f16, f32, pred
from warploom.core.errors import ProblemError
from warploom.core.identity import function_key, importable

if TYPE_CHECKING:
    from warploom.lang.values import Traced

MOST_EXTRAS = 2
"""Matrices that an epilogue may combine with the product."""

ROW_VALUES = 4
"""Numbers that a table of row values has for each row: 16 bytes."""

EpilogueFunction = Callable[..., Any]
"""A function of a traced f32 (and of one more per extra matrix) that returns the f32 to store."""


@dataclass(frozen=True)
class OperandFeatures:
    """The layout of A or B in memory, and which of its edges are ragged.

    ``k_contiguous``: K is the axis with stride 1 (A row-major, B column-major). ``chunk``: elements that one copy may
    take, from the alignment of its lines: 8, 4 or 2 by ``cp.async``, 1 through registers. ``ragged_outer``,
    ``ragged_k``: M (N) or K is no multiple of the tile. ``partial``: a line ends in a chunk. ``batched``: each batch
    has its own (the TMA's concern).
    """

    k_contiguous: bool
    chunk: int = 8
    ragged_outer: bool = False
    ragged_k: bool = False
    partial: bool = False
    batched: bool = False


@dataclass(frozen=True)
class Extra:
    """An extra matrix: ``wide`` if it is f32 and not of the inputs' type, and what it has a value for.

    ``along``: "both" for each element, "rows" for each row, "cols" for each column.
    """

    wide: bool = False
    along: Literal["both", "rows", "cols"] = "both"

    @property
    def size(self) -> int:
        """The size of an element, in 16 bits."""
        return 2 if self.wide else 1


@dataclass(frozen=True)
class Epilogue:
    """A function of each sum before it is stored: ``function(alpha · sum + bias[col], extra[0][row, col], …)``.

    With ``row_values`` the function also takes the f32
    that a table has for the row, :data:`ROW_VALUES` of them, and the column. ``key`` stands for ``function`` in
    comparisons, so that equal lambdas share a kernel: :func:`warploom.core.identity.function_key`.
    """

    scaled: bool = False
    bias: bool = False
    extras: tuple[Extra, ...] = ()
    function: EpilogueFunction | None = field(default=None, compare=False)
    key: Hashable = None
    row_values: bool = False

    def __copy__(self) -> Epilogue:
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> Epilogue:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        function = importable("the epilogue", self.function)
        return _epilogue, (self.scaled, self.bias, self.extras, function, self.row_values)

    @property
    def plain(self) -> bool:
        """Whether sums are stored as they are."""
        return not (self.scaled or self.bias or self.function)

    def call(self, x: Traced, extras: Sequence[Traced]) -> Traced:
        """The user's function of the sum and what comes with it.

        Raises ProblemError if it does not return one f32 or number.
        """
        from warploom.ir.statements import SourceLine
        from warploom.lang.functions import as_f32
        from warploom.lang.values import Traced

        if self.function is None:
            return x
        result = self.function(x, *extras)
        if not isinstance(result, Traced | int | float):
            error = ProblemError(f"the epilogue must return one traced value, not {type(result).__name__}")
            raise error.at(SourceLine.of(self.function))
        if isinstance(result, Traced) and result.dtype is not f32:
            what = "a condition" if result.dtype is pred else f"a {result.dtype}"
            raise ProblemError(
                f"the epilogue must return an f32, not {what}: warploom.lang.functions.select(condition, a, b) makes "
                "numbers of a condition"
            ).at(SourceLine.of(self.function))
        return as_f32(result, x)


def _epilogue(
    scaled: bool, bias: bool, extras: tuple[Extra, ...], function: EpilogueFunction | None, row_values: bool
) -> Epilogue:
    """An epilogue in another process: its function, and what that sees there."""
    return Epilogue(scaled, bias, extras, function, function_key(function), row_values)


@dataclass(frozen=True)
class MatmulFeatures:
    """Trace-time features of a kernel.

    ``out_chunk``: elements per store of a 16-bit C (8, 4, 2, 1), from its alignment. ``pairs``: columns of C, the bias
    and the extras come in aligned pairs. ``empty``: K is 0.
    """

    a: OperandFeatures = OperandFeatures(True)
    b: OperandFeatures = OperandFeatures(False)
    out_dtype: DType = f16
    out_chunk: int = 8
    pairs: bool = True
    ragged_m: bool = False
    ragged_n: bool = False
    batched: bool = False
    epilogue: Epilogue = Epilogue()
    empty: bool = False

    @property
    def bulk_out(self) -> bool:
        """Whether C may leave by bulk stores: 16-bit elements in lines that start at multiples of 16 bytes."""
        return self.out_dtype is not f32 and self.out_chunk == 8


PLAIN = MatmulFeatures()
