"""The C++ expression of every comparison says what the comparison means."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.isa.every_form import every
from warploom.core.dtypes import pred
from warploom.isa.cpp import compared
from warploom.isa.instruction import Instruction

COMPARED = {str(i): i for i in every() if i.op == "setp" and compared(i) is not None}
IN_PYTHON = (("&&", " and "), ("||", " or "), ("!(", " not ("), ("!{", " not {"))


def values(made: Instruction) -> list[tuple[Any, ...]]:
    """Numbers below, equal and above, the ends of their type, and no number at all."""
    of = []
    for dtype in made.operand_types:
        if dtype is pred:
            of.append((False, True))
        elif dtype.is_float:
            of.append((-1.5, -0.0, 0.0, 2.0, np.inf, np.nan))
        else:
            limits = np.iinfo(dtype.numpy)
            of.append((limits.min, 1, 2, limits.max))
    return list(product(*of))


@pytest.mark.parametrize("name", COMPARED)
def test_its_text_is_its_meaning(name: str) -> None:
    made = COMPARED[name]
    found = compared(made)
    assert found is not None
    assert isinstance(found.text, str)
    text = found.text
    for cpp, python in IN_PYTHON:
        text = text.replace(cpp, python)
    given = values(made)
    columns = [np.array(x, t.numpy) for x, t in zip(zip(*given, strict=True), made.operand_types, strict=True)]
    with np.errstate(invalid="ignore"):
        wanted = made.meaning(*(x[None] for x in columns))[0].reshape(-1)
    said = [bool(eval(text.format(*(f"({v!r})" for v in one)), {"inf": np.inf, "nan": np.nan})) for one in given]
    assert said == wanted.tolist()
