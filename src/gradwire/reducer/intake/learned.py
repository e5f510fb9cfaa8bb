"""What steps show of a model: BucketOrder learns in which order gradients arrive, UsedParameters which parameters are used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from gradwire.collectives import all_reduce, broadcast
from gradwire.groups.base import Group
from gradwire.reducer.buckets.layout import BucketLayout, ParameterSpec, by_size


class BucketOrder:
    """The order in which the gradients of one model arrive. Buckets are rebuilt in that order once, after the first step. `limits`
    are the sizes of buckets in bytes; None: buckets are never rebuilt."""

    def __init__(self, parameters: Sequence[ParameterSpec], limits: Sequence[int] | None) -> None:
        self.limits = limits
        self.rebuilt = False
        self.last_arrival: list[int] = []
        """The parameters in the order in which their gradients arrived in the last step that showed it."""
        self.graph_seems_static = True
        """Whether the same parameters got gradients in all steps so far."""
        self._parameters = tuple(parameters)
        self._learned: list[int] | None = None

    def note(self, arrival: list[int]) -> None:
        """A step has ended in which gradients arrived in this order."""
        if self.last_arrival and arrival != self.last_arrival and set(arrival) != set(self.last_arrival):
            self.graph_seems_static = False
        self.last_arrival = arrival
        if arrival:
            self.learn(arrival)

    def learn(self, arrival: Sequence[int] = ()) -> None:
        """Learn this order. In a step of other ranks any will do, since rank 0's is taken."""
        if self._learned is None and not self.rebuilt:
            self._learned = list(dict.fromkeys([*arrival, *range(len(self._parameters))]))

    def names(self, layout: BucketLayout) -> list[str]:
        """The parameters in the order in which gradients arrive, once that is known: for `expect`."""
        known = [i for members in layout.members for i in members] if self.rebuilt else self._learned or []
        return [self._parameters[i].name for i in known]

    def expect(self, names: Sequence[str]) -> None:
        """Take this order, which an earlier run has learned. Names of another model are ignored."""
        index = {spec.name: i for i, spec in enumerate(self._parameters)}
        if not self.rebuilt and index.keys() == set(names):
            self._learned = [index[name] for name in names]

    def forget(self) -> None:
        self.rebuilt = False
        self._learned = None

    def rebuild(self, group: Group | None, device: torch.device) -> BucketLayout | None:
        """Buckets in the order in which rank 0's gradients arrived; None before it is known, and once `rebuilt`. A collective.
        Without a group, in the order that was learned, which is then the same on all ranks."""
        if self.rebuilt or self.limits is None or self._learned is None:
            return None
        order = torch.tensor(self._learned, dtype=torch.int64, device=device)
        if group is not None:
            group.submit(broadcast(order, src=0, label="bucket order")).wait()
        return BucketLayout.make(self._parameters, by_size(self._parameters, self.limits, order=order.tolist()))

    def unused_nbytes(self) -> int:
        seen = set(self.last_arrival)
        return sum(spec.nbytes for i, spec in enumerate(self._parameters) if i not in seen)


class UsedParameters:
    """What this rank used in a step, and what no rank used: such gradients are left as they are. Ranks exchange what they used at
    the end of every step (`track`), or once for a static graph."""

    def __init__(self, count: int, *, track: bool, device: torch.device) -> None:
        self.track = track
        self.counts = torch.zeros(count, dtype=torch.int32, device="cpu")
        """How many ranks had a gradient for each parameter when they last exchanged it."""
        self.exchanged = track
        """Whether ranks exchange what they used at the end of this step."""
        self.learning = False
        """Whether the next backward shows what a static graph uses."""
        self.learning_unused = False
        """Whether the end of this step shows what no rank uses in a static graph."""
        self.uses: Counter[int] = Counter()
        """Of each parameter, in the first backward of a static graph. One that failed may have counted some."""
        self._device = device
        self.seen: set[int] = set()
        """Parameters that have a gradient, perhaps from under no_sync: what has accumulated there is reduced later."""
        self._static_unused: frozenset[int] = frozenset()

    def learn_static_graph(self) -> None:
        """Count uses in the next backward, and exchange what is used once, at its end."""
        self.learning = self.learning_unused = self.exchanged = True
        self.uses = Counter()

    def pop_first_uses(self) -> Counter[int]:
        """How often each parameter got a gradient, in order of the first. If any did, the graph has been learned."""
        uses, self.uses = self.uses, Counter()
        self.learning = not uses
        return uses

    def unused_everywhere(self, group: Group) -> frozenset[int]:
        """The parameters that no rank used. A collective, if they are exchanged in this step."""
        if not self.exchanged:
            return self._static_unused
        mine = [i in self.seen for i in range(len(self.counts))]
        self.counts = torch.tensor(mine, dtype=torch.int32, device=self._device)
        group.submit(all_reduce(self.counts, label="used parameters")).wait()
        self.seen.clear()
        unused = frozenset(i for i, ranks in enumerate(self.counts.tolist()) if ranks == 0)
        if self.learning_unused:
            self._static_unused, self.learning_unused, self.exchanged = unused, False, self.track
        return unused
