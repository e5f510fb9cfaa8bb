"""Reproducible randomness: generators seeded identically on all ranks, or per rank."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from gradwire.hooks.base import Turn


def key(seed: int, turn: Turn, *, shared: bool) -> int:
    """A signed 64-bit key for this bucket and step: the same on every rank if `shared`, otherwise different on each.

    Rank and step are those of `turn.origin`: a combinator may give two of its parts the same rank and step. Such parts are
    distinguished by the bucket's first parameter and by `turn.path`. Nothing else counts, so a resumed run draws the same numbers.
    """
    rank, step = turn.origin
    first = turn.spec.names[0] if turn.spec.names else ""
    return _number(f"{seed}/{step}/{turn.spec.index}/{'all' if shared else rank}/{turn.path}/{first}")


def generator(seed: int, turn: Turn, *, shared: bool) -> torch.Generator:
    """A generator seeded with that key, on the bucket's device. Devices of different models draw different numbers. Numbers that
    must be equal on all ranks come from `noise`, or from the CPU."""
    return torch.Generator(device=turn.spec.device).manual_seed(key(seed, turn, shared=shared))


def device_key(seed: int, turn: Turn, *, shared: bool) -> Tensor:
    """That key as a tensor, for `noise` and for kernels, which use 31 bits of it."""
    return turn.on_device(lambda now: key(seed, now, shared=shared))


def noise(index: Tensor, key: Tensor | int) -> Tensor:
    """A number in [0, 1) for each index and the lower 31 bits of a key: the same on every device. It is the 32-bit finalizer of
    MurmurHash3, computed in int64."""
    h = ((index * 0x9E3779B9) ^ (key & 0x7FFFFFFF)) & 0xFFFFFFFF
    h ^= h >> 16
    h = (h * 0x85EBCA6B) & 0xFFFFFFFF
    h ^= h >> 13
    h = (h * 0xC2B2AE35) & 0xFFFFFFFF
    h ^= h >> 16
    return (h >> 8).to(torch.float32) * 2.0**-24


def named_generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator for a parameter, independent of bucket, step, rank and device."""
    return torch.Generator().manual_seed(_number(f"{seed}/{name}"))


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
