"""The vote of a step, counted by hosts."""

from __future__ import annotations

import torch

from gradwire.groups.base import Group


def vote_of_hosts(group: Group, wants: list[int], facts: list[int], *, holds: bool) -> tuple[int, int, int, bool]:
    """How many want others to join and to leave, how many do not hold the state yet, and whether all others have the same facts as
    this member. A sum costs the least, and hashes that differ do not add up."""
    votes = torch.tensor([*wants, int(not holds), *(fact * holds for fact in facts)], dtype=torch.int64, device="cpu")
    group.all_reduce(votes, label="vote")
    join, leave, behind, *totals = votes.tolist()
    number = group.size - behind
    agree = not any((total - number * fact) % 2**64 for total, fact in zip(totals, facts, strict=True))
    return join, leave, behind, agree
