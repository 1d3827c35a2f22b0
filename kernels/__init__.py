"""How: the kernels, one folder per backend."""
