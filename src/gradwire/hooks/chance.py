"""Chance that can be repeated: generators seeded by what everybody knows."""

from __future__ import annotations

import hashlib

import torch

from gradwire.hooks.base import Turn


def generator(seed: int, turn: Turn, *, shared: bool) -> torch.Generator:
    """A generator for this bucket and step: the same on every rank if `shared`, else another on each.

    It depends on nothing else, so a run that is resumed from a checkpoint draws the numbers it would have drawn.
    """
    who = "all" if shared else str(turn.rank)
    text = f"{seed}/{turn.step}/{turn.spec.index}/{who}"
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
    return torch.Generator(device=turn.spec.device).manual_seed(number)


def named_generator(seed: int, name: str) -> torch.Generator:
    """A generator for what begins with a parameter, whatever bucket, step and rank it is on. On the CPU: the same everywhere."""
    number = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little", signed=True)
    return torch.Generator().manual_seed(number)
