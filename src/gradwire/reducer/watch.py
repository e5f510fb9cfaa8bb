"""What can be told of gradients by looking at `.grad`, without being called for each.

It knows parameters and their `.grad`. It does not know buckets, the machine, or what is done about what it sees.

Note [Silent gradients]
To have any hook called costs the engine three microseconds a gradient on a slow core, and the bare model has none. So on the
CPU, after a step that was *plain*, hooks stay only on the parameter whose gradient comes first, the opener, and on those that
fill buckets, the closers. When a closer comes, the gradients of its bucket are looked at; if all are there, it is launched.

Why a gradient that is there is complete: within one graph task the engine sums up everything that flows to a leaf, and then
accumulates once. At the opener all other `.grad` were None, so one that is not None now has been accumulated since, in this
backward, as no backward can begin on this thread before another has ended but a re-entrant one. And nothing is looked at
while an accumulation is half done: one thread runs the backward, and it is in our hook.

A plain step is one in which that was seen to hold while every gradient spoke: all other `.grad` were None when the first
gradient came (`zero_grad(set_to_none=True)`, before or after forward), the graph task in which it came brought all others,
and no `.grad` changed between the launch of its bucket and the end of backward. Programs that accumulate, that zero in place,
or that checkpoint re-entrantly are not plain. They are listened to quietly instead: see [Quiet gradients] in `reducer.py`.

What happens when a silent step is not like the last one:
- A closer comes and a gradient of its bucket is not there yet, another order launches other buckets, the graph task ends and
  something is missing: every parameter is given its hook at once, what is there by now is counted, and the rest of the step is
  as loud as the first. Nothing is launched too early, and what is missing in the end is named as always.
- The opener comes and something is there already: it came earlier, in another order, or it is left over. It came if it is
  another tensor than at the end of forward, or has another version. An in-place zeroing between forward and backward looks
  the same; so these are remembered, and if one comes after all, that is an error and no silent mistake.
- A backward raises: the engine drops what was queued at the opener, and what is there then is counted, so that the error of
  the next forward names the right parameters.
- A gradient is accumulated a second time, by a re-entrant backward. If before its bucket is launched, the sum is complete and
  right, and nothing is said (torch refuses this too). If after, the gradient's version, or the tensor, is another at the end
  of backward than at the launch, and the step fails with ReadyTwice before anything is put back.

After three such surprises the program is not one for silence, and it is not tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter, is_, is_not

from torch import Tensor

_PATIENCE = 3
_version: Callable[[Tensor | None], int] = attrgetter("_version")


class Watch:
    """Looks at the gradients of one model, and judges whether steps are plain. See [Silent gradients]."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self.plain = False
        """Whether the last step was."""
        self.odd = False
        """Whether something in this step is not as in a plain one."""
        self.surprises = 0
        self.certain = False
        """Whether every gradient that is there, has come in this step."""
        self._before: dict[int, tuple[Tensor, int]] = {}
        self._nothing_left_over = False
        self._launched: dict[int, tuple[Sequence[Tensor], Sequence[Tensor | None], list[int]]] = {}
        self.now: dict[int, list[Tensor | None]] = {}
        """Of each bucket launched, its gradients as `changed` found them."""

    @property
    def patient(self) -> bool:
        """Whether it makes sense to go on."""
        return self.surprises < _PATIENCE

    def surprised(self) -> None:
        """This step was to be plain and is not."""
        self.odd = True
        self.surprises += 1

    def forget(self) -> None:
        """Let go of gradients."""
        self._nothing_left_over = False
        self._before.clear()
        self._launched.clear()
        self.now.clear()

    # -- a step, in this order -------------------------------------------------------------------------------------------

    def prepared(self) -> None:
        """A forward has ended: note what is left over."""
        self.forget()
        gradients = [p.grad for p in self._parameters]
        self._nothing_left_over = all(map(is_, gradients, repeat(None)))
        if not self._nothing_left_over:
            self._before = {i: (g, g._version) for i, g in enumerate(gradients) if g is not None}

    def opened(self, index: int) -> bool:
        """The first gradient has come, that of `index`. Whether no other is there, or left over."""
        self.plain = False
        self.certain = self._nothing_left_over or [i for i, p in enumerate(self._parameters) if p.grad is not None] == [
            index
        ]
        self.odd = not self.certain
        if self.certain:
            self._before.clear()
        return self.certain

    def come(self, indices: Iterable[int]) -> list[int]:
        """Those of `indices` whose gradients have come since `prepared`."""
        return [i for i in indices if self._has_come(i)]

    def _has_come(self, index: int) -> bool:
        grad = self._parameters[index].grad
        if grad is None:
            return False
        before, version = self._before.get(index, (None, 0))
        return grad is not before or grad._version != version

    def launched(self, bucket: int, members: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """A bucket is launched with these gradients: from now on they must not change."""
        if all_there(gradients):
            self._launched[bucket] = members, gradients, list(map(_version, gradients))
        else:
            self.odd = True

    def changed(self) -> list[Tensor]:
        """Parameters whose gradients are not those that were launched."""
        found: list[Tensor] = []
        for bucket, (members, gradients, versions) in self._launched.items():
            now = self.now[bucket] = [p.grad for p in members]
            if not all(map(is_, now, gradients)) or list(map(_version, now)) != versions:
                rows = zip(members, now, gradients, versions, strict=True)
                found += [p for p, g, launched, v in rows if g is not launched or (g is not None and g._version != v)]
        self._launched.clear()
        self.odd = self.odd or bool(found)
        return found

    def ended(self) -> None:
        """The step is over, and all went well."""
        self.plain = not self.odd
        self.forget()


def all_there(gradients: Sequence[Tensor | None]) -> bool:
    """Whether none is None. (`in` would compare tensors.)"""
    return all(map(is_not, gradients, repeat(None)))
