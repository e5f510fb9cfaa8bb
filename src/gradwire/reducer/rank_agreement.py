"""Cross-rank comparisons outside of steps: equal parameters, equal hook settings, state dicts that all ranks can load."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradwire.collectives import all_gather, all_gather_into_tensor
from gradwire.errors import HookError, LayoutError
from gradwire.groups.base import Group
from gradwire.hooks.base import CommHook
from gradwire.reducer.buckets.layout import ParameterSpec
from gradwire.reducer.hook.hook_states import HookStates, from_dict

T = TypeVar("T")


def gather_rows(group: Group, mine: Tensor, *, label: str) -> Tensor:
    """The rows of all ranks, which are equally long. A collective."""
    gathered = mine.new_empty(group.size * mine.numel())
    group.submit(all_gather_into_tensor(gathered, mine, label=label)).wait()
    return gathered.view(group.size, -1)


def odd_ones_out(group: Group, text: str, *, device: torch.device, label: str) -> list[int]:
    """The ranks whose `text` differs from this rank's. Every rank calls it; digests are compared."""
    mine = _tensor(hashlib.sha256(text.encode()).digest(), device)
    return [r for r, row in enumerate(gather_rows(group, mine, label=label)) if not torch.equal(row, mine)]


def compare_parameters(group: Group, specs: Sequence[ParameterSpec], *, device: torch.device) -> None:
    """Raise LayoutError on every rank unless all have the same parameters; names the first that differs, and the ranks. On the
    wire: 32 bytes a rank; the descriptions are sent only when they differ."""
    text = json.dumps([spec.describe() for spec in specs])
    if not odd_ones_out(group, text, device=device, label="compare parameters"):
        return
    mine = _tensor(text.encode(), device)
    lengths = gather_rows(group, torch.tensor([mine.numel()], device=device), label="compare parameters").tolist()
    places = [torch.empty(length, dtype=torch.uint8, device=device) for (length,) in lengths]
    group.submit(all_gather(places, mine, label="describe parameters")).wait()
    by_rank = [json.loads(bytes(p.tolist())) for p in places]
    reference = max(by_rank, key=by_rank.count)
    odd = [rank for rank, lines in enumerate(by_rank) if lines != reference]
    raise LayoutError(_difference(by_rank, reference, odd), ranks=odd)


def _tensor(data: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _difference(by_rank: list[list[str]], reference: list[str], odd: list[int]) -> str:
    base, other = by_rank.index(reference), by_rank[odd[0]]
    who = f"rank {odd[0]}" if len(odd) == 1 else f"ranks {odd}"
    what = f"{who} and rank {base} disagree"
    if len(reference) != len(other):
        what = f"ranks have different numbers of parameters: {who} {len(other)}, rank {base} {len(reference)}"
    differ = [i for i, (a, b) in enumerate(zip(reference, other, strict=False)) if a != b]
    if differ:
        first = f"The first parameter that differs is number {differ[0]}: {other[differ[0]]!r} against {reference[differ[0]]!r}."
    else:
        shorter, longer = sorted([reference, other], key=len)
        first = f"The first one that only some have is number {len(shorter)}: {longer[len(shorter)]!r}."
    return f"replicating a model: {what}. {first} Build the same model on every rank before you replicate it."


def load_together(
    saved: Mapping[str, Any], hook: CommHook, group: Group, *, device: torch.device, build: Callable[[HookStates], T]
) -> T:
    """What `build` makes of this rank's states. Every rank calls it; if one cannot load, or is at another step, none does. So
    `build` makes all that the caller needs and changes nothing yet: the caller puts it in place when all ranks are able to."""
    built, refused, at = [], None, repr(hook)
    try:
        states = from_dict(saved, hook, rank=group.rank)
        at = f"{hook!r} at step {states.steps}"
        text = f"{at}, an order of {sorted(saved.get('order', ()))}"
        built.append(build(states))
    except Exception as error:  # whatever it is, the others must not wait for this rank
        refused, text = error, "refused"
    odd = odd_ones_out(group, text, device=device, label="load_hook_state_dict")
    if isinstance(refused, HookError):
        raise refused
    if refused is not None:
        raise HookError(
            f"load_hook_state_dict on rank {group.rank} for {hook!r}: the state cannot be read, {type(refused).__name__}: "
            f"{refused}. Nothing was changed; pass what hook_state_dict() returned.",
            hook=repr(hook),
        ) from refused
    if odd:
        raise HookError(
            f"load_hook_state_dict on rank {group.rank}, {at}: ranks {odd} could not load theirs, or loaded another step's or "
            "another run's. Nothing was changed; load states saved after the same step, and on a new rank those of rank 0.",
            hook=repr(hook),
        )
    return built[0]
