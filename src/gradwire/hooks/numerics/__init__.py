"""The arithmetic that hooks share: random numbers, selection, orthogonalization, kernels."""
