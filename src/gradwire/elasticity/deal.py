"""`Deal`: the data of a run whose members change. A step has the same samples for any set of members.

Note [Slots]
The global batch of a step is divided into a fixed number of *slots*, micro-batches of one shape, and the members of a view share
the slots. Which samples a slot of a step has depends on the seed alone, so a step that is computed again by fewer members has the
same samples, and since the position in the data is the number of committed steps, each sample counts in one of them in each epoch.
Epochs follow one another without a gap: a batch may have the last samples of one and the first of the next.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate

from gradwire.errors import UsageError, UsageTypeError


class Deal:
    """Samples of a map-style data set, shuffled in every epoch, by step and slot.

    >>> deal = Deal(range(10), global_batch=4, slots=2)
    >>> [deal.samples(step, slot) for step in range(2) for slot in range(2)]
    [[6, 7], [5, 2], [8, 3], [4, 1]]
    >>> deal.batch(0, 1)
    tensor([5, 2])
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int,
        slots: int,
        seed: int = 0,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if not map_style or isinstance(dataset, IterableDataset):
            raise UsageTypeError(
                f"Deal({type(dataset).__name__}): of an iterable data set no other rank can read a sample again. Pass one "
                "with __len__ and __getitem__."
            )
        if slots < 1 or global_batch < slots or global_batch % slots:
            raise UsageError(
                f"Deal(global_batch={global_batch}, slots={slots}): slots have equally many samples, at least one. Choose a "
                "global batch that is a multiple of the number of slots."
            )
        if not len(dataset):
            raise UsageError("Deal: the data set has no samples. Pass one that has.")
        self.dataset = dataset
        self.global_batch = global_batch
        self.slots = slots
        self.seed = int(seed)  # another type of number has another hash
        self._collate = collate_fn

    @property
    def facts(self) -> tuple[int, ...]:
        """What must be equal on all ranks."""
        return self.slots, self.global_batch, self.seed, len(self.dataset)

    def samples(self, step: int, slot: int) -> list[int]:
        """The samples of this slot in this step."""
        if not 0 <= slot < self.slots:
            raise UsageError(f"slot {slot} of step {step}: there are {self.slots}, counted from 0.")
        size, length = self.global_batch // self.slots, len(self.dataset)
        first = step * self.global_batch + slot * size
        return [_order(length, self.seed, n // length)[n % length] for n in range(first, first + size)]

    def batch(self, step: int, slot: int) -> Any:
        """The samples of this slot in this step, collated."""
        return self._collate([self.dataset[i] for i in self.samples(step, slot)])

    def steps(self, epochs: float = 1) -> int:
        """How many steps there are until every sample has been used this many times."""
        return math.ceil(epochs * len(self.dataset) / self.global_batch)


@functools.lru_cache(maxsize=4)  # a batch may have samples of two epochs
def _order(length: int, seed: int, epoch: int) -> array[int]:
    generator = torch.Generator().manual_seed(fixed_hash(seed, epoch))
    return array("q", torch.randperm(length, generator=generator, device="cpu").numpy().tobytes())


def seed_generators(seed: int) -> None:
    """As `random.seed` and `torch.manual_seed`, which would format a stack trace for each kind of device that is not in use."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if (kind := torch.accelerator.current_accelerator()) is not None:
        device = torch.get_device_module(kind)
        (getattr(device, "manual_seed_all", None) or device.manual_seed)(seed)


def share_slots(slots: int, members: Sequence[str], before: Sequence[str] = ()) -> tuple[str, ...]:
    """Who computes each slot: numbers of slots differ by at most one, and as few as possible move from the owners `before`.

    Those of a member that left go to the others, and a joiner gets some of each. The same on all members, from the same `before`.

    >>> share_slots(4, ("a", "b"))
    ('b', 'a', 'b', 'a')
    >>> share_slots(4, ("a", "b", "c"), before=("b", "a", "b", "a"))
    ('b', 'c', 'b', 'a')
    """
    if not 0 < len(members) <= slots:
        raise UsageError(
            f"{len(members)} members for {slots} slots: each needs at least one. Choose more slots, four or more for each "
            "member, or run with fewer members."
        )
    owners = [m if m in members else None for m in before] or [None] * slots
    load = Counter(dict.fromkeys(members, 0))
    load.update(m for m in owners if m is not None)

    def give(slot: int) -> None:
        receiver = min(members, key=lambda m: (load[m], fixed_hash(slot, m)))
        giver, owners[slot] = owners[slot], receiver
        load[receiver] += 1
        if giver is not None:
            load[giver] -= 1

    for slot, owner in enumerate(owners):
        if owner is None:
            give(slot)
    while max(load.values()) - min(load.values()) > 1:
        most = max(load.values())
        give(min((s for s in range(slots) if load[owners[s] or ""] == most), key=lambda s: fixed_hash(s, *members)))
    return tuple(owner for owner in owners if owner is not None)


def fixed_hash(*facts: object) -> int:
    """A number of 63 bits that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=8).digest(), "big") >> 1
