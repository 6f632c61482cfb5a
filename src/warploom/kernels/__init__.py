"""The kernels that come with warploom: generator, configuration, ladder and reference of each, side by side."""
