"""A pytest fixture for tests of Triton kernels: ``check_triton`` fails the test if the emulator finds anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from warploom.checking.foreign import CheckedPtx


@pytest.fixture
def check_triton() -> Callable[..., CheckedPtx]:
    """:func:`warploom.check_triton`, raising EmulationError with all findings if there is any.

    ``def test_softmax(check_triton): check_triton(softmax_kernel, (8,), [y, x, n], BLOCK=1024)``
    """

    def check(kernel: Any, grid: Any, arguments: Any, **options: Any) -> CheckedPtx:
        from warploom.checking.foreign import check_triton

        return check_triton(kernel, grid, arguments, **options).raise_if_found()

    return check
