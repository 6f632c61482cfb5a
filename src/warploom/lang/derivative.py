"""The derivative of a traced f32 value, from the instructions that computed it: a vector-Jacobian product.

At a tie :func:`~warploom.lang.functions.maximum` and ``minimum`` pass the gradient to their second operand, so that
``relu`` has the derivative 0 at 0; ``absolute`` has 0 there too. Where no gradient comes, an exponential passes none
on, though it be infinite: of sigmoid(-1000) = 1 / (1 + e^1000) the derivative is 0, not 0 · ∞.
"""

from __future__ import annotations

from collections.abc import Sequence

from warploom.core.dtypes import f32
from warploom.core.errors import ProblemError
from warploom.ir.statements import Operand
from warploom.lang.values import Number, Traced


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
