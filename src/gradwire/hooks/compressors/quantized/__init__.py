"""Quantized hooks: a few bits per element, and block-wise scales."""

from gradwire.hooks.compressors.quantized.quantize import quantize
from gradwire.hooks.compressors.quantized.sign import sign

__all__ = ["quantize", "sign"]
