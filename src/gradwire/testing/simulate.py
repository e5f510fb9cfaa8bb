"""`simulate`: a hook on simulated ranks, in one thread and without a group: the third driver of generator hooks.
`simulate_outer`: the outer half of a hook that has one.

The ranks' generators advance in lockstep. Each round of what they yield is compared, as a group would, and carried out by the
reference, so a run is the same bits every time, can be stepped through in a debugger, and tells what would be on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import Collective, Signature
from gradwire.collectives.agree import mismatch
from gradwire.collectives.reference import perform
from gradwire.collectives.traffic import sent_bytes
from gradwire.errors import CollectiveMismatch, UsageError
from gradwire.hooks import BucketSpec, CommHook, OuterHook, Reduced, Turn
from gradwire.hooks.base import Reduction, begin


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective of a simulation."""

    op: Signature
    """As rank 0 yielded it."""
    nbytes: tuple[int, ...]
    """What each rank contributed to it."""
    sent: tuple[float, ...]
    """What each rank had to send for it: see `collectives.traffic`."""


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """What `simulate` found."""

    reduced: tuple[Reduced, ...]
    """Each rank's result."""
    states: tuple[Any, ...]
    """Each rank's state afterwards: pass them to the next step."""
    exchanges: tuple[Exchange, ...]
    """The collectives, in order."""

    @property
    def nbytes(self) -> int:
        """The bytes that the busiest rank contributed, over all collectives."""
        return max(map(sum, zip(*(e.nbytes for e in self.exchanges), strict=True)), default=0)

    @property
    def wire_bytes(self) -> float:
        """The bytes that the busiest rank had to send, over all collectives: what `CommHook.wire_bytes` foretells."""
        return max(map(sum, zip(*(e.sent for e in self.exchanges), strict=True)), default=0.0)


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
) -> Simulation:
    """Reduce one gradient per rank, each flat, with `hook`: one step of one bucket, on as many ranks as there are gradients.

    Without a `spec` the bucket holds one parameter; without `states` they come from `hook.init`. The gradients are copied
    if they are `donated`. CollectiveMismatch says where ranks do not yield the same collectives.

    >>> from gradwire.hooks import cast, chain, mean
    >>> done = simulate(chain(cast(torch.bfloat16), mean()), [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])])
    >>> [value for value, sent in done.reduced]
    [tensor([2., 4.]), tensor([2., 4.])]
    >>> [(e.op.kind.value, e.nbytes) for e in done.exchanges], done.nbytes
    ([('all_reduce', (4, 4))], 4)
    """
    if not gradients or len({(g.numel(), g.dtype) for g in gradients}) > 1:
        raise UsageError(
            f"simulate({hook!r}) on gradients {[(tuple(g.shape), g.dtype) for g in gradients]}: pass one or more, one per "
            "rank, of the same length and dtype."
        )
    size = len(gradients)
    spec = spec or _one_parameter(gradients[0])
    states = [hook.init(spec) for _ in gradients] if states is None else list(states)
    weights = [1.0] * size if weights is None else weights
    reductions = [
        begin(
            hook,
            g.clone() if donated else g,
            state,
            Turn(spec, rank, size, step, donated=donated, divisor=divisor, weight=weight),
        )
        for rank, (g, state, weight) in enumerate(zip(gradients, states, weights, strict=True))
    ]
    reduced, exchanges = _in_lockstep(f"simulate({hook!r})", reductions)
    return Simulation(reduced, tuple(states), exchanges)


