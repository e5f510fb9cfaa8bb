"""`simulate`: one step of a hook on simulated ranks, in one thread and without a group; `simulate_outer`: an outer step.

The generators of all ranks advance in lockstep. Collectives run on the reference once all ranks that take part have yielded theirs,
and are compared first, as in a group. So a run is bitwise reproducible, can be stepped through in a debugger, and shows what would
be on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import Collective, Layout, Scope, Signature
from gradwire.collectives.matching import mismatch
from gradwire.collectives.op import sent_bytes
from gradwire.collectives.reference import perform
from gradwire.errors import CollectiveMismatch, UsageError
from gradwire.hooks import BucketSpec, CommHook, OuterHook, Reduced, Turn
from gradwire.hooks.arguments import check_hooks
from gradwire.hooks.base import Reduction
from gradwire.hooks.pump import advance, begin


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective of a simulation."""

    op: Signature
    """As the lowest of its ranks yielded it."""
    nbytes: tuple[int, ...]
    """The bytes that each rank contributed; 0 if it takes no part."""
    sent: tuple[float, ...]
    """The bytes that each rank had to send: see `sent_bytes`. If hosts were given, those inside a host do not count."""


def _busiest(exchanges: Sequence[Sequence[float]]) -> float:
    return max(map(sum, zip(*exchanges, strict=True)), default=0.0)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Simulated:
    """What a step leaves behind."""

    states: tuple[Any, ...]
    """Each rank's state afterwards: pass them to the next one."""
    exchanges: tuple[Exchange, ...]
    """The collectives, in order."""

    @property
    def wire_bytes(self) -> float:
        """The bytes that the busiest rank had to send, over all collectives: what `CommHook.wire_bytes` predicts, or for an outer
        step `OuterHook.outer_wire_bytes`."""
        return _busiest([e.sent for e in self.exchanges])


@dataclass(frozen=True, slots=True, eq=False)
class Simulation(_Simulated):
    """The result of `simulate`."""

    reduced: tuple[Reduced, ...]
    """Each rank's result."""

    @property
    def nbytes(self) -> int:
        """The bytes that the busiest rank contributed, over all collectives."""
        return int(_busiest([e.nbytes for e in self.exchanges]))


@torch.no_grad()
def simulate(
    hook: CommHook,
    gradients: Sequence[Tensor],
    *,
    spec: BucketSpec | None = None,
    states: Sequence[Any] | None = None,
    step: int = 0,
    donated: bool = False,
    divisor: int | None = None,
    weights: Sequence[float] | None = None,
    hosts: Sequence[Sequence[int]] | Layout | None = None,
    anchor: Tensor | None = None,
) -> Simulation:
    """Reduce one gradient per rank, each flat, with `hook`: one step of one bucket, on as many ranks as there are gradients.

    Without a `spec` the bucket holds one parameter; without `states`, `hook.init` makes them. Gradients that are `donated` are
    copied first. `hosts` are the ranks of each host, such as [[0, 1], [2, 3]]; by default all ranks are on one host. `anchor` is
    `turn.anchor`, for hooks inside `diloco`. Raises CollectiveMismatch if ranks do not yield the same collectives.

    >>> from gradwire.hooks import cast, chain, mean
    >>> done = simulate(chain(cast(torch.bfloat16), mean()), [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])])
    >>> [value for value, sent in done.reduced]
    [tensor([2., 4.]), tensor([2., 4.])]
    >>> [(e.op.kind.value, e.nbytes) for e in done.exchanges], done.nbytes
    ([('all_reduce', (4, 4))], 4)
    """
    check_hooks("simulate", hook=hook)
    if not gradients or len({(g.numel(), g.dtype) for g in gradients}) > 1:
        raise UsageError(
            f"simulate({hook!r}) on gradients {[(tuple(g.shape), g.dtype) for g in gradients]}: pass one or more, one per "
            "rank, of the same length and dtype."
        )
    size = len(gradients)
    layout = hosts if hosts is None or isinstance(hosts, Layout) else Layout(tuple(tuple(host) for host in hosts))
    if layout is not None and layout.size != size:
        raise UsageError(
            f"simulate({hook!r}) on {size} gradients: the hosts {layout.hosts} have {layout.size} ranks. Pass one "
            "gradient per rank."
        )
    spec = spec or one_parameter(gradients[0])
    hook.check(spec)
    states = [hook.init(spec) for _ in gradients] if states is None else list(states)
    weights = [1.0] * size if weights is None else weights
    turns = [
        Turn(spec, rank, size, step, donated=donated, divisor=divisor, weight=weight, hosts=layout, anchor=anchor)
        for rank, weight in enumerate(weights)
    ]
    reductions = [
        begin(hook, hook.reduce, g.clone() if donated else g, state, turn, like=g)
        for g, state, turn in zip(gradients, states, turns, strict=True)
    ]
    reduced, exchanges = _Lockstep(f"simulate({hook!r})", size, layout).run(reductions)
    return Simulation(reduced, states=tuple(states), exchanges=exchanges)


@dataclass(frozen=True, slots=True, eq=False)
class OuterSimulation(_Simulated):
    """The result of `simulate_outer`."""

    parameters: tuple[Tensor, ...]
    """Each rank's, after the outer step."""


