"""Cross-rank checks of hooks between steps: equal settings; load state dicts together."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from gradwire.collectives import all_gather_into_tensor
from gradwire.errors import HookError
from gradwire.groups.base import Group
from gradwire.hooks.base import CommHook
from gradwire.reducer.hook.hook_states import HookStates, from_dict

T = TypeVar("T")


def odd_ones_out(group: Group, text: str, *, device: torch.device, label: str) -> list[int]:
    """The ranks whose `text` differs from this rank's. Every rank calls it; digests are compared."""
    digest = hashlib.sha256(text.encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    gathered = torch.empty(group.size * 32, dtype=torch.uint8, device=device)
    group.submit(all_gather_into_tensor(gathered, mine, label=label)).wait()
    return [r for r, row in enumerate(gathered.view(group.size, 32)) if not torch.equal(row, mine)]


def load_together(
    saved: Mapping[str, Any], hook: CommHook, group: Group, *, device: torch.device, build: Callable[[HookStates], T]
) -> T:
    """What `build` makes of this rank's states. Every rank calls it; if one cannot load, or is at another step, none does.

    So `build` makes all that the caller needs and changes nothing yet: the caller puts it in place when all ranks are able to.
    """
    built, refused, at = [], None, repr(hook)
    try:
        states = from_dict(saved, hook, rank=group.rank)
        at = f"{hook!r} at step {states.steps}"
        text = f"{at}, an order of {sorted(saved.get('order', ()))}"
        built.append(build(states))
    except Exception as error:  # whatever it is, the others must not wait for a rank that has gone
        refused, text = _refusal(error, hook, group), "refused"
    odd = odd_ones_out(group, text, device=device, label="load_hook_state_dict")
    if refused is not None:
        raise refused
    if odd:
        raise HookError(
            f"load_hook_state_dict on rank {group.rank}, {at}: ranks {odd} could not load theirs, or loaded another step's or "
            "another run's. Nothing was changed; load states saved after the same step, and on a new rank those of rank 0.",
            hook=repr(hook),
        )
    return built[0]


def _refusal(error: Exception, hook: CommHook, group: Group) -> HookError:
    if isinstance(error, HookError):
        return error
    refusal = HookError(
        f"load_hook_state_dict on rank {group.rank} for {hook!r}: the state cannot be read, {type(error).__name__}: {error}. "
        "Nothing was changed; pass what hook_state_dict() gave.",
        hook=repr(hook),
    )
    refusal.__cause__ = error
    return refusal
