"""Tests on CuPy's own CUDA sources; without CuPy they are skipped."""
