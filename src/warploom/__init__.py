"""warploom: tensor-core kernels that a person can write, check and understand in Python."""

__version__ = "0.1.0"
