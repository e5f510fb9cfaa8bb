"""The layout of a quantized message: which parameters share a bit width, and where their codes and scales are.

Pure arithmetic: nothing here reads a tensor.

A message has one row per rank. For each bit width (`Part`) a row holds the codes of its blocks, then their float32 scales, both
padded to 16 bytes. Within a block the codes are packed in planes, so that a loop over bytes can be vectorized: byte j of a block of
B elements with p codes per byte holds the elements j, j + B/p, j + 2 B/p, ..., the first in its lowest bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import Tensor

from gradwire.errors import UsageError
from gradwire.hooks.bucket import BucketSpec, Slices

WIDTHS = (1, 2, 4, 8)
_ALIGN = 16

Rules = tuple[tuple[str, int], ...]
"""Patterns of parameter names and their bit width; the first match wins."""
Key = Tensor | int | None
"""For the codec: a tensor of one element rounds stochastically, None to nearest. With one bit: which zeros are positive."""


@dataclass(frozen=True, slots=True)
class Part:
    """The elements of one bit width in a message, as the codec needs them."""

    bits: int
    block: int
    numel: int
    """Elements without padding."""
    blocks: int
    stride: int
    """Bytes per row, over all parts."""
    codes_at: int
    scales_at: int
    """The offsets of codes and scales in a row, in bytes."""

    @property
    def row(self) -> int:
        return self.blocks * self.block

    def owned_by(self, rank: int) -> Part:
        """The part of it that `rank` sums: its row."""
        return replace(self, numel=min(max(self.numel - rank * self.row, 0), self.row))

    @property
    def planes(self) -> int:
        return 8 // self.bits

    @property
    def block_bytes(self) -> int:
        return self.block * self.bits // 8

    @property
    def top(self) -> int:
        """The largest code. Levels are symmetric around zero, so one of the possible codes is unused."""
        return (1 << (self.bits - 1)) - 1

    @property
    def fraction(self) -> int:
        """Fraction bits of the fixed-point sum of absolute values (1 bit): a block's sum stays below 2 ** 30."""
        return min(21, 30 - (self.block - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Section:
    """The parameters of a bucket that have the same bit width."""

    bits: int
    slices: Slices


class RowPart(NamedTuple):
    """The elements of one bit width in one or more rows of a message."""

    slices: Slices
    rows: slice
    part: Part


@dataclass(frozen=True, slots=True)
class MessageLayout:
    sections: tuple[Section, ...]
    block: int

    def parts(self, ranks: int) -> tuple[Part, ...]:
        """Where each section is in a message with a row for each rank."""
        return self._parts([-(-section.slices.numel // (self.block * ranks)) for section in self.sections])

    def _parts(self, blocks: Sequence[int]) -> tuple[Part, ...]:
        found, at = [], 0
        for section, each in zip(self.sections, blocks, strict=True):
            scales_at = at + _aligned(each * self.block * section.bits // 8)
            found.append(Part(section.bits, self.block, section.slices.numel, each, 0, at, scales_at))
            at = scales_at + _aligned(4 * each)
        return tuple(replace(part, stride=at) for part in found)

    def stride(self, ranks: int) -> int:
        return next((part.stride for part in self.parts(ranks)), 0)

    def rows(self, ranks: int) -> list[list[RowPart]]:
        """For each section, its elements in each of `ranks` equal rows of the bucket, padded to the same number of blocks."""
        numel = sum(section.slices.numel for section in self.sections) // ranks
        inside = [[section.slices.within(r * numel, numel) for r in range(ranks)] for section in self.sections]
        parts = self._parts([-(-max(row.numel for row in rows) // self.block) for rows in inside])
        return [
            [RowPart(row, slice(r, r + 1), replace(part, numel=row.numel)) for r, row in enumerate(rows)]
            for part, rows in zip(parts, inside, strict=True)
        ]


def joined(rows: list[RowPart]) -> list[RowPart]:
    """All rows of a section in one part, if none of them is padded."""
    part = rows[0].part
    if any(row.part.numel != part.row for row in rows):
        return rows
    slices = Slices.of([each for row in rows for each in row.slices.ranges])
    return [RowPart(slices, slice(0, len(rows)), replace(part, numel=slices.numel))]


def part_of(numel: int, bits: int, *, block: int = 256, rows: int = 1) -> Part:
    return of_one_section(numel, bits, block=block).parts(rows)[0]


def of_one_section(numel: int, bits: int, *, block: int = 256) -> MessageLayout:
    return MessageLayout((Section(bits, Slices(((0, numel),))),), block)


def lay_out(spec: BucketSpec, rules: Rules, block: int) -> MessageLayout:
    """The sections of a bucket. A complex element is two real ones."""
    reals = 2 if spec.dtype.is_complex else 1
    ranges: dict[int, list[tuple[int, int]]] = {}
    for name, offset, numel in zip(spec.names, spec.offsets, spec.numels, strict=True):
        bits = next((bits for pattern, bits in rules if fnmatchcase(name, pattern)), None)
        if bits is None:
            raise UsageError(
                f"quantize(bits={dict(rules)}): no pattern matches the parameter {name!r}. Add a last one, such as '*': 8."
            )
        ranges.setdefault(bits, []).append((reals * offset, reals * numel))
    return MessageLayout(tuple(Section(bits, Slices.of(ranges[bits])) for bits in sorted(ranges, reverse=True)), block)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
