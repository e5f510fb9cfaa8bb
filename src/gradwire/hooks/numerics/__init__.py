"""The arithmetic that hooks share: random numbers, selection, slices of flat buffers, orthogonalization, kernels."""
