"""The laws of hooks about steps that are dropped and ranks that leave or join. See `laws.py`, which lists them all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import Layout
from gradwire.hooks import CommHook
from gradwire.hooks.state import add_owed
from gradwire.testing.hook_trial import HookTrial, difference, equal_states, same_bits, wide


def forks(trial: HookTrial) -> Iterator[str]:
    """A step that is dropped leaves no trace, a retry gives the same bits, and a commit is as if there were no fork."""
    hook, spec = trial.hook, trial.spec
    states: list[Any] = [hook.init(spec) for _ in range(trial.ranks)]
    kept = [hook.fork(state) for state in states]
    for step, plain in enumerate(trial.train(3)):
        before = [hook.save(state, spec) for state in states]
        kept = [fork if fork.state is state else hook.fork(state) for fork, state in zip(kept, states, strict=True)]
        for fork in kept:
            fork.renew()
        tried = trial.run(trial.gradients(step), states, step=step).reduced
        states = [fork.drop() for fork in kept]
        for rank, (state, old) in enumerate(zip(states, before, strict=True)):
            if not equal_states(hook.save(state, spec), old):
                yield f"rank {rank}'s state is not the same after step {step} was dropped"
        again = trial.run(trial.gradients(step), states, step=step).reduced
        for what, results in (("after it was dropped", tried), ("with a fork before it", plain.reduced)):
            for rank, (one, other) in enumerate(zip(again, results, strict=True)):
                if not same_bits(one.value, other.value):
                    yield f"rank {rank} has {difference(one.value, other.value)} in step {step} {what}"


def average_owed(hook: CommHook, saved: Sequence[Any]) -> dict[str, Tensor]:
    """What all ranks owe in these saved states, divided by their number, by parameter."""
    total = add_owed(*([(name, wide(t).reshape(-1)) for name, t in hook.owed(one) or ()] for one in saved))
    return {name: t / len(saved) for name, t in total.items()}


def conserves(trial: HookTrial) -> Iterator[str]:
    """What ranks owe is the same in the average after one leaves or joins, and a step of the new ranks works."""
    hook, n = trial.hook, trial.ranks
    *_, done = trial.train(3)
    saved = [hook.save(state, trial.spec) for state in done.states]
    if hook.owed(saved[0]) is None:
        return
    before = average_owed(hook, saved)
    sizes = [(name, float(wide(t).norm())) for one in saved for name, t in hook.owed(one) or ()]
    hosts = trial.hosts
    joined = hosts and Layout((*hosts.hosts[:-1], (*hosts.hosts[-1], n)))
    changes = [("joined", joined, [*(hook.rebase(one, n, n + 1) for one in saved), hook.shared(saved[0])])]
    if n > 1:
        heirs = (hook.inherit(saved[0], saved[-1]), *saved[1:-1])
        changes.append(("left", hosts and hosts.within(range(n - 1)), [hook.rebase(one, n, n - 1) for one in heirs]))
    for what, layout, new in changes:
        states = [hook.load(one, trial.spec) for one in new]
        after = average_owed(hook, [hook.save(state, trial.spec) for state in states])
        for name in before.keys() | after.keys():
            there, here = (owed.get(name, torch.zeros(())) for owed in (before, after))
            # Of ranks that owe almost the opposite the mean is no more exact than what they owe.
            off, scale = float((there - here).norm()), max((size for of, size in sizes if of == name), default=0.0)
            if not off <= 1e-6 * scale:
                yield f"after a rank of {n} has {what}, what is owed of {name} is {off:.3g} off; a rank owed {scale:.3g}"
        more = replace(trial, ranks=len(states), hosts=layout)
        values = [value for value, _ in more.run(more.gradients(3), states, step=3).reduced]
        if not hook.local and not all(same_bits(value, values[0]) for value in values):
            yield f"after a rank of {n} has {what}, the ranks disagree in the next step"
