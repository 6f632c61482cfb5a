"""Words of the language that are one instruction: a typed method without a body, and the name of the instruction."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from warploom.isa.form import RefusedError, named

Method = TypeVar("Method", bound=Callable[..., Any])


def word(name: str) -> Callable[[Method], Method]:
    """Give a method of ``k`` its body: the instruction of PTX's name on the method's parameters, in their order.

    The form gives the types of operands and results. Raises TypeError, as the module is imported, where the method has
    other parameters than the instruction has operands.
    """

    def decorate(method: Method) -> Method:
        signature = inspect.signature(method)
        count = len(signature.parameters) - 1
        try:
            made = named(name, operands=count)
        except RefusedError as error:
            raise TypeError(f"{method.__qualname__}: {error}") from None
        defaults = method.__defaults__ or ()

        def call(self: Any, *given: Any, **by_name: Any) -> Any:
            values = (*given, *defaults[len(given) - count :]) if len(given) < count else given
            if by_name or len(values) != count:
                method(self, *given, **by_name)  # Python's own message where the arguments do not fit
                bound = signature.bind(self, *given, **by_name)
                bound.apply_defaults()
                values = bound.args[1:]
            operands = [self.operand(x, dtype) for x, dtype in zip(values, made.operand_types, strict=True)]
            results = self.emit(made, operands)
            return results[0] if len(results) == 1 else results or None

        for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(call, attribute, getattr(method, attribute))
        call.__wrapped__ = method  # type: ignore[attr-defined]
        return cast("Method", call)

    return decorate
