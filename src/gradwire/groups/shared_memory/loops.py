"""Sums of all ranks' pieces as compiled loops: every piece is read once, and the sum written in its place.

Without numba there are none, and `fold.py` uses numpy, which gives the same bits.

Note [Once through the cache]
numpy adds in one pass and copies the sum to the other ranks in another. A block that is large enough for numpy's price per call
has left the first-level cache by then, and so every byte crosses it twice. A compiled loop has no price per call: of two and of
four ranks it stores each sum where it was read from, at once; of other numbers it goes in blocks of 256 elements, which
stay in the innermost cache until they are stored.

Note [The same bits]
Elements are added in rank order. The mean is the sum divided by the number of ranks, or, where that is a power of two, the sum
times its inverse, which rounds to the same bits (see `fold.divide`). bfloat16 is widened to float32, added there and rounded once,
to nearest and ties to even, as the reference does it. Only which of its many bit patterns a NaN has may differ. float16 is not
here: its conversions, done by integers, take nearly as long as torch's whole way, which has instructions for them.

Arrays are flat, of one length and one dtype, and do not overlap. That an argument is None is known when a loop is compiled, so
asking costs nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.runtime.jit import loop


@loop
def add_two(x: Any, y: Any, scale: Any) -> None:
    """`x` and `y` become (x + y) * scale, or x + y where `scale` is None."""
    for i in range(x.shape[0]):
        total = x[i] + y[i]
        if scale is not None:
            total = total * scale
        x[i] = total
        y[i] = total


@loop
def add_four(x: Any, y: Any, z: Any, w: Any, scale: Any) -> None:
    """The same of four."""
    for i in range(x.shape[0]):
        total = ((x[i] + y[i]) + z[i]) + w[i]
        if scale is not None:
            total = total * scale
        x[i] = total
        y[i] = total
        z[i] = total
        w[i] = total


@loop
def add_all(parts: Any, scale: Any, divisor: Any) -> None:
    """Each of `parts`, three arrays or more, becomes the sum of all, times `scale` and over `divisor` where they are not None."""
    length = parts[0].shape[0]
    block = np.empty(256, parts[0].dtype)
    for low in range(0, length, 256):
        count = min(256, length - low)
        first, last = parts[0][low : low + count], parts[1][low : low + count]
        for i in range(count):
            block[i] = first[i] + last[i]
        for rank in range(2, len(parts) - 1):
            last = parts[rank][low : low + count]
            for i in range(count):
                block[i] = block[i] + last[i]
        last = parts[len(parts) - 1][low : low + count]
        for i in range(count):
            total = block[i] + last[i]
            if scale is not None:
                total = total * scale
            if divisor is not None:
                total = total / divisor
            block[i] = total
        for rank in range(len(parts)):
            out = parts[rank][low : low + count]
            for i in range(count):
                out[i] = block[i]


@loop
def add_all_bfloat16(parts: Any, scale: Any, divisor: Any) -> None:
    """`add_all` of the bits of bfloat16 numbers, as uint16."""
    length = parts[0].shape[0]
    block = np.empty(256, np.float32)
    bits16 = np.empty(256, np.uint16)
    for low in range(0, length, 256):
        count = min(256, length - low)
        for i in range(count):
            block[i] = np.float32(-0.0)  # adding to it changes no bit of what is added; +0.0 would make -0.0 a +0.0
        for rank in range(len(parts)):
            part = parts[rank][low : low + count]
            for i in range(count):
                block[i] = block[i] + np.uint32(np.uint32(part[i]) << np.uint32(16)).view(np.float32)
        for i in range(count):
            total = block[i]
            if scale is not None:
                total = total * scale
            if divisor is not None:
                total = total / divisor
            bits = np.float32(total).view(np.uint32)
            odd = (bits >> np.uint32(16)) & np.uint32(1)
            rounded = np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
            bits16[i] = np.uint16(rounded if total == total else np.uint32(0x7FC0))
        for rank in range(len(parts)):
            out = parts[rank][low : low + count]
            for i in range(count):
                out[i] = bits16[i]
