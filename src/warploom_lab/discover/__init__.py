"""Fragment layouts, found by running tracer kernels."""
