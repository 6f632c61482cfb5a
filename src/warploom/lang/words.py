"""All words of the language together."""

from __future__ import annotations

from warploom.lang.hopper import HopperWords
from warploom.lang.matrix import MatrixWords


class Kernel(HopperWords, MatrixWords):
    """``k``: the first argument of every kernel function. Its methods are the language; see the base classes."""
