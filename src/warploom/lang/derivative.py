"""The derivative of a traced f32 value, from the instructions that computed it: a vector-Jacobian product.

At a tie :func:`~warploom.lang.functions.maximum` and ``minimum`` pass the gradient to their second operand, so that
``relu`` has the derivative 0 at 0; ``absolute`` has 0 there too. Where no gradient comes, an exponential passes none
on, though it be infinite: of sigmoid(-1000) = 1 / (1 + e^1000) the derivative is 0, not 0 · ∞.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from warploom.core.dtypes import f32
from warploom.core.errors import ProblemError
from warploom.ir.statements import Operand
from warploom.isa.alu import Binary, Fma, Select, Unary
from warploom.isa.base import Instruction
from warploom.isa.conversion import Move
from warploom.lang.functions import reciprocal, select
from warploom.lang.values import Number, Traced

LN_2 = math.log(2.0)
Sources = Sequence[Traced]
Rule = Callable[[Traced, Traced, Sources], Sequence[Number]]
"""What each operand adds to its gradient: from the result, the result's gradient and the operands."""

_UNARY: dict[str, Callable[[Traced, Traced, Traced], Number]] = {
    "neg": lambda _y, g, _x: -g,
    "abs": lambda _y, g, x: select(x > 0.0, g, select(x < 0.0, -g, 0.0)),
    "ex2": lambda y, g, _x: select(g == 0.0, 0.0, g * y * LN_2),
    "lg2": lambda _y, g, x: g * reciprocal(x) * (1.0 / LN_2),
    "rcp": lambda y, g, _x: -g * y * y,
    "rsqrt": lambda y, g, _x: g * -0.5 * y * y * y,
    "sqrt": lambda y, g, _x: g * 0.5 / y,
    "tanh": lambda y, g, _x: g * (1.0 - y * y),
}
_BINARY: dict[str, Callable[[Traced, Traced, Traced, Traced], Sequence[Number]]] = {
    "add": lambda _y, g, _a, _b: (g, g),
    "sub": lambda _y, g, _a, _b: (g, -g),
    "mul": lambda _y, g, a, b: (g * b, g * a),
    "div": lambda y, g, _a, b: (g / b, -g * y / b),
    "max": lambda _y, g, a, b: (select(a > b, g, 0.0), select(a > b, 0.0, g)),
    "min": lambda _y, g, a, b: (select(a < b, g, 0.0), select(a < b, 0.0, g)),
}


def _rule(instruction: Instruction) -> Rule | None:
    """How an instruction is differentiated; None where it has no derivative."""
    if isinstance(instruction, Unary) and instruction.op in _UNARY:
        unary = _UNARY[instruction.op]
        return lambda y, g, x: (unary(y, g, x[0]),)
    if isinstance(instruction, Binary) and instruction.op in _BINARY:
        binary = _BINARY[instruction.op]
        return lambda y, g, x: binary(y, g, *x)
    if isinstance(instruction, Fma):
        return lambda _y, g, x: (g * x[1], g * x[0], g)
    if isinstance(instruction, Select):
        return lambda _y, g, x: (0.0, select(x[0], g, 0.0), select(x[0], 0.0, g))
    return (lambda _y, g, _x: (g,)) if isinstance(instruction, Move) else None


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
        rule = _rule(value.definition.instruction)
        if rule is None:
            raise ProblemError(
                f"{value.definition.instruction.mnemonic} ({value.definition.where}) has no derivative: call under "
                "torch.no_grad(), or write the epilogue without it"
            )
        own = value.builder.operand(found[value.ir], f32)
        for source, part in zip(value.sources, rule(value, own, value.sources), strict=True):
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
