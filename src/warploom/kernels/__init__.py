"""The kernels that come with warploom: generator, configuration and reference of each, side by side."""
