"""CUDA kernels by CUTLASS' CuTe, in a library of the stable ABI."""
