"""Global, shared and local memory: their bytes, who accessed them when, and what of them is poison."""
