"""Functions of traced values for code that has no kernel ``k`` at hand, and derivatives of what they compute.

Epilogues are written with these functions. Each takes traced f32 values and Python numbers, at least one of them
traced. The derivative is a vector-Jacobian product, from the instructions that computed a value. At a tie
:func:`maximum` and :func:`minimum` pass the gradient to their second operand, so that :func:`relu` has the derivative 0
at 0; :func:`absolute` has 0 there too. Where no gradient comes, an exponential passes none on, though it be infinite:
of sigmoid(-1000) = 1 / (1 + e^1000) the derivative is 0, not 0 · ∞.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from warploom.core.dtypes import f32
from warploom.core.errors import ProblemError, TraceError
from warploom.ir.statements import Operand
from warploom.lang.values import Number, Traced

if TYPE_CHECKING:
    from warploom.lang.arithmetic import Arithmetic

LOG2_E = math.log2(math.e)


def _words(*values: Number) -> Arithmetic:
    for value in values:
        if isinstance(value, Traced):
            return cast("Arithmetic", value.builder)
    raise TraceError("functions of warploom.lang.functions take at least one traced value; use math for numbers")


def maximum(a: Number, b: Number) -> Traced:
    """The larger of two values; the other one where one is NaN."""
    return _words(a, b).maximum(_float(a), _float(b))


def minimum(a: Number, b: Number) -> Traced:
    """The smaller of two values; the other one where one is NaN."""
    return _words(a, b).minimum(_float(a), _float(b))


def fma(a: Number, b: Number, c: Number) -> Traced:
    """a·b + c with one rounding."""
    return _words(a, b, c).fma(a, b, c)


def select(condition: Traced, a: Number, b: Number) -> Traced:
    """``a`` where the comparison holds, else ``b``."""
    return _words(condition).select(condition, _float(a), _float(b))


def exp2(x: Traced) -> Traced:
    """2 to the x, at most 2 ulp off."""
    return _words(x).exp2(x)


def exp(x: Traced) -> Traced:
    """e to the x by ``exp2``: a relative error of about 2^-22·(1 + abs(x))."""
    return _words(x).exp2(x * LOG2_E)


def log(x: Traced) -> Traced:
    """The natural logarithm (``lg2.approx``)."""
    return _words(x).log2(x) * math.log(2.0)


def tanh(x: Traced) -> Traced:
    """Hyperbolic tangent (``tanh.approx``, about 2^-11 relative error)."""
    return _words(x).tanh(x)


def reciprocal(x: Traced) -> Traced:
    """1/x, at most 1 ulp off."""
    return _words(x).reciprocal(x)


def sqrt(x: Traced) -> Traced:
    """Square root, correctly rounded."""
    return _words(x).sqrt(x)


def absolute(x: Traced) -> Traced:
    """The absolute value of x."""
    return _words(x).absolute(x)


def relu(x: Traced) -> Traced:
    """max(x, 0); 0 for NaN."""
    return maximum(x, 0.0)


def sigmoid(x: Traced) -> Traced:
    """1 / (1 + e^-x)."""
    return reciprocal(exp2(x * -LOG2_E) + 1.0)


def silu(x: Traced) -> Traced:
    """x · sigmoid(x)."""
    return x * sigmoid(x)


def gelu(x: Traced) -> Traced:
    """GELU in its tanh form: x/2 · (1 + tanh(√(2/π)·(x + 0.044715·x³))), the tanh through an exponential."""
    inner = x * fma(x * x, 0.044715 * math.sqrt(2.0 / math.pi), math.sqrt(2.0 / math.pi))
    return x * sigmoid(inner * 2.0)


def _float(value: Number) -> Number:
    """Python integers as floats, so that ``maximum(x, 0)`` reads as it should."""
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    try:
        return float(value)
    except OverflowError:
        return value  # refused where it becomes an operand, with the author's line


def as_f32(value: Number, like: Traced) -> Traced:
    """``value`` as an f32 operand of the kernel that ``like`` belongs to."""
    return _words(like).value(_float(value), f32)


def vector_jacobian(result: Traced, inputs: Sequence[Traced], gradient: Traced) -> list[Number]:
    """``gradient`` · ∂result/∂input for each f32 input; 0.0 for those that the result does not depend on.

    Raises ProblemError that names the first instruction between them which has no derivative.
    """
    wanted = {x.ir for x in inputs}
    found: dict[Operand, Number] = {result.ir: gradient}
    for value in reversed(_between(result, wanted)):
        if value.ir in wanted or value.ir not in found:
            continue
        assert value.definition is not None
        rule = value.definition.instruction.gradient
        if rule is None:
            raise ProblemError(
                f"{value.definition.instruction.mnemonic} ({value.definition.where}) has no derivative: call under "
                "torch.no_grad(), or write the epilogue without it"
            )
        own = value.builder.operand(found[value.ir], f32)
        for source, part in zip(value.sources, rule(value.builder, value, own, *value.sources), strict=True):
            if source.dtype is f32 and source.constant is None:
                found[source.ir] = found[source.ir] + part if source.ir in found else part
    return [found.get(x.ir, 0.0) for x in inputs]


def _between(result: Traced, inputs: set[Operand]) -> list[Traced]:
    """The values that depend on the inputs and that ``result`` depends on, each after those it depends on."""
    ordered: dict[Operand, Traced] = {}
    depends: dict[Operand, bool] = {}

    def visit(value: Traced) -> bool:
        if value.ir in depends:
            return depends[value.ir]
        parts = [visit(source) for source in value.sources] if value.ir not in inputs else [True]
        depends[value.ir] = any(parts)
        if depends[value.ir]:
            ordered[value.ir] = value
        return depends[value.ir]

    visit(result)
    return list(ordered.values())
