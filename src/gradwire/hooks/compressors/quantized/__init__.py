"""Quantized hooks: a few bits per element, with scales per block or parameter."""

from gradwire.hooks.compressors.quantized.quantize import quantize
from gradwire.hooks.compressors.quantized.sign import sign

__all__ = ["quantize", "sign"]
