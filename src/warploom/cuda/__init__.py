"""Print a Program as CUDA C++, compile it without a toolkit, keep it on disk, load and launch it."""
