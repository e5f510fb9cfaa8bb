"""What all ranks do together about their hooks between steps: agree on what they say, and load states."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from gradwire.collectives import all_gather_into_tensor
from gradwire.errors import HookError
from gradwire.groups.base import Group
from gradwire.hooks.base import CommHook
from gradwire.hooks.states import States, from_dict


def odd_ones_out(group: Group, said: str, *, device: torch.device, label: str) -> list[int]:
    """The ranks that say something else than this one; every rank asks. What is compared is a digest."""
    digest = hashlib.sha256(said.encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    everybody = torch.empty(group.size * 32, dtype=torch.uint8, device=device)
    group.submit(all_gather_into_tensor(everybody, mine, label=label)).wait()
    return [r for r, row in enumerate(everybody.view(group.size, 32)) if not torch.equal(row, mine)]


def load_together(saved: Mapping[str, Any], hook: CommHook, group: Group, *, device: torch.device) -> States:
    """This rank's states from what was saved. Every rank calls it; if one cannot load, or is at another step, none does."""
    states, refused = None, None
    try:
        states = from_dict(saved, hook, rank=group.rank)
        said = f"{hook!r} at step {states.step}"
    except HookError as error:
        refused, said = error, "refused"
    odd = odd_ones_out(group, said, device=device, label="load_hook_state_dict")
    if refused is not None:
        raise refused
    assert states is not None
    if odd:
        raise HookError(
            f"load_hook_state_dict on rank {group.rank}, {said}: ranks {odd} could not load theirs, or loaded another step's. "
            "Nothing was changed; load states that were saved after the same step, and on a new rank those of rank 0.",
            hook=repr(hook),
        )
    return states
