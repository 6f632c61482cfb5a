"""Time kernels on a GPU: clocks, samples in rounds, and the problems of operations with their inputs and checks."""
