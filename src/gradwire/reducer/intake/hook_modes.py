"""Chooses how the reducer learns of gradients: a HookMode for each step, from what the steps before have shown.

Pure: it knows parameters by their indices, never tensors, hooks or buckets' memory, so every rule is a row of a table test.
`arrivals.py` carries out what is chosen here.

Note [Last per bucket]
To be called for every gradient is what costs most: by the time the next one arrives the engine has pushed this code out of the
caches, so a call takes 5 to 10 microseconds on a slow core. All but a few of these calls change nothing: in a step like the last
one, buckets are launched when the same gradients arrive. So once a step has shown which these are, all other hooks only append
their parameter to a list, which takes no Python at all, and the state machine processes them, in order, when one of the
few arrives, when backward ends, and when a new step begins. Nothing is missed and nothing is launched later: only a bucket's
own last gradient can fill it, and when one of the few launches other buckets than last time, the order has changed and every
gradient calls until the end of the step.

Note [Poll]
To have any hook called costs the engine three microseconds a gradient on a slow core, and the bare model has none. So on the
CPU, after a *regular* step, hooks stay only on the parameters that fill buckets. When one of them arrives, the `.grad` of the
others in its bucket is looked at; if all are there, the bucket is launched. In addition there is one hook on the model's output,
which a backward reaches first: it queues a look at what has arrived for the end of that backward, however it ends.

Why a gradient that is there is complete: within one graph task the engine sums up everything that flows to a leaf, and then
accumulates once. At the end of forward every `.grad` was None, or the step does not poll. So one that is not None now has been
accumulated since. And nothing is looked at while an accumulation is half done: one thread runs the backward, and it is in our
hook.

A regular step is one in which every gradient called and polling would have done: no other `.grad` was there when the first
gradient arrived, the graph task in which it arrived brought all others, and no `.grad` changed between the launch of its bucket
and the end of backward. Programs that accumulate, zero in place or checkpoint re-entrantly are irregular, and those that zero
between forward and backward find something left over at the end of forward. They get LAST_PER_BUCKET instead.

What happens when a step that polls is not like the last one:
- One of the few arrives and a gradient of its bucket is not there yet, other buckets are launched than last time, or the graph
  task ends having brought something but not all: every parameter gets its hook at once, what is there by now is counted, and the
  rest of the step is as in the mode ALL. Nothing is launched too early, and what is missing in the end is named as always.
- A backward raises: the engine drops what was queued at its beginning, and what is there then is counted, so that the error of
  the next forward names the right parameters.
- A gradient is accumulated a second time, by a re-entrant backward or by another one. If before its bucket is launched, the
  sum is complete and right, and there is no error (torch, and the other modes, refuse this). If after, the tensor or its
  version differs at the end of backward from that at the launch, and the step fails with ReadyTwice before anything is put
  back. The same happens to a program that suddenly writes to `.grad` itself between forward and the end of backward.
- A backward reaches neither an output of the model nor one of the few, but other parameters: it is not noticed, if their
  gradients are gone before they are looked at. Such a loss was not computed from the model's outputs, which torch requires.

After three such steps the program is not one for polling, and it is not tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gradwire.autograd.grad_hooks import HookMode

_IRREGULAR_STEPS_ALLOWED = 3


class Listening:
    """The mode of the current step, and what the steps so far allow for the next."""

    def __init__(self) -> None:
        self.mode = HookMode.ALL
        self.expected: Mapping[int, int] = {}
        """Where not all call: the parameters that do, each with how many buckets its gradient launches."""
        self.watching = False
        """Whether it matters if this step is regular."""
        self._regular = False
        self._irregular = False
        self._irregular_steps = 0
        self._launches: dict[int, int] = {}
        self._last_launches: dict[int, int] = {}

    @property
    def last_per_bucket(self) -> Mapping[int, int]:
        """The gradients that launched buckets in the last step, each with how many."""
        return self._last_launches

    @property
    def polling(self) -> bool:
        """Whether most gradients of this step call no hook."""
        return self.mode is HookMode.POLL

    # -- a step, in this order -------------------------------------------------------------------------------------------

    def choose(self, *, need_all: bool, can_poll: bool, clean: Callable[[], bool]) -> HookMode:
        """The mode for the backward to come. `clean()`: no parameter is frozen that must call, and none has a `.grad` yet."""
        self._launches = {}
        self.watching = can_poll and self._irregular_steps < _IRREGULAR_STEPS_ALLOWED
        if need_all or not self._last_launches:
            self.mode = HookMode.ALL
        elif not self.watching:
            self.mode = HookMode.LAST_PER_BUCKET
        elif self._regular and clean():
            self.mode = HookMode.POLL
        else:
            self._irregular_steps += 1
            self.mode = HookMode.ALL
        self.expected = {} if self.mode is HookMode.ALL else self._last_launches
        return self.mode

    def first_arrived(self, *, others_there: bool) -> None:
        """The first gradient of the step has arrived. Were `.grad`s of other parameters there already?"""
        self._regular = False
        self._irregular = others_there

    def launched(self, index: int, buckets: int) -> None:
        """The gradient of `index` has launched so many buckets."""
        self._launches[index] = buckets

    def must_fall_back(self, index: int, buckets: int) -> bool:
        """Whether the gradient of `index`, which has launched so many buckets, calls for falling back to ALL."""
        return self.mode is not HookMode.ALL and self.expected.get(index, 0) != buckets

    def mark_irregular(self) -> None:
        """Polling would have missed gradients in this step."""
        self._irregular = True

    def fall_back(self) -> None:
        """Every gradient calls for the rest of the step."""
        if self.polling:
            self._irregular = True
            self._irregular_steps += 1
        self.mode, self.expected = HookMode.ALL, {}

    def ended(self) -> None:
        """The step has succeeded: the next one is expected to be like it."""
        self._last_launches = self._launches
        if self.watching:
            self._regular = not self._irregular

    # -- what is no step -------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """The step has failed."""
        if self.polling:
            self.mode, self.expected = HookMode.ALL, {}

    def forget(self) -> None:
        """Buckets have changed: it is not known which gradients launch them."""
        self._launches, self._last_launches = {}, {}
