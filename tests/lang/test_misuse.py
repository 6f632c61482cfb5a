"""What people write by mistake, and the message that puts them right."""

# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false

import numpy as np
import pytest

from warploom.core.errors import ProblemError, TraceError, VerifyError
from warploom.emulate import emulate
from warploom.lang import Global, Kernel, f32, kernel


@kernel(threads=32)
def doubled(k: Kernel, x: Global[f32], y: Global[f32]) -> None:
    y.store(x.load(k.lane + np.int64(0))[0] * 2.0, k.lane)


def test_numpys_integers_are_integers():
    x, y = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    emulate(doubled.trace(), 1, [x, y]).raise_if_found()
    assert (y == 2 * x).all()


@pytest.mark.parametrize("grid", [0, (1, 0), (-1,), (1, 1, 1, 1)])
def test_a_grid_has_positive_counts(grid):
    x = np.zeros(32, np.float32)
    with pytest.raises(ProblemError, match="one to three positive counts"):
        emulate(doubled.trace(), grid, [x, x.copy()])


def test_calling_a_kernel_says_what_to_do():
    with pytest.raises(TraceError, match=r"traced, not called: doubled\.trace"):
        doubled(1, 2)


def test_the_decorator_needs_its_arguments():
    with pytest.raises(TraceError, match=r"write @kernel\(threads="):
        kernel(lambda k: None)


def traces(body):
    @kernel(threads=32)
    def bad(k: Kernel, x: Global[f32]) -> None:
        body(k, x)

    return bad.trace()


def test_no_access_moves_three_elements():
    with pytest.raises(VerifyError, match="1, 2 or 4 elements"):
        traces(lambda k, x: x.load(k.lane, 3))
    with pytest.raises(VerifyError, match="1, 2 or 4 elements"):
        traces(lambda k, x: x.store([1.0, 2.0, 3.0], k.lane))


def test_shared_memory_beyond_every_gpu_is_refused():
    with pytest.raises(VerifyError, match="bytes of shared memory"):
        traces(lambda k, x: k.shared(f32, (1024, 1024)).store(1.0, 0, 0))


def test_pythons_max_is_pointed_at_maximum():
    with pytest.raises(TraceError, match=r"k\.maximum"):
        traces(lambda k, x: max(x.load(k.lane)[0], 1.0))


def test_pythons_abs_works():
    program = traces(lambda k, x: x.store(abs(x.load(k.lane)[0]), k.lane))
    x = np.linspace(-1, 1, 32, dtype=np.float32)
    expected = np.abs(x)
    emulate(program, 1, [x]).raise_if_found()
    assert (x == expected).all()
