"""Checks of a step: whether gradients are finite, whether averages are averages."""
