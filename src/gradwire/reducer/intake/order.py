"""BucketOrder: learns in which order gradients arrive, and so how parameters are assigned to buckets."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.collectives import broadcast
from gradwire.groups.base import Group
from gradwire.reducer.buckets.layout import BucketLayout, ParameterSpec, by_size


class BucketOrder:
    """The order in which the gradients of one model arrive. Buckets are rebuilt in that order once, after the first step.

    `limits` are the sizes of buckets in bytes; None: buckets are never rebuilt.
    """

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
        if self._learned is None and not self.rebuilt and arrival:
            seen = set(arrival)
            self._learned = arrival + [i for i in range(len(self._parameters)) if i not in seen]

    def note_shadow_step(self) -> None:
        """Other ranks have learned the order in this step; any order will do here, since rank 0's is taken."""
        if self._learned is None and not self.rebuilt:
            self._learned = list(range(len(self._parameters)))

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
        """Learn the order again, and rebuild buckets once more after the next step."""
        self.rebuilt = False
        self._learned = None

    def rebuild(self, group: Group, device: torch.device) -> BucketLayout | None:
        """Buckets in the order in which rank 0's gradients arrived; None before it is known, and once `rebuilt`. A collective."""
        if self.rebuilt or self.limits is None or self._learned is None:
            return None
        order = torch.tensor(self._learned, dtype=torch.int64, device=device)
        group.submit(broadcast(order, src=0, label="bucket order")).wait()
        return BucketLayout.make(self._parameters, by_size(self._parameters, self.limits, order=order.tolist()))

    def unused_nbytes(self) -> int:
        """Bytes of parameters that got no gradient in the last step."""
        seen = set(self.last_arrival)
        return sum(spec.nbytes for i, spec in enumerate(self._parameters) if i not in seen)
