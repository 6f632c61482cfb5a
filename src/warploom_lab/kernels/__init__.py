"""The rungs of the ladders: kernels that show one idea after another."""
