"""Hooks that send fewer bytes per step: sparse, low rank, quantized, scaled to a narrow dtype."""
