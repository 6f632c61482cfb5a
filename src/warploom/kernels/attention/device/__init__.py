"""The kernels of attention as they are traced; the modules beside this folder say how each is set and launched."""
