"""`hierarchical`: one hook within each host, another between hosts.

Note [Two levels of a reduction]
Within the host, all ranks reduce the bucket with the `inside` hook. Then every carrier (see Note [Rails] in `collectives.layout`)
reduces its slice of the host's mean with the `across` hook over the carriers of its rail, one per host, and the slices are gathered
within the host. A host with n of N counted ranks, one of h hosts, contributes its mean times n h / N. What `across` lost of a slice
is added to the `sent` of the carrier n times, because the carrier's share in the mean is n times smaller.

Note [Slices are rows]
A carrier's slice consists of rows of every parameter, so that in the `across` hook matrices stay matrices, patterns of names match,
and state belongs to a parameter's rows. A parameter with fewer rows than rails, or not contiguous ones, is split as a vector.

Note [What is owed between hosts]
The state of a carrier in the `across` hook belongs to its rows in a rail over h hosts, and what it owes counts 1 / h in the
average. A saved state also has it as a gradient of the rank, which counts 1 / N with N ranks: N / h times as much. When ranks leave
or join, that is rescaled, and rails, rows and h may become others. Then what is owed in the hook's own state is dropped, and the
gradient is added to the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.collectives import Collective, Layout, Scope, all_gather, broadcast
from gradwire.errors import HookError
from gradwire.hooks.arguments import check_hooks, refuse_traits
from gradwire.hooks.base import CommHook, Reduced, Reduction, Trait, Turn
from gradwire.hooks.bucket import BucketSpec, Slices, is_dense
from gradwire.hooks.composite import Composite
from gradwire.hooks.dense import MEAN
from gradwire.hooks.numerics.elementwise import wide
from gradwire.hooks.pump import relay
from gradwire.hooks.state import Owed, add_owed, bundle, join_flat, join_owed, pick, split_flat


class RailSlice(NamedTuple):
    spec: BucketSpec
    rows: Slices


def slices(spec: BucketSpec, rails: int) -> tuple[RailSlice, ...]:
    """The bucket, split into one slice per rail. See Note [Slices are rows]."""
    if rails == 1:
        return (RailSlice(spec, Slices.of([(0, spec.numel)])),)
    cuts = [_cut(*one, rails) for one in zip(spec.shapes, spec.strides, spec.offsets, strict=True)]
    rails_of = [zip(*parts, strict=True) for parts in zip(*cuts, strict=True)]
    return tuple(RailSlice(replace(spec, shapes=a, strides=b), Slices.of(ranges)) for a, b, ranges in rails_of)


def _cut(
    shape: tuple[int, ...], stride: tuple[int, ...], offset: int, rails: int
) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, int]]]:
    """Shape, strides and range in the bucket of each rail's part of a parameter."""
    numel = torch.Size(shape).numel()
    if not (
        len(shape) > 1 and numel and shape[0] >= rails and stride[0] * shape[0] == numel and is_dense(shape, stride)
    ):
        shape, stride = (numel,), (1,)
    row = numel // shape[0] if numel else 0
    bounds = [rail * shape[0] // rails for rail in range(rails + 1)]
    return [
        ((end - start, *shape[1:]), stride, (offset + start * row, (end - start) * row))
        for start, end in pairwise(bounds)
    ]


@dataclass(slots=True)
class _Levels:
    inside: Any
    saved: dict[str, Any]
    """What was loaded for the hook between hosts, until it is known which slice this rank carries."""
    slices: tuple[RailSlice, ...] = ()
    rails: int = -1
    """The number of slices; 0 with one host, -1 before the first reduction."""
    rail: int = 0
    mine: RailSlice | None = None
    across: Any = None
    scale: float = 1.0
    """N / h of Note [What is owed between hosts]."""
    unsent: dict[str, Tensor] = field(default_factory=dict)
    """By parameter, as a gradient: what was owed between hosts when the state was saved."""

    def add_unsent(self, grad: Tensor, spec: BucketSpec) -> Tensor:
        """The gradient with what was owed, in new memory."""
        if not self.unsent:
            return grad
        grad = join_flat(self.unsent, spec, dtype=wide(grad.dtype)).add_(grad).to(grad.dtype)
        self.unsent = {}
        return grad


@dataclass(frozen=True, slots=True, repr=False)
class Hierarchical(Composite):
    inside: CommHook
    across: CommHook

    made_by = "hierarchical"
    dense_only = True

    @property
    def parts(self) -> Mapping[str, CommHook]:
        return {"inside": self.inside, "across": self.across}

    def init(self, spec: BucketSpec) -> _Levels:
        """The state of the inner level. Which slice this rank carries, if any, is known once `turn.hosts` is."""
        return _Levels(self.inside.init(spec), {})

    def reduce(self, grad: Tensor, state: _Levels, turn: Turn) -> Reduction:
        """See Note [Two levels of a reduction]."""
        layout = turn.hosts if turn.hosts is not None and len(turn.hosts.hosts) > 1 else None
        host, index = (0, 0) if layout is None else layout.place(turn.rank)
        self._assign_slice(state, turn, layout, index)
        grad = state.add_unsent(grad, turn.spec)
        if layout is None:
            return (yield from self.inside.reduce(grad, state.inside, replace(turn, hosts=None)))
        ranks, hosts = len(layout.hosts[host]), len(layout.hosts)
        within = replace(
            turn, rank=index, world_size=ranks, divisor=None, hosts=None, path=f"{turn.path}/inside {host}"
        )
        value, sent = yield from _among(Scope.INSIDE, self.inside.reduce(grad, state.inside, within))
        value, sent = value.view(-1), sent.view(-1)
        row, lost = value[:0], value[:0]
        if state.mine is not None:
            # In new memory, because a hook's result may be a part of its state.
            own = state.mine.rows.take(value) * (ranks * hosts / turn.counted)
            between = replace(
                within, spec=state.mine.spec, rank=host, world_size=hosts, path=f"{turn.path}/across {index}"
            )
            row, contributed = yield from _among(Scope.ACROSS, self.across.reduce(own, state.across, between))
            lost = row[:0] if turn.donated else contributed - own
        out = grad if turn.donated else torch.empty_like(grad)
        yield from self._share(row, out, state, ranks, f"bucket {turn.spec.index}")
        if turn.donated or state.mine is None:
            return Reduced(out, sent)
        sent, rows = sent.clone(), state.mine.rows
        rows.put(sent, rows.take(sent) + lost * (turn.counted / hosts))
        return Reduced(out, sent)

    def _assign_slice(self, state: _Levels, turn: Turn, layout: Layout | None, index: int) -> None:
        """At the first reduction: determine the slice that this rank carries, if any, and make the state for it."""
        rails = 0 if layout is None else layout.width
        if state.rails == rails:
            return
        state.rails, state.slices, state.mine = rails, slices(turn.spec, rails) if rails else (), None
        if layout is not None and index < rails:
            state.rail, state.mine, state.scale = index, state.slices[index], layout.size / len(layout.hosts)
            kept = {n: s["state"] for n, s in state.saved.items() if (s["lane"], s["lanes"]) == (index, rails)}
            for name, owed in self._as_gradients(kept, state, turn.spec).items():
                # A state of an earlier gradwire has no scale, and no gradient either.
                as_saved = state.saved[name].get("scale", state.scale) == state.scale
                gradient = state.unsent.get(name, owed)
                if as_saved and torch.equal(gradient, owed):
                    state.unsent.pop(name, None)
                else:
                    kept |= self.across.rebase({name: kept[name]}, 1, 0)
            state.across = self.across.load(kept, state.mine.spec) if kept else self.across.init(state.mine.spec)
        state.saved = {}

    def _as_gradients(self, saved: Mapping[str, Any], state: _Levels, spec: BucketSpec) -> dict[str, Tensor]:
        """What is owed between hosts, by parameter. See Note [What is owed between hosts]."""
        owed = self.across.owed(saved)
        if not owed or state.mine is None or Trait.MOMENTUM in self.across.traits:
            return {}
        flat = torch.zeros(spec.numel, dtype=wide(spec.dtype), device=spec.device)
        state.mine.rows.put(flat, join_flat(add_owed(owed), state.mine.spec, dtype=flat.dtype) * state.scale)
        owing = {name for name, _ in owed}
        return {name: part for name, part in split_flat(flat, spec).items() if name in owing}

    def _share(self, row: Tensor, out: Tensor, state: _Levels, ranks: int, label: str) -> Any:
        if len(state.slices) == 1:
            if state.mine is not None and row.data_ptr() != out.data_ptr():
                out.copy_(row.view_as(out))
            if ranks > 1:
                yield broadcast(out, src=0, label=label).among(Scope.INSIDE)
            return
        sizes = [s.rows.numel for s in state.slices] + [0] * (ranks - len(state.slices))
        rows = list(out.new_empty(sum(sizes)).split(sizes))
        yield all_gather(rows, row.reshape(-1).contiguous(), label=label).among(Scope.INSIDE)
        for one, part in zip(state.slices, rows, strict=False):
            one.rows.put(out, part)

    def bytes_between(self, spec: BucketSpec, layout: Layout, step: int = 0) -> float | None:
        """The bytes that the busiest rank sends to other hosts for a bucket; None if unknown."""
        hosts = len(layout.hosts)
        counts = [self.across.wire_bytes(one.spec, hosts, step) for one in slices(spec, layout.width)]
        known = [count for count in counts if count is not None]
        return max(known) if len(known) == len(counts) else None

    def error(self, spec: BucketSpec) -> float:
        return self.inside.error(spec) + self.across.error(spec) + CommHook.error(self, spec)

    def save(self, state: _Levels, spec: BucketSpec) -> dict[str, Any]:
        """The inner level's state of each parameter, and the outer level's of the rows that this rank carries."""
        across, unsent = state.saved, state.unsent
        if state.mine is not None:
            rows = {"lane": state.rail, "lanes": len(state.slices), "scale": state.scale}
            saved = self.across.save(state.across, state.mine.spec)
            across = {name: rows | {"state": one} for name, one in saved.items()}
            unsent = add_owed(unsent.items(), self._as_gradients(saved, state, spec).items())
        return bundle(
            inside=self.inside.save(state.inside, spec),
            across={name: across[name] for name in spec.names if name in across},
            unsent={name: unsent[name] for name in spec.names if name in unsent},
        )

    def load(self, saved: Mapping[str, Any], spec: BucketSpec) -> _Levels:
        """Both. If the hosts have changed, state of rows that this rank no longer carries is dropped at the first reduction."""
        return _Levels(
            self.inside.load(pick(saved, "inside"), spec), pick(saved, "across"), unsent=pick(saved, "unsent")
        )

    def shared(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """What both hooks share; that between hosts is for a rank that carries the same rows."""
        across = pick(saved, "across")
        common = self.across.shared({name: part["state"] for name, part in across.items()})
        return bundle(
            inside=self.inside.shared(pick(saved, "inside")),
            across={name: across[name] | {"state": state} for name, state in common.items()},
        )

    def owed(self, saved: Mapping[str, Any]) -> Owed | None:
        """What the hook within the host owes, and the hook between hosts as a gradient; unknown if that is a momentum."""
        between = self.across.owed({name: part["state"] for name, part in pick(saved, "across").items()})
        if between is None or (between and Trait.MOMENTUM in self.across.traits):
            return None
        return join_owed([list(pick(saved, "unsent").items()), self.inside.owed(pick(saved, "inside"))])


def _among(scope: Scope, reduction: Reduction) -> Reduction:
    def scoped(op: Collective) -> Collective:
        if not isinstance(op, Collective):
            return op  # refused by the check of the whole reduction
        if op.scope is not Scope.WORLD:
            raise HookError(f"hierarchical(): the hook {scope.value} yielded {op}, which has a scope already.")
        return op.among(scope)

    return relay(reduction, scoped)


def hierarchical(*, across: CommHook, inside: CommHook = MEAN) -> CommHook:
    """`inside` among the ranks of a host, then `across` between hosts, on the hosts' means.

    Requires a group with a host layout, `HierarchicalGroup`; on any other group all ranks count as one host, and `across` is not
    used. Hosts may differ in size: every rank has the same weight. Memory: a copy of the bucket. On the wire: within the host, what
    `inside` sends and one all-gather; between hosts, what `across` sends for the slice of each carrier:
    `hook.bytes_between(spec, layout)`. `wire_bytes` is None, since it depends on the hosts.

    >>> from gradwire.hooks import cast, chain, mean
    >>> hierarchical(across=chain(cast(torch.bfloat16), mean()))
    hierarchical(inside=mean(), across=cast(torch.bfloat16) > mean())
    """
    check_hooks("hierarchical", inside=inside, across=across)
    refused = {
        Trait.LOCAL: "it leaves gradients on their rank, so a host would have no mean to send. Use it by itself.",
        Trait.WEIGHS: "ranks would be weighted within hosts, and hosts equally, which is not the weighted mean. Use it by itself.",
    }
    for name, hook in (("inside", inside), ("across", across)):
        refuse_traits(f"hierarchical({name}={hook!r})", hook, refused)
    return Hierarchical(inside, across)
