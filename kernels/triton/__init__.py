"""Ours for every GPU that Triton serves: shared primitives, one mask policy, kernels whose loop is the algorithm."""
