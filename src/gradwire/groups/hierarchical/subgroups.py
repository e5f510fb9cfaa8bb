"""`GroupParts`: the groups that a two-level group is made of, which ranks of the whole are in each, and what their errors mean.

Note [Three parts]
`inside` has the ranks of this host. `across` has, for each carrier, the ranks with its place in all hosts (see Note [Rails]).
`messages`, if there is one, has all ranks in order, and carries sends and receives, also those within a host: a receive from any
rank could not wait in two groups at once. Without `messages` a message goes through `inside` or `across` where both ends are in it,
and a receive from any rank is refused. A sub-group's `across` is made from `messages` as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from gradwire.collectives import Collective, Layout, Scope
from gradwire.errors import CollectiveMismatch, CollectiveTimeout, GroupAborted, PeerLost, UsageError
from gradwire.groups.base import Group
from gradwire.groups.failure.membership import Membership
from gradwire.groups.failure.monitor import find_culprit
from gradwire.groups.ledger import Arrivals, Ledger, chained
from gradwire.groups.store.rendezvous import Rendezvous
from gradwire.groups.work import Work

Make = Callable[[str, Sequence[int]], Group]
"""Makes the part of that name, of these ranks of the whole."""


@contextmanager
def make_parts(layout: Layout, rendezvous: Rendezvous, *, inside: Make, across: Make) -> Iterator[dict[str, Any]]:
    """Make the groups that the layout needs: arguments of HierarchicalGroup. They are closed if the block raises."""
    rank = rendezvous.rank
    host, index = layout.place(rank)
    several = len(layout.hosts) > 1
    with ExitStack() as made:

        def make(build: Make, name: str, ranks: Sequence[int]) -> Group:
            with in_ranks_of_whole(ranks, rendezvous):
                group = build(name, ranks)
            made.callback(group.close, 0)
            return group

        within, rail, messages = make(inside, f"inside-{host}", layout.hosts[host]), None, None
        if several and index < layout.width:
            rail = make(across, f"across-{index}", [ranks[index] for ranks in layout.hosts])
        if several:
            messages = make(across, "messages", range(layout.size))
        yield {"inside": within, "across": rail, "messages": messages, "rank": rank, "layout": layout}
        made.pop_all()


class GroupParts:
    """See Note [Three parts]. `members` has the ranks of the whole that are in each part, in the part's order."""

    def __init__(self, layout: Layout, rank: int, inside: Group, across: Group | None, messages: Group | None) -> None:
        mates = layout.hosts[layout.place(rank)[0]]
        everyone = tuple(range(layout.size))
        if messages is None and mates == everyone:
            messages = inside
        if messages is not None and (messages.rank, messages.size) != (rank, layout.size):
            raise UsageError(f"HierarchicalGroup: messages is {messages}. Pass a group of all {layout.size} ranks.")
        self.inside, self.across, self.messages = inside, across, messages
        self.members: dict[Group, tuple[int, ...]] = {inside: mates}
        if across is not None:
            self.members[across] = tuple(ranks[inside.rank] for ranks in layout.hosts)
        if messages is not None:
            self.members[messages] = everyone

    def part(self, where: str) -> Group:
        """The part that carries out a step: "inside" or "across"."""
        part = self.inside if where == "inside" else self.across
        assert part is not None
        return part

    def route(self, op: Collective) -> tuple[Group, Collective] | None:
        """The part that a message goes through, and the message in the part's ranks; None if no part has both ends."""
        if self.messages is not None:
            return self.messages, op
        for part, members in self.members.items():
            if op.peer in members:
                return part, replace(op, peer=members.index(op.peer))
        return None

    def arrivals(self, scope: Scope) -> Arrivals | None:
        """Which ranks have joined the current step of the part of that scope."""
        part = self.inside if scope is Scope.INSIDE else self.across
        steps = [] if part is None else list(part.ledger.pending.values())
        known = part.arrivals(steps[0]) if part is not None and steps else None
        return None if part is None or known is None else self.in_whole(part, known.joined, known.missing)

    def in_whole(self, part: Group, joined: Sequence[int] | None, missing: Sequence[int] | None) -> Arrivals | None:
        """What a part knows, in ranks of the whole."""
        if joined is None or missing is None:
            return None
        members = self.members[part]
        return Arrivals(tuple(members[r] for r in joined), tuple(members[r] for r in missing))


def in_terms_of_whole(
    error: Exception,
    members: Sequence[int],
    ledger: Ledger,
    work: Work | None,
    membership: Membership | None,
) -> Exception:
    """The error of the whole, during `work`, when a part of `members` has failed with `error`. See Note [One failure]."""
    where = ledger.where(work)
    if isinstance(error, CollectiveMismatch):
        ops = {members[r]: s for r, s in error.ops.items() if r < len(members)}
        return chained(CollectiveMismatch(f"{where}: {error}", ops=ops), error)
    if not isinstance(error, (PeerLost, GroupAborted)):
        return error
    rank, why = None, "a peer is gone"
    if isinstance(error, PeerLost) and error.rank is not None:
        rank, why = members[error.rank], str(error)
    elif membership is not None:
        place, patience = 0 if work is None else work.place, 1.0 if isinstance(error, PeerLost) else 0.0
        rank, why = find_culprit(membership, place, patience=patience)
    if rank is not None:
        text = f"{where}: rank {rank} is lost. Look at its output for the cause; make a new group to go on. What is known: {why}"
        return chained(PeerLost(text, rank=rank, op=error.op if isinstance(error, PeerLost) else None), error)
    if isinstance(error, GroupAborted):
        return chained(ledger.aborted(error.reason, work), error)
    return chained(PeerLost(f"{where}: {why}. {error}", op=error.op), error)


@contextmanager
def in_ranks_of_whole(members: Sequence[int], rendezvous: Rendezvous) -> Iterator[None]:
    """While a part of `members` is made: its errors about ranks in terms of the whole, which meets in `rendezvous`."""
    try:
        yield
    except PeerLost as error:
        if rendezvous.found(error) or error.rank is None:
            raise
        raise PeerLost(f"{rendezvous.who}: {error}", rank=members[error.rank]) from error
    except CollectiveTimeout as error:
        if rendezvous.found(error) or error.missing is None:
            raise
        missing = rendezvous.missing_of_all([members[rank] for rank in error.missing])
        joined = [rank for rank in range(rendezvous.size) if rank not in missing]
        raise rendezvous.absent(missing, joined) from error


def interrupted(work: Work, error: BaseException) -> GroupAborted:
    """The error for an operation that `error`, such as Ctrl-C, has broken off on this rank."""
    why = f"rank {work.ledger.rank} broke {work.op} off: {type(error).__name__}{f': {error}' if str(error) else ''}"
    return GroupAborted(f"{work.ledger.where(work)}: {why}. Every rank can call recover() to go on.", reason=why)


def for_part(error: BaseException, members: Sequence[int], name: str) -> BaseException:
    """What to fail a part of `members` with, when the whole, called `name`, has failed with `error`."""
    if isinstance(error, PeerLost) and error.rank in members:
        return PeerLost(str(error), rank=members.index(error.rank), op=error.op)
    if isinstance(error, CollectiveTimeout):
        joined, missing = (
            None if ranks is None else tuple(members.index(rank) for rank in ranks if rank in members)
            for ranks in (error.joined, error.missing)
        )
        return CollectiveTimeout(str(error), op=error.op, joined=joined, missing=missing)
    if isinstance(error, GroupAborted):
        return error
    return GroupAborted(f"{name} has failed: {error}", reason=str(error))