@torch.no_grad()
def simulate_outer(
    hook: OuterHook,
    parameters: Sequence[Tensor],
    *,
    start: Tensor | None = None,
    spec: BucketSpec | None = None,
    states: Sequence[Any] | None = None,
    step: int = 0,
) -> OuterSimulation:
    """One outer step of one bucket of parameters, each rank's flat, on as many ranks as there are.

    Without `states` this is the first outer step, and all ranks began at `start`, or at zeros. `step` counts outer steps.

    >>> from gradwire.hooks import local_sgd
    >>> simulate_outer(local_sgd(every=4), [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])]).parameters
    (tensor([2., 4.]), tensor([2., 4.]))
    """
    size = len(parameters)
    spec = spec or one_parameter(parameters[0])
    turns = [Turn(spec, rank, size, step, donated=True) for rank in range(size)]
    if states is None:
        states = [hook.init(spec) for _ in parameters]
        for state, turn in zip(states, turns, strict=True):
            hook.begin(torch.zeros_like(parameters[0]) if start is None else start.clone(), state, turn)
    each = list(zip(parameters, states, turns, strict=True))
    outer = [begin(hook, hook.after_step, p.clone(), state, turn) for p, state, turn in each]
    reduced, exchanges = _Lockstep(f"simulate_outer({hook!r})", size, None).run(outer)
    settled = tuple(
        hook.settle(p, result.value, state, turn).to(p.dtype, copy=True)
        for (p, state, turn), result in zip(each, reduced, strict=True)
    )
    return OuterSimulation(settled, states=tuple(states), exchanges=exchanges)


def one_parameter(gradient: Tensor) -> BucketSpec:
    """A bucket that holds only `gradient`."""
    shape = tuple(gradient.shape) if gradient.is_sparse else (gradient.numel(),)
    return BucketSpec.of(0, [("parameter", torch.empty(shape, device="meta"))], gradient)


@dataclass(frozen=True, slots=True)
class _Lockstep:
    """Advances the ranks' generators, and runs a collective when all ranks that take part have yielded it."""

    where: str
    size: int
    layout: Layout | None

    def run(self, reductions: Sequence[Reduction]) -> tuple[tuple[Reduced, ...], tuple[Exchange, ...]]:
        """Each rank's result, and the collectives."""
        exchanges: list[Exchange] = []
        steps: dict[int, Collective | Reduced] = {}
        try:
            while True:
                for rank in (rank for rank in range(self.size) if rank not in steps):
                    try:
                        steps[rank] = advance(reductions[rank])
                    except Exception as error:
                        error.add_note(f"raised on simulated rank {rank}")
                        raise
                pending = {rank: op for rank, op in sorted(steps.items()) if isinstance(op, Collective)}
                if not pending:
                    return tuple(s for _, s in sorted(steps.items()) if isinstance(s, Reduced)), tuple(exchanges)
                for members in self._complete(pending):
                    exchanges.append(self._exchange(members, [pending[rank] for rank in members]))
                    for rank in members:
                        del steps[rank]
        finally:
            for reduction in reductions:
                reduction.close()

    def _members(self, rank: int, op: Collective) -> tuple[int, ...]:
        """The ranks that take part in what `rank` has yielded."""
        layout = self.layout
        if op.kind.is_p2p:
            raise UsageError(
                f"{self.where}: rank {rank} yields {op}. Only collectives, in which all take part, are simulated."
            )
        if op.scope is Scope.WORLD or (layout is None and op.scope is Scope.INSIDE):
            return tuple(range(self.size))
        if layout is None:
            return (rank,)
        host, index = layout.place(rank)
        if op.scope is Scope.INSIDE:
            return layout.hosts[host]
        if index >= layout.width:
            raise UsageError(
                f"{self.where}: rank {rank} yields {op}, but only the first {layout.width} ranks of each host communicate with "
                "other hosts. See turn.hosts."
            )
        return tuple(ranks[index] for ranks in layout.hosts)

    def _complete(self, pending: dict[int, Collective]) -> list[tuple[int, ...]]:
        """The sets of ranks that have all yielded. Raises if there is none: no rank could continue."""
        members = {rank: self._members(rank, op) for rank, op in pending.items()}
        found = dict.fromkeys(m for m in members.values() if all(members.get(rank) == m for rank in m))
        if found:
            return list(found)
        ops = {rank: op.signature for rank, op in pending.items()}
        yielding = ", ".join(f"rank {rank} yields {op}" for rank, op in ops.items())
        ended = [rank for rank in range(self.size) if rank not in pending]
        problem = f"ranks {ended} have returned, but {yielding}" if ended else f"ranks wait for each other: {yielding}"
        raise CollectiveMismatch(
            f"{self.where}: {problem}. All ranks must yield the same collectives in the same order.", ops=ops
        )

    def _exchange(self, members: Sequence[int], ops: Sequence[Collective]) -> Exchange:
        """Run what all members have yielded, if it is the same. Labels may differ, as in a group."""
        for place, op in enumerate(ops):
            op.check(place, len(ops))
        signatures = [op.signature for op in ops]
        if signatures.count(signatures[0]) < len(signatures):
            compared = [replace(signature, label="") for signature in signatures]
            error = mismatch(self.where, signatures, compared=compared, ranks=list(members))
            if error is not None:
                raise error
        perform(ops)
        nbytes, sent = [0] * self.size, [0.0] * self.size
        for place, (rank, op) in enumerate(zip(members, ops, strict=True)):
            nbytes[rank] = op.nbytes
            if self.layout is None or op.scope is not Scope.INSIDE:
                sent[rank] = sent_bytes(op, place, len(ops))
        return Exchange(signatures[0], tuple(nbytes), tuple(sent))
