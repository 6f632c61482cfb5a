"""Tests on Triton's kernels; without Triton they are skipped."""
