"""Hooks made of hooks: `Composite`, of any number of them, and `Wrapped`, around one.

A combinator defines `reduce` (or `Wrapped.around`) and whatever differs from what is folded over its parts here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from gradwire.hooks.base import CommHook, Reduction, Trait, Turn
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.numerics.elementwise import wide
from gradwire.hooks.state import Owed, bundle, join_flat, join_owed, pick, split_flat

Reduce = Callable[[Tensor, Any, Turn], Reduction]
"""A hook's `reduce` or `reduce_scatter`."""


class Composite(CommHook):
    """A hook made of hooks. What a subclass does not define is folded over `parts`.

    The state of a bucket is a dict with the state of each part under the part's name, and a tensor of the bucket's size for each
    name in `tensors`, zero at first and in float32 for 16-bit gradients. Saved states have the same keys.
    """

    tensors: tuple[str, ...] = ()
    """What it keeps by itself. It belongs to its rank, so it is not shared."""
    owes: tuple[str, ...] = ()
    """Which of these hold what was not sent yet."""

    @property
    def parts(self) -> Mapping[str, CommHook]:
        """The hooks inside, by the name under which their state is saved."""
        return {}

    @property
    def traits(self) -> Trait:
        """The traits of all parts, without `AVERAGES`: `mean()` cannot follow it in a chain."""
        return Trait.of(*self.parts.values())

    def check(self, spec: BucketSpec) -> None:
        CommHook.check(self, spec)
        for part in self.parts.values():
            part.check(spec)

    def init(self, spec: BucketSpec) -> Any:
        return self._own({}, spec) | {name: part.init(spec) for name, part in self.parts.items()}

    def _own(self, saved: Mapping[str, Any], spec: BucketSpec) -> dict[str, Any]:
        return {name: join_flat(pick(saved, name), spec, dtype=wide(spec.dtype)) for name in self.tensors}

    def error(self, spec: BucketSpec) -> float:
        return max((part.error(spec) for part in self.parts.values()), default=CommHook.error(self, spec))

    def save(self, state: Any, spec: BucketSpec) -> dict[str, Any]:
        own = {name: split_flat(state[name], spec) for name in self.tensors}
        parts = {name: part.save(state[name], spec) for name, part in self.parts.items() if name in state}
        return bundle(**own, **parts)

    def load(self, saved: Mapping[str, Any], spec: BucketSpec) -> Any:
        return self._own(saved, spec) | {n: part.load(pick(saved, n), spec) for n, part in self.parts.items()}

    def shared(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        return bundle(**{name: part.shared(pick(saved, name)) for name, part in self.parts.items()})

    @property
    def structure(self) -> str:
        inside = "; ".join(part.structure for part in self.parts.values())
        return f"{type(self).__qualname__}({inside})" if self.parts else type(self).__qualname__

    def owed(self, saved: Mapping[str, Any]) -> Owed | None:
        own = [pair for name in self.owes for pair in pick(saved, name).items()]
        return join_owed([own, *(part.owed(pick(saved, name)) for name, part in self.parts.items())])


@dataclass(frozen=True, slots=True, repr=False)
class Wrapped(CommHook):
    """A hook around one other, as stages make it. What a subclass does not define is that of the inner hook, state included.

    Except `passes_nonfinite`, which would miss what the stage itself makes of a NaN: it is False.
    """

    inner: CommHook

    adds = Trait(0)
    """Its own traits: it has those of the inner hook too."""

    @property
    def collectives(self) -> int | None:
        return self.inner.collectives

    @property
    def traits(self) -> Trait:
        return self.inner.traits | self.adds

    def inside(self, spec: BucketSpec) -> BucketSpec:
        """The bucket as the inner hook sees it."""
        return spec

    def check(self, spec: BucketSpec) -> None:
        CommHook.check(self, spec)
        self.inner.check(self.inside(spec))

    def init(self, spec: BucketSpec) -> Any:
        return self.inner.init(self.inside(spec))

    def around(self, reduce: Reduce, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        """What the stage does, with `reduce` for the inner hook's `reduce` or `reduce_scatter`. Without it, it defines `reduce`."""
        raise NotImplementedError

    @property
    def scatters(self) -> bool:
        return type(self).around is not Wrapped.around and self.inner.scatters

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        return self.around(self.inner.reduce, grad, state, turn)

    def reduce_scatter(self, grad: Tensor, state: Any, turn: Turn) -> Reduction | None:
        return self.around(cast(Reduce, self.inner.reduce_scatter), grad, state, turn) if self.scatters else None

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        return self.inner.wire_bytes(self.inside(spec), world_size, step)

    def scatter_wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        return self.inner.scatter_wire_bytes(self.inside(spec), world_size, step) if self.scatters else None

    def error(self, spec: BucketSpec) -> float:
        return self.inner.error(self.inside(spec))

    def narrowest(self, dtype: torch.dtype) -> torch.dtype:
        return self.inner.narrowest(dtype)

    def save(self, state: Any, spec: BucketSpec) -> dict[str, Any]:
        return self.inner.save(state, self.inside(spec))

    def load(self, saved: Mapping[str, Any], spec: BucketSpec) -> Any:
        return self.inner.load(saved, self.inside(spec))

    def shared(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        return self.inner.shared(saved)

    @property
    def structure(self) -> str:
        """That of the inner hook, with the class around it if it saves state of its own."""
        inside = self.inner.structure
        return inside if type(self).save is Wrapped.save else f"{type(self).__qualname__}({inside})"

    def owed(self, saved: Mapping[str, Any]) -> Owed | None:
        return self.inner.owed(saved) if type(self).save is Wrapped.save else CommHook.owed(self, saved)

    def __repr__(self) -> str:
        return f"{self._call('inner')} > {self.inner!r}"
