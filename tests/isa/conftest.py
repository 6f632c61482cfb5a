"""Meanings run as the emulator runs them: without NumPy's warnings."""

from collections.abc import Iterator

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield
