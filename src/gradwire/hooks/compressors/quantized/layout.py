"""Where quantized elements lie: which parameters share a width, and where their codes and scales are in a message.

Pure arithmetic on numbers: nothing here touches a tensor's values.

Note [A message]
A message has one row per rank. Of each width (`Part`) a row holds first the codes of its blocks, one block behind the other, then
their scales, one float32 each; both are rounded up to 16 bytes, so that a device can write whole words. Inside a block the codes
are packed in planes: byte j of a block of B elements with p codes a byte holds the elements j, j + B/p, j + 2 B/p, ..., the first
in its lowest bits. So a loop over bytes reads and writes consecutive memory, which a processor does many elements at a time.

Scales are float32 and not something narrower: gradients need the whole range of exponents, and at 256 elements a block they cost
an eighth of a bit per element.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from gradwire.errors import UsageError
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.numerics.slices import Slices

WIDTHS = (1, 2, 4, 8)
_ALIGN = 16

Rules = tuple[tuple[str, int], ...]
"""Patterns of parameter names and the bits of those that match; the first match wins."""


@dataclass(frozen=True, slots=True)
class Part:
    """The elements of one width in a message: what a codec is told."""

    bits: int
    block: int
    numel: int
    """The elements there are; the blocks behind them are padding."""
    blocks: int
    """Blocks a row."""
    stride: int
    """Bytes a row, of all parts together."""
    codes_at: int
    scales_at: int
    """Where codes and scales begin in a row, in bytes."""

    @property
    def row(self) -> int:
        """Elements a row."""
        return self.blocks * self.block

    @property
    def planes(self) -> int:
        """Codes a byte."""
        return 8 // self.bits

    @property
    def block_bytes(self) -> int:
        """Bytes that the codes of a block take."""
        return self.block * self.bits // 8

    @property
    def top(self) -> int:
        """The largest code: zero lies in the middle, so there is one level less than the bits could tell apart."""
        return (1 << (self.bits - 1)) - 1

    @property
    def fraction(self) -> int:
        """Bits behind the point in which 1-bit codecs add up absolute values: a block's sum stays below 2 ** 30."""
        return min(21, 30 - (self.block - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Section:
    """The parameters of a bucket that have the same width."""

    bits: int
    slices: Slices
    """Where they are in the flat bucket."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A bucket by width."""

    sections: tuple[Section, ...]
    block: int

    def parts(self, ranks: int) -> tuple[Part, ...]:
        """Each section's place in a message of as many rows as there are ranks."""
        sized = [(s, -(-_blocks(s.slices.numel, self.block) // ranks)) for s in self.sections]
        places, at = [], 0
        for section, blocks in sized:
            codes_at = at
            scales_at = codes_at + _aligned(blocks * self.block * section.bits // 8)
            at = scales_at + _aligned(4 * blocks)
            places.append((section, blocks, codes_at, scales_at))
        return tuple(
            Part(s.bits, self.block, s.slices.numel, blocks, at, codes, scales) for s, blocks, codes, scales in places
        )

    def stride(self, ranks: int) -> int:
        """Bytes of a message's row."""
        return next((part.stride for part in self.parts(ranks)), 0)


def lay_out(spec: BucketSpec, rules: Rules, block: int) -> Layout:
    """The bucket's sections. Complex elements are two real ones."""
    reals = 2 if spec.dtype.is_complex else 1
    ranges: dict[int, list[tuple[int, int]]] = {}
    for name, offset, numel in zip(spec.names, spec.offsets, spec.numels, strict=True):
        ranges.setdefault(bits_of(name, rules), []).append((reals * offset, reals * numel))
    return Layout(tuple(Section(bits, Slices.of(ranges[bits])) for bits in sorted(ranges, reverse=True)), block)


def bits_of(name: str, rules: Rules) -> int:
    """The width of a parameter."""
    for pattern, bits in rules:
        if fnmatchcase(name, pattern):
            return bits
    raise UsageError(
        f"quantize(bits={dict(rules)}): no pattern matches the parameter {name!r}. Add a last one for the rest, such as "
        '"*": 8.'
    )


def _blocks(numel: int, block: int) -> int:
    return -(-numel // block)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
