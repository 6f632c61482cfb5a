"""Cases of the audit of shipped kernels: each calls a package as installed, and says what its result should be."""
