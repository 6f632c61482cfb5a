"""Tests of the package that reads PTX."""
