"""UsedParameters: which parameters got a gradient on any rank, and how often each is used in a static graph."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gradwire.collectives import all_reduce
from gradwire.groups.base import Group


class UsedParameters:
    """What this rank used in a step, and what no rank used: such gradients are left as they are.

    Ranks exchange what they used at the end of every step (`track`), or once for a static graph.
    """

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
        self._uses: dict[int, int] = {}  # in the first backward of a static graph, of each parameter
        self._device = device
        self._seen = [False] * count
        self._static_unused: frozenset[int] = frozenset()

    def learn_static_graph(self) -> None:
        """Count uses in the next backward, and exchange what is used once, at its end."""
        self.learning = self.learning_unused = self.exchanged = True
        self.forget_first_uses()

    def forget_first_uses(self) -> None:
        """A backward that failed may have counted some."""
        self._uses = {}

    def count(self, indices: Iterable[int]) -> None:
        """In the first backward of a static graph, these parameters have got a gradient."""
        for i in indices:
            self._uses[i] = self._uses.get(i, 0) + 1

    def has_counted(self, index: int) -> bool:
        """Whether a parameter has got a gradient in the first backward of a static graph."""
        return self.learning and index in self._uses

    def pop_first_uses(self) -> dict[int, int]:
        """How often each parameter got a gradient, in order of the first. If any did, the graph has been learned."""
        uses, self._uses = self._uses, {}
        self.learning = not uses
        return uses

    def seen(self, indices: Iterable[int]) -> None:
        """These parameters have a gradient, perhaps from under no_sync: what has accumulated there is reduced later."""
        for i in indices:
            self._seen[i] = True

    def reset(self) -> None:
        """Nothing has been seen in this step."""
        self._seen = [False] * len(self._seen)

    def unused_everywhere(self, group: Group) -> frozenset[int]:
        """The parameters that no rank used. A collective, if they are exchanged in this step."""
        if not self.exchanged:
            return self._static_unused
        self.counts = torch.tensor(self._seen, dtype=torch.int32, device=self._device)
        group.submit(all_reduce(self.counts, label="used parameters")).wait()
        self.reset()
        unused = frozenset(i for i, ranks in enumerate(self.counts.tolist()) if ranks == 0)
        if self.learning_unused:
            self._static_unused, self.learning_unused, self.exchanged = unused, False, self.track
        return unused
