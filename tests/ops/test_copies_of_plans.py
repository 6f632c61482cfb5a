"""Programs, configurations and plans survive copies and pickles, here and in another process."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import warploom
from warploom.lang.functions import gelu

HALF = np.zeros((64, 64), np.float16)


def scaled_gelu(x: Any) -> Any:
    return gelu(x) * 2.0


PLANS: dict[str, Callable[[], Any]] = {
    "attention": lambda: warploom.plan(*[np.zeros((1, 64, 2, 64), np.float16)] * 3, causal=True),
    "matmul": lambda: warploom.plan_matmul(HALF, HALF),
    "epilogue": lambda: warploom.plan_matmul(HALF, HALF, epilogue=scaled_gelu, bias=HALF[0]),
    "split": lambda: warploom.plan_matmul(np.zeros((16, 8192), np.float16), np.zeros((8192, 64), np.float16)),
    "reduce": lambda: warploom.plan_matmul_reduce(HALF, HALF, "logsumexp"),
}
every_plan = pytest.mark.parametrize("name", PLANS)
COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}


@every_plan
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_equals_its_original_and_makes_the_same_kernel(name: str, how: str) -> None:
    plan = PLANS[name]()
    again = COPIES[how](plan)
    assert again == plan
    assert again.config == plan.config
    assert again.program == plan.program
    assert again.cuda == plan.cuda


@every_plan
def test_programs_of_copies_are_equal_and_of_others_not(name: str) -> None:
    program = PLANS[name]().program
    for made in COPIES.values():
        again = made(program)
        assert again == program
        assert hash(again) == hash(program)
    other = PLANS["attention" if name != "attention" else "matmul"]().program
    assert program != other


def test_a_plan_makes_the_same_kernel_in_another_process(tmp_path: Any) -> None:
    plan = PLANS["matmul"]()
    path = tmp_path / "plan"
    path.write_bytes(pickle.dumps((plan, plan.program)))
    script = "import pickle, sys; plan, program = pickle.load(open(sys.argv[1], 'rb')); print(plan.program == program)"
    found = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "True"


def test_an_epilogue_without_a_name_says_why_it_cannot_be_pickled() -> None:
    plan = warploom.plan_matmul(HALF, HALF, epilogue=lambda x: x * 2.0)
    assert copy.deepcopy(plan) == plan
    with pytest.raises(pickle.PicklingError, match="lambda"):
        pickle.dumps(plan)
