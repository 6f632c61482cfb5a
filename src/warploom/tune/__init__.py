"""Finding the fastest configuration of an operation for a class of problems on a GPU."""