@dataclass(frozen=True, slots=True, eq=False)
class OuterSimulation:
    """What `simulate_outer` found."""

    parameters: tuple[Tensor, ...]
    """Each rank's, after the outer step."""
    states: tuple[Any, ...]
    """Each rank's state afterwards: pass them to the next outer step."""
    exchanges: tuple[Exchange, ...]
    """The collectives, in order."""

    @property
    def wire_bytes(self) -> float:
        """The bytes that the busiest rank had to send: what `OuterHook.outer_wire_bytes` foretells."""
        return max(map(sum, zip(*(e.sent for e in self.exchanges), strict=True)), default=0.0)


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

    Without `states` the ranks have gone to `parameters` from `start` (from zeros, without). `step` counts outer steps.

    >>> from gradwire.hooks import local_sgd
    >>> simulate_outer(local_sgd(every=4), [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])]).parameters
    (tensor([2., 4.]), tensor([2., 4.]))
    """
    size = len(parameters)
    spec = spec or _one_parameter(parameters[0])
    turns = [Turn(spec, rank, size, step, donated=True) for rank in range(size)]
    if states is None:
        states = [hook.init(spec) for _ in parameters]
        for state, turn in zip(states, turns, strict=True):
            hook.begin(torch.zeros_like(parameters[0]) if start is None else start.clone(), state, turn)
    each = list(zip(parameters, states, turns, strict=True))
    outer = [begin(hook, p.clone(), state, turn, method="after_step") for p, state, turn in each]
    reduced, exchanges = _in_lockstep(f"simulate_outer({hook!r})", outer)
    moved = tuple(
        hook.settle(p, came.value, state, turn).to(p.dtype, copy=True)
        for (p, state, turn), came in zip(each, reduced, strict=True)
    )
    return OuterSimulation(moved, tuple(states), exchanges)


def _in_lockstep(where: str, reductions: Sequence[Reduction]) -> tuple[tuple[Reduced, ...], tuple[Exchange, ...]]:
    """Advance all ranks together to their ends."""
    size = len(reductions)
    exchanges: list[Exchange] = []
    try:
        while True:
            moves = [_advance(reduction, rank) for rank, reduction in enumerate(reductions)]
            ops = [move for move in moves if isinstance(move, Collective)]
            if not ops:
                return tuple(m for m in moves if isinstance(m, Reduced)), tuple(exchanges)
            _check(where, moves, ops)
            perform(ops)
            sent = tuple(sent_bytes(op, rank, size) for rank, op in enumerate(ops))
            exchanges.append(Exchange(ops[0].signature, tuple(op.nbytes for op in ops), sent))
    finally:
        for reduction in reductions:
            reduction.close()


def _one_parameter(gradient: Tensor) -> BucketSpec:
    shape = tuple(gradient.shape) if gradient.is_sparse else (gradient.numel(),)
    stride = tuple(torch.empty(shape, device="meta").stride())
    return BucketSpec(0, ("parameter",), (shape,), (stride,), gradient.dtype, gradient.device, gradient.is_sparse)


def _advance(reduction: Reduction, rank: int) -> Collective | Reduced:
    """What a rank does next: another collective, or its result."""
    try:
        return next(reduction)
    except StopIteration as stop:
        result: Reduced = stop.value
        return result
    except Exception as error:
        error.add_note(f"raised on simulated rank {rank}")
        raise


def _check(where: str, moves: Sequence[Collective | Reduced], ops: Sequence[Collective]) -> None:
    """Raise unless all ranks yielded the same collective. Labels are for people, as in a group."""
    ended = [rank for rank, move in enumerate(moves) if isinstance(move, Reduced)]
    if ended:
        going_on = {rank: move.signature for rank, move in enumerate(moves) if isinstance(move, Collective)}
        raise CollectiveMismatch(
            f"{where}: ranks {ended} have returned, but {', '.join(f'rank {r} yields {s}' for r, s in going_on.items())}. "
            "All ranks must yield the same collectives in the same order.",
            ops=going_on,
        )
    for rank, op in enumerate(ops):
        if op.kind.is_p2p:
            raise UsageError(
                f"{where}: rank {rank} yields {op}. Only collectives, in which all take part, are simulated."
            )
        op.check(rank, len(ops))
    signatures = [op.signature for op in ops]
    error = mismatch(where, signatures, compared=[replace(s, label="") for s in signatures])
    if error is not None:
        raise error
