"""What can be told of gradients by looking at `.grad`, without being called for each.

It knows parameters and their `.grad`. It does not know buckets, the machine, or what is done about what it sees.

Note [Silent gradients]
To have any hook called costs the engine three microseconds a gradient on a slow core, and the bare model has none. So on the
CPU, after a step that was *plain*, hooks stay only on the parameters that fill buckets, the closers. When one comes, the
gradients of its bucket are looked at; if all are there, it is launched. Beside them there is one hook on the model's output,
through which a backward comes first: it queues a look at what has come when that backward ends, however it does.

Why a gradient that is there is complete: within one graph task the engine sums up everything that flows to a leaf, and then
accumulates once. At the end of forward every `.grad` was None, or the step is not silent. So one that is not None now has been
accumulated since. And nothing is looked at while an accumulation is half done: one thread runs the backward, and it is in
our hook.

A plain step is one in which every gradient spoke and it was seen that silence would have done: no other `.grad` was there when
the first gradient came, the graph task in which it came brought all others, and no `.grad` changed between the launch of its
bucket and the end of backward. Programs that accumulate, that zero in place, or that checkpoint re-entrantly are not plain,
and those that zero between forward and backward find something left over at the end of forward. They are listened to quietly
instead: see [Quiet gradients] in `reducer.py`.

What happens when a silent step is not like the last one:
- A closer comes and a gradient of its bucket is not there yet, other buckets are launched than last time, or the graph task
  ends and has brought something but not all: every parameter gets its hook at once, what is there by now is counted, and the
  rest of the step is as loud as the first. Nothing is launched too early, and what is missing in the end is named as always.
- A backward raises: the engine drops what was queued at its beginning, and what is there then is counted, so that the error
  of the next forward names the right parameters.
- A gradient is accumulated a second time, by a re-entrant backward or by another one. If before its bucket is launched, the
  sum is complete and right, and nothing is said (torch, and every loud step, refuses this too). If after, the tensor, or its
  version, is another at the end of backward than at the launch, and the step fails with ReadyTwice before anything is put
  back. The same befalls a program that suddenly writes to `.grad` itself between forward and the end of backward.

- A backward reaches neither an output of the model nor a closer, but other parameters: it is not noticed, if their gradients
  are gone before they are looked at. Such a loss was not computed from the model's outputs, where torch asks for that.

After three such surprises the program is not one for silence, and it is not tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        self._launched.clear()
        self.now.clear()

    # -- a step, in this order -------------------------------------------------------------------------------------------

    def untouched(self) -> bool:
        """Asked at the end of forward: whether there are no gradients from before, and no hooks of others that run after
        accumulation, which may take `.grad` away."""
        return all(p.grad is None and not p._post_accumulate_grad_hooks for p in self._parameters)

    def opened(self, index: int, *, look: bool) -> None:
        """The first gradient has come, that of `index`. If told to `look`, see whether others are there already."""
        self.forget()
        self.plain = False
        self.odd = look and any(p.grad is not None for i, p in enumerate(self._parameters) if i != index)

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
