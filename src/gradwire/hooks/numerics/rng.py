"""Chance that can be repeated: generators seeded by what everybody knows."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from gradwire.hooks.base import Turn


def key(seed: int, turn: Turn, *, shared: bool) -> int:
    """A number of 64 bits, signed, for this bucket and step: the same on every rank if `shared`, else another on each.

    Rank and step are the driver's: those that a hook made of hooks tells its parts may be the same in two parts. What is left that
    two parts could have in common is told apart by the bucket's first parameter and by `turn.path`. It depends on nothing else,
    so a run that is resumed from a checkpoint draws the numbers it would have drawn.
    """
    rank, step = turn.origin
    first = turn.spec.names[0] if turn.spec.names else ""
    return _number(f"{seed}/{step}/{turn.spec.index}/{'all' if shared else rank}/{turn.path}/{first}")


def generator(seed: int, turn: Turn, *, shared: bool) -> torch.Generator:
    """A generator that begins with that key, on the bucket's device.

    Devices of different models draw different numbers. So what ranks must draw alike comes from `noise`, or from the CPU.
    """
    return torch.Generator(device=turn.spec.device).manual_seed(key(seed, turn, shared=shared))


def noise(index: Tensor, key: int) -> Tensor:
    """A number in [0, 1) for each index and a key of 31 bits: the same on every device.

    It is the finaliser of MurmurHash3, of 32 bits, kept in int64.
    """
    h = ((index * 0x9E3779B9) ^ key) & 0xFFFFFFFF
    h ^= h >> 16
    h = (h * 0x85EBCA6B) & 0xFFFFFFFF
    h ^= h >> 13
    h = (h * 0xC2B2AE35) & 0xFFFFFFFF
    h ^= h >> 16
    return (h >> 8).to(torch.float32) * 2.0**-24


def named_generator(seed: int, name: str) -> torch.Generator:
    """A generator for what begins with a parameter, whatever bucket, step and rank it is on. On the CPU: the same everywhere."""
    return torch.Generator().manual_seed(_number(f"{seed}/{name}"))


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
