"""Finding the fastest configuration of a kernel family for a class of problems."""
