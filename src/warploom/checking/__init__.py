"""Run kernels of a user's file, Python, PTX or CUDA C++, with every check of the emulator."""
