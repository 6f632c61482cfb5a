"""What may be given as ``config``: objects and texts of the operation's own configurations, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import warploom
from warploom.core.errors import ConfigError
from warploom.kernels.attention import backward_choice, choice
from warploom.kernels.matmul import choice as matmul_choice
from warploom.kernels.settings import all_kinds
from warploom.ops.attention_varlen import attention_varlen_backward

X = np.zeros((1, 64, 2, 64), ml_dtypes.bfloat16)
ROWS, LENGTHS = X[0], np.array([64], np.int32)
STARTS = np.array([0, 64], np.int32)
LSE = np.zeros((1, 2, 64), np.float32)
MATRIX = np.zeros((64, 64), ml_dtypes.bfloat16)

OPERATIONS: dict[str, tuple[tuple[Any, ...], Callable[[Any], object]]] = {
    "attention": (choice.KINDS, lambda c: warploom.plan(X, X, X, config=c)),
    "backward": (
        backward_choice.KINDS,
        lambda c: warploom.plan_attention_backward(X, X, X, X, X, LSE, config=c),
    ),
    "paged": (choice.CACHED_KINDS, lambda c: warploom.plan_attention_paged(X, X, X, LENGTHS, config=c)),
    "varlen": (choice.PACKED_KINDS, lambda c: warploom.attention_varlen(ROWS, ROWS, ROWS, STARTS, config=c)),
    "varlen backward": (
        backward_choice.PACKED_KINDS,
        lambda c: attention_varlen_backward(ROWS, ROWS, ROWS, ROWS, ROWS, LSE[0], STARTS, config=c),
    ),
    "matmul": (matmul_choice.KINDS, lambda c: warploom.plan_matmul(MATRIX, MATRIX, config=c)),
    "reduce": (matmul_choice.KINDS, lambda c: warploom.plan_matmul_reduce(MATRIX, MATRIX, "max", config=c)),
    "loss": (
        matmul_choice.KINDS,
        lambda c: warploom.linear_cross_entropy(MATRIX, MATRIX, np.zeros(64, np.int32), config=c),
    ),
}


def classes(kinds: tuple[Any, ...]) -> list[Any]:
    return list(all_kinds(kinds))


EVERY = list(dict.fromkeys(kind for kinds, _ in OPERATIONS.values() for kind in classes(kinds)))


def refused(call: Callable[[Any], object], config: Any) -> bool:
    """Whether a configuration is none of the operation's: others may only not fit."""
    try:
        call(config)
    except ConfigError as error:
        return "config cannot be" in str(error)
    return False


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_takes_objects_and_texts_of_its_own_configurations_alone(operation: str) -> None:
    kinds, call = OPERATIONS[operation]
    own = classes(kinds)
    for kind in EVERY:
        config = kind(head_dim=256) if hasattr(kind, "head_dim") else kind(stages=3)  # most do not fit: nothing runs
        assert [refused(call, config), refused(call, str(config))] == [kind not in own] * 2, kind


def test_rungs_of_ladders_are_configurations_that_an_installed_package_adds() -> None:
    assert {kind.__name__ for kind in EVERY} >= {"RungSm90", "RungSm80", "RungWgmma", "RungGemm"}
    own = {kind for kinds, _ in OPERATIONS.values() for kind in kinds if not isinstance(kind, str)}
    assert not [kind for kind in own if kind.__name__.startswith("Rung")]


@pytest.mark.parametrize("config", ["nonsense", "", "(", "turbo(x=1)", " =", 5, [1], {}, np.zeros(2), object(), EVERY])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_no_configuration_at_all_is_refused(operation: str, config: Any) -> None:
    with pytest.raises(ConfigError):
        OPERATIONS[operation][1](config)
    with pytest.raises(ConfigError):
        OPERATIONS[operation][1](type(config))


@pytest.mark.parametrize("text", ["fast", "tile_m=64", "matmul_sm80"])
def test_a_text_that_is_no_configuration_is_answered_with_those_that_calls_take(text):
    x = np.zeros((64, 64), np.float16)
    with pytest.raises(ConfigError, match=r"matmul_sm80\(") as refused:
        warploom.plan_matmul(x, x, config=text)
    assert "BM=" not in str(refused.value)
