"""Which gradient is which, for a group that is not told.

A hook's state belongs to a gradient, and the operation does not name it. But a model reduces its gradients in the same order in
each backward. So a gradient is identified by those before it in the same backward: by the lengths and dtypes of all of them.
Backwards that begin alike and continue differently (two models that share the group) thus have states of their own; models of equal
shapes do not. What the first backwards reduce is learned at once, since torch's DDP has other buckets in its first ones; later a
sequence is learned when it occurs for the second time. From the place where a backward departs from what was learned, states belong
to lengths and dtypes.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gradwire.hooks.base import CommHook
from gradwire.hooks.bucket import BucketSpec


class GradientPlaces:
    """Which gradient of a backward is which: see the note above."""

    _LEARNED_AT_ONCE = 4
    _LEARNED_LATER = 8

    def __init__(self, hook: CommHook) -> None:
        self._hook = hook
        self._numbers: dict[tuple[Any, ...], int] = {}
        """Of gradients: those that were learned by (number of the one before, length, dtype), the others by (None, how many equal
        ones came before in the same backward, length, dtype)."""
        self._followed: set[int] = set()
        """The numbers after which another gradient was learned."""
        self._backwards = self._learned_later = 0
        self._now: list[tuple[int, str]] = []
        self._departed: deque[tuple[tuple[int, str], ...]] = deque(maxlen=2 * self._LEARNED_LATER)
        """Backwards that departed from what was learned: the last ones."""
        self._at: int | None = -1
        """The number of the last gradient; None after a departure."""
        self._warned = not hook.structure  # nothing depends on it then

    def begin(self) -> None:
        """The last backward is over, and another one begins."""
        last, self._now = tuple(self._now), []
        if self._at is None:
            if last in self._departed and self._learned_later < self._LEARNED_LATER:
                self._learned_later += 1
                self._at = -1
                for what in last:
                    self._at = self._number(*what, learn=True)
                self._departed.remove(last)
            else:
                self._departed.append(last)
        elif last and self._at in self._followed:
            self._warn(f"the last one ended after {len(last)}")
        self._backwards += 1
        self._at = -1

    def next(self, gradient: Tensor) -> BucketSpec:
        """The bucket of the next gradient of this backward."""
        what = numel, dtype = gradient.numel(), str(gradient.dtype).removeprefix("torch.")
        same = self._now.count(what)
        self._now.append(what)
        if self._at is not None:
            self._at = self._number(numel, dtype, learn=self._backwards <= self._LEARNED_AT_ONCE)
            if self._at is None:
                self._warn(f"number {len(self._now)} of this one, of {numel} elements in {dtype}, is new")
        number = self._at
        if number is None:
            number = self._numbers.setdefault((None, same, numel, dtype), len(self._numbers))
        name = f"gradient {number} of {numel} elements in {dtype}"
        return BucketSpec(number, (name,), ((numel,),), ((1,),), gradient.dtype, gradient.device)

    def _number(self, numel: int, dtype: str, *, learn: bool) -> int | None:
        """That of the gradient after the last one, if it was learned."""
        key = (self._at, numel, dtype)
        if learn and key not in self._numbers:
            assert self._at is not None
            self._followed.add(self._at)
            self._numbers[key] = len(self._numbers)
        return self._numbers.get(key)

    def saved(self) -> dict[str, Any]:
        """What a state needs to be loaded for the same gradients."""
        return {"keys": [list(key) for key in self._numbers], "backwards": self._backwards}

    def load(self, saved: Mapping[str, Any]) -> None:
        self._numbers = {tuple(key): number for number, key in enumerate(saved["keys"])}
        self._followed = {key[0] for key in self._numbers if key[0] is not None}
        self._backwards, self._now, self._at = int(saved["backwards"]), [], -1

    def _warn(self, how: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"HookedGroup({self._hook!r}): backwards differ in the gradients that they reduce: {how}. A group does not learn "
                "the names of gradients, so the hook's state belongs to places in this sequence, and from the first difference on "
                "to lengths, until the sequence recurs. If layers are skipped or frozen from step to step, use a hook without "
                "state, or one that gets names: as_fsdp_hook, or DistributedDataParallel. Of many models, give each its own group.",
                stacklevel=2,
            )
