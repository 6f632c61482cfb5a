"""What holds for every test."""

import gc
import os

gc.set_threshold(10_000, 50, 100)  # traced Programs stay: to walk through millions of their objects took a quarter

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX takes three quarters of a GPU otherwise
