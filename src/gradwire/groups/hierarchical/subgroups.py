"""`GroupParts`: the groups that a two-level group is made of, and which ranks of the whole are in each.

Note [Three parts]
`inside` has the ranks of this host. `across` has, for each carrier, the ranks with its place in all hosts (see Note [Rails]).
`messages`, if there is one, has all ranks in order, and carries sends and receives, also those within a host. They could go through
`inside` where both ends are on one host. But a receive from any rank would then have to wait in two groups at once, and an engine
cannot cancel the receive that got no message: it would take a later one. A sender does not know what its receiver has asked for,
so the route must depend on neither. Without `messages` a message goes through `inside` or `across` where both ends are in it, and
a receive from any rank is refused. A sub-group's `across` is made from `messages` as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from gradwire.collectives import Collective, Layout, Scope
from gradwire.errors import UsageError
from gradwire.groups.base import Group
from gradwire.groups.hierarchical.subgroup_failures import in_ranks_of_whole
from gradwire.groups.ledger import Arrivals
from gradwire.groups.store.rendezvous import Rendezvous

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


@dataclass(frozen=True, slots=True, eq=False)
class GroupParts:
    """See Note [Three parts]. `members` has the ranks of the whole that are in each part, in the part's order."""

    layout: Layout
    rank: int
    inside: Group
    across: Group | None
    messages: Group | None
    members: dict[Group, tuple[int, ...]]

    @classmethod
    def of(cls, layout: Layout, rank: int, inside: Group, across: Group | None, messages: Group | None) -> GroupParts:
        """Check that the groups fit the layout."""
        mates = layout.hosts[layout.place(rank)[0]]
        everyone = tuple(range(layout.size))
        if messages is None and len(layout.hosts) == 1 and mates == everyone:
            messages = inside
        carries = len(layout.hosts) > 1 and inside.rank < layout.width
        fits = {
            "inside": (inside, mates[inside.rank : inside.rank + 1] == (rank,) and inside.size == len(mates)),
            "across": (across, across is not None and across.size == len(layout.hosts) if carries else across is None),
            "messages": (messages, messages is None or (messages.rank, messages.size) == (rank, layout.size)),
        }
        for part, (group, fit) in fits.items():
            if not fit:
                raise UsageError(
                    f"HierarchicalGroup: {part} is {group}, which does not fit rank {rank} of {layout}. See the "
                    "constructor for the ranks of each group."
                )
        members = {inside: mates}
        if across is not None:
            members[across] = tuple(ranks[inside.rank] for ranks in layout.hosts)
        if messages is not None:
            members[messages] = everyone
        return cls(layout, rank, inside, across, messages, members)

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
