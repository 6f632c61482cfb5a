"""Defects of the kinds that the field reports, planted in small kernels, each beside its correct twin."""
