"""`DeviceVote`: the vote on one step by the device, so that no host waits. Behind the averages it counts who has voted, and opens
the gate that the optimizer reads before it changes anything.

Note [Gate]
Every member brings a row of numbers. It lies in memory of the host until the device copies it, behind the averages, and gathers
those of all. The gate is open (0) if all rows are there and agree. A member that freezes clears its row on the host before it
aborts its group. So if the device finds the row whole, it had all averages before that: this member is *prepared*. If it does not,
no other member has got the row, and no gate has opened: nobody has committed. What an aborted collective leaves behind is the
zeros that were there, or parts of rows, and neither agrees.

The host learns the result a step later, before the gradients of the next step change what this one must have for a retry. A member
that was frozen in between publishes its standing when the device has come to the end of the vote, not before. So to the others it
is like one whose averages came late, or whose vote ended just before it froze: the protocol has no other histories than with votes
of hosts, and the search of those holds. A view's first vote, its last before a change, and those with digests are of the hosts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.collectives import build
from gradwire.elasticity.deal import fixed_hash
from gradwire.errors import CollectiveTimeout
from gradwire.groups.base import Group

_PAUSE = 5e-5
_DRAIN = 30.0
"""Seconds within which a device comes to the end of what was enqueued, once the group is aborted."""


class DeviceVote:
    """One vote of one member. `facts` must be equal on all members, `wants` need not be."""

    def __init__(self, group: Group, device: torch.device, facts: list[int], wants: list[int]) -> None:
        self._group, self._device, self._facts = group, device, len(facts)
        numbers = [*facts, *wants]
        self._numbers = torch.tensor([*numbers, fixed_hash(*numbers)], dtype=torch.int64, device="cpu")
        self._rows, self._kept = self._pinned(2), self._pinned(2 + group.size)
        self._rows[1] = self._numbers
        self._copied: torch.cuda.Event | None = None
        self.ended = False
        """Whether `wait` has returned."""

    def _pinned(self, rows: int) -> Tensor:
        pin = self._device.type == "cuda"
        return torch.zeros(rows, len(self._numbers), dtype=torch.int64, device="cpu", pin_memory=pin)

    def arm(self) -> None:
        """This member votes, once the device comes to it."""
        self._rows[0] = self._numbers

    def clear(self) -> None:
        """This member does not vote any more, unless the device was there already: before the group is aborted."""
        self._rows[0].zero_()

    def cast(self) -> Tensor:
        """Enqueue the vote: the gate, 0 if all have voted alike and 1 if not, which is a flag such as `found_inf`."""
        gathered = torch.zeros(self._kept.shape, dtype=torch.int64, device=self._device)
        gathered[:2].copy_(self._rows, non_blocking=True)
        try:
            vote = build.all_gather_into_tensor(gathered[2:].view(-1), gathered[0].clone(), label="vote")
            self._group.submit(vote).wait()
            gathered = gathered.clone()  # the host is to read what the gate has read, also if rows come late
            return (gathered[:, : self._facts] != gathered[1, : self._facts]).any().float()
        finally:
            self._kept.copy_(gathered, non_blocking=True)
            self._copied = mark(self._device)

    def wait(self, lost: Callable[[], bool]) -> None:
        """Wait until the device is past the vote. `lost`: whether the group has failed; it is aborted then."""
        wait_for(self._copied, lost, self._group.timeout, f"the vote of {self._group} on {self._device}")
        self.ended = True

    @property
    def prepared(self) -> bool:
        """Whether this member has voted: others may have what the gate compares. After `wait`, as are the following."""
        return torch.equal(self._kept[0, : self._facts], self._numbers[: self._facts])

    @property
    def passed(self) -> bool:
        """Whether the gate was open."""
        facts = self._kept[:, : self._facts]
        return torch.equal(facts, self._numbers[: self._facts].expand_as(facts))

    @property
    def complete(self) -> bool:
        """Whether all have voted, alike or not: their rows are whole."""
        return all(fixed_hash(*row) == check for *row, check in self._kept.tolist())

    @property
    def wants(self) -> bool:
        """Whether any member has brought a number that is not 0 for what it `wants`."""
        return bool(self._kept[:, self._facts : -1].any())


def mark(device: torch.device) -> torch.cuda.Event | None:
    """What has been enqueued so far; None if the device is the host."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def wait_for(event: torch.cuda.Event | None, lost: Callable[[], bool], timeout: float, what: str) -> None:
    """Wait for the device, for at most `timeout` seconds; once the group is `lost`, until what it has left is drained."""
    deadline, drain = time.monotonic() + timeout, None
    while event is not None and not event.query():
        if drain is None and lost():
            deadline = drain = time.monotonic() + _DRAIN
        if time.monotonic() > deadline:
            done = "The group was aborted; look for a kernel that does not end." if drain else "A member may be stuck."
            raise CollectiveTimeout(
                f"{what}: the device has not come to it in {timeout if drain is None else _DRAIN:.3g} s. {done}"
            )
        time.sleep(_PAUSE)


def vote_of_hosts(group: Group, wants: list[int], facts: list[int], *, holds: bool) -> tuple[int, int, int, bool]:
    """How many want others to join and to leave, how many do not hold the state yet, and whether all others have the same facts as
    this member. A sum costs the least, and hashes that differ do not add up."""
    votes = torch.tensor([*wants, int(not holds), *(fact * holds for fact in facts)], dtype=torch.int64, device="cpu")
    group.all_reduce(votes, label="vote")
    join, leave, behind, *totals = votes.tolist()
    number = group.size - behind
    agree = not any((total - number * fact) % 2**64 for total, fact in zip(totals, facts, strict=True))
    return join, leave, behind, agree
