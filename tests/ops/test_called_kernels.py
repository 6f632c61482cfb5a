"""Kernels called on a grid: on arrays of every kind, as ``warploom.launch`` runs them."""

import numpy as np
import pytest

from warploom.core.errors import EmulationError, EmulationWarning, ProblemError, TraceError
from warploom.lang import Global, Kernel, f32, kernel, u32

pytestmark = pytest.mark.usefixtures("emulated")


@kernel(threads=32)
def scaled(k: Kernel, x: Global[f32], y: Global[f32], n: u32, *, by: float = 2.0, races: bool = False) -> None:
    at = k.cta_x * 32 + k.lane
    with k.when(at < n):
        y.store(x.load(at) * by, 0 if races else at)


WAYS = [lambda *given, **more: scaled[2](*given, **more), lambda *given, **more: scaled.launch(2, *given, **more)]


@pytest.mark.parametrize("way", WAYS)
def test_a_kernel_runs_on_a_grid(way):
    x, y = np.arange(40, dtype=np.float32), np.zeros(40, np.float32)
    with pytest.warns(EmulationWarning):
        way(x, y, 40)
    assert (y == 2 * x).all()
    way(x, y, 40, by=3.0)
    assert (y == 3 * x).all()
    with pytest.raises(EmulationError, match="race"):
        way(x, y, 40, races=True)


def test_a_kernel_runs_on_tensors():
    torch = pytest.importorskip("torch")
    x, y = torch.arange(40, dtype=torch.float32), torch.zeros(40)
    scaled[(2, 1)](x, y, 40)
    assert torch.equal(y, 2 * x)


def test_what_does_not_fit_is_refused():
    x = np.zeros(40, np.float32)
    with pytest.raises(ProblemError, match="n"):
        scaled[2](x, x)
    with pytest.raises(TraceError, match="'times' is no trace-time parameter"):
        scaled[2](x, x.copy(), 40, times=2)
    with pytest.raises(ProblemError, match="grid"):
        scaled[0](x, x.copy(), 40)
